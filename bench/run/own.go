package run

import (
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/site"
)

// What is measured shares the processors with the benchmark, which carries the link and
// asks whether the container is ready. So the benchmark takes as little of them as it can, and tells how much.

// heapMost is how much memory the benchmark may take before it collects garbage during a run after all.
const heapMost = 512 << 20

// quiet collects the garbage now, and none until end is called.
func quiet() (end func()) {
	runtime.GC()
	less := site.Room()
	percent, most := debug.SetGCPercent(-1), debug.SetMemoryLimit(heapMost)
	return func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(most)
		less()
	}
}

// ownTime is the processor time that the benchmark itself has taken, in all its threads.
func ownTime() time.Duration {
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
