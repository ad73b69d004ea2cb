package criproxy

import (
	"context"
	"encoding/base64"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/distribution/reference"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// fake is containerd's image service.
type fake struct {
	cri.UnimplementedImageServiceServer
	memory *credentials.Memory
	hang   chan struct{} // calls of PullImage wait for it, when it is not nil
	began  chan struct{}
	seen   *cri.PullImageRequest
	had    credentials.Credential // what was remembered meanwhile
	trace  []string               // of the metadata
}

func (f *fake) PullImage(ctx context.Context, req *cri.PullImageRequest) (*cri.PullImageResponse, error) {
	f.seen = req
	f.had = f.memory.For("registry.example/app")
	md, _ := metadata.FromIncomingContext(ctx)
	f.trace = md.Get("traceparent")
	if f.hang != nil {
		close(f.began)
		select {
		case <-f.hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if req.Image.Image == "registry.example/absent" {
		return nil, status.Error(codes.NotFound, "no such image")
	}
	return &cri.PullImageResponse{ImageRef: "sha256:1"}, nil
}

func (f *fake) ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error) {
	r := &cri.ListImagesResponse{}
	for i := range 50_000 { // some megabytes: more than gRPC takes by itself
		r.Images = append(r.Images, &cri.Image{Id: fmt.Sprint("sha256:", i), RepoTags: []string{"registry.example/a-rather-long-name-of-an-image:and-a-tag"}})
	}
	return r, nil
}

// serve starts containerd and the proxy, and returns a kubelet's connection.
func serve(t *testing.T, f *fake) *grpc.ClientConn {
	t.Helper()
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "c.sock"))
	if err != nil {
		t.Fatal(err)
	}
	containerd := grpc.NewServer()
	cri.RegisterImageServiceServer(containerd, f)
	go func() { _ = containerd.Serve(l) }()
	t.Cleanup(containerd.Stop)
	p, err := New(Options{Endpoint: "unix://" + l.Addr().String(), Memory: f.memory})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	socket := filepath.Join(dir, "proxy.sock")
	go func() { done <- p.Serve(ctx, socket) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestProxy(t *testing.T) {
	f := &fake{memory: new(credentials.Memory)}
	conn := serve(t, f)
	images := cri.NewImageServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", "00-1-2-3")

	req := &cri.PullImageRequest{
		Image: &cri.ImageSpec{Image: "registry.example/app:1", Annotations: map[string]string{"a": "b"}},
		Auth:  &cri.AuthConfig{Username: "alice", Password: "pw"},
	}
	got, err := images.PullImage(ctx, req)
	if err != nil || got.ImageRef != "sha256:1" {
		t.Fatalf("%v, %v", got, err)
	}
	if !proto.Equal(req, f.seen) {
		t.Errorf("containerd got %v", f.seen)
	}
	if want := (credentials.Credential{Username: "alice", Secret: "pw"}); f.had != want {
		t.Error("the credentials were not remembered while the pull ran")
	}
	if !f.memory.For("registry.example/app").IsZero() {
		t.Error("the credentials are remembered though the pull has ended")
	}
	if !cmp.Equal(f.trace, []string{"00-1-2-3"}) {
		t.Errorf("metadata %q", f.trace)
	}
	if _, err := images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "registry.example/absent"}}); status.Code(err) != codes.NotFound || status.Convert(err).Message() != "no such image" {
		t.Errorf("containerd's error came as %v", err)
	}
	if list, err := images.ListImages(ctx, &cri.ListImagesRequest{}); err != nil || len(list.Images) != 50_000 {
		t.Errorf("%d images, %v", len(list.GetImages()), err)
	}
	if _, err := images.ImageFsInfo(ctx, &cri.ImageFsInfoRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("what containerd does not implement: %v", err)
	}
	if _, err := cri.NewRuntimeServiceClient(conn).Version(ctx, &cri.VersionRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("another service: %v", err)
	}
}

func TestProxyPassesCancellationOn(t *testing.T) {
	f := &fake{memory: new(credentials.Memory), hang: make(chan struct{}), began: make(chan struct{})}
	images := cri.NewImageServiceClient(serve(t, f))
	ctx, cancel := context.WithCancel(t.Context())
	end := make(chan error, 1)
	go func() {
		_, err := images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: "registry.example/app"}})
		end <- err
	}()
	<-f.began
	cancel()
	if err := <-end; status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
}

func TestEndpoint(t *testing.T) {
	for endpoint, ok := range map[string]bool{"/run/c.sock": true, "unix:///run/c.sock": true, "": false, "tcp://1.2.3.4:5": false, "run/c.sock": false} {
		p, err := New(Options{Endpoint: endpoint})
		if (err == nil) != ok {
			t.Errorf("%q: %v", endpoint, err)
		}
		if p != nil {
			p.conn.Close()
		}
	}
}

func TestParseAuth(t *testing.T) {
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	named, err := reference.ParseNormalizedNamed("name")
	if err != nil {
		t.Fatal(err)
	}
	hub := reference.Domain(named)
	origin, err := docker.DefaultHost(hub)
	if err != nil || origin == hub {
		t.Fatal(origin, err)
	}
	for name, tc := range map[string]struct {
		in   *cri.AuthConfig
		want credentials.Credential
		bad  bool
	}{
		"nil":            {},
		"empty":          {in: &cri.AuthConfig{ServerAddress: "registry.example"}},
		"password":       {in: &cri.AuthConfig{Username: "u", Password: "p"}, want: credentials.Credential{Username: "u", Secret: "p"}},
		"identity token": {in: &cri.AuthConfig{IdentityToken: "t"}, want: credentials.Credential{Secret: "t"}},
		"registry token": {in: &cri.AuthConfig{RegistryToken: "t"}, want: credentials.Credential{Token: "t"}},
		"auth":           {in: &cri.AuthConfig{Auth: b64("u:p:q\x00\x00")}, want: credentials.Credential{Username: "u", Secret: "p:q"}},
		"auth, bad":      {in: &cri.AuthConfig{Auth: "%%%"}, bad: true},
		"auth, half":     {in: &cri.AuthConfig{Auth: b64("u")}, bad: true},
		"a URL":          {in: &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://registry.example:5000/v1/"}, want: credentials.Credential{Username: "u", Secret: "p", Host: "registry.example:5000"}},
		"a host":         {in: &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "registry.example"}, want: credentials.Credential{Username: "u", Secret: "p", Host: "registry.example"}},
		"a login's":      {in: &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "https://index." + hub + "/v1/"}, want: credentials.Credential{Username: "u", Secret: "p", Host: origin}},
		"no URL":         {in: &cri.AuthConfig{Username: "u", Password: "p", ServerAddress: "http://[::1"}, bad: true},
	} {
		got, err := parseAuth(tc.in)
		if got != tc.want && !tc.bad || (err != nil) != tc.bad {
			t.Errorf("%s: %v, host %q, %v", name, got, got.Host, err)
		}
	}
}

// Whatever a kubelet sends, containerd judges it.
func FuzzRemember(f *testing.F) {
	b, err := proto.Marshal(&cri.PullImageRequest{Image: &cri.ImageSpec{Image: "r.example/a:1"}, Auth: &cri.AuthConfig{Auth: "dTpw", ServerAddress: "r.example"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	p, err := New(Options{Endpoint: "/nowhere", Memory: new(credentials.Memory)})
	if err != nil {
		f.Fatal(err)
	}
	defer p.conn.Close()
	f.Fuzz(func(t *testing.T, b []byte) { p.remember(b)() })
}
