package start

import (
	"testing"
	"testing/synctest"
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
		s.Whole()
		if got := s.Hold(); got != 0 {
			t.Errorf("%s, which begins when all of the image is here: %v", name, got)
		}
	}
}

// TestAwaited: the rest of an image makes room for others when nobody waits for a start any more.
func TestAwaited(t *testing.T) {
	for name, c := range map[string]struct {
		opts  Options
		after time.Duration
		ready bool
		want  bool
	}{
		"pull":                          {},
		"run":                           {opts: Options{Probed: true}, after: holdProbed - 1, want: true},
		"run, ready":                    {opts: Options{Probed: true}, ready: true},
		"run, never ready":              {opts: Options{Probed: true}, after: holdProbed},
		"snapshotter":                   {opts: Options{Soon: true}, after: settle - 1, want: true},
		"snapshotter, a while later":    {opts: Options{Soon: true}, after: settle},
		"snapshotter, somebody said so": {opts: Options{Soon: true}, ready: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := New(t.Context(), c.opts)
			time.Sleep(c.after)
			if c.ready {
				s.Ready()
			}
			if got := s.Awaited(); got != c.want {
				t.Errorf("%s: %v", name, got)
			}
			s.Whole()
			if !s.Awaited() {
				t.Errorf("%s, which begins when all of the image is here: nobody waits for it", name)
			}
		})
	}
}
