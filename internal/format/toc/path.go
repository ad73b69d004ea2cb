package toc

import (
	"fmt"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// IsDir reports whether n is a directory.
func (n *Inode) IsDir() bool { return n.Mode&unix.S_IFMT == unix.S_IFDIR }

// IsRegular reports whether n is a regular file.
func (n *Inode) IsRegular() bool { return n.Mode&unix.S_IFMT == unix.S_IFREG }

// IsSymlink reports whether n is a symbolic link.
func (n *Inode) IsSymlink() bool { return n.Mode&unix.S_IFMT == unix.S_IFLNK }

// Children returns the names in a directory, sorted; none for other inodes.
func (t *TOC) Children(dir int) []Dirent {
	n := &t.Inodes[dir]
	return t.Dirents[n.FirstChild : n.FirstChild+n.Children]
}

// SegmentsOf returns the segments of an inode's content; none when it has no
// content.
func (t *TOC) SegmentsOf(inode int) []Segment {
	if t.Inodes[inode].Content < 0 {
		return nil
	}
	c := &t.Contents[t.Inodes[inode].Content]
	return t.Segments[c.First : c.First+c.Segments]
}

// Lookup finds a path from the root; leading and trailing slashes are optional,
// "/" and "" are the root. The last element is not followed if it is a symlink, and the
// others must be directories, or symlinks, which are followed as Resolve does.
func (t *TOC) Lookup(path string) (inode int, ok bool) { return t.walk(path, false) }

// Resolve finds a path as Lookup does and follows the last symlink, too.
// Absolute targets start at the rootfs's root, ".." stops there, and after 40
// links it gives up, like Linux.
func (t *TOC) Resolve(path string) (inode int, ok bool) { return t.walk(path, true) }

const maxLinks = 40

func (t *TOC) walk(path string, last bool) (int, bool) {
	var above []int // the directories on the way to here
	here, links := 0, 0
	for rest := path; rest != ""; {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		if !t.Inodes[here].IsDir() {
			return 0, false
		}
		switch name {
		case "", ".":
			continue
		case "..":
			if n := len(above); n > 0 {
				here, above = above[n-1], above[:n-1]
			}
			continue
		}
		children := t.Children(here)
		i := sort.Search(len(children), func(i int) bool { return children[i].Name >= name })
		if i == len(children) || children[i].Name != name {
			return 0, false
		}
		child := int(children[i].Inode)
		if n := &t.Inodes[child]; n.IsSymlink() && (last || strings.Trim(rest, "/") != "") {
			if links++; links > maxLinks || len(rest)+len(n.Target) > 1<<16 {
				return 0, false
			}
			if strings.HasPrefix(n.Target, "/") {
				here, above = 0, above[:0]
			}
			rest = n.Target + "/" + rest
			continue
		}
		above = append(above, here)
		here = child
	}
	return here, true
}

// Walk calls fn for every name, depth first and in order, with its absolute
// path; the root's is "/". A file with several names is met several times.
func (t *TOC) Walk(fn func(path string, inode int)) {
	fn("/", 0)
	var walk func(dir int, path []byte)
	walk = func(dir int, path []byte) {
		path = append(path, '/')
		for _, d := range t.Children(dir) {
			p := append(path, d.Name...)
			fn(string(p), int(d.Inode))
			if t.Inodes[d.Inode].IsDir() {
				walk(int(d.Inode), p)
			}
		}
	}
	walk(0, nil)
}

// String names the TOC in messages.
func (t *TOC) String() string {
	return fmt.Sprintf("TOC of %s (%d inodes)", t.ChainID, len(t.Inodes))
}
