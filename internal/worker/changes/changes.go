// Package changes reads what a container has changed of its image: by the upper directory of its overlay, where the
// kernel has noted it, and by the container's filesystem itself, for what is in it.
//
// # What the upper directory says
//
//	a device 0:0                  the name is gone
//	trusted.overlay.opaque = y    nothing of what the image has in this directory is left
//	trusted.overlay.redirect      the directory was renamed: what is in it lies elsewhere, in upper directory and image
//	trusted.overlay.metacopy      the file has no bytes here: only its metadata has changed
//	anything else                 is new, or has changed
//
// Names come from the upper directory, or, below one that was renamed, from the container's filesystem; metadata and
// bytes always from the latter. So what the last three mean is the kernel's to know.
//
// # What is no change
//
// A runtime makes files and directories to mount on, and directories on the way there. What of these is empty but for such
// things, and not in the image, is left out. So
// are sockets, which no layer can have: one in the place of something counts as its removal. The root directory's own
// metadata is no image's to say (see package flatten).
//
// # Whom it believes
//
// A container that runs may rename what is being read. No name is followed through a symbolic link, and none out of the
// directories that are given; what is gone when its turn comes is an error, ErrRunning.
package changes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrRunning is returned, wrapped, when files change while they are read.
var ErrRunning = errors.New("the container changes it just now")

// Tree is where the filesystem of a container is. All are directories of this host.
type Tree struct {
	Upper  string // of the overlay
	Lower  string // what the overlay is on: an image, mounted
	Merged string // the overlay, mounted
	// Mountpoints are the paths in the container where its runtime mounts something.
	Mountpoints []string
}

// Kind says how a path has changed.
type Kind string

// The kinds. A directory is Modified also if only what is in it has changed: its time has.
const (
	Added    Kind = "added"
	Modified Kind = "modified"
	Deleted  Kind = "deleted"
)

// Change is one path that has changed.
type Change struct {
	Path string // clean, relative to the root
	Kind Kind
	// Opaque, of a directory, says that the image has it too, and nothing in it is left but what comes as a change.
	Opaque bool
	// Stat is what the container sees; zero if the path is gone.
	Stat unix.Stat_t

	fd int // of the path, in the container's filesystem (O_PATH), until fn returns; -1: it is gone
}

// Walk calls fn for every change, directories before what is in them, names in the order of their bytes.
//
// Errors: ErrRunning; those of fn; ctx's.
func (t Tree) Walk(ctx context.Context, fn func(*Change) error) error {
	w := walk{ctx: ctx, fn: fn, mounts: make(map[string]bool), ways: make(map[string]bool)}
	for _, m := range t.Mountpoints {
		rel := strings.TrimPrefix(path.Clean("/"+m), "/")
		w.mounts[rel] = true
		for dir := path.Dir(rel); dir != "."; dir = path.Dir(dir) {
			w.ways[dir] = true
		}
	}
	for _, d := range []struct {
		fd   *int
		path string
	}{{&w.upper, t.Upper}, {&w.lower, t.Lower}, {&w.merged, t.Merged}} {
		fd, err := unix.Open(d.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: d.path, Err: err}
		}
		defer unix.Close(fd)
		*d.fd = fd
	}
	return w.dir(".", false, true)
}

// walk is one call of Walk.
type walk struct {
	ctx                  context.Context
	fn                   func(*Change) error
	upper, lower, merged int             // directories
	mounts, ways         map[string]bool // mountpoints, and the directories above them
}

// dir walks a directory. whole says that the upper directory does not tell what is in it: it was renamed. below
// says that the image has this directory, and that it is still there.
func (w *walk) dir(rel string, whole, below bool) error {
	from := w.upper
	if whole {
		from = w.merged
	}
	names, err := names(from, rel)
	if err != nil {
		return w.failed(rel, err)
	}
	for _, name := range names {
		if err := context.Cause(w.ctx); err != nil {
			return err
		}
		if err := w.name(path.Join(rel, name), whole, below); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) name(rel string, whole, below bool) error {
	c := &Change{Path: rel, Kind: Added, fd: -1}
	inImage, there := unix.Stat_t{}, false
	if below {
		var err error
		if there, err = statAt(w.lower, rel, &inImage); err != nil {
			return w.failed(rel, err)
		}
	}
	opaque, renamed := false, false
	if !whole {
		up, err := openAt(w.upper, rel)
		if err != nil {
			return w.failed(rel, err)
		}
		var st unix.Stat_t
		if err = unix.Fstat(up, &st); err == nil && isDir(&st) {
			opaque, renamed, err = overlayDir(up)
		}
		unix.Close(up)
		switch {
		case err != nil:
			return w.failed(rel, err)
		case st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0:
			return w.gone(c, there)
		}
	}
	var err error
	if c.fd, err = openAt(w.merged, rel); err != nil {
		return w.failed(rel, err)
	}
	defer unix.Close(c.fd) // whatever becomes of c.fd
	if err := unix.Fstat(c.fd, &c.Stat); err != nil {
		return w.failed(rel, err)
	}
	if c.Stat.Mode&unix.S_IFMT == unix.S_IFSOCK {
		return w.gone(c, there)
	}
	if !there {
		if ours, err := w.forMounts(rel, c.fd, &c.Stat); ours || err != nil {
			return w.failed(rel, err)
		}
	}
	if there {
		c.Kind = Modified
	}
	if !isDir(&c.Stat) {
		return w.fn(c)
	}
	over := there && isDir(&inImage) // the image has a directory here
	c.Opaque = over && (opaque || renamed)
	if err := w.fn(c); err != nil {
		return err
	}
	return w.dir(rel, whole || renamed, over && !c.Opaque)
}

// forMounts reports whether a path, which the image does not have, is there for mounts only.
func (w *walk) forMounts(rel string, fd int, st *unix.Stat_t) (bool, error) {
	switch {
	case !w.mounts[rel] && !w.ways[rel]:
		return false, nil
	case st.Mode&unix.S_IFMT == unix.S_IFREG:
		return w.mounts[rel] && st.Size == 0, nil
	case !isDir(st):
		return false, nil
	}
	list, err := names(fd, ".")
	if err != nil || w.mounts[rel] && len(list) > 0 && !w.ways[rel] {
		return false, err
	}
	for _, name := range list {
		below, err := openAt(fd, name)
		if err != nil {
			return false, err
		}
		var st unix.Stat_t
		ours := false
		if err = unix.Fstat(below, &st); err == nil {
			ours, err = w.forMounts(path.Join(rel, name), below, &st)
		}
		unix.Close(below)
		if !ours || err != nil {
			return false, err
		}
	}
	return true, nil
}

// gone tells that a path is, if the image has it.
func (w *walk) gone(c *Change, there bool) error {
	if !there {
		return nil
	}
	c.Kind, c.Stat, c.fd = Deleted, unix.Stat_t{}, -1
	return w.fn(c)
}

// failed is the error about a path, or nil.
func (w *walk) failed(rel string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EAGAIN):
		err = ErrRunning
	}
	return fmt.Errorf("read /%s of the container: %w", rel, err)
}

// reopen opens the file of a change for reading, a directory too. The caller closes it.
func (c *Change) reopen() (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", c.fd))
}

func isDir(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFDIR }

// openAt opens a path below a directory with O_PATH.
func openAt(dir int, rel string) (int, error) {
	for {
		fd, err := unix.Openat2(dir, rel, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// statAt reports whether there is something at a path below a directory, and what.
func statAt(dir int, rel string, st *unix.Stat_t) (there bool, err error) {
	fd, err := openAt(dir, rel)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return false, nil
	case err != nil:
		return false, err
	}
	defer unix.Close(fd)
	return true, unix.Fstat(fd, st)
}

// names lists a directory, sorted.
func names(dir int, rel string) ([]string, error) {
	fd, err := openAt(dir, rel)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := f.Readdirnames(-1)
	slices.Sort(list)
	return list, err
}

// overlayDir reads what overlayfs has noted at a directory of an upper directory.
func overlayDir(fd int) (opaque, renamed bool, err error) {
	value, err := getXattr(fd, "trusted.overlay.opaque")
	if err == nil {
		opaque = string(value) == "y"
		_, err = getXattr(fd, "trusted.overlay.redirect")
		renamed = err == nil
	} else if err == unix.ENODATA {
		_, err = getXattr(fd, "trusted.overlay.redirect")
		renamed = err == nil
	}
	if err == unix.ENODATA || errors.Is(err, unix.ENOTSUP) {
		err = nil
	}
	return opaque, renamed, err
}

// getXattr reads an attribute of what an O_PATH descriptor names.
func getXattr(fd int, name string) ([]byte, error) {
	return grow(func(b []byte) (int, error) { return unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), name, b) })
}

// listXattrs lists their names, sorted.
func listXattrs(fd int) ([]string, error) {
	b, err := grow(func(b []byte) (int, error) { return unix.Listxattr(fmt.Sprintf("/proc/self/fd/%d", fd), b) })
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil || len(b) == 0 {
		return nil, err
	}
	list := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	slices.Sort(list)
	return list, nil
}

// maxXattr is what the kernel gives at most, bytes.
const maxXattr = 64 << 10

// grow calls a system call that fills a buffer, with a larger one if need be.
func grow(call func([]byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 16 {
		b := make([]byte, min(size, maxXattr))
		n, err := call(b)
		if errors.Is(err, unix.ERANGE) && size < maxXattr {
			continue
		}
		return b[:max(n, 0)], err
	}
}
