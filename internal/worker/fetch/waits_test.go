package fetch

import (
	"errors"
	"testing"
	"time"
)

func TestWaits(t *testing.T) {
	var w Waits
	began := time.Now()
	var places []int
	for i := range MaxWaits + 3 {
		places = append(places, w.begin(Wait{Offset: int64(i), Began: began.Add(-time.Hour)}))
	}
	failure := errors.New("disk full")
	// They end in another order.
	for i := MaxWaits + 2; i > 1; i-- {
		w.end(places[i], time.Duration(i), failure)
	}
	first := w.First()
	if len(first) != MaxWaits {
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
	w.end(places[1], time.Second, nil)
	if i := w.begin(Wait{}); i != -1 {
		t.Errorf("one more has place %d", i)
	}
	if first := w.First(); len(first) > 0 {
		t.Errorf("%d are remembered after all was forgotten", len(first))
	}
	count, took := w.Total()
	want := time.Second
	for i := 2; i < MaxWaits+3; i++ {
		want += time.Duration(i)
	}
	if count != MaxWaits+2 || took != want {
		t.Errorf("%d have waited %v, want %d and %v", count, took, MaxWaits+2, want)
	}
}
