package gate_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

// needFUSE skips the test where the host has no FUSE.
func needFUSE(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		tb.Skip(err)
	}
}

func startedFUSE(tb testing.TB, o gate.Options) *gate.FUSE {
	tb.Helper()
	needFUSE(tb)
	o.Dir = filepath.Join(tb.TempDir(), "gate")
	tb.Cleanup(func() { unmountAll(tb, o.Dir) })
	g, err := gate.NewFUSE(context.Background(), o)
	if err != nil {
		tb.Fatal(err)
	}
	if err := g.Start(); err != nil {
		tb.Fatal(err)
	}
	return g
}

func unmountAll(tb testing.TB, dir string) {
	tb.Helper()
	mounts, err := kernel.Mounts(dir)
	if err != nil {
		tb.Error(err)
	}
	for _, m := range mounts {
		if err := kernel.Unmount(m.Target, true); err != nil {
			tb.Error(err)
		}
	}
}

func setupFUSE() gatetest.Setup {
	return gatetest.Setup{
		New: func(tb testing.TB, waits int) gate.Gate { return startedFUSE(tb, gate.Options{MaxPending: waits}) },
		Hold: func(g gate.Gate) (func(), error) {
			f, err := g.(*gate.FUSE).Connection()
			return func() { f.Close() }, err
		},
	}
}

func TestFUSE(t *testing.T) { gatetest.Run(t, setupFUSE()) }

// As before Linux 6.12.
func TestFUSEByLoopDevices(t *testing.T) {
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip(err)
	}
	s := setupFUSE()
	s.Loop = true
	gatetest.Run(t, s)
}

// guardedFUSE is an arena behind a FUSE gate, and the path of its file there.
func guardedFUSE(tb testing.TB, g *gate.FUSE, size int) (*gatetest.Backing, string) {
	tb.Helper()
	truth := gatetest.Random(4, size)
	path := filepath.Join(tb.TempDir(), "arena")
	f, err := os.Create(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { f.Close() })
	if err := f.Truncate(int64(size)); err != nil {
		tb.Fatal(err)
	}
	b := gatetest.NewBacking(f, truth, nil)
	if err := g.Guard("arena", f, b); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { b.Fail(errors.New("the test is over")) })
	device := g.Device("arena", path)
	if device == path {
		tb.Fatalf("the device of a guarded arena is the arena, %s", path)
	}
	return b, device
}

// openDevice opens a file of the gate in its own process.
func openDevice(tb testing.TB, path string) *os.File {
	tb.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) // not os.Open: see FUSE
	if err != nil {
		tb.Fatal(err)
	}
	return os.NewFile(uintptr(fd), path)
}

// A thread that reads the gate's file itself waits in a way that only the
// gate's answer ends. EROFS waits like that before Linux 6.13 or so.
func TestFUSESignals(t *testing.T) {
	g := startedFUSE(t, gate.Options{})
	t.Cleanup(func() { g.Close() })
	backing, device := guardedFUSE(t, g, 1<<20)
	reader := func(skip string) (*exec.Cmd, <-chan error) {
		cmd := exec.Command("dd", "if="+device, "of=/dev/null", "bs=4096", "count=1", "skip="+skip)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ch := make(chan error, 1)
		go func() { ch <- cmd.Wait() }()
		t.Cleanup(func() { cmd.Process.Kill() })
		return cmd, ch
	}
	end := func(ch <-chan error) error {
		t.Helper()
		select {
		case err := <-ch:
			return err
		case <-time.After(gatetest.Patience):
			t.Fatal("a reader hangs")
			return nil
		}
	}
	one, oneEnds := reader("0")
	two, twoEnds := reader("20")
	if err := backing.WaitNeeds(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	// A signal with a handler must not make a read fail.
	if err := two.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if err := one.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := end(oneEnds); err == nil {
		t.Error("a killed reader ended well")
	}
	select {
	case err := <-twoEnds:
		t.Fatalf("a signal ended a read: %v", err)
	case <-time.After(5 * time.Millisecond):
	}
	if err := backing.Fill(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := end(twoEnds); err != nil {
		t.Error(err)
	}
	if s := g.Stats(); s.Pending != 0 || s.Denied != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestFUSERefuses(t *testing.T) {
	g := startedFUSE(t, gate.Options{})
	t.Cleanup(func() { g.Close() })
	_, device := guardedFUSE(t, g, 1<<20)
	for _, name := range []string{"0", "1", "2", "x", "0" + filepath.Base(device), "+1"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(device), name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v, want that it does not exist", name, err)
		}
	}
	if fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0); !errors.Is(err, unix.EROFS) {
		if err == nil {
			unix.Close(fd)
		}
		t.Errorf("open for writing: %v, want EROFS", err)
	}
	st, err := os.Stat(device)
	if err != nil || st.Size() != 1<<20 || st.Mode() != 0o400 {
		t.Errorf("%v, %v", st, err)
	}
	if names, err := os.ReadDir(filepath.Dir(device)); err != nil || len(names) > 0 {
		t.Errorf("list: %v, %v", names, err)
	}
}

// A released arena is served to whoever has it open, and then forgotten.
func TestFUSEForgetsReleased(t *testing.T) {
	g := startedFUSE(t, gate.Options{})
	t.Cleanup(func() { g.Close() })
	gate.SetFuseGrace(g, time.Millisecond)
	backing, device := guardedFUSE(t, g, 1<<20)
	f := openDevice(t, device)
	defer f.Close()
	if err := backing.Fill(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := g.Release("arena"); err != nil {
		t.Fatal(err)
	}
	if got := g.Device("arena", "path"); got != "path" {
		t.Errorf("device of a released arena: %s", got)
	}
	// Nothing of the caller's is needed any more.
	backing.File().Close()
	time.Sleep(20 * time.Millisecond)
	b := make([]byte, 1<<20)
	if _, err := f.ReadAt(b, 0); err != nil || !bytes.Equal(b, gatetest.Random(4, 1<<20)) {
		t.Errorf("read after release: %v", err)
	}
	if g.Idle() {
		t.Error("idle, but a file is open")
	}
	f.Close()
	deadline := time.Now().Add(gatetest.Patience)
	for gate.FuseNodes(g) > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if n := gate.FuseNodes(g); n > 0 || !g.Idle() {
		t.Errorf("%d nodes left, idle %v", n, g.Idle())
	}
	if err := g.End(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestFUSETakeover(t *testing.T) {
	needFUSE(t)
	ctx := context.Background()
	g := startedFUSE(t, gate.Options{})
	backing, device := guardedFUSE(t, g, 1<<20)
	f := openDevice(t, device)
	defer f.Close()
	got := make(chan error, 3)
	read := func(block int64) {
		b := make([]byte, 4096)
		_, err := f.ReadAt(b, block*4096)
		if err == nil && !bytes.Equal(b, gatetest.Random(4, 1<<20)[block*4096:][:4096]) {
			err = errors.New("wrong bytes")
		}
		got <- err
	}
	go read(0)
	if err := backing.WaitNeeds(ctx, 1); err != nil {
		t.Fatal(err)
	}
	conn, err := g.Connection()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	go read(1) // while there is no gate
	o := gate.Options{Dir: filepath.Dir(device), Held: map[string]*os.File{gate.KeptFUSE: conn}}
	g, err = gate.TakeoverFUSE(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	go read(2) // before its arena is back
	time.Sleep(10 * time.Millisecond)
	if err := g.Guard("arena", backing.File(), backing); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-got:
		t.Fatalf("a read did not wait: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	if err := backing.Fill(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case err := <-got:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(gatetest.Patience):
			t.Fatal("a read hangs")
		}
	}
	// An arena that does not come back: EIO, not a wait.
	if conn, err = g.Connection(); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	o.Held[gate.KeptFUSE] = conn
	if g, err = gate.TakeoverFUSE(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	go read(3)
	time.Sleep(10 * time.Millisecond)
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; !errors.Is(err, unix.EIO) {
		t.Errorf("read of an arena that is gone: %v, want EIO", err)
	}
	// A connection that has ended is no gate to take over.
	if conn, err = g.Connection(); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	unmountAll(t, filepath.Dir(device))
	o.Held[gate.KeptFUSE] = conn
	if _, err := gate.TakeoverFUSE(o); !errors.Is(err, gate.ErrNoGate) {
		t.Errorf("took over what has ended: %v", err)
	}
}
