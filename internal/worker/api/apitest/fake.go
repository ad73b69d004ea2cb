// Package apitest is a stand-in for the daemon in tests of what talks to it.
package apitest

import (
	"context"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
)

// Funcs is an api.Service made of functions. A method whose function is nil
// fails with api.CodeUnsupported.
type Funcs struct {
	Pull_            func(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error
	PullReport_      func(ctx context.Context, ref string) (*api.PullReport, error)
	Images_          func(ctx context.Context) ([]api.Image, error)
	RemoveImage_     func(ctx context.Context, ref string) error
	CreateContainer_ func(ctx context.Context, req api.ContainerRequest) (*api.Container, error)
	Containers_      func(ctx context.Context) ([]api.Container, error)
	RemoveContainer_ func(ctx context.Context, id string) error
	Started_         func(ctx context.Context, id string, s api.Start) error
	Commit_          func(ctx context.Context, id string, req api.CommitRequest) (*api.CommitReport, error)
	Changes_         func(ctx context.Context, id string, emit func(api.Change) error) error
	TraceStatus_     func(ctx context.Context, id string) (*api.TraceStatus, error)
	Trace_           func(ctx context.Context, id string, req api.TraceRequest) (*api.TraceResult, error)
	Tags_            func(ctx context.Context, req api.TagsRequest) (*api.Tags, error)
	TOC_             func(ctx context.Context, req api.AboutImage) ([]byte, error)
	Startup_         func(ctx context.Context, req api.AboutImage) (*bundle.StartupReport, error)
	StartupService_  func(ctx context.Context, req api.AboutImage) (*bundle.ServiceReport, error)
	ForgetStartup_   func(ctx context.Context, req api.AboutImage) error
	Verify_          func(ctx context.Context, ref string, emit func(api.VerifyEvent) error) error
	Prove_           func(ctx context.Context, ref string, emit func(api.VerifyEvent) error) error
	GC_              func(ctx context.Context, req api.GCRequest) (*api.GCReport, error)
	Status_          func(ctx context.Context) (*api.Status, error)
}

var _ api.Service = Funcs{}

func unsupported(what string) error {
	return &api.Error{Code: api.CodeUnsupported, Message: "this fake daemon does not " + what}
}

func (f Funcs) Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	if f.Pull_ == nil {
		return unsupported("pull")
	}
	return f.Pull_(ctx, req, emit)
}

func (f Funcs) PullReport(ctx context.Context, ref string) (*api.PullReport, error) {
	if f.PullReport_ == nil {
		return nil, unsupported("report pulls")
	}
	return f.PullReport_(ctx, ref)
}

func (f Funcs) Images(ctx context.Context) ([]api.Image, error) {
	if f.Images_ == nil {
		return nil, unsupported("list images")
	}
	return f.Images_(ctx)
}

func (f Funcs) RemoveImage(ctx context.Context, ref string) error {
	if f.RemoveImage_ == nil {
		return unsupported("remove images")
	}
	return f.RemoveImage_(ctx, ref)
}

func (f Funcs) CreateContainer(ctx context.Context, req api.ContainerRequest) (*api.Container, error) {
	if f.CreateContainer_ == nil {
		return nil, unsupported("create containers")
	}
	return f.CreateContainer_(ctx, req)
}

func (f Funcs) Containers(ctx context.Context) ([]api.Container, error) {
	if f.Containers_ == nil {
		return nil, unsupported("list containers")
	}
	return f.Containers_(ctx)
}

func (f Funcs) RemoveContainer(ctx context.Context, id string) error {
	if f.RemoveContainer_ == nil {
		return unsupported("remove containers")
	}
	return f.RemoveContainer_(ctx, id)
}

// ContainerStarted is of no consequence where nobody cares.
func (f Funcs) ContainerStarted(ctx context.Context, id string, s api.Start) error {
	if f.Started_ == nil {
		return nil
	}
	return f.Started_(ctx, id, s)
}

func (f Funcs) Commit(ctx context.Context, id string, req api.CommitRequest) (*api.CommitReport, error) {
	if f.Commit_ == nil {
		return nil, unsupported("commit containers")
	}
	return f.Commit_(ctx, id, req)
}

func (f Funcs) Changes(ctx context.Context, id string, emit func(api.Change) error) error {
	if f.Changes_ == nil {
		return unsupported("tell changes")
	}
	return f.Changes_(ctx, id, emit)
}

func (f Funcs) TraceStatus(ctx context.Context, id string) (*api.TraceStatus, error) {
	if f.TraceStatus_ == nil {
		return nil, unsupported("trace containers")
	}
	return f.TraceStatus_(ctx, id)
}

func (f Funcs) Trace(ctx context.Context, id string, req api.TraceRequest) (*api.TraceResult, error) {
	if f.Trace_ == nil {
		return nil, unsupported("trace containers")
	}
	return f.Trace_(ctx, id, req)
}

func (f Funcs) Tags(ctx context.Context, req api.TagsRequest) (*api.Tags, error) {
	if f.Tags_ == nil {
		return nil, unsupported("list tags")
	}
	return f.Tags_(ctx, req)
}

func (f Funcs) TOC(ctx context.Context, req api.AboutImage) ([]byte, error) {
	if f.TOC_ == nil {
		return nil, unsupported("give tables of contents")
	}
	return f.TOC_(ctx, req)
}

func (f Funcs) Startup(ctx context.Context, req api.AboutImage) (*bundle.StartupReport, error) {
	if f.Startup_ == nil {
		return nil, unsupported("know startup sets")
	}
	return f.Startup_(ctx, req)
}

func (f Funcs) StartupService(ctx context.Context, req api.AboutImage) (*bundle.ServiceReport, error) {
	if f.StartupService_ == nil {
		return nil, unsupported("know startup sets")
	}
	return f.StartupService_(ctx, req)
}

func (f Funcs) ForgetStartup(ctx context.Context, req api.AboutImage) error {
	if f.ForgetStartup_ == nil {
		return unsupported("forget startup sets")
	}
	return f.ForgetStartup_(ctx, req)
}

func (f Funcs) Verify(ctx context.Context, ref string, emit func(api.VerifyEvent) error) error {
	if f.Verify_ == nil {
		return unsupported("verify")
	}
	return f.Verify_(ctx, ref, emit)
}

func (f Funcs) Prove(ctx context.Context, ref string, emit func(api.VerifyEvent) error) error {
	if f.Prove_ == nil {
		return unsupported("prove")
	}
	return f.Prove_(ctx, ref, emit)
}

func (f Funcs) GC(ctx context.Context, req api.GCRequest) (*api.GCReport, error) {
	if f.GC_ == nil {
		return nil, unsupported("free what it can")
	}
	return f.GC_(ctx, req)
}

func (f Funcs) Status(ctx context.Context) (*api.Status, error) {
	if f.Status_ == nil {
		return nil, unsupported("tell its status")
	}
	return f.Status_(ctx)
}

// Start serves s on the socket of a worker at root until stop is called.
func Start(root string, s api.Service) (stop func(), err error) {
	path := api.SocketPath(root)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	srv := httptest.NewUnstartedServer(api.Handler(s))
	_ = srv.Listener.Close() // a TCP port that nobody asked for
	srv.Listener = l
	srv.Start()
	return srv.Close, nil
}
