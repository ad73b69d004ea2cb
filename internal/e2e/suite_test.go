package e2e

import (
	"context"
	"flag"
	"path/filepath"
	"syscall"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// TestSnapshotterSuite is containerd's suite for snapshotters, against a daemon
// for each of its tests, over the socket and with the client that containerd has.
func TestSnapshotterSuite(t *testing.T) {
	// Parts of the suite ask for this flag, which its package defines.
	if err := flag.Set("test.root", "true"); err != nil {
		t.Fatal(err)
	}
	// The suite clears the mask, which is the process's, and puts back what it
	// found before its tests have run; of two at once, one may put back what the
	// other has cleared, for all tests to come. What finds it clear leaves it so.
	mask := syscall.Umask(0)
	t.Cleanup(func() { syscall.Umask(mask) })
	for _, gate := range []string{kernel.GateFanotify, kernel.GateFUSE} {
		t.Run(gate, func(t *testing.T) {
			t.Parallel() // most of the time is containerd's database waiting for the disk
			// The name selects what the suite expects of an overlay.
			testsuite.SnapshotterSuite(t, "overlayfs", func(ctx context.Context, dir string) (snapshots.Snapshotter, func() error, error) {
				root := filepath.Join(dir, "foil")
				w := startWorker(t, root, "--gate", gate)
				if st, err := w.client.Status(ctx); err != nil || st.Gate != gate {
					t.Errorf("the daemon has %+v, %v, want the gate %s", st, err, gate)
				}
				// This socket may come after the one by which commands talk to the daemon.
				conn, err := grpc.NewClient("unix:"+snapshotter.SocketPath(root),
					grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
				if err != nil {
					return nil, nil, err
				}
				return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "hydrofoil"), func() error {
					if err := conn.Close(); err != nil {
						return err
					}
					w.signal(syscall.SIGTERM)
					<-w.done
					if w.err != nil {
						return w.err
					}
					// What the daemon has mounted must be gone before the suite removes
					// its directory.
					mounts, err := kernel.Mounts(root)
					for i := len(mounts) - 1; i >= 0; i-- {
						t.Errorf("the daemon left the mount %s", mounts[i].Target)
						_ = kernel.Unmount(mounts[i].Target, true)
					}
					return err
				}, nil
			})
		})
	}
}
