// Package store knows which rootfs there are, and what becomes of them. A pull has one
// laid out (Open, layout.go), mounted (MountFirst, mount.go), and finished (Finish). What
// nothing names is collected (Collect), what others use of it kept (lend.go). A new
// daemon finds everything again (Restore). Package rootfs is about one of them.
//
// Each belongs to an origin (package origin): it is found, told of and lent within that, or a group of
// such, only.
//
// Store.mu guards the list; it is held for moments. Store.layout orders operations on
// directories and mounts, so that one key means one thing at a time, and is held for as
// long as they take: nothing that a container waits for takes it. Package locks has
// the order.
package store

import (
	"context"
	"errors"
	"fmt"
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
	"hydrofoil.dev/foil/internal/worker/origin"
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
	// Groups are origins that trust each other.
	Groups origin.Groups
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
	// Conflict counts TOCs that are not the one by which a chain ID is known in the same origin.
	Conflict func()
	// At is called at named points; a test dies there.
	At func(point string)
}

// Namer says which rootfs are named, and by whom. Its methods are called with
// Store.layout held, or with no lock.
type Namer interface {
	// Named returns the rootfs that an image, a container or a hold names, and
	// one of them, for people: "image REF".
	Named() map[origin.Key]string
	// ContainersOn lists the IDs of the containers on a rootfs, sorted.
	ContainersOn(key origin.Key) []string
	// Image returns a reference that names a rootfs, or the key itself.
	Image(key origin.Key) string
	// Held reports whether containerd uses a rootfs.
	Held(key origin.Key) bool
	// Origins lists the registries of the images that name a rootfs.
	Origins(key origin.Key) []string
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
	rootfs  map[origin.Key]*Rootfs    // all but lenders
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
	if opts.Conflict == nil {
		opts.Conflict = func() {}
	}
	if opts.At == nil {
		opts.At = func(string) {}
	}
	s := &Store{opts: opts, log: opts.Logger, rootfs: make(map[origin.Key]*Rootfs), lent: make(map[digest.Digest]*Rootfs)}
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

// Get returns the rootfs of a key, or nil.
func (s *Store) Get(key origin.Key) *Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rootfs[key]
}

// Use is Get, and keeps what it returns until release is called.
func (s *Store) Use(key origin.Key) (r *Rootfs, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r = s.rootfs[key]; r == nil {
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

func sorted[K comparable](m map[K]*Rootfs) []*Rootfs {
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
	if r := s.rootfs[origin.Key(id)]; r != nil && r.ID() == id {
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

// mayServe reports whether a rootfs may be used for images of a registry. Called with no lock, or Store.mu.
func (s *Store) mayServe(r *Rootfs, registry string) bool {
	return s.opts.Groups.Same(r.Origin(), registry)
}

// Haves names every rootfs that is here, wholly or in part, and of which the servers of a registry may know (not those that
// were made here), and
// has l keep their arenas: what a server leaves out because of them must still be here when its
// place is looked for. named is the rootfs that the image names by now, if any: of one that no origins are known
// of, its own server is told, and nobody else.
func (s *Store) Haves(l *Leases, registry string, named origin.Key) []bundle.Have {
	var kept []*Rootfs
	s.mu.Lock()
	for key, r := range s.rootfs {
		if r.Broken() == nil && !r.Made() && (key == named || s.mayServe(r, registry) && !r.Unwalled()) {
			l.Take(r)
			kept = append(kept, r)
		}
	}
	s.mu.Unlock()
	// Its own registry's first: that is the one that Find finds.
	slices.SortFunc(kept, func(a, b *Rootfs) int {
		if own := a.Origin() == registry; own != (b.Origin() == registry) {
			if own {
				return -1
			}
			return 1
		}
		return strings.Compare(string(a.ID()), string(b.ID()))
	})
	var list []bundle.Have
	for _, r := range kept {
		if h, ok := r.Have(); ok && !slices.ContainsFunc(list, func(o bundle.Have) bool { return o.ChainID == h.ChainID && o.TOC == h.TOC }) {
			list = append(list, h)
		}
	}
	return list
}

// TOC reads the encoded TOC of a chain ID from a rootfs that may be used for images of a registry, or that the
// image names.
func (s *Store) TOC(registry string, named origin.Key, chain, want digest.Digest) ([]byte, error) {
	r := s.Find(registry, named, chain, want)
	if r == nil {
		return nil, fmt.Errorf("read the TOC of rootfs %s: it is not here: %w", chain, os.ErrNotExist)
	}
	return r.EncodedTOC()
}

// Find returns the rootfs of a chain ID by a TOC that an image of a registry may use, or nil: that of its own
// registry before those of its group.
func (s *Store) Find(registry string, named origin.Key, chain, by digest.Digest) *Rootfs {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range []origin.Key{origin.KeyOf(registry, chain, by), named} {
		if r := s.rootfs[key]; r != nil && r.ChainID() == chain && r.TOC() == by {
			return r
		}
	}
	for _, r := range sorted(s.rootfs) {
		if r.ChainID() == chain && r.TOC() == by && s.mayServe(r, registry) && r.Broken() == nil {
			return r
		}
	}
	return nil
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
