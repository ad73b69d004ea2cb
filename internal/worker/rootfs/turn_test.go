package rootfs

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/mounts"
)

// filler is a pull of a test.
type filler struct{ unclaimed bool }

func (f *filler) Claimed() bool { return !f.unclaimed }
func (f *filler) Yield()        {}

// Who wants a rootfs that another one fills is next, in turn. While there is a next one no read fails.
func TestTurns(t *testing.T) {
	tree, _, _ := toctest.Files{"program": toctest.Blob(1, 5000)}.TOC(t)
	l, err := arena.NewLayout(tree, nil)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	r := New(Options{Logger: log, Mounts: mounts.Options{Logger: log}}, t.TempDir())
	a, err := arena.Create(r.Dir(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r.Backing(a, nil)
	first, second, third, header := &filler{}, &filler{}, &filler{}, &filler{unclaimed: true}
	fills := func(what string, want Filler, fails error) {
		t.Helper()
		if by := r.Filler(); by != want {
			t.Fatalf("%s: %p fills it, want %p", what, by, want)
		}
		if err := a.Failure(); !errors.Is(err, fails) {
			t.Fatalf("%s: reads fail with %v, want %v", what, err, fails)
		}
	}
	for i, f := range []Filler{first, header, second, third, second} {
		if mine := r.Claim(f); mine != (i == 0) {
			t.Errorf("the claim %d is granted: %v", i, mine)
		}
	}
	why := errors.New("it has failed")
	r.GiveUp(second, why)
	fills("one that does not fill it has given up", first, nil)
	r.GiveUp(first, why)
	fills("the first has given up", second, nil)
	r.Unclaim(first)
	if !r.HandOver(second, third) {
		t.Error("it is not handed over")
	}
	fills("the third takes it over", third, nil)
	r.Unclaim(third)
	fills("the third has ended", second, nil)
	r.GiveUp(second, why)
	fills("nobody is next", second, why)
	if !r.Claim(third) {
		t.Error("one that has given up keeps it")
	}
	fills("another one comes", third, nil)
	r.Unclaim(second)
	r.Unclaim(third)
	fills("nobody has claimed it", nil, nil)
	if header.unclaimed = false; !r.Claim(header) {
		t.Error("nobody fills it, and it is not to be had")
	}
	if err := r.Await(canceled(t), 0, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("a read waits no more: %v", err)
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}
