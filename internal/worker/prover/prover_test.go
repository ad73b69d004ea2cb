package prover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/store"
)

// bench is a Prover whose tries are functions, in a bubble of package synctest.
type bench struct {
	*Prover
	mu    sync.Mutex
	busy  bool
	tries map[origin.Key]func(ctx context.Context) error // of what is not there nothing comes, ever
	began []string                                       // KEY at SECONDS
	ends  []string                                       // results
	start time.Time
}

func newBench(t *testing.T) *bench {
	b := &bench{tries: make(map[origin.Key]func(context.Context) error), start: time.Now()}
	b.Prover = New(Options{
		Store: store.New(store.Options{Logger: slog.New(slog.DiscardHandler)}), Logger: slog.New(slog.DiscardHandler),
		Busy:  func() bool { return b.busy },
		Count: func(result string) { b.ends = append(b.ends, result) },
	})
	b.provable = func(origin.Key) bool { return true }
	b.attempt = func(x *task) error {
		b.mu.Lock()
		b.began = append(b.began, fmt.Sprintf("%s at %v", x.key, time.Since(b.start).Round(time.Second)))
		fn := b.tries[x.key]
		b.mu.Unlock()
		if fn == nil {
			<-x.ctx.Done()
			return context.Cause(x.ctx)
		}
		return fn(x.ctx)
	}
	b.work.Go(b.run)
	t.Cleanup(b.Stop)
	return b
}

// to adds what is to be proven, one after the other.
func (b *bench) to(keys ...origin.Key) {
	for _, key := range keys {
		b.add(key, string(key), credentials.Credential{})
		synctest.Wait()
	}
}

// saw fails the test unless tries of a key began at these times, and forgets them.
func (b *bench) saw(t *testing.T, key string, want ...string) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	var got []string
	for _, s := range b.began {
		if k, at, _ := strings.Cut(s, " at "); k == key {
			got = append(got, at)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("tries of %s began at %v, want %v; all: %v", key, got, want, b.began)
	}
}

func right(context.Context) error { return nil }

// Nobody waits for servers that say nothing: not while there are few of them, and else for their turns.
func TestWhatTakesLongGivesWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tries["good"], b.tries["late"] = right, right
		b.to("mute1", "mute2", "mute3", "good")
		b.saw(t, "good", "0s")
		time.Sleep(10 * time.Second)
		b.to("mute4", "late")
		b.saw(t, "late")
		time.Sleep(time.Hour)
		b.saw(t, "late", "1m0s") // when the first turn was over
		if s := b.tasks["mute1"].state; s.Phase != Proving && s.Phase != Unproven {
			t.Errorf("mute1 is %v", s)
		}
		if b.tasks["late"] != nil || b.tasks["good"] != nil {
			t.Error("what is proven is remembered")
		}
	})
}

// What has failed by others' turns has a longer one each time: whatever takes long is proven in the end, beside any number
// of servers that say nothing.
func TestWhatTakesLongIsProvenInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tries["slow"] = func(ctx context.Context) error {
			select {
			case <-time.After(20 * time.Minute):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		b.to("slow")
		for i := range 100 {
			b.to(origin.Key(fmt.Sprint("mute", i)))
		}
		time.Sleep(48 * time.Hour)
		synctest.Wait()
		if b.tasks["slow"] != nil {
			t.Errorf("it is %v after two days", b.tasks["slow"].state)
		}
	})
}

// What somebody waits for takes the place of what nobody waits for, at once.
func TestWhatIsWaitedForIsProvenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.to("mute1", "mute2", "mute3", "mute4")
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		err := b.Await(ctx, "waited", nil)
		b.saw(t, "waited", "0s")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it ends with %v", err)
		}
		n := 0
		for _, x := range b.tasks {
			if x.running {
				n++
			}
		}
		if n != lanes {
			t.Errorf("%d tries are under way", n)
		}
	})
}

// A pause ends what runs, and what is added meanwhile waits for its end.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.to("one", "two")
		time.Sleep(time.Second)
		resume := b.Pause()
		for _, x := range b.tasks {
			if x.running {
				t.Errorf("%s runs", x.key)
			}
		}
		b.to("three")
		time.Sleep(time.Minute)
		b.saw(t, "three")
		// Nothing is here of the rootfs: what is known of them goes.
		resume()
		synctest.Wait()
		if len(b.tasks) != 0 {
			t.Errorf("%d are remembered of what was removed", len(b.tasks))
		}
	})
}

// Nothing is remembered here of what has failed: its rootfs has the verdict.
func TestWhatFailedIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		for i := range 1000 {
			key := origin.Key(fmt.Sprint(i))
			b.tries[key] = func(context.Context) error { return &proof.Failed{Why: "a lie"} }
			b.to(key)
		}
		if len(b.tasks) > 0 || len(b.ends) != 1000 || b.ends[0] != string(Failed) {
			t.Errorf("%d of %d are remembered", len(b.tasks), len(b.ends))
		}
	})
}

// What came to nothing is tried again after a minute, then less and less often.
func TestTriesThatComeToNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tries["a"] = func(context.Context) error { return errors.New("no recipe") }
		b.to("a")
		if s := b.tasks["a"].state; s != (State{Phase: Unproven, Why: "no recipe"}) {
			t.Errorf("it is %v", s)
		}
		time.Sleep(4 * time.Hour)
		b.saw(t, "a", "0s", "1m0s", "3m0s", "7m0s", "15m0s", "31m0s", "1h3m0s", "2h3m0s", "3h3m0s")
	})
}

// reads has a proof read so many bytes in chunks, each of which takes so long, and returns how long all took.
func (b *bench) reads(ctx context.Context, t *testing.T, bytes int, each time.Duration) time.Duration {
	t.Helper()
	const chunk = 128 << 10
	began := time.Now()
	at := &seat{ctx: ctx, desk: b.desk}
	if err := at.sit(); err != nil {
		t.Fatal(err)
	}
	defer at.leave()
	for ; bytes > 0; bytes -= chunk {
		if err := b.pace(ctx, at, chunk); err != nil {
			t.Error(err)
		}
		time.Sleep(each)
	}
	return time.Since(began)
}

// A proof rests for as long as it works; beside pulls it reads 8 MiB a second, neither more nor less, but nothing in their
// first second; and for who waits it does not rest.
func TestPace(t *testing.T) {
	for _, test := range []struct {
		what          string
		busy, waiting bool
		each, want    time.Duration
	}{
		{"nothing else", false, false, time.Millisecond, 1023 * time.Millisecond},
		{"a slow disk", false, false, time.Second, 512*time.Second + 511*mostRest},
		{"a pull", true, false, 0, 8*time.Second + startRest - time.Second/64},
		{"a pull, and somebody waits", true, true, time.Millisecond, 512 * time.Millisecond},
	} {
		t.Run(test.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.busy = test.busy
				if test.waiting {
					b.tasks["a"] = &task{key: "a", waiting: 1, running: true, ctx: b.ctx}
				}
				if got := b.reads(t.Context(), t, 64<<20, test.each); got != test.want {
					t.Errorf("64 MiB take %v, want %v", got, test.want)
				}
			})
		})
	}
}

// Whatever begins, and however often, a proof keeps most of its least rate.
func TestProofsAreNotStarved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		n := 0
		b.opts.Busy = func() bool { n++; return n%2 == 0 }
		if got := b.reads(t.Context(), t, 64<<20, 0); got > 10*time.Second {
			t.Errorf("64 MiB take %v beside what begins again and again", got)
		}
	})
}

// Two proofs read no more than one would, and have equal shares.
func TestProofsShareTheDesk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.busy = true
		took := make([]time.Duration, 2)
		var work sync.WaitGroup
		for i := range took {
			work.Go(func() { took[i] = b.reads(t.Context(), t, 64<<20, 0) })
		}
		work.Wait()
		for _, d := range took {
			if d < 16*time.Second || d > 17*time.Second {
				t.Errorf("64 MiB take %v beside as many, want 17s", d)
			}
		}
	})
}

// A proof that is to end does not wait for the desk, and leaves it.
func TestTheDeskIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk()
		ctx, cancel := context.WithCancelCause(t.Context())
		first, second := &seat{ctx: t.Context(), desk: d}, &seat{ctx: ctx, desk: d}
		if err := first.sit(); err != nil {
			t.Fatal(err)
		}
		cancel(errTurn)
		if err := second.away(func() error { return nil }); !errors.Is(err, errTurn) {
			t.Errorf("who is to end has the desk: %v", err)
		}
		second.leave()
		if err := first.away(func() error { return api.Errorf(api.CodeUnavailable, "no answer") }); err == nil || !first.taken {
			t.Errorf("after an error: %v, %v", err, first.taken)
		}
		first.leave()
		if len(d) != 0 {
			t.Error("somebody has it")
		}
	})
}

// What has just come here starts first: its proof is begun when it has been calm, and not while others start, unless
// that goes on for long. Who asks for a proof has it begun at once.
func TestProofsLetStartsGoFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.opts.Calm = 10 * time.Second
		proven := func(context.Context) error { return nil }
		b.tries["calm"], b.tries["busy"], b.tries["asked"] = proven, proven, proven
		b.to("calm")
		time.Sleep(20 * time.Second)
		b.saw(t, "calm", "10s")

		b.busy = true
		b.to("busy", "asked")
		if err := b.Await(t.Context(), "asked", nil); err == nil {
			t.Error("a rootfs that the store does not know is proven")
		}
		time.Sleep(3 * time.Minute)
		b.saw(t, "asked", "20s")
		b.saw(t, "busy", "1m30s")
	})
}
