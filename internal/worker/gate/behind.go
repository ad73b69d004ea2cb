package gate

import (
	"context"
	"sync/atomic"
	"time"
)

// behind is an arena behind a gate of either kind, or one released a moment ago.
type behind struct {
	name    string
	backing Backing
	ctx     context.Context // ends with Release or Close
	cancel  context.CancelFunc
	// released is set, before ctx is cancelled, when Release has removed the mark, or lets all reads through;
	// complete, before it, if everything was present by then.
	released, complete atomic.Bool
	since              time.Time // of the release; guarded by the gate's mu
	waiting            int       // reads; guarded by the gate's mu

	denials denials
}

// present asks the backing, or, once a complete arena is released, nobody: the caller may have closed it when late
// reads come.
func (a *behind) present(off, n int64) bool {
	return a.complete.Load() || a.backing.Present(off, n)
}

// meets is present, for a read that has just met the gate.
func (a *behind) meets(off, n int64) bool {
	if a.complete.Load() {
		return true
	}
	present := a.backing.Present(off, n)
	a.backing.Met(off, n, present)
	return present
}
