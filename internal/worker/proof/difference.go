package proof

import (
	"fmt"
	"path"
	"slices"

	"hydrofoil.dev/foil/internal/format/toc"
)

// difference returns the first path, in the order of a walk, at which two TOCs differ, and how; "": at none.
func difference(here, layers *toc.TOC) (at, what string) {
	d := differ{here, layers, make(map[uint32]uint32)}
	return d.inode("/", 0, 0)
}

type differ struct {
	a, b  *toc.TOC
	links map[uint32]uint32 // inodes of a that were met, and those of b in their places
}

func (d *differ) inode(at string, i, k uint32) (string, string) {
	if other, ok := d.links[i]; ok {
		if other != k {
			return at, "it is a hard link of another file"
		}
		return "", ""
	}
	d.links[i] = k
	x, y := &d.a.Inodes[i], &d.b.Inodes[k]
	for _, v := range []struct {
		what string
		same bool
		a, b any
	}{
		{"mode", x.Mode == y.Mode, fmt.Sprintf("%#o", x.Mode), fmt.Sprintf("%#o", y.Mode)},
		{"owner", x.UID == y.UID, x.UID, y.UID},
		{"group", x.GID == y.GID, x.GID, y.GID},
		{"device", x.Major == y.Major && x.Minor == y.Minor, fmt.Sprint(x.Major, ":", x.Minor), fmt.Sprint(y.Major, ":", y.Minor)},
		{"time", x.Mtime == y.Mtime && x.MtimeNsec == y.MtimeNsec, x.Mtime, y.Mtime},
		{"target", x.Target == y.Target, x.Target, y.Target},
		{"size", x.Size == y.Size, x.Size, y.Size},
		{"number of names", x.Nlink == y.Nlink, x.Nlink, y.Nlink},
	} {
		if !v.same {
			return at, fmt.Sprintf("its %s is %v here and %v there", v.what, v.a, v.b)
		}
	}
	sameXattr := func(a, b toc.Xattr) bool { return a.Name == b.Name && slices.Equal(a.Value, b.Value) }
	if !slices.EqualFunc(d.a.Xattrs[x.Xattrs], d.b.Xattrs[y.Xattrs], sameXattr) {
		return at, "its extended attributes"
	}
	if (x.Content < 0) != (y.Content < 0) || x.Content >= 0 && !d.sameContent(&d.a.Contents[x.Content], &d.b.Contents[y.Content]) {
		return at, "its content"
	}
	return d.children(at, x, y)
}

func (d *differ) sameContent(x, y *toc.Content) bool {
	return x.ID == y.ID && slices.Equal(d.a.Segments[x.First:x.First+x.Segments], d.b.Segments[y.First:y.First+y.Segments])
}

func (d *differ) children(at string, x, y *toc.Inode) (string, string) {
	a := d.a.Dirents[x.FirstChild:][:x.Children]
	b := d.b.Dirents[y.FirstChild:][:y.Children]
	for len(a) > 0 || len(b) > 0 {
		switch {
		case len(b) == 0 || len(a) > 0 && a[0].Name < b[0].Name:
			return path.Join(at, a[0].Name), "the layers do not have it"
		case len(a) == 0 || b[0].Name < a[0].Name:
			return path.Join(at, b[0].Name), "only the layers have it"
		}
		if at, what := d.inode(path.Join(at, a[0].Name), a[0].Inode, b[0].Inode); what != "" {
			return at, what
		}
		a, b = a[1:], b[1:]
	}
	return "", ""
}
