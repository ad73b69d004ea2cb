package gate

import "fmt"

// How many reads wait in a gate at most. Each costs some 4 kB. At a fanotify gate the kernel wakes all of them
// for each answer to one, whatever its arena: beside 512 that wait a read of a present page of another arena takes
// 0.36 ms instead of 7 µs, beside 7,500 it took 23 ms.
const (
	fanotifyPending = 1024
	fusePending     = 16000
)

// slots are what reads that wait take, one each. Guarded by the gate's mu.
//
// An arena may have as many of them as are free. So one whose server stalls gets half of all, two get a
// third each, and a read of another arena finds a slot however many readers those have. What has none fails
// with EIO: to wait without a slot is not possible. A fanotify event that is not read stands before
// everybody else's, and one that is read costs a descriptor until it is answered.
type slots struct {
	max, taken int
}

// take takes one for an arena that has *of, or says that it may not.
func (s *slots) take(of *int) error {
	if *of >= s.max-s.taken {
		return fmt.Errorf("%d reads of this image wait already, and %d are left for all others", *of, s.max-s.taken)
	}
	s.taken++
	*of++
	return nil
}

// free gives one back.
func (s *slots) free(of *int) {
	s.taken--
	*of--
}
