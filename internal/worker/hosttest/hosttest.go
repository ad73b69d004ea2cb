// Package hosttest is what tests of the daemon have in common: a test binary that is the keeper, too, and roots of which
// nothing is left.
package hosttest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// T is a testing.TB, or a check of package rapid.
type T interface {
	Helper()
	Cleanup(func())
	Context() context.Context
	Logf(format string, args ...any)
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
}

// Main is TestMain. The binary is also the keeper, and what others say that it is: they do not return then. Where no
// daemon can run it skips the tests.
func Main(m *testing.M, others ...func()) {
	kerneltest.OwnMounts()
	if len(os.Args) > 3 && os.Args[1] == "keeper" {
		err := keeper.Serve(context.Background(), os.Args[3], func() {
			fmt.Println("ready")
			_ = keeper.Detach()
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	for _, other := range others {
		other()
	}
	if os.Geteuid() != 0 {
		fmt.Println("skip: these tests mount filesystems and need root")
		os.Exit(0)
	}
	features, err := kernel.Features(context.Background(), os.TempDir())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, f := range features {
		if f.Need && !f.Have {
			fmt.Printf("skip: this host has no %s: %s\n", f.Name, f.Detail)
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// Gates are those that a daemon may have here, the best one first: with a service manager that keeps its descriptors, and
// without.
var Gates = sync.OnceValues(func() (list []string, err error) {
	for _, kept := range []bool{true, false} {
		gate, _, err := kernel.ChooseGate(context.Background(), os.TempDir(), kept)
		if err != nil {
			return nil, err
		}
		list = append(list, gate)
	}
	return slices.Compact(list), nil
})

// Root returns the directory of a host. At the end of the test stop is called, no process and no mount of it is left, and
// it is removed.
func Root(t T, stop func()) string {
	t.Helper()
	root, err := os.MkdirTemp("", "foil-host-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		EndKeeper(t, root)
		Unmount(t, root)
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return root
}

// Keepers returns the keepers of a root.
func Keepers(t T, root string) (pids []int) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		args := strings.Split(string(b), "\x00")
		if err != nil || len(args) < 4 || args[1] != "keeper" || !strings.HasPrefix(args[3], root+"/") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// EndKeeper kills the keeper of a root, which stays while something is incomplete.
func EndKeeper(t T, root string) {
	t.Helper()
	for _, pid := range Keepers(t, root) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	Eventually(t, "the keeper is gone", func() error {
		if k := Keepers(t, root); len(k) > 0 {
			return fmt.Errorf("%v", k)
		}
		return nil
	})
}

// Mounts returns where something is mounted below a root.
func Mounts(t T, root string) (targets []string) {
	t.Helper()
	list, err := kernel.Mounts(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		targets = append(targets, m.Target)
	}
	return targets
}

// Unmount takes all mounts below a root away.
func Unmount(t T, root string) {
	t.Helper()
	for _, m := range slices.Backward(Mounts(t, root)) {
		if err := kernel.Unmount(m, true); err != nil {
			t.Error(err)
		}
	}
}

// Eventually waits until a condition gives no error.
func Eventually(t T, what string, cond func() error) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after two minutes: %v", what, err)
		}
	}
}

// Puller is a node.Node.
type Puller interface {
	Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error
}

// Pull follows a pull until an event, and returns the last one.
func Pull(t T, n Puller, ref string, until api.EventKind) (last api.Event, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = n.Pull(ctx, api.PullRequest{Ref: ref, Until: until}, func(ev api.Event) error { last = ev; return nil })
	if err == nil && last.Err != "" {
		err = &api.Error{Code: last.Code, Message: last.Err}
	}
	return last, err
}
