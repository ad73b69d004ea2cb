package gate_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

// need skips the test where the host has no pre-content events.
func need(tb testing.TB) {
	tb.Helper()
	group, err := kernel.NewFanotifyGroup()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	defer group.Close()
	f, err := os.Create(filepath.Join(tb.TempDir(), "file"))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	err = kernel.MarkPreAccess(group, f)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
}

func started(tb testing.TB, o gate.Options) *gate.Fanotify {
	tb.Helper()
	need(tb)
	g, err := gate.New(context.Background(), o)
	if err != nil {
		tb.Fatal(err)
	}
	if err := g.Start(); err != nil {
		tb.Fatal(err)
	}
	return g
}

func TestFanotify(t *testing.T) {
	gatetest.Run(t, gatetest.Setup{
		New: func(tb testing.TB, waits int) gate.Gate { return started(tb, gate.Options{MaxPending: waits}) },
		Hold: func(g gate.Gate) (func(), error) {
			f, err := g.(*gate.Fanotify).Group()
			return func() { f.Close() }, err
		},
	})
}
