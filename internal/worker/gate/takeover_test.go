package gate_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

// guardedFile is a present file behind a gate, and a descriptor that is asked for.
func guardedFile(tb testing.TB, g *gate.Fanotify, size int) (*gatetest.Backing, *os.File) {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "arena")
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { file.Close() })
	if err := file.Truncate(int64(size)); err != nil {
		tb.Fatal(err)
	}
	b := gatetest.NewBacking(file, gatetest.Random(1, size), nil)
	if err := g.Guard("arena", file, b); err != nil {
		tb.Fatal(err)
	}
	asked, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { asked.Close() })
	return b, asked
}

// hold returns what a keeper would hold of g.
func hold(tb testing.TB, g *gate.Fanotify) map[string]*os.File {
	tb.Helper()
	group, err := g.Group()
	if err != nil {
		tb.Fatal(err)
	}
	journal, err := g.Journal()
	if err != nil {
		tb.Fatal(err)
	}
	return map[string]*os.File{gate.KeptGroup: group, gate.KeptJournal: journal}
}

// TestThousands: very many reads wait at once, as many as may, and all get their bytes.
func TestThousands(t *testing.T) {
	const reads = 2000
	g := started(t, gate.Options{MaxPending: 2 * reads})
	defer g.Close()
	backing, f := guardedFile(t, g, reads*4096)
	errs := make(chan error, reads)
	want := gatetest.Random(1, reads*4096)
	for i := range reads {
		go func() {
			b := make([]byte, 4096)
			_, err := f.ReadAt(b, int64(i)*4096)
			if err == nil && string(b) != string(want[i*4096:][:4096]) {
				err = os.ErrInvalid
			}
			errs <- err
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), gatetest.Patience)
	defer cancel()
	if err := backing.WaitNeeds(ctx, reads); err != nil {
		t.Fatal(err)
	}
	if n := g.Stats().Pending; n != reads {
		t.Errorf("%d pending, want %d", n, reads)
	}
	backing.Demand(true)
	for range reads {
		select {
		case err := <-errs:
			if err != nil {
				t.Fatal(err)
			}
		case <-ctx.Done():
			t.Fatal("a read hangs")
		}
	}
	// A reader has its bytes a moment before its event is forgotten.
	for g.Stats().Pending != 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if s := g.Stats(); s.Pending != 0 || s.Denied != 0 || s.Events < reads {
		t.Errorf("stats %+v", s)
	}
}

// TestSharedNumbers takes a gate over in a process where other files have the
// numbers of all its waiting events, and lets new events have them too.
func TestSharedNumbers(t *testing.T) {
	const old, fresh = 20, 40
	for _, again := range []bool{false, true} {
		g := started(t, gate.Options{})
		backing, f := guardedFile(t, g, 1<<20)
		want := gatetest.Random(1, 1<<20)
		errs := make(chan error, old+fresh)
		read := func(from, n int) {
			for i := from; i < from+n; i++ {
				go func() {
					b := make([]byte, 4096)
					_, err := f.ReadAt(b, int64(i)*4096)
					if err == nil && string(b) != string(want[i*4096:][:4096]) {
						err = os.ErrInvalid
					}
					errs <- err
				}()
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), gatetest.Patience)
		defer cancel()
		read(0, old)
		if err := backing.WaitNeeds(ctx, old); err != nil {
			t.Fatal(err)
		}
		held := hold(t, g)
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		var nulls []*os.File // take the numbers that Close gave back
		for range old + 5 {
			null, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			nulls = append(nulls, null)
		}
		takeover := func(held map[string]*os.File) *gate.Fanotify {
			g, err := gate.Takeover(ctx, gate.Options{Held: held})
			if err != nil {
				t.Fatal(err)
			}
			if err := g.Guard("arena", backing.File(), backing); err != nil {
				t.Fatal(err)
			}
			return g
		}
		g = takeover(held)
		for _, null := range nulls {
			null.Close()
		}
		if err := g.Start(); err != nil {
			t.Fatal(err)
		}
		read(old, fresh)
		if err := backing.WaitNeeds(ctx, old+old+fresh); err != nil {
			t.Fatal(err)
		}
		denied := 0
		if again {
			// The next daemon cannot know who waits under the shared numbers:
			// they fail, and the others go on.
			held = hold(t, g)
			if err := g.Close(); err != nil {
				t.Fatal(err)
			}
			g = takeover(held)
			if err := g.Start(); err != nil {
				t.Fatal(err)
			}
		}
		backing.Demand(true)
		for range old + fresh {
			select {
			case err := <-errs:
				if err != nil && again && isEIO(err) {
					denied++
				} else if err != nil {
					t.Error(err)
				}
			case <-ctx.Done():
				t.Fatal("a read hangs")
			}
		}
		if again && denied < old {
			t.Errorf("%d reads denied, want %d or more", denied, old)
		}
		if err := g.Release("arena"); err != nil {
			t.Fatal(err)
		}
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func isEIO(err error) bool { return errors.Is(err, unix.EIO) }

func TestTakeoverRefuses(t *testing.T) {
	if _, err := gate.Takeover(t.Context(), gate.Options{}); !errors.Is(err, gate.ErrNoGate) {
		t.Errorf("nothing held: %v, want ErrNoGate", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	_, err = gate.Takeover(t.Context(), gate.Options{Held: map[string]*os.File{gate.KeptGroup: null}})
	if err == nil {
		t.Error("a device was taken for a group")
	}
}

// TestLostJournal: waiting reads fail, later ones work.
func TestLostJournal(t *testing.T) {
	g := started(t, gate.Options{})
	backing, f := guardedFile(t, g, 1<<20)
	errs := make(chan error, 1)
	go func() {
		_, err := f.ReadAt(make([]byte, 4096), 0)
		errs <- err
	}()
	if err := backing.WaitNeeds(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	held := hold(t, g)
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	held[gate.KeptJournal].Close()
	delete(held, gate.KeptJournal)
	g, err := gate.Takeover(t.Context(), gate.Options{Held: held})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := <-errs; !isEIO(err) {
		t.Errorf("waiting read: %v, want EIO", err)
	}
	backing.Demand(true)
	if err := g.Guard("arena", backing.File(), backing); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

// TestUnknownArena: an event of a file that nobody guards is denied.
func TestUnknownArena(t *testing.T) {
	g := started(t, gate.Options{})
	defer g.Close()
	path := filepath.Join(t.TempDir(), "file")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	group, err := g.Group()
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	if err := kernel.MarkPreAccess(group, file); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(path); !isEIO(err) {
		t.Errorf("%v, want EIO", err)
	}
}
