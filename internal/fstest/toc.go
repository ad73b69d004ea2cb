package fstest

import (
	"crypto/sha256"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/toc"
)

// FromTOC returns the tree that a mount of the rootfs must show.
func FromTOC(t *toc.TOC) Tree {
	tree := Tree{}
	first := map[int]string{}
	t.Walk(func(path string, inode int) {
		path = relative(path)
		in := &t.Inodes[inode]
		n := Node{
			Mode: in.Mode, UID: in.UID, GID: in.GID, Major: in.Major, Minor: in.Minor,
			Size: in.Size, Mtime: in.Mtime, MtimeNsec: in.MtimeNsec, Target: in.Target,
		}
		if !in.IsDir() {
			n.Nlink = uint64(in.Nlink)
		}
		if in.Mode&unix.S_IFMT == unix.S_IFREG {
			n.Content = sha256.Sum256(nil)
			if in.Content >= 0 {
				n.Content = t.Contents[in.Content].ID
			}
		}
		for _, x := range t.Xattrs[in.Xattrs] {
			if n.Xattrs == nil {
				n.Xattrs = map[string]string{}
			}
			n.Xattrs[x.Name] = string(x.Value)
		}
		if n.Nlink > 1 {
			if other, ok := first[inode]; !ok || path < other {
				first[inode] = path
			}
		}
		tree[path] = n
	})
	t.Walk(func(path string, inode int) {
		path = relative(path)
		if link, ok := first[inode]; ok {
			n := tree[path]
			n.Link = link
			tree[path] = n
		}
	})
	return tree
}

func relative(path string) string {
	if path == "/" {
		return "."
	}
	return path[1:]
}
