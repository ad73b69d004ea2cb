package erofs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/fstest"
	"hydrofoil.dev/foil/internal/kernel"
)

// layOut puts the data of b into devices, several contents on each, writes the
// image, and returns the paths.
func layOut(tb testing.TB, dir string, b built, devices int) (image string, arenas []string) {
	tb.Helper()
	files := make([]*os.File, devices)
	opts := Options{Devices: make([]Device, devices)}
	for i := range files {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("arena-%d", i)))
		if err != nil {
			tb.Fatal(err)
		}
		defer f.Close()
		files[i], arenas = f, append(arenas, f.Name())
		opts.Devices[i].Tag = filepath.Base(f.Name())
	}
	places := make([]Extent, len(b.toc.Contents))
	for c := range b.toc.Contents {
		data, ok := b.data[c]
		if !ok {
			places[c].Device = Hole
			continue
		}
		d := c % devices
		places[c] = Extent{Device: d, Block: opts.Devices[d].Blocks}
		if _, err := files[d].WriteAt(data, int64(places[c].Block)*BlockSize); err != nil {
			tb.Fatal(err)
		}
		opts.Devices[d].Blocks += uint32(roundUp(len(data), BlockSize) / BlockSize)
	}
	for d, f := range files {
		if err := f.Truncate(int64(opts.Devices[d].Blocks) * BlockSize); err != nil {
			tb.Fatal(err)
		}
	}
	opts.Place = func(content int) Extent { return places[content] }
	return writeImage(tb, dir, b.toc, opts), arenas
}

func writeImage(tb testing.TB, dir string, t *toc.TOC, o Options) string {
	tb.Helper()
	f, err := os.Create(filepath.Join(dir, "image"))
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	if err := Write(f, t, o); err != nil {
		tb.Fatal(err)
	}
	return f.Name()
}

// fataler is what testing.TB and rapid.T share.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// mounted mounts the image for the time of a call of use.
func mounted(t fataler, image string, arenas []string, use func(target string)) {
	t.Helper()
	target := image + ".mnt"
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatalf("%v", err)
	}
	if err := kernel.MountErofs(kernel.Erofs{Image: image, Devices: arenas, Target: target}); err != nil {
		t.Fatalf("%v", err)
	}
	defer func() {
		if err := kernel.Unmount(target, false); err != nil {
			t.Fatalf("%v", err)
		}
	}()
	use(target)
}

func needMount(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("mounting needs root")
	}
	dir := tb.TempDir()
	image, arenas := layOut(tb, dir, build(newDir(0o755)), 1)
	target := filepath.Join(dir, "mnt")
	if err := os.Mkdir(target, 0o755); err != nil {
		tb.Fatal(err)
	}
	err := kernel.MountErofs(kernel.Erofs{Image: image, Devices: arenas, Target: target})
	if errors.Is(err, unix.ENOTBLK) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EPERM) {
		tb.Skipf("this kernel does not mount EROFS files: %v", err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	if err := kernel.Unmount(target, false); err != nil {
		tb.Fatal(err)
	}
}

// expect is the tree that a mount of b must show.
func expect(b built) fstest.Tree { return expected(b, true) }

// expectNoContent is expect for a TOC without the bytes of its contents.
func expectNoContent(b built) fstest.Tree { return expected(b, false) }

func expected(b built, content bool) fstest.Tree {
	tree := fstest.Tree{}
	names := map[uint32][]string{}
	var walk func(path string, i uint32)
	walk = func(path string, i uint32) {
		in := &b.toc.Inodes[i]
		n := fstest.Node{Mode: in.Mode, UID: in.UID, GID: in.GID, Mtime: in.Mtime, MtimeNsec: in.MtimeNsec, Target: in.Target, Size: in.Size}
		for _, x := range b.toc.Xattrs[in.Xattrs] {
			if _, _, ok := namespace(x.Name); !ok {
				continue
			}
			if n.Xattrs == nil {
				n.Xattrs = map[string]string{}
			}
			n.Xattrs[x.Name] = string(x.Value)
		}
		switch fileType(in.Mode) {
		case typeDir:
			n.Size = 0
		case typeChar, typeBlock:
			n.Major, n.Minor = in.Major, in.Minor
		case typeRegular:
			if !content {
				break
			}
			data := make([]byte, in.Size)
			if in.Content >= 0 {
				copy(data, b.data[int(in.Content)])
			}
			n.Content = sha256.Sum256(data)
		}
		if fileType(in.Mode) != typeDir {
			n.Nlink = uint64(in.Nlink)
			names[i] = append(names[i], path)
		}
		tree[path] = n
		for _, e := range b.toc.Dirents[in.FirstChild : in.FirstChild+in.Children] {
			walk(filepath.Join(path, e.Name), e.Inode)
		}
	}
	walk(".", 0)
	for _, paths := range names {
		if len(paths) < 2 {
			continue
		}
		first := paths[0]
		for _, p := range paths {
			first = min(first, p)
		}
		for _, p := range paths {
			n := tree[p]
			n.Link = first
			tree[p] = n
		}
	}
	return tree
}

func checkMounted(t fataler, b built, image string, arenas []string) {
	t.Helper()
	mounted(t, image, arenas, func(target string) {
		got, err := fstest.Snapshot(target)
		if err != nil {
			t.Fatalf("%v", err)
		}
		if d := fstest.Diff(expect(b), got); d != "" {
			t.Fatalf("the TOC and its mount differ:\n%s", d)
		}
		checkNlinks(t, b, target)
	})
}

// checkNlinks compares the links of directories, which Snapshot leaves out.
func checkNlinks(t fataler, b built, target string) {
	t.Helper()
	var walk func(path string, i uint32)
	walk = func(path string, i uint32) {
		in := &b.toc.Inodes[i]
		if fileType(in.Mode) != typeDir {
			return
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if st.Nlink != uint64(in.Nlink) {
			t.Fatalf("%s: %d links, want %d", path, st.Nlink, in.Nlink)
		}
		for _, e := range b.toc.Dirents[in.FirstChild : in.FirstChild+in.Children] {
			walk(filepath.Join(path, e.Name), e.Inode)
		}
	}
	walk(target, 0)
}

// capability is a value of security.capability that the kernel accepts.
var capability = []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")

// awkward has one of everything that is near an edge of the format.
func awkward() *node {
	root := newDir(0o755)
	root.inode.Mtime = -1
	root.inode.MtimeNsec = 999_999_999
	add := func(name string, n *node) *node { root.children[name] = n; return n }

	add("empty", newFile(0o4755, nil))
	add("one byte", newFile(0o2640, []byte{7}))
	add("a block", newFile(0o644, bytes.Repeat([]byte("b"), BlockSize)))
	add("a block and a byte", newFile(0o644, bytes.Repeat([]byte("c"), BlockSize+1)))
	add("large", newFile(0o644, bytes.Repeat([]byte("0123456789abcdef!"), 100_000)))
	add("same as large", newFile(0o600, bytes.Repeat([]byte("0123456789abcdef!"), 100_000)))
	hole := add("hole", newFile(0o644, make([]byte, 1<<20+5)))
	hole.hole = true

	linked := add("link 1", newFile(0o644, []byte("linked")))
	sub := add("sub", newDir(0o1777))
	sub.children["link 2"] = linked
	sub.children["..a"] = newFile(0o644, nil)
	sub.children[".!"] = newFile(0o644, nil) // sorts between "." and ".."
	sub.children["!"] = newFile(0o644, nil)  // sorts before "."
	sub.children["\xff\xfe"] = newFile(0o644, nil)
	sub.children[strings.Repeat("n", 255)] = newFile(0o644, nil)
	sub.children[strings.Repeat("\xe4", 255)] = newDir(0o700)
	slink := newSymlink("sub")
	add("symlink 1", slink)
	sub.children["symlink 2"] = slink

	for _, n := range []int{1, 31, 32, 33, 4000, 4031, 4032, 4033, 4094, 4095} {
		add(fmt.Sprintf("symlink of %d", n), newSymlink(strings.Repeat("s", n)))
	}

	special := func(name string, mode, major, minor uint32) {
		add(name, &node{inode: toc.Inode{Mode: mode, Major: major, Minor: minor}})
	}
	special("null", 0o020666, 1, 3)
	special("disk", 0o060660, 4095, 1<<20-1)
	special("minor 256", 0o020600, 259, 256)
	special("fifo", 0o010644, 0, 0)
	special("socket", 0o140755, 0, 0)

	owner := add("large owner", newFile(0o644, []byte("o")))
	owner.inode.UID, owner.inode.GID = math.MaxUint32-1, 1<<31
	owner.inode.Mtime = 1 << 40
	old := add("old", newFile(0o644, []byte("o")))
	old.inode.Mtime = -1 << 33

	// Xattr areas of every length around the alignment of the chunk index.
	for n := range 12 {
		f := add(fmt.Sprintf("xattr of %d", n), newFile(0o644, []byte("behind an xattr")))
		f.xattrs = []toc.Xattr{{Name: "user.x", Value: bytes.Repeat([]byte{byte('a' + n)}, n)}}
	}
	for i := range 5 {
		f := add(fmt.Sprintf("capable %d", i), newFile(0o755, fmt.Appendf(nil, "program %d", i)))
		f.xattrs = []toc.Xattr{
			{Name: "security.capability", Value: capability},
			{Name: "trusted.shared", Value: bytes.Repeat([]byte("shared "), 20)},
			{Name: "user.own", Value: fmt.Appendf(nil, "%d", i)},
			{Name: "com.apple.provenance", Value: []byte("has no namespace")},
		}
	}
	big := add("large xattrs", newFile(0o644, []byte("behind large xattrs")))
	for i := range 3 {
		big.xattrs = append(big.xattrs, toc.Xattr{Name: fmt.Sprintf("user.big%d", i), Value: bytes.Repeat([]byte{byte(i)}, 5000)})
	}
	big.xattrs = append(big.xattrs, toc.Xattr{Name: "trusted." + strings.Repeat("n", 247), Value: nil})
	only := add("only a foreign xattr", newFile(0o644, []byte("x")))
	only.xattrs = []toc.Xattr{{Name: "com.apple.provenance", Value: []byte("x")}}
	dx := add("dir with large xattrs", newDir(0o755))
	dx.xattrs = big.xattrs[:1]
	dx.children["child"] = newFile(0o644, nil)
	sx := add("symlink with large xattrs", newSymlink("target"))
	sx.xattrs = []toc.Xattr{{Name: "trusted.x", Value: bytes.Repeat([]byte("v"), 4060)}}
	many := newDir(0o755)
	add("more shared xattrs than fit", many)
	for i := range 2 {
		f := newFile(0o644, fmt.Appendf(nil, "%d", i))
		for x := range 300 {
			f.xattrs = append(f.xattrs, toc.Xattr{Name: fmt.Sprintf("user.number-%03d", x), Value: []byte("value")})
		}
		f.xattrs = append(f.xattrs, toc.Xattr{Name: "user.own", Value: fmt.Appendf(nil, "%d", i)})
		many.children[fmt.Sprint(i)] = f
	}

	// Directories whose data end around a block.
	for _, n := range []int{250, 330, 331, 332, 333, 334, 335, 336, 1000} {
		d := add(fmt.Sprintf("dir of %d", n), newDir(0o755))
		for i := range n {
			d.children[fmt.Sprintf("%09d", i)] = linked
		}
	}
	deep := root
	for range 40 {
		d := newDir(0o755)
		deep.children["deep"] = d
		deep = d
	}
	return root
}

func TestKernelShowsTOC(t *testing.T) {
	needMount(t)
	for _, devices := range []int{1, 3, 200} {
		t.Run(fmt.Sprintf("%d devices", devices), func(t *testing.T) {
			b := build(awkward())
			image, arenas := layOut(t, t.TempDir(), b, devices)
			checkMounted(t, b, image, arenas)
		})
	}
	t.Run("no devices", func(t *testing.T) {
		root := newDir(0o755)
		root.children["etc"] = newDir(0o755)
		root.children["etc"].children["empty"] = newFile(0o644, nil)
		b := build(root)
		checkMounted(t, b, writeImage(t, t.TempDir(), b.toc, Options{}), nil)
	})
}

// An image of the size that the benchmarks measure: metadata only.
func TestKernelShowsManyFiles(t *testing.T) {
	needMount(t)
	b := built{toc: toctest.Synthetic(84_000, 1)}
	for _, set := range b.toc.Xattrs {
		for i := range set {
			if set[i].Name == "security.capability" {
				set[i].Value = capability // the kernel shows no other bytes
			}
		}
	}
	dir := t.TempDir()
	o := anywhere(b.toc)
	image := writeImage(t, dir, b.toc, o)
	arena := filepath.Join(dir, "arena")
	if err := os.WriteFile(arena, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(arena, int64(o.Devices[0].Blocks)*BlockSize); err != nil {
		t.Fatal(err)
	}
	mounted(t, image, []string{arena}, func(target string) {
		got, err := fstest.Options{NoContent: true}.Snapshot(target)
		if err != nil {
			t.Fatal(err)
		}
		if d := fstest.Diff(expectNoContent(b), got); d != "" {
			t.Fatalf("the TOC and its mount differ:\n%s", d)
		}
		checkNlinks(t, b, target)
	})
}

func TestKernelMapsFiles(t *testing.T) {
	needMount(t)
	b := build(awkward())
	image, arenas := layOut(t, t.TempDir(), b, 2)
	mounted(t, image, arenas, func(target string) {
		f, err := os.Open(filepath.Join(target, "large"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		want := bytes.Repeat([]byte("0123456789abcdef!"), 100_000)
		got, err := unix.Mmap(int(f.Fd()), 0, len(want), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(got)
		if !bytes.Equal(got, want) {
			t.Error("mapped bytes differ from those written")
		}
	})
}

func TestKernelReadsAtLimits(t *testing.T) {
	needMount(t)
	// A sparse arena with bytes at its far end, and a content beyond the
	// largest chunk. ext4 and xfs hold files of 16 TiB less a block.
	const blocks = 1<<32 - 2
	dir := t.TempDir()
	arena, err := os.Create(filepath.Join(dir, "arena"))
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Close()
	if err := arena.Truncate(blocks * BlockSize); err != nil {
		t.Skipf("no file of 16 TiB here: %v", err)
	}
	const large = 9 << 40
	for _, off := range []int64{0, 8<<40 + 3*BlockSize, (blocks - 1) * BlockSize} {
		if _, err := arena.WriteAt(fmt.Appendf(nil, "at %d", off), off); err != nil {
			t.Fatal(err)
		}
	}
	root := newDir(0o755)
	root.children["last"] = newFile(0o644, make([]byte, BlockSize))
	root.children["large"] = newFile(0o644, []byte("any"))
	root.children["large"].inode.Size = large
	b := build(root)
	image := writeImage(t, dir, b.toc, Options{
		Devices: []Device{{Blocks: blocks}},
		Place: func(c int) Extent {
			if b.toc.Contents[c].Size == large {
				return Extent{Block: 0}
			}
			return Extent{Block: blocks - 1}
		},
	})
	mounted(t, image, []string{arena.Name()}, func(target string) {
		read := func(name string, off int64) string {
			f, err := os.Open(filepath.Join(target, name))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			buf := make([]byte, 40)
			n, err := f.ReadAt(buf, off)
			if err != nil {
				t.Fatalf("%s at %d: %v", name, off, err)
			}
			return string(bytes.TrimRight(buf[:n], "\x00"))
		}
		for _, off := range []int64{0, 8<<40 + 3*BlockSize} {
			if got, want := read("large", off), fmt.Sprintf("at %d", off); got != want {
				t.Errorf("large: %q at %d", got, off)
			}
		}
		if got, want := read("last", 0), fmt.Sprintf("at %d", int64(blocks-1)*BlockSize); got != want {
			t.Errorf("last: %q, want %q", got, want)
		}
	})
}

func TestFsck(t *testing.T) {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Skip("fsck.erofs is not installed (erofs-utils)")
	}
	b := build(awkward())
	image, arenas := layOut(t, t.TempDir(), b, 3)
	var args []string
	for _, a := range arenas {
		args = append(args, "--device="+a)
	}
	args = append(args, image)
	if out, err := exec.Command(fsck, append([]string{"--extract"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	dump, err := exec.LookPath("dump.erofs")
	if err != nil {
		t.Skip("dump.erofs is not installed (erofs-utils)")
	}
	out, err := exec.Command(dump, append([]string{"-s"}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("dump.erofs: %v\n%s", err, out)
	}
	for _, want := range []string{"sb_csum", "chunked_file", "device_table", fmt.Sprint(len(b.toc.Inodes))} {
		if !strings.Contains(string(out), want) {
			t.Errorf("dump.erofs does not show %q:\n%s", want, out)
		}
	}
}

func TestMountedEqualsTOC(t *testing.T) {
	needMount(t)
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		b := build(randomTree(t))
		dir, err := os.MkdirTemp(base, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		image, arenas := layOut(tbOf(t), dir, b, rapid.IntRange(1, 4).Draw(t, "devices"))
		checkMounted(t, b, image, arenas)
	})
}

// tbFromRapid lets helpers for testing.TB serve a rapid check.
type tbFromRapid struct {
	testing.TB
	t *rapid.T
}

func tbOf(t *rapid.T) testing.TB      { return tbFromRapid{t: t} }
func (tb tbFromRapid) Helper()        {}
func (tb tbFromRapid) Fatal(a ...any) { tb.t.Fatal(a...) }

func randomTree(t *rapid.T) *node {
	name := rapid.OneOf(
		rapid.StringMatching(`[!-.0-~]{1,12}`),
		rapid.StringMatching(`[a-c.]{1,3}`),
		rapid.Map(rapid.SliceOfN(rapid.ByteRange(1, 255), 1, 255), func(b []byte) string {
			return strings.ReplaceAll(string(b), "/", "_")
		}),
	).Filter(func(s string) bool { return s != "." && s != ".." })
	value := rapid.SliceOfN(rapid.Byte(), 0, 60)
	dirs := []*node{newDir(0o755)}
	var files []*node
	count := rapid.IntRange(0, 120).Draw(t, "files")
	for range count {
		d := dirs[rapid.IntRange(0, len(dirs)-1).Draw(t, "in")]
		var n *node
		switch rapid.IntRange(0, 9).Draw(t, "type") {
		case 0, 1:
			n = newDir(rapid.Uint32Range(0, 0o7777).Draw(t, "mode"))
		case 2:
			n = newSymlink(rapid.StringMatching(`[a-z/.]{1,300}`).Draw(t, "target"))
		case 3:
			n = &node{inode: toc.Inode{
				Mode:  rapid.SampledFrom([]uint32{0o020000, 0o060000}).Draw(t, "device") | 0o600,
				Major: rapid.Uint32Range(1, 4095).Draw(t, "major"), Minor: rapid.Uint32Range(0, 1<<20-1).Draw(t, "minor")}}
		case 4:
			n = &node{inode: toc.Inode{Mode: rapid.SampledFrom([]uint32{0o010600, 0o140600}).Draw(t, "special")}}
		case 5:
			if len(files) == 0 {
				continue
			}
			d.children[name.Draw(t, "name")] = files[rapid.IntRange(0, len(files)-1).Draw(t, "link to")]
			continue
		default:
			size := rapid.OneOf(rapid.IntRange(0, 50), rapid.IntRange(4000, 20_000)).Draw(t, "size")
			fill := rapid.Byte().Draw(t, "fill")
			data := bytes.Repeat([]byte{fill}, size)
			for i := range data {
				data[i] += byte(i / 7)
			}
			n = newFile(rapid.Uint32Range(0, 0o7777).Draw(t, "mode"), data)
		}
		if !n.isDir() {
			files = append(files, n)
		}
		d.children[name.Draw(t, "name")] = n
		n.inode.Mtime = rapid.Int64Range(-1<<33, 1<<40).Draw(t, "mtime")
		n.inode.MtimeNsec = rapid.Uint32Range(0, 999_999_999).Draw(t, "nsec")
		n.inode.UID, n.inode.GID = rapid.Uint32Range(0, math.MaxUint32-1).Draw(t, "uid"), rapid.Uint32Range(0, math.MaxUint32-1).Draw(t, "gid")
		if rapid.IntRange(0, 3).Draw(t, "with xattrs") == 0 {
			// The kernel looks into security.capability and the ACLs: values
			// of those are not free.
			for _, x := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"trusted.a", "trusted.long name", "security.long", "trusted.c", "security.x"}), 1, 4, rapid.ID).Draw(t, "xattrs") {
				n.xattrs = append(n.xattrs, toc.Xattr{Name: x, Value: value.Draw(t, "value")})
			}
		}
		if n.isDir() {
			dirs = append(dirs, n)
		}
	}
	return dirs[0]
}
