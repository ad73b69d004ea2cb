package store

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// MountFirst mounts a rootfs that Open laid out. After it the rootfs is recorded: a
// new daemon goes on with it. then is called when it is mounted, before anybody
// hears that it is; its error is one of the mount. Ready is closed in any case.
func (s *Store) MountFirst(r *Rootfs, then func() error) error {
	defer r.FirstMounted()
	err := s.mountFirst(r)
	s.opts.At("mounted")
	if err == nil {
		err = then()
	}
	if err != nil {
		r.Break(err)
	}
	return err
}

func (s *Store) mountFirst(r *Rootfs) error {
	meta, err := r.MetaWritten()
	if err != nil {
		return fmt.Errorf("metadata image of rootfs %s: %w", r.ChainID(), err)
	}
	r.SetMeta(meta)
	rec := r.Record()
	s.opts.At("meta")
	// Not durable, and neither is what it describes: a rootfs that a power cut takes
	// so early is pulled again. Finish, and that of one that uses contents of it, sync it.
	if err := r.Save(&rec, records.Replace); err != nil {
		return err
	}
	s.opts.At("saved")
	r.Recorded()
	return s.mount(r)
}

// mount mounts what is on the disk.
func (s *Store) mount(r *Rootfs) error {
	devices, gated := s.devices(r)
	if err := r.Mount().Make(devices, gated); err != nil {
		return err
	}
	r.Mounted()
	s.readPastCache(r)
	return nil
}

// unmount takes the mount of a rootfs away. Unless detach is set, one that somebody uses
// stays, and that is an error.
func (s *Store) unmount(r *Rootfs, detach bool) error {
	if err := r.Mount().Unmount(detach); err != nil {
		return err
	}
	r.Unmounted()
	return nil
}

// PassGate mounts every complete rootfs anew that is mounted by way of the gate
// and need not be any more. Containers that run stay on the old mount; those
// that come have no daemon in their path. Where it fails, reads go on through
// the daemon.
func (s *Store) PassGate() {
	s.layout.Lock()
	defer s.layout.Unlock()
	for _, r := range s.List() {
		if r.State() != rootfs.Complete || !r.Mount().Gated() {
			continue
		}
		devices, still := s.devices(r)
		if still {
			continue // an arena that lends is not complete
		}
		if err := r.Mount().Replace(devices); err != nil {
			s.log.Warn("mount a complete rootfs without the gate; reads of it go through the daemon", "rootfs", r.ChainID(), "error", err)
			continue
		}
		s.readPastCache(r)
	}
}

// keepWarm has what a pull left in memory read until Options.KeepWarm has passed, and
// then not any more: see mounts.Mount.ReadPastCache.
func (s *Store) keepWarm() {
	s.work.Go(func() {
		if backoff.Wait(s.ctx, s.opts.KeepWarm) == nil { // else the next daemon does it
			s.readAllPastCache()
		}
	})
}

// readAllPastCache makes the mounts of all complete rootfs read past their arenas'
// page cache that are not kept warm.
func (s *Store) readAllPastCache() {
	s.layout.Lock()
	defer s.layout.Unlock()
	for _, r := range s.List() {
		s.readPastCache(r)
	}
}

// readPastCache does so for one. Called with Store.layout held, or by whoever has
// just mounted it.
func (s *Store) readPastCache(r *Rootfs) {
	if r.Warm() {
		return
	}
	devices, _ := s.devices(r)
	if !r.Mount().ReadPastCache(devices) || r.Own() < 0 {
		return
	}
	f, err := os.Open(r.Path("arena"))
	if err == nil {
		err = errors.Join(unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
	}
	if err != nil {
		s.log.Debug("drop an arena from the page cache", "rootfs", r.ChainID(), "error", err)
	}
}
