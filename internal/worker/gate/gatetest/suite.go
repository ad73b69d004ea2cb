// Package gatetest is the suite that every gate runs: what a reader of an
// EROFS mount over a guarded arena sees, whatever holds it back.
package gatetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/gate"
)

// Setup makes gates of one kind.
type Setup struct {
	// New returns a gate that answers, in which so many reads may wait (0: as many as by default). It is
	// closed by the suite. It skips the test where the kernel or the host cannot have such a gate.
	New func(tb testing.TB, waits int) gate.Gate
	// Loop mounts EROFS over loop devices.
	Loop bool
	// Hold becomes a second holder of g until let is called, as the keeper is.
	Hold func(g gate.Gate) (let func(), err error)
}

// Patience is how long a reader may take before a test calls it hung. Nothing
// here takes a hundredth of it, unless the machine has much else to do.
const Patience = 2 * time.Minute

// rig is a mounted tree behind a gate.
type rig struct {
	*Tree
	gate    gate.Gate
	backing *Backing
	dir     string // the mount
	ctx     context.Context
	hold    func(g gate.Gate) (let func(), err error)
}

const arenaName = "sha256:0000/arena" // names are free text

// gate makes a gate for one test.
func (s Setup) gate(t *testing.T, waits int) gate.Gate {
	t.Helper()
	g := s.New(t, waits)
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Errorf("close gate: %v", err)
		}
	})
	return g
}

// rig mounts a tree over an arena that g guards under a name.
func (s Setup) rig(t *testing.T, g gate.Gate, name string) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	t.Cleanup(cancel)
	tmp := t.TempDir()
	program, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	tree := NewTree(t, tmp, map[string][]byte{
		"big":   Random(1, 4<<20),
		"odd":   Random(2, 1<<20+1234),
		"small": Random(3, 100),
		"exec":  program,
	})
	path := filepath.Join(tmp, "arena")
	file := tree.NewArena(t, path)
	r := &rig{Tree: tree, gate: g, backing: NewBacking(file, tree.Truth, nil), dir: filepath.Join(tmp, "mnt"), ctx: ctx, hold: s.Hold}
	if err := g.Guard(name, file, r.backing); err != nil {
		t.Fatal(err)
	}
	tree.MountBy(t, g.Device(name, path), r.dir, s.Loop)
	// Readers that a failed test leaves behind must not outlive it, nor keep it from being unmounted.
	t.Cleanup(func() { r.backing.Fail(errors.New("the test is over")) })
	return r
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

// open opens a file of the tree.
func (r *rig) open(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.Open(r.path(name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// async runs fn, and wait returns what it returned, or says that it hangs.
func async(fn func() error) (wait func(t *testing.T) error, done <-chan struct{}) {
	ch := make(chan struct{})
	var err error
	go func() {
		err = fn()
		close(ch)
	}()
	return func(t *testing.T) error {
		t.Helper()
		select {
		case <-ch:
			return err
		case <-time.After(Patience):
			t.Fatal("a reader hangs")
			return nil
		}
	}, ch
}

// readAt reads [off, off+n) of name and compares.
func (r *rig) readAt(f *os.File, name string, off, n int) error {
	want := r.Files[name][off : off+n]
	got := make([]byte, n)
	if _, err := f.ReadAt(got, int64(off)); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("wrong bytes in %s at %d+%d", name, off, n)
	}
	return nil
}

// forget drops f's pages from the page cache of the mount.
func forget(f *os.File) error {
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// Run runs the suite.
func Run(t *testing.T, s Setup) {
	tests := []struct {
		name string
		fn   func(t *testing.T, r *rig)
	}{
		{"read", testRead},
		{"pread at odd offsets", testPread},
		{"mmap", testMmap},
		{"exec", testExec},
		{"readahead", testReadahead},
		{"concurrent readers", testConcurrent},
		{"waits for its own range only", testIndependent},
		{"EIO and then right bytes", testFailure},
		{"EIO on a fault", testFaultFailure},
		{"deny and retry", testDenyRetry},
		{"release", testRelease},
		{"release lets waiting reads through", testReleaseWaiting},
		{"killed reader", testKilled},
		{"readers killed at any moment", testKilledAnytime},
		{"guard refuses", testGuardRefuses},
		{"close leaves reads waiting", testClose},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.fn(t, s.rig(t, s.gate(t, 0), arenaName)) })
	}
	t.Run("one arena's readers leave room for others", s.testRoom)
	t.Run("killed readers leave room", s.testKilledRoom)
}

func testRead(t *testing.T, r *rig) {
	r.backing.Demand(true)
	for name, want := range r.Files {
		wait, _ := async(func() error {
			got, err := os.ReadFile(r.path(name))
			if err == nil && !bytes.Equal(got, want) {
				err = fmt.Errorf("wrong bytes in %s", name)
			}
			return err
		})
		if err := wait(t); err != nil {
			t.Error(err)
		}
	}
	if len(r.backing.Needs()) == 0 {
		t.Error("nothing went through the gate")
	}
}

func testPread(t *testing.T, r *rig) {
	r.backing.Demand(true)
	rng := rand.New(rand.NewPCG(1, 2))
	f := r.open(t, "odd")
	size := len(r.Files["odd"])
	wait, _ := async(func() error {
		for range 200 {
			off := rng.IntN(size)
			if err := r.readAt(f, "odd", off, min(1+rng.IntN(20000), size-off)); err != nil {
				return err
			}
			if rng.IntN(10) == 0 {
				if err := forget(f); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err := wait(t); err != nil {
		t.Error(err)
	}
	// What is behind the end is nothing, not a wait.
	if n, err := f.ReadAt(make([]byte, 100), int64(size-50)); n != 50 || err == nil {
		t.Errorf("read across the end: %d bytes, error %v; want 50 and EOF", n, err)
	}
}

// compareMapped compares ranges of name, each 5,000 bytes, in another process
// that maps it: a goroutine that waits in a page fault stops the Go runtime
// around it, and with that, sooner or later, the gate.
func (r *rig) compareMapped(t *testing.T, name string, offsets ...int) error {
	want := filepath.Join(t.TempDir(), "want")
	if err := os.WriteFile(want, r.Files[name], 0o600); err != nil {
		return err
	}
	return runChild(r.ctx, append([]string{r.path(name), want}, strings.Fields(strings.Trim(fmt.Sprint(offsets), "[]"))...))
}

func testMmap(t *testing.T, r *rig) {
	r.backing.Demand(true)
	rng := rand.New(rand.NewPCG(3, 4))
	var offsets []int
	for range 100 {
		offsets = append(offsets, rng.IntN(4<<20-5000))
	}
	wait, _ := async(func() error { return r.compareMapped(t, "big", offsets...) })
	if err := wait(t); err != nil {
		t.Error(err)
	}
	if len(r.backing.Needs()) == 0 {
		t.Error("nothing went through the gate")
	}
}

func testExec(t *testing.T, r *rig) {
	r.backing.Demand(true)
	wait, _ := async(r.exec)
	if err := wait(t); err != nil {
		t.Error(err)
	}
	if len(r.backing.Needs()) == 0 {
		t.Error("nothing went through the gate")
	}
}

// exec runs the program of the tree. Another process executes it: when Go
// starts a process it stops one of its own processors until the new program is loaded, and
// with that, sooner or later, the gate.
func (r *rig) exec() error {
	out, err := exec.CommandContext(r.ctx, "/bin/sh", "-c", `exec "$0"`, r.path("exec")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func testReadahead(t *testing.T, r *rig) {
	r.backing.Demand(true)
	f := r.open(t, "big")
	wait, _ := async(func() error {
		// A window that begins and ends between blocks and is longer than one event.
		_, _, errno := syscall.Syscall(syscall.SYS_READAHEAD, f.Fd(), 12345, 1<<20)
		if errno != 0 {
			return errno
		}
		if err := unix.Fadvise(int(f.Fd()), 2<<20, 1<<20, unix.FADV_WILLNEED); err != nil {
			return err
		}
		if err := r.readAt(f, "big", 0, 4<<20); err != nil {
			return err
		}
		return nil
	})
	if err := wait(t); err != nil {
		t.Error(err)
	}
	for _, n := range r.backing.Needs() {
		if n.Off < 0 || n.N <= 0 || n.Off+n.N > int64(len(r.Truth)) {
			t.Errorf("needed %d+%d, outside of the arena", n.Off, n.N)
		}
	}
}

func testConcurrent(t *testing.T, r *rig) {
	var waits []func(*testing.T) error
	for i := range 32 {
		name := []string{"big", "odd"}[i%2]
		f := r.open(t, name)
		rng := rand.New(rand.NewPCG(5, uint64(i)))
		wait, _ := async(func() error {
			for range 20 {
				off := rng.IntN(len(r.Files[name]) - 9000)
				if err := r.readAt(f, name, off, 1+rng.IntN(9000)); err != nil {
					return err
				}
			}
			return nil
		})
		waits = append(waits, wait)
	}
	// Bytes arrive in an order of their own while the readers wait.
	if err := r.backing.WaitNeeds(r.ctx, 2); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(6, 7))
	for _, i := range rng.Perm((len(r.Truth) + 65535) / 65536) {
		if err := r.backing.Fill(int64(i)*65536, 65536); err != nil {
			t.Fatal(err)
		}
	}
	for _, wait := range waits {
		if err := wait(t); err != nil {
			t.Error(err)
		}
	}
}

func testIndependent(t *testing.T, r *rig) {
	big, small := r.open(t, "big"), r.open(t, "small")
	wait, done := async(func() error { return r.readAt(big, "big", 1<<20, 100) })
	if err := r.backing.WaitNeeds(r.ctx, 1); err != nil {
		t.Fatal(err)
	}
	need := r.backing.Needs()[0]
	at := int64(bytes.Index(r.Truth, r.Files["small"]))
	if err := r.backing.Fill(at, 100); err != nil {
		t.Fatal(err)
	}
	waitSmall, _ := async(func() error { return r.readAt(small, "small", 0, 100) })
	if err := waitSmall(t); err != nil {
		t.Error(err)
	}
	select {
	case <-done:
		t.Error("the read of an absent block did not wait")
	default:
	}
	if err := r.backing.Fill(need.Off, need.N); err != nil {
		t.Fatal(err)
	}
	// Its page may take more than one event.
	r.backing.Demand(true)
	if err := wait(t); err != nil {
		t.Error(err)
	}
}

func testFailure(t *testing.T, r *rig) {
	f := r.open(t, "big")
	r.backing.Fail(errors.New("server gone"))
	for _, off := range []int{0, 5000, 3 << 20} {
		wait, _ := async(func() error { return r.readAt(f, "big", off, 100) })
		if err := wait(t); !errors.Is(err, unix.EIO) {
			t.Errorf("read at %d: %v, want EIO", off, err)
		}
	}
	wait, _ := async(r.exec)
	if err := wait(t); err == nil || !strings.Contains(err.Error(), "Input/output error") {
		t.Errorf("exec: %v, want EIO", err)
	}
	// The failure is not remembered by any cache.
	r.backing.Fail(nil)
	r.backing.Demand(true)
	wait, _ = async(func() error { return r.readAt(f, "big", 0, 4<<20) })
	if err := wait(t); err != nil {
		t.Error(err)
	}
	wait, _ = async(r.exec)
	if err := wait(t); err != nil {
		t.Errorf("exec: %v", err)
	}
}

func testFaultFailure(t *testing.T, r *rig) {
	r.backing.Fail(errors.New("server gone"))
	touch := func() error { return r.compareMapped(t, "big", 9000) }
	wait, _ := async(touch)
	if err := wait(t); err == nil || !strings.Contains(err.Error(), "fault") {
		t.Errorf("fault: %v, want one that fails", err)
	}
	r.backing.Fail(nil)
	r.backing.Demand(true)
	wait, _ = async(touch)
	if err := wait(t); err != nil {
		t.Error(err)
	}
}

func testDenyRetry(t *testing.T, r *rig) {
	f := r.open(t, "odd")
	for i := range 50 {
		off := i * 20011
		r.backing.Fail(errors.New("not now"))
		wait, _ := async(func() error { return r.readAt(f, "odd", off, 3000) })
		err := wait(t)
		// It may have been in a window that arrived before.
		if err != nil && !errors.Is(err, unix.EIO) {
			t.Fatalf("read at %d: %v, want EIO", off, err)
		}
		r.backing.Fail(nil)
		r.backing.Demand(true)
		wait, _ = async(func() error { return r.readAt(f, "odd", off, 3000) })
		if err := wait(t); err != nil {
			t.Fatal(err)
		}
		r.backing.Demand(false)
	}
}

func testRelease(t *testing.T, r *rig) {
	if err := r.backing.Fill(0, int64(len(r.Truth))); err != nil {
		t.Fatal(err)
	}
	if err := r.gate.Release(arenaName); err != nil {
		t.Fatal(err)
	}
	// Now nobody asks: a backing that fails everything is not noticed.
	r.backing.Fail(errors.New("asked after release"))
	for name := range r.Files {
		f := r.open(t, name)
		wait, _ := async(func() error { return r.readAt(f, name, 0, len(r.Files[name])) })
		if err := wait(t); err != nil {
			t.Error(err)
		}
	}
	if n := r.backing.Needs(); len(n) > 0 {
		t.Errorf("complete, and yet %d ranges were needed", len(n))
	}
	if err := r.gate.Release(arenaName); err == nil {
		t.Error("released twice without an error")
	}
}

func testReleaseWaiting(t *testing.T, r *rig) {
	f := r.open(t, "big")
	var waits []func(*testing.T) error
	for i := range 10 {
		wait, _ := async(func() error { return r.readAt(f, "big", i*300_000, 100) })
		waits = append(waits, wait)
	}
	if err := r.backing.WaitNeeds(r.ctx, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.backing.FillUnseen(); err != nil {
		t.Fatal(err)
	}
	if err := r.gate.Release(arenaName); err != nil {
		t.Fatal(err)
	}
	for _, wait := range waits {
		if err := wait(t); err != nil {
			t.Error(err)
		}
	}
}

func testKilled(t *testing.T, r *rig) {
	for i := range 5 {
		cmd := exec.Command("dd", "if="+r.path("big"), "of=/dev/null", "bs=4096", "count=1", fmt.Sprintf("skip=%d", i*100))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		err := r.backing.WaitNeeds(r.ctx, i+1)
		if err != nil {
			t.Error(err)
		}
		cmd.Process.Kill()
		wait, _ := async(cmd.Wait)
		if err := wait(t); err == nil {
			t.Error("dd read an absent block")
		}
	}
	// Another reader of the same block is not harmed, and what was asked for a
	// reader that is no more does not stand in its way. Whether the gate is
	// asked again, or the reader shares what is under way, is the kernel's.
	f := r.open(t, "big")
	wait, done := async(func() error { return r.readAt(f, "big", 0, 3<<20) })
	select {
	case <-done:
		t.Error("the read of an absent block did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	r.backing.Demand(true)
	if err := wait(t); err != nil {
		t.Error(err)
	}
}

// testKilledAnytime: a reader that is killed in the middle of a long read must
// not leave the rest of it in the page cache as zeros.
func testKilledAnytime(t *testing.T, r *rig) {
	r.backing.Demand(true)
	f := r.open(t, "big")
	rng := rand.New(rand.NewPCG(8, 9))
	for i := range 60 {
		if err := forget(f); err != nil {
			t.Fatal(err)
		}
		// One that loops, so that there is always something to interrupt.
		cmd := exec.Command("cat", r.path("big"), r.path("odd"), r.path("big"))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rng.IntN(6000)) * time.Microsecond)
		cmd.Process.Kill()
		wait, _ := async(cmd.Wait)
		wait(t) // it may have ended by itself
		wait, _ = async(func() error { return r.readAt(f, "big", 0, 4<<20) })
		if err := wait(t); err != nil {
			t.Fatalf("after kill %d: %v", i, err)
		}
	}
}

func testGuardRefuses(t *testing.T, r *rig) {
	other, err := os.Create(filepath.Join(t.TempDir(), "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := r.gate.Guard(arenaName, other, r.backing); err == nil {
		t.Error("a second arena got the name of the first")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if err := r.gate.Guard("device", null, r.backing); err == nil {
		t.Error("a device went behind the gate")
	}
	if err := r.gate.Release("nobody"); err == nil {
		t.Error("what was not guarded was released")
	}
}

func testClose(t *testing.T, r *rig) {
	// Another holder, as the keeper is; without one the kernel lets go.
	let, err := r.hold(r.gate)
	if err != nil {
		t.Fatal(err)
	}
	defer let()
	// The reader is a process, because it can only end by SIGKILL.
	cmd := exec.Command("cat", r.path("big"))
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	kill := func() { once.Do(func() { cmd.Process.Kill() }) }
	defer kill()
	if err := r.backing.WaitNeeds(r.ctx, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.gate.Close(); err != nil {
		t.Fatal(err)
	}
	wait, done := async(cmd.Wait)
	select {
	case <-done:
		t.Error("the reader did not go on waiting")
	case <-time.After(50 * time.Millisecond):
	}
	kill()
	if err := wait(t); err == nil {
		t.Error("the reader ended by itself")
	}
	if out.Len() > 0 {
		t.Errorf("the reader got %d bytes that are not here", out.Len())
	}
}
