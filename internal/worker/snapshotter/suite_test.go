package snapshotter

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"

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
// suite expects of an overlay. The tests of the whole program run it against a
// daemon.
func TestSuite(t *testing.T) {
	testsuite.SnapshotterSuite(t, "overlayfs", func(ctx context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		s, err := Open(ctx, Options{Dir: root})
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	})
}

// TestChangesWhileWalked makes snapshots, so many bytes of them that the
// database grows, while a client is told of those there are: neither may wait
// for the other.
func TestChangesWhileWalked(t *testing.T) {
	s, err := Open(t.Context(), Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, name := range []string{"first", "second"} {
		if _, err := s.Prepare(t.Context(), name, ""); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	err = s.Walk(t.Context(), func(context.Context, snapshots.Info) error {
		seen++
		changed := make(chan error, 1)
		go func() {
			_, err := s.Prepare(t.Context(), fmt.Sprint("large-", seen), "", snapshots.WithLabels(map[string]string{"large": strings.Repeat("x", 1<<20)}))
			changed <- err
		}()
		select {
		case err := <-changed:
			return err
		case <-time.After(time.Minute):
			return errors.New("Prepare waits for Walk")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen != 2 {
		t.Errorf("saw %d snapshots of the 2 that were there", seen)
	}
}
