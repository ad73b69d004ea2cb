package kernel

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestPriority(t *testing.T) {
	nice := func() int {
		v, err := unix.Getpriority(unix.PRIO_PROCESS, unix.Gettid())
		if err != nil {
			t.Fatal(err)
		}
		return 20 - v
	}
	usual := nice()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p := OwnPriority()
		defer p.End()
		for _, low := range []bool{true, true, false, true} {
			p.SetLow(low)
			want := usual
			if low {
				want = min(usual+lowBy, 19)
			}
			if got := nice(); got != want {
				t.Errorf("low %v: nice %d, want %d", low, got, want)
			}
		}
	}()
	<-done
	// Threads are used again: none has kept it.
	for range 50 {
		ended := make(chan int)
		go func() { ended <- nice() }()
		if got := <-ended; got != usual {
			t.Fatalf("another goroutine has nice %d, want %d", got, usual)
		}
	}
}
