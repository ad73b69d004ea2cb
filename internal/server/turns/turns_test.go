package turns

import (
	"testing"
	"testing/synctest"
	"time"
)

// asked asks for a turn and returns when it came.
func asked(s *Stream) chan *Turn {
	c := make(chan *Turn, 1)
	s.Ask(func(t *Turn) { c <- t })
	return c
}

// wait returns how long it takes until a turn comes, and the turn.
func wait(t *testing.T, c chan *Turn) (time.Duration, *Turn) {
	t.Helper()
	began := time.Now()
	select {
	case turn := <-c:
		return time.Since(began), turn
	case <-time.After(time.Hour):
		t.Fatal("no turn comes")
		return 0, nil
	}
}

func TestTurns(t *testing.T) {
	for name, test := range map[string]func(t *testing.T){
		"at once when nothing is urgent": func(t *testing.T) {
			x := New(1)
			for range 10 {
				if d, _ := wait(t, asked(x.Stream("a"))); d != 0 {
					t.Errorf("waited %v", d)
				}
			}
		},
		"few beside what is urgent, and each lapses": func(t *testing.T) {
			x := New(2)
			defer x.Urgent("u")()
			for i, want := range []time.Duration{0, 0, Lapse, 0, Lapse} {
				if d, _ := wait(t, asked(x.Stream("a"))); d != want {
					t.Errorf("turn %d after %v, want %v", i, d, want)
				}
			}
		},
		"one that is done is free at once": func(t *testing.T) {
			x := New(1)
			defer x.Urgent("u")()
			for range 10 {
				d, turn := wait(t, asked(x.Stream("a")))
				if d != 0 {
					t.Errorf("waited %v", d)
				}
				turn.Done(100)
				turn.Done(100) // once more does nothing
			}
		},
		"what is urgent counts for its time": func(t *testing.T) {
			x := New(1)
			defer x.Urgent("a")()
			if d, _ := wait(t, asked(x.Stream("a"))); d != UrgentFor {
				t.Errorf("waited %v", d)
			}
		},
		"its end lets others go": func(t *testing.T) {
			x := New(1)
			end := x.Urgent("a")
			time.AfterFunc(time.Millisecond, end)
			if d, _ := wait(t, asked(x.Stream("a"))); d != time.Millisecond {
				t.Errorf("waited %v", d)
			}
			end() // once more does nothing
		},
		"a connection with always something urgent": func(t *testing.T) {
			x := New(1)
			ends := []func(){x.Urgent("a")}
			for i := range 20 { // one begins before the last one ends
				time.AfterFunc(time.Duration(i)*UrgentFor/3, func() { ends = append(ends, x.Urgent("a")) })
			}
			if d, _ := wait(t, asked(x.Stream("a"))); d != UrgentFor {
				t.Errorf("waited %v", d)
			}
			time.Sleep(20 * UrgentFor)
			for _, end := range ends {
				end()
			}
			if len(x.schedule.conns) != 0 || x.schedule.urgent != 0 || x.schedule.out != 0 {
				t.Errorf("left: %+v", x.schedule)
			}
		},
		"who withdraws has none": func(t *testing.T) {
			x := New(1)
			end := x.Urgent("a")
			s, other := x.Stream("a"), x.Stream("a")
			c := asked(s)
			d := asked(other)
			s.Close()
			s.Close()
			end()
			synctest.Wait()
			if len(c) != 0 || len(d) != 1 {
				t.Errorf("%d turns for who withdrew, %d for the other", len(c), len(d))
			}
			time.Sleep(time.Second)
			if x.schedule.out != 0 || len(x.schedule.waiting) != 0 {
				t.Errorf("left: %+v", x.schedule)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
}
