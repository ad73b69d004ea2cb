package node

import (
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// EROFS keeps what it reads in the page cache of its own files, and reads arenas
// by way of theirs: each page is copied, is there twice for a while, and comes
// with as much read-ahead of the arena as its disk has, which a container that
// reads here and there pays for. While an image arrives that is right: what is
// written to an arena is read from memory, not from the disk. Some time after it
// is complete its mount is told to read past the arena's page cache (Linux 6.15),
// and what is there goes.

// warmFor is how long the pages that a pull left in memory are kept for
// containers that start right after it.
const warmFor = time.Minute

func (o *Options) warm() time.Duration {
	if o.warmFor > 0 {
		return o.warmFor
	}
	return warmFor
}

// keepWarm is called when r has become complete: what its pull left in memory is
// read for a while, and then not any more.
func (n *Node) keepWarm(r *rootfs) {
	n.mu.Lock()
	r.warmUntil = time.Now().Add(n.opts.warm())
	n.mu.Unlock()
	n.work.Go(func() {
		timer := time.NewTimer(n.opts.warm())
		defer timer.Stop()
		select {
		case <-timer.C:
			n.readDirectly()
		case <-n.ctx.Done(): // the next daemon does it
		}
	})
}

// readDirectly makes the mounts of all complete rootfs read past their arenas'
// page cache that are not kept warm.
func (n *Node) readDirectly() {
	n.layout.Lock()
	defer n.layout.Unlock()
	n.mu.Lock()
	list := slices.Collect(maps.Values(n.rootfs))
	n.mu.Unlock()
	for _, r := range list {
		n.readArenasDirectly(r)
	}
}

// readArenasDirectly does so for one. Where it cannot be had nothing changes.
// Called with n.layout held, or by whoever has just mounted it.
func (n *Node) readArenasDirectly(r *rootfs) {
	n.mu.Lock()
	can := r.mounted && !r.direct && !r.gated && r.rec.Complete && r.broken == nil && !n.loop && !time.Now().Before(r.warmUntil)
	n.mu.Unlock()
	if !can {
		return
	}
	devices, _ := n.devices(r)
	for _, d := range devices {
		if ok, err := kernel.ReadsPagesDirectly(d); !ok {
			n.log.Debug("pages of an image are kept twice until memory is short: its arenas' filesystem reads no single pages directly", "rootfs", r.rec.ChainID, "error", err)
			return
		}
	}
	if err := kernel.SetErofsDirect(r.path("mnt")); err != nil {
		n.log.Debug("pages of an image are kept twice until memory is short", "rootfs", r.rec.ChainID, "error", err)
		return
	}
	n.mu.Lock()
	r.direct = true
	n.mu.Unlock()
	if err := n.setReadAhead(r); err != nil {
		n.log.Debug("give a mount the read-ahead of its disk", "rootfs", r.rec.ChainID, "error", err)
	}
	if r.own() < 0 {
		return
	}
	f, err := os.Open(r.path("arena"))
	if err == nil {
		err = errors.Join(unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
	}
	if err != nil {
		n.log.Debug("drop an arena from the page cache", "rootfs", r.rec.ChainID, "error", err)
	}
}
