package waits

import (
	"errors"
	"testing"
	"time"
)

func TestWaits(t *testing.T) {
	var w List
	began := time.Now()
	var places []int
	for i := range Most + 3 {
		places = append(places, w.Begin(Wait{Offset: int64(i), Began: began.Add(-time.Hour)}))
	}
	failure := errors.New("disk full")
	// They end in another order.
	for i := Most + 2; i > 1; i-- {
		w.End(places[i], Wait{Offset: int64(i), Took: time.Duration(i), Err: failure})
	}
	first := w.First()
	if len(first) != Most {
		t.Fatalf("%d are remembered", len(first))
	}
	for i, one := range first {
		if one.Offset != int64(i) || one.Waiting != (i < 2) {
			t.Errorf("number %d is %+v", i, one)
		}
		switch {
		case one.Waiting && (one.Took < time.Hour || one.Err != nil):
			t.Errorf("number %d, which waits, is %+v", i, one)
		case !one.Waiting && (one.Took != time.Duration(i) || !errors.Is(one.Err, failure)):
			t.Errorf("number %d, which does not wait any more, is %+v", i, one)
		}
	}
	w.Forget()
	w.End(places[1], Wait{Took: time.Second})
	if i := w.Begin(Wait{}); i != -1 {
		t.Errorf("one more has place %d", i)
	}
	if first := w.First(); len(first) > 0 {
		t.Errorf("%d are remembered after all was forgotten", len(first))
	}
	count, took := w.Total()
	want := time.Second
	for i := 2; i < Most+3; i++ {
		want += time.Duration(i)
	}
	if count != Most+2 || took != want {
		t.Errorf("%d have waited %v, want %d and %v", count, took, Most+2, want)
	}
}

// The longest wait is told with its bound, whether it is over or not.
func TestLongestWait(t *testing.T) {
	var w List
	if one, over := w.Longest(); one.Took != 0 || over != 0 {
		t.Errorf("of none: %+v, %d", one, over)
	}
	w.End(w.Begin(Wait{}), Wait{Took: time.Second, Bound: 400 * time.Millisecond})
	w.End(w.Begin(Wait{}), Wait{Took: 2 * time.Second, Bound: time.Second})
	w.End(w.Begin(Wait{}), Wait{Took: time.Second})
	if one, over := w.Longest(); one.Took != 2*time.Second || one.Bound != time.Second || over != 1 {
		t.Errorf("%+v, %d", one, over)
	}
	w.Begin(Wait{Began: time.Now().Add(-time.Hour), Bound: time.Minute})
	if one, over := w.Longest(); one.Took < time.Hour || one.Bound != time.Minute || over != 2 {
		t.Errorf("with one that waits: %+v, %d", one, over)
	}
}
