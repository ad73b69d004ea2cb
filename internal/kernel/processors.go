package kernel

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Processors is the time that all processors of this host have spent so far, together, and this process.
type Processors struct {
	Number int           // of processors
	Idle   time.Duration // nobody wanted them
	Usual  time.Duration // for processes, and by the kernel for them
	Low    time.Duration // for processes whose nice value is above 0, as far as they themselves ran
	Own    time.Duration // of Usual and Low: this process
	// OwnUser is what this process itself ran of Own.
	OwnUser time.Duration
}

// userHz is the unit of times in /proc/stat on all of Linux's architectures that Go runs on.
const userHz = 100

// Processors reads these times (proc_stat(5), getrusage(2)). Those of interrupts are left out, and what a hypervisor
// gave to others.
func (p Proc) Processors() (t Processors, err error) {
	b, err := p.read("stat")
	if err != nil {
		return t, err
	}
	line, each, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 6 || f[0] != "cpu" {
		return t, errors.New("stat does not begin with the times of all processors")
	}
	var ticks [5]time.Duration // user, nice, system, idle, iowait
	for i := range ticks {
		n, err := strconv.ParseInt(f[i+1], 10, 64)
		if err != nil {
			return t, err
		}
		ticks[i] = time.Duration(n) * (time.Second / userHz)
	}
	for one := range strings.Lines(each) {
		if !strings.HasPrefix(one, "cpu") {
			break
		}
		t.Number++
	}
	var own unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &own); err != nil {
		return t, err
	}
	t.OwnUser = time.Duration(own.Utime.Nano())
	t.Own = t.OwnUser + time.Duration(own.Stime.Nano())
	t.Usual, t.Low, t.Idle = ticks[0]+ticks[2], ticks[1], ticks[3]+ticks[4]
	return t, nil
}
