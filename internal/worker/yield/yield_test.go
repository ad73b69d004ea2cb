package yield

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
)

func TestDecide(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name string
		d    kernel.Processors
		want bool
	}{
		{"nothing happens", kernel.Processors{Idle: 1000 * ms}, false},
		{"no time has passed", kernel.Processors{}, false},
		{"an image arrives, nobody else is there", kernel.Processors{Idle: 500 * ms, Usual: 300 * ms, Low: 200 * ms, Own: 450 * ms, OwnUser: 350 * ms}, false},
		{"a fast link: the daemon leaves nothing idle", kernel.Processors{Usual: 500 * ms, Low: 500 * ms, Own: 700 * ms, OwnUser: 500 * ms}, false},
		{"services use all", kernel.Processors{Usual: 950 * ms, Low: 50 * ms, Own: 100 * ms, OwnUser: 60 * ms}, true},
		{"services use half, the rest is idle", kernel.Processors{Idle: 400 * ms, Usual: 550 * ms, Low: 50 * ms, Own: 100 * ms, OwnUser: 60 * ms}, false},
		{"half of a processor is idle", kernel.Processors{Idle: 250 * ms, Usual: 730 * ms, Low: 20 * ms, Own: 40 * ms, OwnUser: 20 * ms}, false},
		{"less", kernel.Processors{Idle: 240 * ms, Usual: 740 * ms, Low: 20 * ms, Own: 40 * ms, OwnUser: 20 * ms}, true},
		{"a hundredth of 64 is more", kernel.Processors{Number: 64, Idle: 10 * ms, Usual: 990 * ms, Own: 40 * ms, OwnUser: 20 * ms}, false},
		{"half of one of 64", kernel.Processors{Number: 64, Idle: 5 * ms, Usual: 995 * ms, Own: 40 * ms, OwnUser: 20 * ms}, true},
		{"others of low priority would make room", kernel.Processors{Usual: 600 * ms, Low: 400 * ms, Own: 60 * ms, OwnUser: 40 * ms}, false},
		{"what is of low priority is the daemon's", kernel.Processors{Usual: 800 * ms, Low: 200 * ms, Own: 300 * ms, OwnUser: 200 * ms}, true},
	} {
		if c.d.Number == 0 {
			c.d.Number = 2
		}
		if got := decide(kernel.Processors{Idle: 5, Usual: 6, Low: 7, Own: 8, OwnUser: 9}, kernel.Processors{
			Number: c.d.Number, Idle: c.d.Idle + 5, Usual: c.d.Usual + 6, Low: c.d.Low + 7, Own: c.d.Own + 8, OwnUser: c.d.OwnUser + 9,
		}); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := kernel.Processors{Number: 1}
		var fails error
		looks := 0
		w := New(func() (kernel.Processors, error) { looks++; return now, fails })
		pass := func(d time.Duration, busy bool) {
			time.Sleep(d)
			if busy {
				now.Usual += d
			} else {
				now.Idle += d
			}
		}
		now.Usual = time.Hour // before anybody has looked
		for _, c := range []struct {
			name string
			d    time.Duration
			busy bool
			want bool
		}{
			{"the first look says nothing", Turn, true, false},
			{"a turn in which all is used", Turn, true, true},
			{"a moment later", Turn / 5, false, true},
			{"a turn in which most is idle", Turn, false, false},
			{"again", Turn, true, true},
			{"nobody has asked for long", stale, true, false},
			{"then", Turn, true, true},
		} {
			if pass(c.d, c.busy); w.Wanted() != c.want {
				t.Errorf("%s: %v", c.name, !c.want)
			}
		}
		if looks != 6 || w.Turns() != 3 {
			t.Errorf("%d looks, %d turns", looks, w.Turns())
		}
		fails = errors.New("no procfs")
		if pass(Turn, true); w.Wanted() {
			t.Error("what cannot be seen is wanted")
		}
	})
	var none *Watch
	if none.Wanted() || none.Turns() != 0 {
		t.Error("nobody watches, and somebody wants something")
	}
}
