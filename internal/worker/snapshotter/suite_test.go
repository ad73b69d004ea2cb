package snapshotter

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"hydrofoil.dev/foil/internal/kernel/kerneltest"
)

func TestMain(m *testing.M) {
	kerneltest.OwnMounts()
	if os.Geteuid() != 0 {
		fmt.Println("skip: these tests mount filesystems and need root")
		return
	}
	// Parts of the suite ask for this flag, which its package defines.
	if err := flag.Set("test.root", "true"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// TestSuite is containerd's suite for snapshotters. Its name selects what the
// suite expects of an overlay.
func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, "overlayfs", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		s, err := Open(ctx, Options{Dir: root})
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	})
}

// TestSuiteOverSocket is the same, as containerd sees it.
func TestSuiteOverSocket(t *testing.T) {
	testsuite.SnapshotterSuite(t, "overlayfs", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		s, err := Open(ctx, Options{Dir: root})
		if err != nil {
			return nil, nil, err
		}
		served, stop := context.WithCancel(context.WithoutCancel(ctx))
		done := make(chan error, 1)
		socket := filepath.Join(root, "s.sock")
		go func() { done <- s.Serve(served, socket) }()
		conn, err := grpc.NewClient("unix:"+socket,
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
		if err != nil {
			stop()
			return nil, nil, err
		}
		client := proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), "hydrofoil")
		return client, func() error {
			stop()
			if err := conn.Close(); err != nil {
				return err
			}
			if err := <-done; err != nil {
				return err
			}
			return s.Close()
		}, nil
	})
}
