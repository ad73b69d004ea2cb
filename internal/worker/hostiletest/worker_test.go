// Package hostiletest has a worker meet servers that lie. A lie is an image that says what is not so, or a server that
// does not send what it says: package bundletest has both. What each test holds is a rule of ARCHITECTURE.md: an
// origin is a wall, and nothing is lent before it was hashed whole.
package hostiletest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/hosttest"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

func TestMain(m *testing.M) { hosttest.Main(m) }

// worker is a daemon on a root of its own.
type worker struct {
	t    hosttest.T
	root string
	n    *node.Node
	opts node.Options
	log  logtest.Buffer
}

// onGates runs a test on each gate.
func onGates(t *testing.T, fn func(t *testing.T, w *worker)) {
	t.Helper()
	list, err := hosttest.Gates()
	if err != nil {
		t.Fatal(err)
	}
	for _, gate := range list {
		t.Run(gate, func(t *testing.T) { fn(t, newWorkerOn(t, gate)) })
	}
}

func newWorker(t hosttest.T, groups ...string) *worker {
	t.Helper()
	return newWorkerOn(t, "", groups...)
}

// newWorkerOn is newWorker with a gate of that kind; empty: the daemon's choice.
func newWorkerOn(t hosttest.T, gate string, groups ...string) *worker {
	t.Helper()
	w := &worker{t: t}
	w.root = hosttest.Root(t, w.end)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	trusting, err := origin.ParseGroups(groups)
	if err != nil {
		t.Fatal(err)
	}
	w.opts = node.Options{Root: w.root, Binary: self, Gate: gate, Groups: trusting, GiveUp: 30 * time.Second, Logger: slog.New(slog.NewTextHandler(&w.log, nil))}
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

// end ends the daemon.
func (w *worker) end() {
	if w.n != nil {
		if err := w.n.Close(); err != nil {
			w.t.Error(err)
		}
	}
	if w.t.Failed() {
		w.t.Logf("log:\n%s", w.log.String())
	}
}

// pull follows a pull until an event.
func (w *worker) pull(ref string, until api.EventKind) error {
	_, err := hosttest.Pull(w.t, w.n, ref, until)
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
	hosttest.Eventually(w.t, "what the test waits for", func() error {
		if !ok() {
			return errors.New("not yet")
		}
		return nil
	})
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
