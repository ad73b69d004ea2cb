package snapshotter

import (
	"context"
	"net"
	"path/filepath"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"google.golang.org/grpc"
)

// SocketPath is where the snapshotter of a worker's root listens by default.
func SocketPath(root string) string { return filepath.Join(root, "run", "snapshotter.sock") }

// Serve answers containerd on a listener until ctx ends.
func (s *Snapshotter) Serve(ctx context.Context, l net.Listener) error {
	if s.opts.Listening != nil {
		s.opts.Listening()
	}
	srv := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(srv, snapshotservice.FromSnapshotter(s))
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// Requests that make something end by themselves; those that wait for a
	// server do not.
	hard := time.AfterFunc(2*time.Second, srv.Stop)
	defer hard.Stop()
	srv.GracefulStop()
	return <-done
}
