// Package fstest takes a directory tree apart as a container would see it, by
// lstat, llistxattr, readlink and read, and compares two of them. Tests use it
// to hold an unpacked layer, a flattened TOC and a mounted rootfs against each
// other.
package fstest

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Tree is every file below a directory, by its path relative to it; the
// directory itself is ".". Names are raw bytes.
type Tree map[string]Node

// Node is what one name shows.
type Node struct {
	Mode         uint32 // st_mode: type and permissions
	UID, GID     uint32
	Nlink        uint64 // 0 for directories: file systems count them differently
	Major, Minor uint32 // of character and block devices
	Size         int64  // of regular files, and the length of a symlink's target
	Mtime        int64  // seconds
	MtimeNsec    uint32
	Xattrs       map[string]string // nil when there are none
	Target       string            // of a symlink
	Content      [sha256.Size]byte // SHA-256 of a regular file's bytes
	// Link is the first path, in byte order, of the inode that this name
	// shares with others; empty when it is this file's only name.
	Link string
}

// Options says what Snapshot looks at. The zero value is everything.
type Options struct {
	// NoContent leaves files unread; Node.Content is then zero.
	NoContent bool
	// IgnoreXattr drops the attributes for which it returns true.
	IgnoreXattr func(name string) bool
}

// Snapshot reads the tree below dir. It follows no symlink and crosses no
// mount point: a directory on another device is listed, not entered.
func Snapshot(dir string) (Tree, error) { return Options{}.Snapshot(dir) }

// Snapshot reads the tree below dir as o says.
func (o Options) Snapshot(dir string) (Tree, error) {
	type inode struct{ dev, ino uint64 }
	tree := Tree{}
	groups := map[inode][]string{}
	var rootDev uint64
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		if rel == "." {
			rootDev = st.Dev
		}
		n, err := o.node(path, &st)
		if err != nil {
			return err
		}
		tree[rel] = n
		if n.Nlink > 1 {
			id := inode{st.Dev, st.Ino}
			groups[id] = append(groups[id], rel)
		}
		if d.IsDir() && st.Dev != rootDev {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", dir, err)
	}
	for _, paths := range groups {
		if len(paths) < 2 {
			continue
		}
		first := slices.Min(paths)
		for _, p := range paths {
			n := tree[p]
			n.Link = first
			tree[p] = n
		}
	}
	return tree, nil
}

func (o Options) node(path string, st *unix.Stat_t) (Node, error) {
	n := Node{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid,
		Mtime: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec),
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		n.Nlink = st.Nlink
	}
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		n.Size = st.Size
		if !o.NoContent {
			if n.Content, err = sum(path); err != nil {
				return n, err
			}
		}
	case unix.S_IFLNK:
		if n.Target, err = os.Readlink(path); err != nil {
			return n, err
		}
		n.Size = int64(len(n.Target))
	case unix.S_IFCHR, unix.S_IFBLK:
		n.Major, n.Minor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	}
	n.Xattrs, err = o.xattrs(path)
	return n, err
}

func sum(path string) (id [sha256.Size]byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return id, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return id, err
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

func (o Options) xattrs(path string) (map[string]string, error) {
	list, err := readAll(func(b []byte) (int, error) { return unix.Llistxattr(path, b) })
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "llistxattr", Path: path, Err: err}
	}
	var m map[string]string
	for name := range bytes.SplitSeq(bytes.TrimSuffix(list, []byte{0}), []byte{0}) {
		if len(name) == 0 || o.IgnoreXattr != nil && o.IgnoreXattr(string(name)) {
			continue
		}
		v, err := readAll(func(b []byte) (int, error) { return unix.Lgetxattr(path, string(name), b) })
		if err != nil {
			return nil, &os.PathError{Op: fmt.Sprintf("lgetxattr %q of", name), Path: path, Err: err}
		}
		if m == nil {
			m = map[string]string{}
		}
		m[string(name)] = string(v)
	}
	return m, nil
}

// readAll calls a system call that fills a buffer until the buffer is large
// enough.
func readAll(call func([]byte) (int, error)) ([]byte, error) {
	for size := 1024; ; size *= 4 {
		buf := make([]byte, size)
		n, err := call(buf)
		if errors.Is(err, unix.ERANGE) && size < 1<<20 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

// Diff lists the differences between two trees, one a line and in path order;
// at most 50 of them. It is empty when they are equal. Ignore, if given, edits
// each pair of nodes before they are compared.
func Diff(a, b Tree, ignore ...func(path string, a, b *Node)) string {
	paths := slices.Sorted(maps.Keys(a))
	for p := range b {
		if _, ok := a[p]; !ok {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	var lines []string
	for _, p := range paths {
		na, inA := a[p]
		nb, inB := b[p]
		switch {
		case !inB:
			lines = append(lines, fmt.Sprintf("%q: only in the first: %s", p, na))
		case !inA:
			lines = append(lines, fmt.Sprintf("%q: only in the second: %s", p, nb))
		default:
			for _, f := range ignore {
				f(p, &na, &nb)
			}
			if d := diffNode(na, nb); d != "" {
				lines = append(lines, fmt.Sprintf("%q: %s", p, d))
			}
		}
	}
	if n := len(lines); n > 50 {
		lines = append(lines[:50], fmt.Sprintf("and %d more", n-50))
	}
	return strings.Join(lines, "\n")
}

func diffNode(a, b Node) string {
	var d []string
	add := func(what string, x, y any) {
		if x != y {
			d = append(d, fmt.Sprintf("%s %v != %v", what, x, y))
		}
	}
	add("mode", fmt.Sprintf("%#o", a.Mode), fmt.Sprintf("%#o", b.Mode))
	add("uid", a.UID, b.UID)
	add("gid", a.GID, b.GID)
	add("nlink", a.Nlink, b.Nlink)
	add("device", [2]uint32{a.Major, a.Minor}, [2]uint32{b.Major, b.Minor})
	add("size", a.Size, b.Size)
	add("mtime", fmt.Sprintf("%d.%09d", a.Mtime, a.MtimeNsec), fmt.Sprintf("%d.%09d", b.Mtime, b.MtimeNsec))
	add("target", fmt.Sprintf("%q", a.Target), fmt.Sprintf("%q", b.Target))
	add("content", fmt.Sprintf("%x", a.Content), fmt.Sprintf("%x", b.Content))
	add("hard link of", fmt.Sprintf("%q", a.Link), fmt.Sprintf("%q", b.Link))
	for _, k := range slices.Sorted(maps.Keys(a.Xattrs)) {
		if v, ok := b.Xattrs[k]; !ok {
			d = append(d, fmt.Sprintf("xattr %q only in the first", k))
		} else if v != a.Xattrs[k] {
			d = append(d, fmt.Sprintf("xattr %q %q != %q", k, a.Xattrs[k], v))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(b.Xattrs)) {
		if _, ok := a.Xattrs[k]; !ok {
			d = append(d, fmt.Sprintf("xattr %q only in the second", k))
		}
	}
	return strings.Join(d, "; ")
}

// String is one line about n.
func (n Node) String() string {
	s := fmt.Sprintf("mode %#o owner %d:%d size %d", n.Mode, n.UID, n.GID, n.Size)
	if n.Target != "" {
		s += fmt.Sprintf(" -> %q", n.Target)
	}
	if n.Link != "" {
		s += fmt.Sprintf(" = %q", n.Link)
	}
	return s
}
