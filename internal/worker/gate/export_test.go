package gate

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// WithStop returns o with a function that is called at the points "read",
// "noted", "handled" and "answered".
func (o Options) WithStop(stop func(point string)) Options {
	o.stop = stop
	return o
}

// Group returns another descriptor of the group.
func (g *Fanotify) Group() (*os.File, error) { return duplicate(g.groupFD, KeptGroup) }

// Journal returns another descriptor of the journal.
func (g *Fanotify) Journal() (*os.File, error) {
	return duplicate(int(g.journal.File().Fd()), KeptJournal)
}

func duplicate(fd int, name string) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// SetJournalLimit changes the limit of numbers in g's journal.
func SetJournalLimit(g *Fanotify, limit uint64) { g.journal.SetLimit(limit) }

// Connection returns another descriptor of the FUSE connection.
func (g *FUSE) Connection() (*os.File, error) { return duplicate(g.devFD, KeptFUSE) }

// SetFuseGrace sets how long a released node stays.
func SetFuseGrace(g *FUSE, d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.grace = d
}

// FuseNodes returns how many arenas g serves.
func FuseNodes(g *FUSE) int { return len(*g.nodes.Load()) }
