package start

import "time"

// holdProbed is how long the server holds back what comes after the startup set for a
// container to become ready: long enough for most, short enough for a link not to
// lie idle for those that take minutes. holdSoon is for one of which nobody will say that it is
// ready: containerd starts it as soon as the image is mounted.
const (
	holdProbed = 20 * time.Second
	holdSoon   = 2 * time.Second
)

// HoldAfter is for how long after ready the server goes on to hold: a port is open before what is behind it
// answers, and whoever has waited for the service asks it now. redis listens some 10 to 30 ms before it
// answers, in which the rest of its image took half of two processors.
const HoldAfter = 100 * time.Millisecond

// Awaited reports whether somebody may wait for a service to become ready: what arrives of the image may be what
// it waits for. It is, for one that begins when all of it is here.
func (s *Start) Awaited() bool {
	switch {
	case s.IsWhole():
		return true
	case s.isReady():
		return false
	case s.opts.Probed:
		return time.Since(s.began) < holdProbed
	case s.opts.Soon:
		return time.Since(s.began) < settle
	}
	return false
}

// Whole tells that no container begins before all of the image is here: nothing is held back for a start. It
// reports whether that is new.
func (s *Start) Whole() (first bool) { return !s.whole.Swap(true) }

// IsWhole reports whether Whole was called.
func (s *Start) IsWhole() bool { return s.whole.Load() }

// Hold is how long the server is to hold back what is not of the startup set: not at
// all when nothing is about to be started, or somebody has said that it is ready.
func (s *Start) Hold() time.Duration {
	switch {
	case s.isReady() || s.IsWhole():
		return 0
	case s.opts.Probed:
		return holdProbed
	case s.opts.Soon:
		return holdSoon
	}
	return 0
}
