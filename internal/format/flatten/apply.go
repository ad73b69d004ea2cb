package flatten

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/toc"
)

// unchanged is the ID that chown(2) takes for "leave as it is".
const unchanged = 1<<32 - 1

// entry applies one entry.
func (c *change) entry(e *layer.Entry) error {
	dir, base := "", e.Name
	if i := strings.LastIndexByte(e.Name, '/'); i >= 0 {
		dir, base = e.Name[:i], e.Name[i+1:]
	}
	resolved, err := c.resolve(dir)
	if err != nil {
		return err
	}
	parent, err := c.parent(resolved)
	if err != nil {
		return err
	}
	if base == layer.OpaqueName {
		c.hide(resolved, parent)
		return nil
	}
	if gone, ok := strings.CutPrefix(base, layer.WhiteoutPrefix); ok {
		if gone == "" || gone == "." || gone == ".." {
			return errors.New("whiteout without a name to remove")
		}
		delete(parent.Children, gone)
		return nil
	}
	where := e.Name
	if resolved != dir {
		where = join(resolved, base)
	}
	f := parent.Children[base]
	if f != nil && !(isDir(f) && e.Type == layer.Directory) {
		delete(parent.Children, base)
		f = nil
	}
	switch {
	case e.Type == layer.Global:
		c.made = append(c.made, where)
		return nil
	case e.Type == layer.HardLink:
		if f, err = c.linkTarget(e.Link); err != nil {
			return err
		}
	case f == nil:
		if err := c.newFile(); err != nil {
			return err
		}
		f = newNode(e)
		inheritGroup(parent, f)
	}
	parent.Children[base] = f
	if err := setMetadata(f, e); err != nil {
		return err
	}
	if e.Type == layer.Directory {
		c.dirs = append(c.dirs, dirTime{e.Name, f.Mtime, f.MtimeNsec})
	}
	c.made = append(c.made, where)
	return nil
}

// linkTarget finds what a hard link names: its parents are resolved, itself it
// may be a symlink.
func (c *change) linkTarget(target string) (*toc.File, error) {
	dir, base := "", target
	if i := strings.LastIndexByte(target, '/'); i >= 0 {
		dir, base = target[:i], target[i+1:]
	}
	resolved, err := c.resolve(dir)
	if err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", target, err)
	}
	f, err := c.lookup(join(resolved, base))
	if err != nil {
		return nil, fmt.Errorf("hard link to %q: %w", target, err)
	}
	if f == nil {
		return nil, fmt.Errorf("hard link to %q, which the rootfs does not have", target)
	}
	if isDir(f) {
		return nil, fmt.Errorf("hard link to %q, which is a directory", target)
	}
	return f, nil
}

// hide does what an opaque marker in the directory at path says.
func (c *change) hide(path string, dir *toc.File) {
	if c.opaque[path] {
		return
	}
	c.opaque[path] = true
	if c.set == nil {
		c.set = make(map[string]bool, len(c.made))
	}
	for _, p := range c.made {
		c.set[p] = true
	}
	c.made = c.made[:0]
	c.hideBelow(path, dir)
}

func (c *change) hideBelow(path string, dir *toc.File) {
	for name, f := range dir.Children {
		below := join(path, name)
		if !c.set[below] {
			delete(dir.Children, name)
		} else if isDir(f) {
			c.hideBelow(below, f)
		}
	}
}

// newNode makes the inode of an entry, without its metadata.
func newNode(e *layer.Entry) *toc.File {
	switch e.Type {
	case layer.Directory:
		return newDirectory(0)
	case layer.Symlink:
		return &toc.File{Mode: unix.S_IFLNK | 0o777, Target: e.Link}
	case layer.CharDevice:
		return &toc.File{Mode: unix.S_IFCHR, Major: e.Major, Minor: e.Minor}
	case layer.BlockDevice:
		return &toc.File{Mode: unix.S_IFBLK, Major: e.Major, Minor: e.Minor}
	case layer.Fifo:
		return &toc.File{Mode: unix.S_IFIFO}
	}
	f := &toc.File{Mode: unix.S_IFREG}
	if e.Size > 0 {
		f.Content = &toc.Bytes{ID: e.Content, Size: e.Size, Segments: make([]toc.Segment, len(e.Segments))}
		at := int64(0)
		for i, s := range e.Segments {
			f.Content.Segments[i] = toc.Segment{ID: s.ID, Offset: at, Length: s.Length}
			at += int64(s.Length)
		}
	}
	return f
}

// inheritGroup gives a new file the group of a setgid directory, which shows
// when nothing sets another one.
func inheritGroup(parent, f *toc.File) {
	if parent.Mode&unix.S_ISGID != 0 {
		f.GID = parent.GID
	}
}

// setMetadata does to an inode what chown, setxattr, chmod and utimensat do, in
// this order, which is containerd's.
func setMetadata(f *toc.File, e *layer.Entry) error {
	if e.UID != unchanged {
		f.UID = e.UID
	}
	if e.GID != unchanged {
		f.GID = e.GID
	}
	if !isDir(f) {
		f.Xattrs = withoutXattr(f.Xattrs, "security.capability")
	}
	if err := setXattrs(f, e.Xattrs); err != nil {
		return err
	}
	if !isSymlink(f) {
		f.Mode = f.Mode&unix.S_IFMT | e.Mode
		chmodACL(f)
	}
	f.Mtime, f.MtimeNsec = boundTime(e.Mtime, e.MtimeNsec)
	return nil
}

func setXattrs(f *toc.File, xattrs []toc.Xattr) error {
	special := !isDir(f) && f.Mode&unix.S_IFMT != unix.S_IFREG
	for _, x := range xattrs {
		switch {
		case strings.HasPrefix(x.Name, "user.") && special:
			continue
		case x.Name == layer.ACLAccess || x.Name == layer.ACLDefault:
			if isSymlink(f) {
				continue
			}
			if x.Name == layer.ACLDefault && !isDir(f) {
				if len(x.Value) > 0 {
					return fmt.Errorf("extended attribute %q on what is no directory", x.Name)
				}
				continue
			}
			if len(x.Value) == 0 {
				f.Xattrs = withoutXattr(f.Xattrs, x.Name)
				continue
			}
		}
		f.Xattrs = withXattr(f.Xattrs, x)
	}
	total := 0
	for _, x := range f.Xattrs {
		total += len(x.Name) + len(x.Value)
	}
	if total > maxXattrs {
		return fmt.Errorf("%d bytes of extended attributes with those it had, at most %d are possible", total, maxXattrs)
	}
	return nil
}

// maxXattrs is well below what an EROFS inode holds (256 KiB with all headers).
const maxXattrs = 128 << 10

func chmodACL(f *toc.File) {
	for _, x := range f.Xattrs {
		if x.Name != layer.ACLAccess {
			continue
		}
		if value := layer.ChmodACL(x.Value, f.Mode); value != nil {
			f.Xattrs = withXattr(f.Xattrs, toc.Xattr{Name: x.Name, Value: value})
		} else {
			f.Xattrs = withoutXattr(f.Xattrs, x.Name)
		}
		return
	}
}
