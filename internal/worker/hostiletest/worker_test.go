// Package hostiletest has a worker meet servers that lie. A lie is an image that says what is not so, or a server that
// does not send what it says: package bundletest has both. What each test holds is a rule of ARCHITECTURE.md: an
// origin is a wall, and nothing is lent before it was hashed whole.
package hostiletest

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
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
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/keeper"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// This test binary is also the keeper.
func TestMain(m *testing.M) {
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

// tester is a testing.TB, or a check of package rapid.
type tester interface {
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

// worker is a daemon on a root of its own.
type worker struct {
	t    tester
	root string
	n    *node.Node
	opts node.Options
	log  logtest.Buffer
}

// gates are those that a daemon may have here: with a service manager that keeps its descriptors, and without.
var gates = sync.OnceValues(func() (list []string, err error) {
	for _, kept := range []bool{true, false} {
		gate, _, err := kernel.ChooseGate(context.Background(), os.TempDir(), kept)
		if err != nil {
			return nil, err
		}
		list = append(list, gate)
	}
	return slices.Compact(list), nil
})

// onGates runs a test on each gate.
func onGates(t *testing.T, fn func(t *testing.T, w *worker)) {
	t.Helper()
	list, err := gates()
	if err != nil {
		t.Fatal(err)
	}
	for _, gate := range list {
		t.Run(gate, func(t *testing.T) { fn(t, newWorkerOn(t, gate)) })
	}
}

func newWorker(t tester, groups ...string) *worker {
	t.Helper()
	return newWorkerOn(t, "", groups...)
}

// newWorkerOn is newWorker with a gate of that kind; empty: the daemon's choice.
func newWorkerOn(t tester, gate string, groups ...string) *worker {
	t.Helper()
	root, err := os.MkdirTemp("", "foil-hostile-")
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{t: t, root: root}
	t.Cleanup(w.end)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	trusting, err := origin.ParseGroups(groups)
	if err != nil {
		t.Fatal(err)
	}
	w.opts = node.Options{Root: root, Binary: self, Gate: gate, Groups: trusting, GiveUp: 30 * time.Second, Logger: slog.New(slog.NewTextHandler(&w.log, nil))}
	w.begin()
	return w
}

// begin starts the daemon.
func (w *worker) begin() {
	w.t.Helper()
	var err error
	if w.n, err = node.New(w.opts); err != nil {
		w.t.Fatal(err)
	}
}

// restart ends the daemon, and starts another one.
func (w *worker) restart() {
	w.t.Helper()
	if err := w.n.Close(); err != nil {
		w.t.Fatal(err)
	}
	w.n = nil
	w.begin()
}

// end leaves nothing of the worker.
func (w *worker) end() {
	if w.n != nil {
		if err := w.n.Close(); err != nil {
			w.t.Error(err)
		}
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		args := strings.Split(string(b), "\x00")
		var pid int
		if err != nil || len(args) < 4 || args[1] != "keeper" || !strings.HasPrefix(args[3], w.root+"/") {
			continue
		}
		if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	mounts, err := kernel.Mounts(w.root)
	if err != nil {
		w.t.Error(err)
	}
	for _, m := range slices.Backward(mounts) {
		if err := kernel.Unmount(m.Target, true); err != nil {
			w.t.Error(err)
		}
	}
	if err := os.RemoveAll(w.root); err != nil {
		w.t.Error(err)
	}
	if w.t.Failed() {
		w.t.Logf("log:\n%s", w.log.String())
	}
}

// pull follows a pull until an event.
func (w *worker) pull(ref string, until api.EventKind) error {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	var last api.Event
	err := w.n.Pull(ctx, api.PullRequest{Ref: ref, Until: until}, func(ev api.Event) error { last = ev; return nil })
	if err == nil && last.Err != "" {
		err = &api.Error{Code: last.Code, Message: last.Err}
	}
	return err
}

func (w *worker) mustPull(ref string, until api.EventKind) {
	w.t.Helper()
	if err := w.pull(ref, until); err != nil {
		w.t.Fatalf("pull %s: %v", ref, err)
	}
}

// read reads a file of an image as a container would: through its mount. An error includes that nothing comes.
func (w *worker) read(ref, name string) (string, error) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	h, err := w.n.Hold(ctx, ref)
	if err != nil {
		return "", err
	}
	defer w.n.Release(h.Rootfs)
	b, err := os.ReadFile(filepath.Join(h.Mount, name))
	return string(b), err
}

// reads fails the test unless a file of an image is what it should be.
func (w *worker) reads(ref, name, want string) {
	w.t.Helper()
	if got, err := w.read(ref, name); err != nil || got != want {
		w.t.Errorf("%s of %s is %.40q, %v; want %.40q", name, ref, got, err, want)
	}
}

// eventually waits for a condition.
func (w *worker) eventually(ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatal("not after two minutes")
		}
	}
}

// right fails the test unless the daemon finds every byte of an image right.
func (w *worker) right(ref string) {
	w.t.Helper()
	err := w.n.Verify(w.t.Context(), ref, func(ev api.VerifyEvent) error {
		if ev.Bad != "" {
			return fmt.Errorf("%s is wrong", ev.Bad)
		}
		return nil
	})
	if err != nil {
		w.t.Error(err)
	}
}

// records returns the record of an image's rootfs.
func (w *worker) records(ref string) (rec rootfs.Record) {
	w.t.Helper()
	h, err := w.n.Hold(w.t.Context(), ref)
	if err != nil {
		w.t.Fatal(err)
	}
	defer w.n.Release(h.Rootfs)
	b, err := os.ReadFile(filepath.Join(filepath.Dir(h.Mount), rootfs.RecordName))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return rec
}

// change changes the record of a rootfs on the disk.
func (w *worker) change(path string, fn func(*rootfs.Record)) {
	w.t.Helper()
	var rec rootfs.Record
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err == nil {
		fn(&rec)
		b, err = json.Marshal(&rec)
	}
	if err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}
