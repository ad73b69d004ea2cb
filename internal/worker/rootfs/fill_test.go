package rootfs

import (
	"testing"
	"testing/synctest"
	"time"
)

// A pause ends once, not sooner than it may, and not before a server wants to be
// asked.
func TestWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := NewWake(time.Minute)
		if w.Fire(0) {
			t.Error("a server is asked before it wants to be")
		}
		time.Sleep(time.Minute)
		if w.Fire(time.Hour) {
			t.Error("the pause ended too soon")
		}
		if !w.Fire(time.Second) {
			t.Error("the pause did not end")
		}
		<-w.C()
		if w.Fire(0) {
			t.Error("a pause ended twice")
		}
		over := NewWake(0)
		over.End()
		if over.Fire(0) {
			t.Error("a pause ended that was over")
		}
	})
}

// Every state is reached, and has a name; nothing comes after Gone.
func TestStates(t *testing.T) {
	reached := map[State]bool{LaidOut: true}
	for from, to := range next {
		for _, s := range to {
			if s != from {
				reached[s] = true
			}
		}
	}
	for s := LaidOut; s <= Gone; s++ {
		if !reached[s] {
			t.Errorf("nothing becomes %v", s)
		}
		if s.String() == "" || s != Gone && len(next[s]) == 0 {
			t.Errorf("state %d: %q, next %v", s, s, next[s])
		}
	}
	if len(next[Gone]) > 0 {
		t.Errorf("after %v: %v", Gone, next[Gone])
	}
}
