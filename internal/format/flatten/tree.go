package flatten

import (
	"io"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/toc"
)

// treeEntries reads a TOC as one layer.
type treeEntries struct {
	t     *toc.TOC
	paths []string       // in the order of toc.TOC.Walk, without the root
	inode []int          // of each
	names map[int]string // the first name of each inode that has several
	next  int
}

// Tree returns the entries of one layer that alone makes the tree of a TOC: what its own layers make, all of them. Flattened
// together with further layers it gives the TOC that its own layers do with these, but for the chain ID.
func Tree(t *toc.TOC) Entries {
	e := &treeEntries{t: t, names: make(map[int]string)}
	t.Walk(func(path string, inode int) {
		if path != "/" {
			e.paths, e.inode = append(e.paths, strings.TrimPrefix(path, "/")), append(e.inode, inode)
		}
	})
	return e
}

// Next returns the next entry, or io.EOF.
func (e *treeEntries) Next() (*layer.Entry, error) {
	if e.next == len(e.paths) {
		return nil, io.EOF
	}
	path, at := e.paths[e.next], e.inode[e.next]
	e.next++
	n := &e.t.Inodes[at]
	entry := &layer.Entry{
		Name: path, Mode: n.Mode & 0o7777, UID: n.UID, GID: n.GID, Mtime: n.Mtime, MtimeNsec: n.MtimeNsec,
		Xattrs: e.t.Xattrs[n.Xattrs],
	}
	if n.Nlink > 1 && !n.IsDir() {
		first, ok := e.names[at]
		if ok {
			entry.Type, entry.Link = layer.HardLink, first
			return entry, nil
		}
		e.names[at] = path
	}
	switch n.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		entry.Type, entry.Size = layer.Regular, n.Size
		if n.Content >= 0 {
			entry.Content = e.t.Contents[n.Content].ID
			for _, s := range e.t.SegmentsOf(at) {
				entry.Segments = append(entry.Segments, layer.Segment{ID: s.ID, Length: s.Length})
			}
		}
	case unix.S_IFDIR:
		entry.Type = layer.Directory
	case unix.S_IFLNK:
		entry.Type, entry.Link = layer.Symlink, n.Target
	case unix.S_IFCHR:
		entry.Type, entry.Major, entry.Minor = layer.CharDevice, n.Major, n.Minor
	case unix.S_IFBLK:
		entry.Type, entry.Major, entry.Minor = layer.BlockDevice, n.Major, n.Minor
	default:
		entry.Type = layer.Fifo
	}
	return entry, nil
}
