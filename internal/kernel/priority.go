package kernel

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// lowBy is how much more nice work of low priority is: a thread of it has a tenth of the processor
// that one of a container's has which wants all of it (sched(7)).
const lowBy = 10

// Priority is that of the calling goroutine's thread, which is its alone until End.
type Priority struct {
	thread int
	usual  int // nice value
	low    bool
}

// OwnPriority begins with the usual priority. The goroutine has to call End.
func OwnPriority() *Priority {
	runtime.LockOSThread()
	p := &Priority{thread: unix.Gettid()}
	// The system call's 1 to 40 are nice values of 19 to -20.
	if v, err := unix.Getpriority(unix.PRIO_PROCESS, p.thread); err == nil {
		p.usual = 20 - v
	}
	return p
}

// SetLow has the thread make room for those of others, or not. Who may not raise a
// priority again, for want of CAP_SYS_NICE, keeps the low one.
func (p *Priority) SetLow(low bool) {
	if low == p.low {
		return
	}
	nice := p.usual
	if low {
		nice = min(nice+lowBy, 19)
	}
	if unix.Setpriority(unix.PRIO_PROCESS, p.thread, nice) == nil {
		p.low = low
	}
}

// End gives the thread back, with its usual priority. One whose priority stays low
// ends with the goroutine.
func (p *Priority) End() {
	if p.SetLow(false); !p.low {
		runtime.UnlockOSThread()
	}
}
