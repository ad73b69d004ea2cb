// Package mounts is how the metadata image of a rootfs is mounted: over which
// devices, with which read-ahead, and by way of which page cache. Files in the
// directory of the rootfs tell the next daemon what a mount cannot be asked:
//
//	gated      there while the mount reads by files of a FUSE gate, and so depends
//	           on it even when everything is here. It is there before the mount is
//	bdi        names the file that sets the read-ahead of the mount, since nothing
//	           else leads there. A kernel gives no such name twice before it boots
//	           again, and a rootfs that is mounted anew has none, or a new one
//	readahead  the same; there while the mount has no read-ahead
//
// After a reboot they say nothing.
package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/locks"
)

// Files of a rootfs's directory that are this package's.
const (
	Image         = "meta.erofs"
	target        = "mnt"
	gatedName     = "gated"
	bdiName       = "bdi"
	readAheadName = "readahead"
)

// Files are the names of what is of use for a mount only. Image is not among them.
var Files = []string{gatedName, bdiName, readAheadName, target}

// Options are those of all mounts of a daemon.
type Options struct {
	// Root is the worker's directory: a mount that reads past the page cache has the
	// read-ahead of its disk.
	Root string
	// Loop says that EROFS is mounted over loop devices.
	Loop   bool
	Logger *slog.Logger
}

// Mount is the mount of one rootfs, which may be there or not. Make, Replace,
// Unmount, and ReadPastCache are not called side by side.
type Mount struct {
	opts Options
	dir  string
	log  *slog.Logger

	mu        locks.Mutex[locks.Leaf]
	mounted   bool
	gated     bool   // it reads by files of the gate
	direct    bool   // it reads past the page cache of arenas
	readAhead string // the file that sets its read-ahead; empty: there is none
	starts    int    // services that are being started, for which it has no read-ahead
}

// New is of the rootfs in a directory, which is not mounted as far as is known.
func New(opts Options, dir string) *Mount {
	return &Mount{opts: opts, dir: dir, log: opts.Logger.With("rootfs", filepath.Base(dir))}
}

// Found notes that an earlier daemon has mounted it.
func (m *Mount) Found() {
	_, err := os.Stat(m.path(gatedName))
	file := m.foundReadAhead()
	// An earlier version may have made it.
	if err := kernel.Restrict(m.Point()); err != nil {
		m.log.Warn("set-user-ID bits and device nodes of an image work below the daemon's root until its host boots again", "error", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mounted, m.gated, m.readAhead = true, err == nil, file
}

func (m *Mount) path(name string) string { return filepath.Join(m.dir, name) }

// Point is where it is mounted.
func (m *Mount) Point() string { return m.path(target) }

// Mounted reports whether it is mounted.
func (m *Mount) Mounted() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mounted
}

// Gated reports whether it is mounted, and reads by files of the gate.
func (m *Mount) Gated() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mounted && m.gated
}

// Direct reports whether it is mounted, and reads past the page cache of arenas.
func (m *Mount) Direct() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mounted && m.direct
}

// Make mounts the image. gated says that one of the devices is the gate's.
//
// Errors: api.CodeUnsupported when the kernel cannot.
func (m *Mount) Make(devices []string, gated bool) error {
	if err := m.setGated(gated); err != nil {
		return err
	}
	if err := m.mount(devices, gated, false); err != nil {
		return Explain(fmt.Errorf("mount rootfs %s: %w", filepath.Base(m.dir), err))
	}
	return nil
}

// Replace mounts the image beneath the mount that is there, which reads by the gate,
// over devices that are not the gate's, and takes the old one away. Containers that
// run stay on it, with read-ahead: all is here.
func (m *Mount) Replace(devices []string) error {
	m.mu.Lock()
	old := m.readAhead
	m.mu.Unlock()
	// gated until the old mount is away.
	err := m.mount(devices, true, true)
	if old != "" {
		err = errors.Join(err, kernel.SetReadAhead(old, kernel.DefaultReadAhead))
	}
	if err == nil {
		err = unmountTop(m.Point())
	}
	if err == nil {
		err = m.setGated(false)
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gated = false
	return nil
}

// mount mounts the image at its place, or beneath the mount that is there.
func (m *Mount) mount(devices []string, gated, beneath bool) error {
	for _, name := range []string{readAheadName, bdiName} {
		if err := os.Remove(m.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	m.mu.Lock()
	none := m.starts > 0
	m.mu.Unlock()
	var file string
	e := kernel.Erofs{Image: m.path(Image), Devices: devices, Target: m.Point(), Loop: m.opts.Loop, Beneath: beneath, ReadAheadFile: &file}
	if none {
		e.ReadAhead = new(int)
	}
	if err := kernel.MountErofs(e); err != nil {
		// Where there is no sysfs to write the mount has the kernel's read-ahead:
		// reads of what arrives wait for more, those of large files take longer.
		m.log.Debug("mount with a read-ahead that can be set", "error", err)
		e.ReadAhead, e.ReadAheadFile, file = nil, nil, ""
		if err := kernel.MountErofs(e); err != nil {
			return err
		}
	}
	m.mu.Lock()
	m.mounted, m.gated, m.direct, m.readAhead = true, gated, false, file
	m.mu.Unlock()
	if file == "" {
		return nil
	}
	if err := os.WriteFile(m.path(bdiName), []byte(file), 0o600); err != nil {
		return err
	}
	if none {
		return m.setReadAhead()
	}
	return nil
}

// Unmount takes the mount away. Unless detach is set, one that somebody uses stays,
// and that is an error.
func (m *Mount) Unmount(detach bool) error {
	err := kernel.Unmount(m.Point(), detach)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: not mounted
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mounted = false
	return nil
}

// setGated writes or removes the file that says so.
func (m *Mount) setGated(gated bool) error {
	if gated {
		return os.WriteFile(m.path(gatedName), nil, 0o600)
	}
	if err := os.Remove(m.path(gatedName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
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

// ReadPastCache makes the mount read past the page cache of its devices, files that are all
// here (Linux 6.15). Where it cannot be had nothing changes. It reports whether it
// has.
//
// EROFS keeps what it reads in the page cache of its own files, and reads arenas
// by way of theirs: each page is copied, is there twice for a while, and comes
// with as much read-ahead of the arena as its disk has, which a container that
// reads here and there pays for. While an image arrives that is right: what is
// written to an arena is read from memory, not from the disk.
func (m *Mount) ReadPastCache(devices []string) bool {
	m.mu.Lock()
	can := m.mounted && !m.direct && !m.gated && !m.opts.Loop
	m.mu.Unlock()
	if !can {
		return false
	}
	for _, d := range devices {
		if ok, err := kernel.ReadsPagesDirectly(d); !ok {
			m.log.Debug("pages of an image are kept twice until memory is short: its arenas' filesystem reads no single pages directly", "error", err)
			return false
		}
	}
	if err := kernel.SetErofsDirect(m.Point()); err != nil {
		m.log.Debug("pages of an image are kept twice until memory is short", "error", err)
		return false
	}
	m.mu.Lock()
	m.direct = true
	m.mu.Unlock()
	if err := m.setReadAhead(); err != nil {
		m.log.Debug("give a mount the read-ahead of its disk", "error", err)
	}
	return true
}

// Explain says of an error that an image cannot be mounted what that means.
func Explain(err error) error {
	if !kernel.Lacking(err) {
		return err
	}
	return api.Errorf(api.CodeUnsupported, "%w; this kernel, %s, does not mount EROFS images from files (that needs Linux 6.12 with CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE): `foil doctor` says what this host lacks", err, kernel.Release())
}
