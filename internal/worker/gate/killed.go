package gate

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
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
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.pid))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return true
	}
	if err != nil {
		return false
	}
	state, start, ok := parseStat(b)
	if !ok {
		return false
	}
	dead := state == 'Z' || state == 'X'
	// The number is another one's if that began later.
	return dead && r.thread || start > r.since+2*clockTick
}

// parseStat returns a thread's state and when it began, of /proc/PID/stat. The name before them,
// in parentheses, is any bytes.
func parseStat(b []byte) (state byte, start time.Duration, ok bool) {
	b = b[bytes.LastIndexByte(b, ')')+1:]
	fields := bytes.Fields(b)
	if len(fields) < 20 || len(fields[0]) != 1 {
		return 0, 0, false
	}
	ticks, err := strconv.ParseInt(string(fields[19]), 10, 64) // field 22 of proc(5)
	return fields[0][0], time.Duration(ticks) * clockTick, err == nil
}
