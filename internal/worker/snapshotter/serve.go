package snapshotter

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"google.golang.org/grpc"
)

// SocketPath is where the snapshotter of a worker's root listens by default.
func SocketPath(root string) string { return filepath.Join(root, "run", "snapshotter.sock") }

// Serve answers containerd on a Unix socket until ctx ends.
func (s *Snapshotter) Serve(ctx context.Context, socket string) error {
	// Only the one daemon of a root serves its snapshotter: a socket that is
	// there is a dead one's.
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
