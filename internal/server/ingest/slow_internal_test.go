package ingest

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// busyReader takes a while for each byte.
type busyReader struct{ r io.Reader }

func (b busyReader) Read(p []byte) (int, error) { return b.r.Read(p[:1]) }

// TestSlowReader: it rests as long as its reader was busy, and gives way to all that is ingested.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w work
		ctx, cancel := context.WithCancel(t.Context())
		s := &slowReader{ctx: ctx, r: busyReader{strings.NewReader("abcdef")}, work: &w}
		read := func() (time.Duration, error) {
			began := time.Now()
			_, err := s.Read(make([]byte, 10))
			return time.Since(began), err
		}
		if took, err := read(); took != 0 || err != nil {
			t.Errorf("the first read took %v, %v", took, err)
		}
		time.Sleep(30 * time.Millisecond)
		if took, err := read(); took != 30*time.Millisecond || err != nil {
			t.Errorf("after 30 ms of work it rested %v, %v", took, err)
		}
		time.Sleep(time.Hour)
		if took, err := read(); took != pause || err != nil {
			t.Errorf("after an hour it rested %v, %v", took, err)
		}
		w.begin()
		w.begin()
		done := make(chan error)
		go func() {
			_, err := read()
			done <- err
		}()
		for range 2 {
			time.Sleep(time.Hour)
			select {
			case err := <-done:
				t.Fatalf("it read while something was ingested: %v", err)
			default:
			}
			w.end()
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		w.begin()
		go func() {
			time.Sleep(time.Hour)
			cancel()
		}()
		if took, err := read(); took != time.Hour || !errors.Is(err, context.Canceled) {
			t.Errorf("it ended after %v, %v", took, err)
		}
	})
}

// TestSlotsAreWork: what has a slot keeps others waiting until it gives it back.
func TestSlotsAreWork(t *testing.T) {
	g := &Ingester{Options: Options{Parallel: 2}}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	var release []func()
	for range 2 {
		r, err := g.slot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		release = append(release, r)
	}
	for i, want := range []bool{false, true} {
		release[i]()
		g.work.mu.Lock()
		if none := g.work.none == nil; none != want {
			t.Errorf("after %d of 2 no work: %v", i+1, none)
		}
		g.work.mu.Unlock()
	}
	r, err := g.slot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer r()
	if err := g.work.wait(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("with work, an ended wait: %v", err)
	}
}
