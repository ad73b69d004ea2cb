package toc

import (
	"bytes"
	"slices"
)

// Compare calls fn for every path at which two trees differ, in the order of Walk: x is the inode that a has there, y the
// one that b has, and -1 says that there is none. Of what only one has fn is called for the name itself, and, if b has it, for all that
// is below. Inodes differ by type, mode, owner, time, attributes, target, device and bytes; not by their other names, or by the names in
// a directory.
func Compare(a, b *TOC, fn func(path string, x, y int)) {
	c := comparison{a, b, fn}
	c.dirs("", 0, 0)
}

type comparison struct {
	a, b *TOC
	fn   func(path string, x, y int)
}

// dirs compares two directories of one path.
func (c *comparison) dirs(path string, x, y int) {
	if !c.same(x, y) {
		name := path
		if name == "" {
			name = "/"
		}
		c.fn(name, x, y)
	}
	before, after := c.a.Children(x), c.b.Children(y)
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].Name < after[0].Name:
			c.fn(path+"/"+before[0].Name, int(before[0].Inode), -1)
			before = before[1:]
		case len(before) == 0 || after[0].Name < before[0].Name:
			c.added(path+"/"+after[0].Name, int(after[0].Inode))
			after = after[1:]
		default:
			c.names(path+"/"+after[0].Name, int(before[0].Inode), int(after[0].Inode))
			before, after = before[1:], after[1:]
		}
	}
}

func (c *comparison) names(path string, x, y int) {
	was, is := c.a.Inodes[x].IsDir(), c.b.Inodes[y].IsDir()
	switch {
	case was && is:
		c.dirs(path, x, y)
	case is:
		c.fn(path, x, y)
		c.below(path, y)
	case !c.same(x, y):
		c.fn(path, x, y)
	}
}

func (c *comparison) added(path string, y int) {
	c.fn(path, -1, y)
	if c.b.Inodes[y].IsDir() {
		c.below(path, y)
	}
}

func (c *comparison) below(path string, y int) {
	for _, d := range c.b.Children(y) {
		c.added(path+"/"+d.Name, int(d.Inode))
	}
}

// same compares two inodes.
func (c *comparison) same(x, y int) bool {
	p, q := &c.a.Inodes[x], &c.b.Inodes[y]
	if p.Mode != q.Mode || p.UID != q.UID || p.GID != q.GID || p.Mtime != q.Mtime || p.MtimeNsec != q.MtimeNsec ||
		p.Major != q.Major || p.Minor != q.Minor || p.Size != q.Size || p.Target != q.Target {
		return false
	}
	if p.Content >= 0 && c.a.Contents[p.Content].ID != c.b.Contents[q.Content].ID {
		return false
	}
	return slices.EqualFunc(c.a.Xattrs[p.Xattrs], c.b.Xattrs[q.Xattrs], func(s, t Xattr) bool {
		return s.Name == t.Name && bytes.Equal(s.Value, t.Value)
	})
}
