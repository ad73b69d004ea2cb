package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/kernel"
)

// gatedName is a file in the directory of a rootfs whose mount reads arenas by
// files of the gate, and so depends on it even when everything is here. It is
// there before the mount is. After a reboot it says nothing.
const gatedName = "gated"

// devices returns the paths by which the arenas of a rootfs are to be mounted,
// and whether one of them is the gate's.
func (n *Node) devices(r *rootfs) (paths []string, gated bool) {
	for _, c := range r.rec.Arenas {
		other := n.arenaOf(c)
		if c == r.id() {
			other = r
		}
		arena := filepath.Join(n.opts.Root, "rootfs", c.Encoded(), "arena") // it is gone, and the mount says so
		if other != nil {
			arena = other.path("arena")
		}
		device := n.gate.Device(c.Encoded(), arena)
		gated = gated || device != arena
		paths = append(paths, device)
	}
	return paths, gated
}

// setGated writes or removes the file.
func (r *rootfs) setGated(gated bool) error {
	if gated {
		return os.WriteFile(r.path(gatedName), nil, 0o600)
	}
	if err := os.Remove(r.path(gatedName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// isGated reports whether the file is there.
func (r *rootfs) isGated() bool {
	_, err := os.Stat(r.path(gatedName))
	return err == nil
}

// passGate mounts every complete rootfs anew that is mounted by way of the gate
// and need not be any more. Containers that run stay on the old mount; those
// that come have no daemon in their path. Where it fails, reads go on through
// the daemon.
func (n *Node) passGate() {
	n.layout.Lock()
	defer n.layout.Unlock()
	n.mu.Lock()
	var gated []*rootfs
	for _, r := range n.rootfs {
		if r.gated && r.mounted && r.rec.Complete && r.broken == nil {
			gated = append(gated, r)
		}
	}
	n.mu.Unlock()
	for _, r := range gated {
		devices, still := n.devices(r)
		if still {
			continue // an arena that lends is not complete
		}
		// Containers that run go on with the old one, and with read-ahead: all is here.
		n.mu.Lock()
		old := r.readAheadFile
		n.mu.Unlock()
		err := n.mountErofs(r, devices, true)
		if old != "" {
			err = errors.Join(err, kernel.SetReadAhead(old, kernel.DefaultReadAhead))
		}
		if err == nil {
			err = unmountTop(r.path("mnt"))
		}
		if err == nil {
			err = r.setGated(false)
		}
		if err != nil {
			n.log.Warn("mount a complete rootfs without the gate; reads of it go through the daemon", "rootfs", r.rec.ChainID, "error", err)
			continue
		}
		n.mu.Lock()
		r.gated, r.direct = false, false
		n.mu.Unlock()
		n.readArenasDirectly(r)
	}
}

// unmountTop leaves the lowest of the mounts at target, of which there can be
// more than two when a daemon was killed here.
func unmountTop(target string) error {
	mounts, err := kernel.Mounts(target)
	if err != nil {
		return err
	}
	for range len(mounts) - 1 {
		if err := kernel.Unmount(target, true); err != nil {
			return err
		}
	}
	return nil
}

// gateName is the gate for `foil status`.
func (n *Node) gateName() string {
	if n.loop {
		return fmt.Sprintf("%s (%s)", n.gate.Kind(), kernel.GateLoop)
	}
	return n.gate.Kind()
}
