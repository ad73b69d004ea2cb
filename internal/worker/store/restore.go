package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Inherited is what an earlier daemon left besides the disk.
type Inherited struct {
	// Held are the descriptors that the keeper held, by name. Restore takes those
	// of arenas.
	Held map[string]*os.File
	// GateLost: there was no gate to take over.
	GateLost bool
	// FromStore: the gate was with the service manager only, not with a keeper.
	FromStore bool
}

// errUnnamed is what reads fail with of what nobody brings any more.
var errUnnamed = errors.New("no image names this rootfs any more, so nothing brings what it lacks")

// Restore finds again what an earlier daemon left, in this order, because each
// step relies on the one before:
//
//  1. Records of rootfs. A directory without one is a leftover of a crash. What older versions
//     left gets the origin of its images.
//  2. Arenas that are incomplete: through the descriptor that the keeper holds,
//     where there is one, since a new one would wait for itself. Each goes
//     behind the gate.
//  3. Mounts. Those that are there stay: containers use them. Those over
//     incomplete arenas whose gate was lost (daemon and keeper died together)
//     are taken away and made anew (invariant 3), and reported: what ran on
//     them may have read zeros. After a reboot none is there and all are made.
//  4. The gate answers again.
//
// A rootfs that cannot be restored harms only itself. Pulls are the caller's to go
// on with. lost reports whether mounts over incomplete arenas had lost their gate.
//
// Errors: api.CodeUnsupported when a newer foil wrote a record.
func (s *Store) Restore(in Inherited) (lost bool, err error) {
	mounts, err := kernel.Mounts(s.opts.Root)
	if err != nil {
		return false, err
	}
	mounted := make(map[string]bool)
	for _, m := range mounts {
		mounted[m.Target] = true
	}
	x := &restoring{s: s, Inherited: in, read: make(map[*Rootfs]*Files), lost: make(map[*Rootfs]bool)}
	if err := x.load(mounted); err != nil {
		return false, err
	}
	x.adopt()
	for _, r := range s.List() {
		x.openArena(r)
	}
	x.checkLent()
	for _, r := range s.lenders() {
		x.releaseLeft(r)
	}
	x.dropLeft()
	x.remount()
	if err := s.opts.Gate.Start(); err != nil {
		return false, err
	}
	s.Collect()
	s.PassGate()
	s.readAllPastCache()
	named := s.opts.Names.Named()
	for _, r := range s.List() {
		// A container may be on it all the same: a tag has moved since.
		if !strings.HasPrefix(named[r.Key()], "image ") {
			r.Fail(errUnnamed)
		}
	}
	return len(x.lost) > 0, nil
}

// restoring is one Restore. Nobody else uses the store meanwhile.
type restoring struct {
	s *Store
	Inherited
	read map[*Rootfs]*Files // what was read of incomplete ones
	lost map[*Rootfs]bool   // that were mounted, and have lost their gate
}

// load reads the records, and removes leftovers.
func (x *restoring) load(mounted map[string]bool) error {
	s := x.s
	names, err := os.ReadDir(s.dir())
	if err != nil {
		return err
	}
	bad := make(map[*Rootfs]error)
	for _, e := range names {
		r := rootfs.New(s.each, filepath.Join(s.dir(), e.Name()))
		if _, err := os.Stat(r.Path(rootfs.LenderName)); err == nil {
			err := r.LoadLender()
			if newer := (*records.NewerError)(nil); errors.As(err, &newer) {
				return api.Errorf(api.CodeUnsupported, "%w", err)
			}
			if err != nil {
				// Who borrowed of it can be mounted all the same.
				r.Unlisted(err)
				s.opts.Warn("the list of what is kept of rootfs %s cannot be used: %v; it stays until no image uses contents of it", e.Name(), err)
			}
			s.lent[r.ID()] = r
			continue
		}
		err := r.Load()
		if newer := (*records.NewerError)(nil); errors.As(err, &newer) {
			return api.Errorf(api.CodeUnsupported, "%w", err)
		}
		r.Found(mounted[r.Mountpoint()])
		if err == nil && s.rootfs[r.Key()] != nil {
			err = fmt.Errorf("there are two of it: %s is the other", s.rootfs[r.Key()].Dir())
		}
		if err == nil {
			s.rootfs[r.Key()] = r
		} else {
			bad[r] = err
		}
	}
	x.setAside(bad)
	return nil
}

// adopt gives each rootfs that an older version left the origin of the images that name it, once: it serves
// images of that registry, and lends nothing, since nobody knows what it was lent. One that images of several
// registries name, or none, or that has contents in such a one, stays without: the images that
// name it go on with it, and no other one gets it, since it cannot be told whose bytes it has.
func (x *restoring) adopt() {
	s := x.s
	var old []*Rootfs
	found := make(map[digest.Digest]string) // by arena
	for _, r := range s.List() {
		if r.Broken() != nil || r.Record().Version == rootfs.RecordVersion {
			continue
		}
		old = append(old, r)
		if registries := s.opts.Names.Origins(r.Key()); len(registries) == 1 {
			found[r.ID()] = registries[0]
		}
	}
	for _, r := range old {
		registry := found[r.ID()]
		for _, id := range r.Arenas() {
			if found[id] != registry {
				registry = ""
			}
		}
		r.Adopt(registry)
		rec := r.Record()
		if err := r.Save(&rec, durable.Replace); err != nil {
			r.Adopt("")
			s.opts.Warn("note whose rootfs %s is, which an older version left: %v; only the images that name it use it", r.ChainID(), err)
			continue
		}
		s.log.Info("a rootfs that an older version left lends nothing", "rootfs", r.ChainID(), "registry", registry)
	}
}

// setAside keeps what cannot be used, but others use, and removes the rest.
func (x *restoring) setAside(bad map[*Rootfs]error) {
	s := x.s
	lends := make(map[digest.Digest]bool)
	for _, r := range s.rootfs {
		for _, id := range r.Arenas() {
			lends[id] = true
		}
	}
	for r, err := range bad {
		key := r.Key()
		if s.rootfs[key] == nil && (lends[r.ID()] || !r.Mount().Mounted() && r.IsOpen()) {
			// Others need its arena, or a container that the daemon does not know
			// its mount.
			r.Unreadable(err)
			s.rootfs[key] = r
			s.opts.Warn("rootfs %s cannot be used, but others use it: %v", key, err)
			continue
		}
		if err := r.Close(); err != nil {
			s.log.Debug("close what is left of a rootfs", "error", err)
		}
		if !errors.Is(err, os.ErrNotExist) {
			s.opts.Warn("rootfs %s cannot be used and is removed: %v; pull its image again", key, err)
		}
		if r.Mount().Mounted() {
			if err := r.Mount().Unmount(true); err != nil {
				s.opts.Warn("unmount what is left of a rootfs: %v", err)
				continue
			}
		}
		if err := os.RemoveAll(r.Dir()); err != nil {
			s.opts.Warn("remove what is left of a rootfs: %v", err)
		}
	}
}

// openArena opens the arena of a rootfs that is incomplete, and releases that of one
// that is not.
func (x *restoring) openArena(r *Rootfs) {
	if wrong := r.Record().Wrong; wrong != "" && r.Complete() && r.Broken() == nil {
		r.Break(errors.New(wrong))
	}
	if r.Complete() {
		x.releaseLeft(r)
		if x.GateLost && r.Broken() == nil && r.Mount().Gated() {
			x.lost[r] = true
		}
		return
	}
	if r.Broken() == nil {
		if err := x.reopen(r); err != nil {
			r.Break(err)
			x.s.opts.Warn("rootfs %s cannot be restored: %v", r.ChainID(), err)
		}
	}
	if wrong := r.Record().Wrong; wrong != "" && r.Broken() == nil {
		r.Break(errors.New(wrong)) // all of it is here: containers that began before read it
	}
	switch {
	case r.Broken() != nil && r.Arena() == nil && !r.Mount().Mounted():
		// Nobody reads what is absent from it, but others may have contents in
		// its arena.
		x.releaseLeft(r)
	case r.Broken() == nil && r.Mount().Mounted() && x.GateLost:
		x.lost[r] = true
	}
}

// reopen opens the arena of an incomplete rootfs and puts it behind the gate.
func (x *restoring) reopen(r *Rootfs) error {
	s := x.s
	have, err := r.Read()
	if err != nil {
		return err
	}
	x.read[r] = have
	r.SetLent(have.TOC, have.Place)
	if r.Own() < 0 {
		return nil
	}
	l, err := r.Layout(have)
	if err != nil {
		return err
	}
	var a *arena.Arena
	kept := gate.KeptArena + r.Name()
	switch f := x.Held[kept]; {
	case f != nil:
		a, err = arena.OpenFile(r.Dir(), f, l)
	case x.FromStore:
		// It is marked still: a new descriptor would wait for itself.
		return api.Errorf(api.CodeUnavailable, "keeper and daemon died together, and the service manager has not kept the descriptor of its arena (see FileDescriptorStoreMax= of the unit, and its log): end the containers on it, remove the image and pull it again")
	default:
		a, err = arena.Open(r.Dir(), l)
	}
	if err != nil {
		return err
	}
	if why := a.Doubt(); why != "" {
		s.opts.Warn("arena of rootfs %s: %s; what is missing is pulled again", r.ChainID(), why)
	}
	if err := s.opts.Gate.Guard(r.Name(), a.File(), r.Backing(a, nil)); err != nil {
		delete(x.Held, kept)
		r.Retire()
		return err
	}
	return nil
}

// releaseLeft takes an arena from behind the gate from which nobody reads what
// is absent. Most often that finishes what LeaveGate had begun: the rootfs is
// complete and recorded so, but its arena was still behind the gate when the
// daemon died.
func (x *restoring) releaseLeft(r *Rootfs) {
	name := r.Name()
	f := x.Held[gate.KeptArena+name]
	if f == nil {
		return
	}
	err := x.s.opts.Gate.Guard(name, f, allHere{})
	if err == nil {
		err = errors.Join(x.s.opts.Gate.Release(name), f.Close())
		delete(x.Held, gate.KeptArena+name)
	}
	if err != nil {
		x.s.opts.Warn("take the arena of rootfs %s from behind the gate: %v; reads of it go through the daemon until it is", r.ChainID(), err)
	}
}

// checkLent finds rootfs that use contents in place which are not there any
// more: a reboot took what was not durable from an arena that lends, or a damage.
// Such a rootfs is made anew when nobody uses it, else it is reported.
func (x *restoring) checkLent() {
	s := x.s
	for _, r := range s.List() {
		if r.Complete() || r.Broken() != nil {
			continue
		}
		err := s.lentAbsent(r, x.read[r])
		if err == nil {
			continue
		}
		if r.Mount().Mounted() || r.IsOpen() || len(s.borrowers(r)) > 0 {
			r.Break(err)
			s.opts.Warn("rootfs %s cannot be restored: %v", r.ChainID(), err)
			continue
		}
		s.log.Info("a rootfs is laid out anew", "rootfs", r.ChainID(), "why", err)
		delete(s.rootfs, r.Key())
		s.discard(r)
	}
}

// dropLeft takes from the keeper what nothing uses: arenas whose rootfs was
// removed, or completed, just when the daemon died. The descriptor of an arena that
// is incomplete and could not be opened is kept: it may be marked, and another
// descriptor of it would wait for itself.
func (x *restoring) dropLeft() {
	s := x.s
	used := make(map[string]bool)
	for _, r := range s.all() {
		name := gate.KeptArena + r.Name()
		if r.Arena() != nil {
			used[name] = true
		} else if f := x.Held[name]; f != nil && r.Broken() != nil && !r.Complete() {
			used[name] = true
			r.Strand(f)
		}
	}
	for name, f := range x.Held {
		if !strings.HasPrefix(name, gate.KeptArena) || used[name] {
			continue
		}
		if err := s.opts.Drop(context.WithoutCancel(s.ctx), name); err != nil {
			s.log.Warn("take a descriptor from the keeper", "name", name, "error", err)
		}
		_ = f.Close()
	}
}

// remount mounts what is named and not mounted, and mounts anew what lost its
// gate.
func (x *restoring) remount() {
	s := x.s
	named := s.opts.Names.Named()
	for _, r := range s.List() {
		if r.Broken() != nil {
			continue
		}
		chain, key := r.ChainID(), r.Key()
		if x.lost[r] {
			if on := strings.Join(s.opts.Names.ContainersOn(key), " "); on != "" && r.Mount().Gated() {
				s.opts.Warn("the gate of rootfs %s was lost (daemon and keeper died together): reads of containers on it fail; remove and start again: %s", chain, on)
			} else if on != "" {
				s.opts.Warn("the gate of rootfs %s was lost (daemon and keeper died together): containers on it may have read zeros for bytes that were absent; remove and start again: %s", chain, on)
			}
			if err := s.unmount(r, true); err != nil {
				r.Break(err)
				s.opts.Warn("rootfs %s cannot be mounted again: %v", chain, err)
				continue
			}
		}
		if r.Mount().Mounted() {
			r.Mount().RestoreReadAhead() // nobody knows any more how far the start has come
		}
		if r.Mount().Mounted() || named[key] == "" {
			continue
		}
		if err := s.mountAgain(r, x.read[r]); err != nil {
			r.Break(err)
			s.opts.Warn("rootfs %s cannot be mounted again: %v", chain, err)
		}
	}
}

// mountAgain mounts a rootfs from what is on the disk. The metadata image is
// believed by its digest, or else written anew.
func (s *Store) mountAgain(r *Rootfs, have *Files) error {
	rec := r.Record()
	got, err := records.Sum(r.MetaImage())
	if err != nil || got != rec.Meta {
		if have == nil {
			if have, err = r.Read(); err != nil {
				return err
			}
		}
		img, err := s.planMeta(r, have, nil)
		if err != nil {
			return err
		}
		if got, err = writeMeta(r, img); err != nil {
			return err
		}
		if got != rec.Meta {
			rec.Meta = got
			r.SetMeta(got)
			if err := r.Save(&rec, durable.Replace); err != nil {
				return err
			}
		}
	}
	return s.mount(r)
}

// allHere answers for an arena that has everything.
type allHere struct{}

func (allHere) Present(off, n int64) bool                    { return true }
func (allHere) Met(off, n int64, present bool)               {}
func (allHere) Need(ctx context.Context, off, n int64) error { return nil }
