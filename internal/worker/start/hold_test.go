package start

import (
	"testing"
	"time"
)

// TestHoldFor: the server holds back what follows a startup set only for who is about
// to start a container, and longer when it will be said that it is ready.
func TestHoldFor(t *testing.T) {
	for name, c := range map[string]struct {
		opts  Options
		ready bool
		want  time.Duration
	}{
		"pull":        {},
		"run":         {opts: Options{Probed: true}, want: holdProbed},
		"run, ready":  {opts: Options{Probed: true}, ready: true},
		"snapshotter": {opts: Options{Soon: true}, want: holdSoon},
	} {
		s := New(t.Context(), c.opts)
		if c.ready {
			s.Ready()
		}
		if got := s.Hold(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
