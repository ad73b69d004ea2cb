// Package criproxy stands between a kubelet and containerd for one service of
// CRI, runtime.v1.ImageService. It passes every call on as it is, and remembers
// the credentials of a PullImage while that call runs: containerd does not give
// them to its snapshotters.
//
// Messages are passed on as bytes, whatever their version: of PullImage only a
// copy is read. Calls of other services are refused, since a kubelet makes them
// at another address (--container-runtime-endpoint).
package criproxy

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/distribution/reference"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

const (
	service   = "/runtime.v1.ImageService/"
	pullImage = service + "PullImage"
	// maxMessage is what containerd and kubelets take, bytes.
	maxMessage = 16 << 20
)

// Options configure a Proxy. Endpoint and Memory are required.
type Options struct {
	// Endpoint is containerd's socket: a path, or unix:// and a path.
	Endpoint string
	// Memory is told of credentials.
	Memory *credentials.Memory
	Logger *slog.Logger // nil means none
}

// Proxy passes calls on.
type Proxy struct {
	memory *credentials.Memory
	log    *slog.Logger
	conn   *grpc.ClientConn
	server *grpc.Server
}

// New does not connect yet: containerd may come later, and go.
func New(opts Options) (*Proxy, error) {
	path := strings.TrimPrefix(opts.Endpoint, "unix://")
	if !strings.HasPrefix(path, "/") {
		return nil, fmt.Errorf("CRI endpoint %q: want the path of containerd's socket, for example /run/containerd/containerd.sock", opts.Endpoint)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{memory: opts.Memory, log: opts.Logger}
	var err error
	p.conn, err = grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{}), grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	p.server = grpc.NewServer(grpc.ForceServerCodecV2(raw{}), grpc.UnknownServiceHandler(p.pass),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage))
	return p, nil
}

// Serve answers on a Unix socket, for root only, until ctx ends.
func (p *Proxy) Serve(ctx context.Context, socket string) error {
	defer p.conn.Close()
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		return errors.Join(err, l.Close())
	}
	done := make(chan error, 1)
	go func() { done <- p.server.Serve(l) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// A kubelet tries again what is cut off.
	hard := time.AfterFunc(2*time.Second, p.server.Stop)
	defer hard.Stop()
	p.server.GracefulStop()
	return <-done
}

// raw passes messages as they are.
type raw struct{}

func (raw) Name() string { return "proto" } // what they are, to the other side

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// pass passes one call on: messages there, then messages back, as all methods of
// the service have them.
func (p *Proxy) pass(_ any, in grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(in)
	if !strings.HasPrefix(method, service) {
		return status.Errorf(codes.Unimplemented, "%s: only the image service is served here; the runtime service is containerd's own", method)
	}
	ctx := in.Context()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md.Copy())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var request []byte
	if err := in.RecvMsg(&request); err != nil {
		return err
	}
	if method == pullImage {
		defer p.remember(request)()
	}
	out, err := p.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := errors.Join(out.SendMsg(&request), out.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	header, err := out.Header()
	if err != nil {
		return err
	}
	if err := in.SetHeader(header); err != nil {
		return err
	}
	for {
		var answer []byte
		err := out.RecvMsg(&answer)
		if err != nil {
			in.SetTrailer(out.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := in.SendMsg(&answer); err != nil {
			return err
		}
	}
}

// remember reads the credentials of a PullImage, which it never fails: containerd
// says what is wrong with the request.
func (p *Proxy) remember(request []byte) (forget func()) {
	nothing := func() {}
	var req cri.PullImageRequest
	if err := proto.Unmarshal(request, &req); err != nil {
		return nothing
	}
	named, err := reference.ParseNormalizedNamed(req.GetImage().GetImage())
	if err != nil {
		return nothing
	}
	c, err := parseAuth(req.GetAuth())
	if err != nil {
		p.log.Warn("the credentials of a pull cannot be used; its layers may come the plain way", "image", named.String(), "error", err)
		return nothing
	}
	if c.IsZero() {
		return nothing
	}
	return p.memory.Remember(named.Name(), c)
}

// parseAuth reads what a kubelet sends, as containerd does.
func parseAuth(a *cri.AuthConfig) (c credentials.Credential, err error) {
	if a == nil {
		return c, nil
	}
	switch {
	case a.Username != "":
		c.Username, c.Secret = a.Username, a.Password
	case a.IdentityToken != "":
		c.Secret = a.IdentityToken
	case a.Auth != "":
		b, err := base64.StdEncoding.DecodeString(a.Auth)
		if err != nil {
			return c, errors.New("the field auth is not base64")
		}
		if c, err = credentials.Parse(strings.Trim(string(b), "\x00")); err != nil {
			return c, errors.New("the field auth has no USER:PASSWORD")
		}
	case a.RegistryToken != "":
		c.Token = a.RegistryToken
	default:
		return c, nil
	}
	if a.ServerAddress != "" {
		if c.Host, err = credentials.HostOf(a.ServerAddress); err != nil {
			return credentials.Credential{}, err
		}
	}
	return c, nil
}
