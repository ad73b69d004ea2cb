package erofs

import (
	"crypto/sha256"
	"io"
	"io/fs"
	"os"
	"path"
	"testing"
	"unicode/utf8"

	goerofs "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/fstest"
)

// Another reader of the format, which shares no code with the kernel.
func TestGoErofs(t *testing.T) {
	root := awkward()
	// Names of io/fs are UTF-8.
	for _, d := range []*node{root, root.children["sub"]} {
		for name := range d.children {
			if !utf8.ValidString(name) {
				delete(d.children, name)
			}
		}
	}
	b := build(root)
	name, arenas := layOut(t, t.TempDir(), b, 3)
	image, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	var devices []io.ReaderAt
	for _, a := range arenas {
		f, err := os.Open(a)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		devices = append(devices, f)
	}
	fsys, err := goerofs.Open(image, goerofs.WithExtraDevices(devices...))
	if err != nil {
		t.Fatal(err)
	}
	got := fstest.Tree{}
	inodes := map[int64][]string{}
	err = fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*goerofs.Stat)
		n := fstest.Node{
			Mode: unixMode(st.Mode), UID: st.UID, GID: st.GID,
			Mtime: int64(st.Mtime), MtimeNsec: st.MtimeNs, Xattrs: st.Xattrs,
		}
		if len(n.Xattrs) == 0 {
			n.Xattrs = nil
		}
		if !d.IsDir() {
			n.Nlink = uint64(st.Nlink)
			inodes[st.Ino] = append(inodes[st.Ino], p)
		}
		switch n.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			n.Size = st.Size
			if n.Target, err = fsys.(fs.ReadLinkFS).ReadLink(p); err != nil {
				return err
			}
		case unix.S_IFCHR, unix.S_IFBLK:
			n.Major, n.Minor = st.Rdev>>8&0xfff, st.Rdev&0xff|st.Rdev>>12&^0xff
		case unix.S_IFREG:
			n.Size = st.Size
			data, err := fs.ReadFile(fsys, p)
			if err != nil {
				return err
			}
			n.Content = sha256.Sum256(data)
		}
		got[path.Clean(p)] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, names := range inodes {
		for _, p := range names[1:] {
			n := got[p]
			n.Link = names[0]
			got[p] = n
		}
		if len(names) > 1 {
			n := got[names[0]]
			n.Link = names[0]
			got[names[0]] = n
		}
	}
	if d := fstest.Diff(expect(b), got, func(_ string, want, got *fstest.Node) {
		// WalkDir's order is by path element, Link's by path.
		if want.Link != "" && got.Link != "" {
			got.Link = want.Link
		}
	}); d != "" {
		t.Errorf("the TOC and what go-erofs reads differ:\n%s", d)
	}
}

// unixMode turns a mode of io/fs into one of stat(2).
func unixMode(m fs.FileMode) uint32 {
	mode := uint32(m.Perm())
	for bit, unixBit := range map[fs.FileMode]uint32{
		fs.ModeSetuid: unix.S_ISUID, fs.ModeSetgid: unix.S_ISGID, fs.ModeSticky: unix.S_ISVTX,
	} {
		if m&bit != 0 {
			mode |= unixBit
		}
	}
	switch m.Type() {
	case 0:
		return mode | unix.S_IFREG
	case fs.ModeDir:
		return mode | unix.S_IFDIR
	case fs.ModeSymlink:
		return mode | unix.S_IFLNK
	case fs.ModeDevice:
		return mode | unix.S_IFBLK
	case fs.ModeDevice | fs.ModeCharDevice:
		return mode | unix.S_IFCHR
	case fs.ModeNamedPipe:
		return mode | unix.S_IFIFO
	case fs.ModeSocket:
		return mode | unix.S_IFSOCK
	}
	return mode
}
