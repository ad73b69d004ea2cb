// Package store knows which rootfs there are, and what becomes of them. A pull has one
// laid out (Open, layout.go), mounted (MountFirst, mount.go), and finished (Finish). What
// nothing names is collected (Collect), what others use of it kept (lend.go). A new
// daemon finds everything again (Restore). Package rootfs is about one of them.
//
// Store.mu guards the list; it is held for moments. Store.layout orders operations on
// directories and mounts, so that one chain ID means one thing at a time, and is held for as
// long as they take: nothing that a container waits for takes it. Package locks has
// the order.
package store

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Options configure a Store. Root, Gate, Names and Logger are required.
type Options struct {
	// Root is the worker's directory.
	Root string
	// Gate holds back reads of what is absent. It is started by Restore.
	Gate gate.Gate
	// Loop says that EROFS is mounted over loop devices.
	Loop bool
	// Drop has the keeper forget a descriptor.
	Drop func(ctx context.Context, name string) error
	// Names says who uses rootfs.
	Names Namer
	// Warn records what an operator should know.
	Warn   func(format string, args ...any)
	Logger *slog.Logger
	// KeepWarm is how long the pages that a pull left in memory are kept for
	// containers that start right after it; 0: a minute.
	KeepWarm time.Duration
	// WakeAfter is how long after the failure of a pull a read of what it did not
	// bring has it begun again at the earliest.
	WakeAfter time.Duration
	// Waited is told how long each read of absent bytes took.
	Waited func(time.Duration)
	// At is called at named points; a test dies there.
	At func(point string)
}

// Namer says which rootfs are named, and by whom. Its methods are called with
// Store.layout held, or with no lock.
type Namer interface {
	// Named returns the chain IDs that an image, a container or a hold names, and
	// one of them, for people: "image REF".
	Named() map[digest.Digest]string
	// ContainersOn lists the IDs of the containers on a rootfs, sorted.
	ContainersOn(chain digest.Digest) []string
	// Image returns a reference that names a rootfs, or the chain ID itself.
	Image(chain digest.Digest) string
	// Held reports whether containerd uses a rootfs.
	Held(chain digest.Digest) bool
}

// The names of package rootfs that whoever has a Store needs.
type (
	Rootfs    = rootfs.Rootfs
	Leases    = rootfs.Leases
	Placement = rootfs.Placement
	Files     = rootfs.Files
	Filler    = rootfs.Filler
	Source    = rootfs.Source
	Observer  = rootfs.Observer
	Wake      = rootfs.Wake
)

// NewWake is rootfs.NewWake.
func NewWake(asked time.Duration) *Wake { return rootfs.NewWake(asked) }

// Store keeps the rootfs of one root.
type Store struct {
	opts Options
	log  *slog.Logger
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	work sync.WaitGroup

	each rootfs.Options // of its rootfs

	// layout: see the package comment.
	layout locks.Mutex[locks.Layout]

	mu      locks.Mutex[locks.Store]
	rootfs  map[digest.Digest]*Rootfs // by chain ID; all but lenders
	lent    map[digest.Digest]*Rootfs // lenders, by ID
	closing bool
	later   bool // Collect is going to be called again
	inUse   int  // how often in a row it has met what is in use
}

// New returns a Store that knows nothing until Restore.
func New(opts Options) *Store {
	if opts.KeepWarm == 0 {
		opts.KeepWarm = time.Minute
	}
	if opts.Waited == nil {
		opts.Waited = func(time.Duration) {}
	}
	if opts.At == nil {
		opts.At = func(string) {}
	}
	s := &Store{opts: opts, log: opts.Logger, rootfs: make(map[digest.Digest]*Rootfs), lent: make(map[digest.Digest]*Rootfs)}
	s.each = rootfs.Options{
		Mounts: mounts.Options{Root: opts.Root, Loop: opts.Loop, Logger: opts.Logger},
		Logger: opts.Logger, WakeAfter: opts.WakeAfter, Waited: opts.Waited,
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

// Stop ends what the store does by itself, and waits for it.
func (s *Store) Stop() {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.stop()
	s.work.Wait()
}

// Close makes arenas durable and closes them, after the gate has stopped to ask
// for them. Mounts stay.
func (s *Store) Close() error {
	var errs []error
	for _, r := range s.all() {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// Sync makes durable what has arrived in arenas that are not complete.
func (s *Store) Sync(ctx context.Context) error {
	var errs []error
	for _, r := range s.List() {
		if a := r.Arena(); a != nil {
			errs = append(errs, a.Sync(ctx))
		}
	}
	return errors.Join(errs...)
}

// NeedsGate reports whether a rootfs is not complete, so that the gate must live on.
func (s *Store) NeedsGate() bool {
	for _, r := range s.List() {
		// One that could not be opened again has its gate all the same.
		if !r.Complete() && (r.Own() >= 0 || r.Broken() != nil) {
			return true
		}
	}
	return false
}

// Get returns the rootfs of a chain ID, or nil.
func (s *Store) Get(chain digest.Digest) *Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rootfs[chain]
}

// Use is Get, and keeps what it returns until release is called.
func (s *Store) Use(chain digest.Digest) (r *Rootfs, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r = s.rootfs[chain]; r == nil {
		return nil, nil
	}
	r.Use()
	return r, sync.OnceFunc(r.LetGo)
}

// List returns all rootfs but lenders, by ID.
func (s *Store) List() []*Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sorted(s.rootfs)
}

// lenders returns all lenders, by ID.
func (s *Store) lenders() []*Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sorted(s.lent)
}

func (s *Store) all() []*Rootfs { return append(s.List(), s.lenders()...) }

func sorted(m map[digest.Digest]*Rootfs) []*Rootfs {
	list := make([]*Rootfs, 0, len(m))
	for _, r := range m {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *Rootfs) int { return strings.Compare(string(a.ID()), string(b.ID())) })
	return list
}

// owner returns the rootfs or lender whose arena has an ID, or nil.
func (s *Store) owner(id digest.Digest) *Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ownerLocked(id)
}

func (s *Store) ownerLocked(id digest.Digest) *Rootfs {
	if r := s.lent[id]; r != nil {
		return r
	}
	if r := s.rootfs[id]; r != nil && r.ID() == id {
		return r
	}
	for _, r := range s.rootfs {
		if r.ID() == id {
			return r
		}
	}
	return nil
}

func (s *Store) dir() string { return filepath.Join(s.opts.Root, "rootfs") }

// Settle lets go of everything but r and what lends to it: a pull has taken from
// others what it can.
func (s *Store) Settle(l *Leases, r *Rootfs) {
	keep := map[*Rootfs]bool{r: true}
	for _, id := range r.Arenas() {
		keep[s.owner(id)] = true
	}
	l.Keep(keep)
}

// Haves names every rootfs that is here, wholly or in part, and has l keep their
// arenas: what a server leaves out because of them must still be here when its
// place is looked for.
func (s *Store) Haves(l *Leases) []bundle.Have {
	var kept []*Rootfs
	s.mu.Lock()
	for _, r := range s.rootfs {
		if r.Broken() == nil {
			l.Take(r)
			kept = append(kept, r)
		}
	}
	s.mu.Unlock()
	var list []bundle.Have
	for _, r := range kept {
		if h, ok := r.Have(); ok {
			list = append(list, h)
		}
	}
	return list
}

// discard removes a rootfs that came to nothing, or that nobody borrows from any more: it
// is not mounted, nothing refers to it, and it is in no map. Called with Store.layout
// held.
func (s *Store) discard(r *Rootfs) {
	// The record first: what a crash leaves is a leftover.
	for _, name := range []string{rootfs.RecordName, rootfs.LenderName} {
		if err := os.Remove(r.Path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.log.Warn("remove what is left of a rootfs", "rootfs", r.ChainID(), "error", err)
		}
	}
	s.opts.At("discarding")
	if r.Gone() != nil {
		if err := s.opts.Gate.Release(r.Name()); err != nil {
			s.log.Debug("release a discarded arena", "rootfs", r.ChainID(), "error", err)
		}
	}
	s.dropStranded(r)
	if err := r.Close(); err != nil {
		s.log.Debug("close a discarded arena", "rootfs", r.ChainID(), "error", err)
	}
	if err := os.RemoveAll(r.Dir()); err != nil {
		s.log.Warn("remove what is left of a rootfs", "rootfs", r.ChainID(), "error", err)
	}
}

// dropStranded takes an arena's descriptor from the keeper that no gate needs.
func (s *Store) dropStranded(r *Rootfs) {
	f := r.TakeStranded()
	if f == nil {
		return
	}
	if err := s.opts.Drop(context.WithoutCancel(s.ctx), gate.KeptArena+r.Name()); err != nil {
		s.log.Warn("take a descriptor from the keeper", "rootfs", r.ChainID(), "error", err)
	}
	_ = f.Close()
}
