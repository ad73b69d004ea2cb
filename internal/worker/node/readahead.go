package node

import (
	"errors"
	"io/fs"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// A startup set has the pages that a start touches, and no others. With
// read-ahead, a read asks for a window around its page, most of which is not in
// the set, and waits for all of it. So the mount of a rootfs that comes with a
// startup set has no read-ahead until a second after its container is ready, as far as anybody
// says so: else for settle after the set has arrived, and never once everything
// is here. The same holds while nobody knows a set and what is read is noticed to
// make one (learn.go): with read-ahead it would have what nobody asked for.
//
// A file that is opened meanwhile keeps reading page by page for as long as it
// is open: what is not in the page cache is read two to four times slower than
// with read-ahead, what is there as fast.
const settle = 5 * time.Second

// readAheadName is a file in the directory of a rootfs whose mount has no
// read-ahead: it names the file that sets it. After a reboot it says nothing.
const readAheadName = "readahead"

// bdiName is a file in the directory of a mounted rootfs that names the file that
// sets its mount's read-ahead, for the next daemon: nothing else leads from a mount
// to it. A kernel gives no such name twice before it boots again, and a rootfs that
// is mounted anew has none, or a new one.
const bdiName = "bdi"

// mostReadAhead is the longest read-ahead of a mount, KiB.
const mostReadAhead = 2048

// mountErofs mounts a rootfs at its place, or beneath the mount that is there.
func (n *Node) mountErofs(r *rootfs, devices []string, beneath bool) error {
	n.mu.Lock()
	off := r.starting
	r.readAheadFile = ""
	n.mu.Unlock()
	for _, name := range []string{readAheadName, bdiName} {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	var none int
	var file string
	e := kernel.Erofs{Image: r.path("meta.erofs"), Devices: devices, Target: r.path("mnt"), Loop: n.loop, Beneath: beneath, ReadAheadFile: &file}
	if off {
		e.ReadAhead = &none
	}
	if err := kernel.MountErofs(e); err != nil {
		// Where there is no sysfs to write the mount has the kernel's read-ahead:
		// reads of what arrives wait for more, those of large files take longer.
		n.log.Debug("mount with a read-ahead that can be set", "rootfs", r.rec.ChainID, "error", err)
		e.ReadAhead, e.ReadAheadFile = nil, nil
		return kernel.MountErofs(e)
	}
	if err := os.WriteFile(r.path(bdiName), []byte(file), 0o600); err != nil {
		return err
	}
	n.mu.Lock()
	r.readAheadFile = file
	n.mu.Unlock()
	if !off {
		return nil
	}
	if err := os.WriteFile(r.path(readAheadName), []byte(file), 0o600); err != nil {
		return errors.Join(err, kernel.SetReadAhead(file, kernel.DefaultReadAhead))
	}
	n.mu.Lock()
	over := !r.starting // before the mount was there
	n.mu.Unlock()
	if over {
		n.endStart(r)
	}
	return nil
}

// setReadAhead gives the mount of r the read-ahead that it should have now.
func (n *Node) setReadAhead(r *rootfs) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.readAheadFile == "" {
		return nil
	}
	kib := kernel.DefaultReadAhead
	switch {
	case r.starting || r.starts > 0:
		kib = 0
	case r.direct:
		disk, err := kernel.DiskReadAhead(n.opts.Root)
		if err != nil {
			n.log.Debug("give a mount the read-ahead of its disk", "rootfs", r.rec.ChainID, "error", err)
		}
		kib = min(max(kib, disk), mostReadAhead)
	}
	return kernel.SetReadAhead(r.readAheadFile, kib)
}

// findReadAhead finds the file that sets the read-ahead of a mount that an earlier
// daemon made. One of an older version left it only while there was none.
func (r *rootfs) findReadAhead() {
	for _, name := range []string{bdiName, readAheadName} {
		if file, err := os.ReadFile(r.path(name)); err == nil {
			r.readAheadFile = strings.TrimSpace(string(file))
			return
		}
	}
}

// endStart gives the mount of a rootfs its read-ahead, if it has none, unless a
// service that has joined is still being started: the last one's end does it.
func (n *Node) endStart(r *rootfs) {
	n.mu.Lock()
	r.starting = false
	others := r.starts > 0
	n.mu.Unlock()
	if others {
		return
	}
	if _, err := os.Stat(r.path(readAheadName)); errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err := n.setReadAhead(r); err != nil && !errors.Is(err, fs.ErrNotExist) { // it is not mounted any more
		n.log.Warn("give a mount its read-ahead back: large files are read slowly", "rootfs", r.rec.ChainID, "error", err)
	}
	if err := os.Remove(r.path(readAheadName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log.Warn("remove a file", "error", err)
	}
}

// arrived is told of the startup set when all of it has arrived, or when there is
// none.
func (p *pull) arrived(s fetch.Startup) {
	p.mu.Lock()
	r := p.rootfs
	p.mu.Unlock()
	if r == nil {
		return
	}
	p.n.mu.Lock()
	learning := r.learning != nil
	p.n.mu.Unlock()
	p.n.work.Go(func() {
		if s.Origin != "" || learning {
			settled := time.NewTimer(settle)
			defer settled.Stop()
			after := settled.C
			if p.req.Probed {
				after = nil
			}
			select {
			case <-p.ready:
				// What is read right after is in the set as well, and reported.
				select {
				case <-time.After(reportAfter):
				case <-p.ctx.Done():
				}
			case <-after:
			case <-p.ctx.Done():
			}
		}
		p.n.endStart(r)
		select {
		case <-r.ready:
			debug.FreeOSMemory() // what the mount of a large image took; a start would wait for it
		case <-p.ctx.Done():
		}
	})
}

// isReady ends what p does for the start of a container.
func (p *pull) isReady() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.ready: // a service that has joined
		close(p.nextReady)
		p.nextReady = make(chan struct{})
	default:
		close(p.ready)
	}
	if p.fetch != nil {
		p.fetch.ReleaseAfter(holdAfter)
	}
}

// holdAfter is for how long after ready the server goes on to hold: a port is open before what is behind it
// answers, and whoever has waited for the service asks it now. redis listens some 10 to 30 ms before it
// answers, in which the rest of its image took half of two processors.
const holdAfter = 100 * time.Millisecond

// holdProbed is how long the server holds back what comes after the startup set for a
// container to become ready: long enough for most, short enough for a link not to
// lie idle for those that take minutes. holdStarted is for one of which nobody will say that it is
// ready: containerd starts it as soon as the image is mounted.
const (
	holdProbed  = 20 * time.Second
	holdStarted = 2 * time.Second
)

// hold is how long it does: not at all when nothing is about to be started, or somebody
// has said that it is ready.
func (p *pull) hold() time.Duration {
	select {
	case <-p.ready:
		return 0
	default:
	}
	switch {
	case p.req.Probed:
		return holdProbed
	case p.early != nil || p.req.Until == api.Mounted:
		return holdStarted
	}
	return 0
}

// wantsStartup reports whether a pull asks for a startup set.
func (p *pull) wantsStartup() bool { return !p.n.opts.NoStartup && !p.req.NoStartup }
