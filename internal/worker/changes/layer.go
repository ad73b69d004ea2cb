package changes

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer"
)

// LayerOptions say how a layer is written.
type LayerOptions struct {
	// Latest is the latest time that a file may have: later ones become it, so that who does the same again gets the
	// same bytes. Zero: all stay.
	Latest time.Time
	// File is called when the next byte to be written is the first of a file, which has some. It may be nil.
	File func(path string)
}

// Written is what a layer has.
type Written struct {
	Entries int
	Bytes   int64 // of files
}

// WriteLayer writes the changes as the tar stream of an OCI layer. Equal changes give equal bytes.
//
// Entries have the order of Walk. What is gone is a whiteout (.wh.NAME); after an opaque directory comes .wh..wh..opq, before
// what is in it. Of a file with several names the first has the bytes, the others are hard links to it. Headers are
// PAX where they need to be, with times in nanoseconds, and without names of users. Extended attributes are those that
// package layer keeps, but for what belongs to this host: labels and hashes of its security modules, and whatever
// overlayfs notes.
//
// What unpacks layers in place cannot take an extended attribute from a directory of the image: no layer can say so.
//
// Errors: those of Walk; a name that begins with .wh., which no layer can have.
func (t Tree) WriteLayer(ctx context.Context, w io.Writer, o LayerOptions) (n Written, err error) {
	l := layerWriter{tar: tar.NewWriter(w), o: o, links: make(map[inode]string), buf: make([]byte, 256<<10)}
	if err := t.Walk(ctx, func(c *Change) error { return l.write(ctx, c) }); err != nil {
		return l.n, err
	}
	return l.n, l.tar.Close()
}

type inode struct{ dev, ino uint64 }

type layerWriter struct {
	tar   *tar.Writer
	o     LayerOptions
	links map[inode]string // the first name of each file that has several
	buf   []byte
	n     Written
}

func (l *layerWriter) write(ctx context.Context, c *Change) error {
	dir, name := path.Split(c.Path)
	if strings.HasPrefix(name, layer.WhiteoutPrefix) {
		return fmt.Errorf("/%s cannot be in a layer, where %s begins the names of what was removed: rename it, or remove it", c.Path, layer.WhiteoutPrefix)
	}
	if c.Kind == Deleted {
		return l.whiteout(dir + layer.WhiteoutPrefix + name)
	}
	h, err := l.header(c)
	if err != nil {
		return err
	}
	if !isDir(&c.Stat) && c.Stat.Nlink > 1 {
		id := inode{c.Stat.Dev, c.Stat.Ino}
		if first, ok := l.links[id]; ok {
			h.Typeflag, h.Linkname, h.Size, h.Devmajor, h.Devminor = tar.TypeLink, first, 0, 0, 0
		} else {
			l.links[id] = c.Path
		}
	}
	l.n.Entries++
	if err := l.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("/%s cannot be in a layer: %w", c.Path, err)
	}
	if h.Typeflag == tar.TypeReg && h.Size > 0 {
		if l.o.File != nil {
			l.o.File(c.Path)
		}
		return l.bytes(ctx, c)
	}
	if c.Opaque {
		return l.whiteout(c.Path + "/" + layer.OpaqueName)
	}
	return nil
}

func (l *layerWriter) whiteout(name string) error {
	l.n.Entries++
	return l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, ModTime: time.Unix(0, 0)})
}

func (l *layerWriter) header(c *Change) (*tar.Header, error) {
	st := &c.Stat
	h := &tar.Header{
		Name: c.Path, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	if latest := l.o.Latest; !latest.IsZero() && h.ModTime.After(latest) {
		h.ModTime = latest
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		target, err := grow(func(b []byte) (int, error) {
			n, err := unix.Readlinkat(c.fd, "", b)
			if err == nil && n == len(b) {
				err = unix.ERANGE
			}
			return n, err
		})
		if err != nil {
			return nil, &os.PathError{Op: "readlink", Path: "/" + c.Path, Err: err}
		}
		h.Linkname = string(target)
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return nil, fmt.Errorf("/%s has a type that no layer can have: mode %#o", c.Path, st.Mode)
	}
	return h, l.xattrs(c, h)
}

// ofHosts are attributes that say something of this host, or that overlayfs would take for its own.
var ofHosts = []string{"security.selinux", "security.ima", "security.evm", "security.apparmor", "user.overlay."}

func (l *layerWriter) xattrs(c *Change, h *tar.Header) error {
	list, err := listXattrs(c.fd)
	if err != nil {
		return &os.PathError{Op: "listxattr", Path: "/" + c.Path, Err: err}
	}
next:
	for _, name := range list {
		for _, host := range ofHosts {
			if strings.HasPrefix(name, host) {
				continue next
			}
		}
		value, err := getXattr(c.fd, name)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		keep := false
		if err == nil {
			keep, err = layer.CheckXattr(name, value)
		}
		if err != nil {
			return fmt.Errorf("attribute %s of /%s: %w", name, c.Path, err)
		}
		if keep {
			if h.PAXRecords == nil {
				h.PAXRecords = make(map[string]string)
			}
			h.PAXRecords["SCHILY.xattr."+name] = string(value)
		}
	}
	return nil
}

func (l *layerWriter) bytes(ctx context.Context, c *Change) error {
	f, err := c.reopen()
	if err != nil {
		return fmt.Errorf("read /%s: %w", c.Path, err)
	}
	defer f.Close()
	l.n.Bytes += c.Stat.Size
	for left := c.Stat.Size; left > 0; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := f.Read(l.buf[:min(left, int64(len(l.buf)))])
		if n > 0 {
			if _, err := l.tar.Write(l.buf[:n]); err != nil {
				return err
			}
			left -= int64(n)
		}
		if err == io.EOF && left > 0 {
			return fmt.Errorf("read /%s of the container: %w: it is shorter now", c.Path, ErrRunning)
		}
		if err != nil && err != io.EOF {
			return fmt.Errorf("read /%s: %w", c.Path, err)
		}
	}
	return nil
}
