package gate

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

const (
	// lookEvery is how often the readers that wait are looked at, and
	// looksAtOnce at how many of them, some 10 µs each.
	lookEvery   = time.Second
	looksAtOnce = 1000
	// clockTick is the unit of times in /proc.
	clockTick = 10 * time.Millisecond
)

// reader is who waits.
type reader struct {
	pid    int32         // its number; 0: not known
	since  time.Duration // of the boot: when it began to wait
	thread bool          // pid is that of the very thread, not that of its process
}

// newReader is one that begins to wait now.
func newReader(pid int32, thread bool) reader {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return reader{}
	}
	return reader{pid, time.Duration(ts.Nano()), thread}
}

// rounds takes turns in looking at waits.
type rounds[W any] struct{ left []W }

// next returns the waits to be looked at now. all gives all of them.
func (r *rounds[W]) next(all func() []W) []W {
	if len(r.left) == 0 {
		r.left = all()
	}
	n := min(len(r.left), looksAtOnce)
	now := r.left[:n]
	r.left = r.left[n:]
	return now
}

// gone reports whether the reader is no more. Of one that is not known, and of one of whose process other
// threads may wait, it is not said before it is certain.
func (r reader) gone() bool {
	if r.pid <= 0 {
		return false
	}
	p, err := kernel.ReadProcess(fmt.Sprintf("/proc/%d", r.pid))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return true
	}
	if err != nil {
		return false
	}
	// The number is another one's if that began later.
	return p.Ended() && r.thread || time.Duration(p.Start)*clockTick > r.since+2*clockTick
}
