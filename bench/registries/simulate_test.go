package registries

import (
	"io"
	"slices"
	"testing"
	"time"

	"hydrofoil.dev/foil/bench/trace"
)

func get(at int, client, layer string) trace.Request {
	return trace.Request{At: time.Duration(at) * time.Second, Image: "r", Layer: layer, Client: client, Bytes: 100}
}

func manifest(at int, client string) trace.Request {
	return trace.Request{At: time.Duration(at) * time.Second, Manifest: true, Image: "r:1", Client: client}
}

// Three clients pull two layers each: at 10 bytes a second one takes 10 s.
func TestSimulate(t *testing.T) {
	requests := []trace.Request{
		manifest(0, "a"), get(5, "a", "x"), get(30, "a", "y"),
		manifest(60, "b"), get(61, "b", "x"), get(62, "b", "y"),
		manifest(99, "b"), // it has them
	}
	for _, tc := range []struct {
		policy          string
		hit, wait, miss float64
		waited          time.Duration
	}{
		{LRU, 0.5, 0, 0.5, 0},
		{ARC, 0.5, 0, 0.5, 0},
		{ARCUB, 0.75, 0.25, 0, 5 * time.Second},
	} {
		// A share of 8 of what there is: all fits, also by the rule that one thing takes a quarter at most.
		s := Simulate(requests, tc.policy, 8, Restoring{Rate: 10, Workers: 2})
		if s.Hit != tc.hit || s.Wait != tc.wait || s.Miss != tc.miss || s.Waited != tc.waited {
			t.Errorf("%s: %+v", tc.policy, s)
		}
	}
	if s := Simulate(requests, LRU, 0.5, Restoring{}); s.Hit != 0 {
		t.Errorf("one layer of two fits, and they are asked for in turns: %+v", s)
	}
}

// Only the time between images is shortened.
func TestSchedule(t *testing.T) {
	got := schedule([]trace.Request{manifest(0, "a"), get(7, "a", "x"), manifest(100, "b"), get(500, "b", "x"), get(1000, "c", "x")}, 100)
	var at []time.Duration
	for _, q := range got {
		at = append(at, q.At)
	}
	want := []time.Duration{0, time.Second, 7 * time.Second, 10 * time.Second, 31 * time.Second}
	if !slices.Equal(at, want) {
		t.Errorf("at %v, want %v", at, want)
	}
}

func TestSimulateAll(t *testing.T) {
	s, err := trace.Find("syd")
	if err != nil {
		t.Fatal(err)
	}
	all, err := SimulateAll(io.Discard, "syd", trace.Generate(s.Scale(0.2), 1), Restoring{})
	if err != nil || len(all) != 9 {
		t.Fatalf("%d, %v", len(all), err)
	}
	for i := 0; i < len(all); i += 3 {
		if lru, ub := all[i], all[i+2]; ub.Hit <= lru.Hit {
			t.Errorf("prediction brings nothing: %+v, %+v", lru, ub)
		}
	}
}
