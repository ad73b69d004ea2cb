package toc_test

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

var update = flag.Bool("update", false, "write golden files anew")

var equate = cmpopts.EquateEmpty()

const chain = digest.Digest("sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")

func dir(children map[string]*toc.File) *toc.File {
	if children == nil {
		children = map[string]*toc.File{}
	}
	return &toc.File{Mode: unix.S_IFDIR | 0o755, Mtime: 1_700_000_000, Children: children}
}

func link(target string) *toc.File {
	return &toc.File{Mode: unix.S_IFLNK | 0o777, Target: target}
}

func file(content string) *toc.File {
	f := &toc.File{Mode: unix.S_IFREG | 0o644, Mtime: 1_700_000_000}
	if content != "" {
		id := segment.Sum([]byte(content))
		f.Content = &toc.Bytes{ID: id, Size: int64(len(content)),
			Segments: []toc.Segment{{ID: id, Length: uint32(len(content))}}}
	}
	return f
}

// everything is a small tree with all that a TOC can hold.
func everything() *toc.File {
	sh := file("#!/bin/sh")
	sh.Mode = unix.S_IFREG | unix.S_ISUID | 0o755
	sh.UID, sh.GID = 1<<32-2, 1<<31
	sh.Mtime, sh.MtimeNsec = -5, 999_999_999
	sh.Xattrs = []toc.Xattr{{Name: "user.b", Value: nil}, {Name: "security.capability", Value: []byte{1, 0, 0, 2}}}
	hole := file("a")
	hole.Content = &toc.Bytes{ID: segment.Sum(make([]byte, 100)), Size: 100, Segments: []toc.Segment{{Length: 100}}}
	large := file("b")
	large.Content = &toc.Bytes{ID: segment.Sum([]byte("large")), Size: 2_500_000, Segments: []toc.Segment{
		{ID: segment.Sum([]byte("1")), Length: 400_000},
		{Offset: 400_000, Length: 1_000_000},
		{ID: segment.Sum([]byte("2")), Offset: 1_400_000, Length: 1_000_000},
		{ID: segment.Sum([]byte("3")), Offset: 2_400_000, Length: 100_000},
	}}
	return dir(map[string]*toc.File{
		"bin": dir(map[string]*toc.File{"sh": sh, "dash": sh, "copy": file("#!/bin/sh")}),
		"dev": dir(map[string]*toc.File{
			"null": {Mode: unix.S_IFCHR | 0o666, Major: 1, Minor: 3},
			"sda":  {Mode: unix.S_IFBLK | 0o660, Major: 8},
			"pipe": {Mode: unix.S_IFIFO | 0o600},
			"sock": {Mode: unix.S_IFSOCK | 0o600},
		}),
		"etc":              dir(map[string]*toc.File{"empty": file(""), "link": link("../bin/sh"), "abs": link("/bin"), "hole": hole, "large": large}),
		"other":            sh,
		"\xff\xfe not UTF": dir(nil),
		"loop":             link("loop"),
		"up":               link("../../../etc/link"),
	})
}

func build(t testing.TB, root *toc.File) *toc.TOC {
	t.Helper()
	got, err := toc.Build(chain, root)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func roundTrip(t interface {
	Helper()
	Fatal(...any)
}, want *toc.TOC) []byte {
	t.Helper()
	b, err := toc.Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := toc.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, equate); d != "" {
		t.Fatal(d)
	}
	contents, err := toc.DecodeContents(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&toc.TOC{ChainID: want.ChainID, Rules: want.Rules, Contents: want.Contents, Segments: want.Segments}, contents, equate); d != "" {
		t.Fatal(d)
	}
	if n, err := toc.CountSegments(b); err != nil || n != len(want.Segments) {
		t.Fatal(n, "segments,", err)
	}
	return b
}

func TestRoundTrip(t *testing.T) {
	b := roundTrip(t, build(t, everything()))
	if toc.Digest(b) != digest.FromBytes(b) {
		t.Error("Digest is not the SHA-256 of the bytes")
	}
	roundTrip(t, build(t, dir(nil)))
	roundTrip(t, toctest.Synthetic(3000, 1))
}

func TestRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		root := drawTree(t)
		want, err := toc.Build(chain, root)
		if err != nil {
			t.Fatal(err)
		}
		first := roundTrip(t, want)
		again, err := toc.Build(chain, root) // maps are in another order
		if err != nil {
			t.Fatal(err)
		}
		second, err := toc.Encode(again)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(first, second) {
			t.Fatal("equal trees encode to different bytes")
		}
	})
}

func drawTree(t *rapid.T) *toc.File {
	root := dir(nil)
	dirs, files := []*toc.File{root}, []*toc.File{}
	for range rapid.IntRange(0, 60).Draw(t, "names") {
		d := rapid.SampledFrom(dirs).Draw(t, "dir")
		name := rapid.StringMatching(`[a-c.é]{1,4}`).Draw(t, "name")
		if d.Children[name] != nil || name == "." || name == ".." {
			continue
		}
		var f *toc.File
		switch rapid.IntRange(0, 6).Draw(t, "kind") {
		case 0, 1:
			f = dir(nil)
			dirs = append(dirs, f)
		case 2:
			f = link(rapid.StringMatching(`[a-c/.]{1,6}`).Draw(t, "target"))
		case 3:
			if len(files) == 0 {
				continue
			}
			f = rapid.SampledFrom(files).Draw(t, "linked")
		case 4:
			f = &toc.File{Mode: unix.S_IFBLK | 0o600, Major: rapid.Uint32().Draw(t, "major"), Minor: rapid.Uint32().Draw(t, "minor")}
		default:
			f = file(rapid.StringMatching(`[xy]{0,3}`).Draw(t, "content"))
			f.Mode |= rapid.Uint32Range(0, 0o7777).Draw(t, "mode")
			f.UID = rapid.Uint32().Draw(t, "uid")
			f.Mtime, f.MtimeNsec = rapid.Int64().Draw(t, "mtime"), rapid.Uint32Range(0, 999_999_999).Draw(t, "nsec")
			if rapid.Bool().Draw(t, "xattr") {
				f.Xattrs = []toc.Xattr{{Name: rapid.StringMatching(`[ab]`).Draw(t, "xattr name"), Value: rapid.SliceOf(rapid.Byte()).Draw(t, "value")}}
			}
			files = append(files, f)
		}
		d.Children[name] = f
	}
	return root
}

func TestNlink(t *testing.T) {
	x := build(t, everything())
	for path, want := range map[string]uint32{"/": 6, "/bin": 2, "/bin/sh": 3, "/etc/empty": 1} {
		i, ok := x.Lookup(path)
		if !ok || x.Inodes[i].Nlink != want {
			t.Errorf("%s: %v, %d links, want %d", path, ok, x.Inodes[i].Nlink, want)
		}
	}
}

func TestPaths(t *testing.T) {
	x := build(t, everything())
	path := map[int]string{}
	x.Walk(func(p string, i int) {
		if path[i] == "" {
			path[i] = p
		}
	})
	for _, c := range []struct{ path, lookup, resolve string }{
		{"", "/", "/"},
		{"/", "/", "/"},
		{"bin", "/bin", "/bin"},
		{"/bin/../bin/./copy", "/bin/copy", "/bin/copy"},
		{"/../../bin", "/bin", "/bin"},
		{"/etc/link", "/etc/link", "/bin/dash"},
		{"/etc/abs", "/etc/abs", "/bin"},
		{"/etc/abs/", "/etc/abs", "/bin"},
		{"/etc/abs/copy", "/bin/copy", "/bin/copy"},
		{"/up", "/up", "/bin/dash"},
		{"/loop", "/loop", ""},
		{"/loop/x", "", ""},
		{"/bin/sh/x", "", ""},
		{"/bin/sh/", "/bin/dash", "/bin/dash"},
		{"/nothing", "", ""},
		{"/etc/", "/etc", "/etc"},
	} {
		for _, f := range []struct {
			name string
			call func(string) (int, bool)
			want string
		}{{"Lookup", x.Lookup, c.lookup}, {"Resolve", x.Resolve, c.resolve}} {
			got := ""
			if i, ok := f.call(c.path); ok {
				got = path[i]
			}
			if got != f.want {
				t.Errorf("%s(%q) is %q, want %q", f.name, c.path, got, f.want)
			}
		}
	}
}

func TestWalk(t *testing.T) {
	var got []string
	build(t, everything()).Walk(func(p string, i int) { got = append(got, p) })
	want := strings.Fields(`/ /bin /bin/copy /bin/dash /bin/sh /dev /dev/null /dev/pipe /dev/sda /dev/sock
		/etc /etc/abs /etc/empty /etc/hole /etc/large /etc/link /loop /other /up`)
	want = append(want, "/\xff\xfe not UTF")
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// Every rule of the TOC's comment, broken once.
func TestInvalid(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(x *toc.TOC)
	}{
		{"chain ID", func(x *toc.TOC) { x.ChainID = "sha256:12" }},
		{"no inodes", func(x *toc.TOC) { x.Inodes = nil }},
		{"root is a file", func(x *toc.TOC) { x.Inodes[0].Mode = unix.S_IFREG }},
		{"unnamed inode", func(x *toc.TOC) { x.Inodes = append(x.Inodes, toc.Inode{Mode: unix.S_IFIFO, Content: -1}) }},
		{"name too many", func(x *toc.TOC) { x.Dirents = append(x.Dirents, toc.Dirent{Name: "z", Inode: 1}) }},
		{"unsorted", func(x *toc.TOC) { x.Dirents[0].Name = "zz" }},
		{"twice", func(x *toc.TOC) { x.Dirents[1].Name = x.Dirents[0].Name }},
		{"slash", func(x *toc.TOC) { x.Dirents[0].Name = "a/b" }},
		{"nul", func(x *toc.TOC) { x.Dirents[0].Name = "a\x00" }},
		{"dot", func(x *toc.TOC) { x.Dirents[0].Name = ".." }},
		{"empty name", func(x *toc.TOC) { x.Dirents[0].Name = "" }},
		{"long name", func(x *toc.TOC) { x.Dirents[0].Name = "a" + strings.Repeat("a", 255) }},
		{"cycle", func(x *toc.TOC) { x.Dirents[4].Inode = 1 }},
		{"root as child", func(x *toc.TOC) { x.Dirents[4].Inode = 0 }},
		{"inode skipped", func(x *toc.TOC) { x.Dirents[3].Inode++ }},
		{"inode out of range", func(x *toc.TOC) { x.Dirents[len(x.Dirents)-1].Inode = 1 << 30 }},
		{"children of a file", func(x *toc.TOC) { at(x, "/bin/copy").Children = 1 }},
		{"children elsewhere", func(x *toc.TOC) { at(x, "/bin").FirstChild++ }},
		{"children too many", func(x *toc.TOC) { x.Inodes[0].Children = 1 << 31 }},
		{"type", func(x *toc.TOC) { at(x, "/dev/pipe").Mode = 0o150000 }},
		{"mode", func(x *toc.TOC) { at(x, "/dev/pipe").Mode |= 1 << 20 }},
		{"nsec", func(x *toc.TOC) { x.Inodes[0].MtimeNsec = 1e9 }},
		{"size", func(x *toc.TOC) { at(x, "/bin/copy").Size++ }},
		{"size of empty", func(x *toc.TOC) { at(x, "/etc/empty").Size++ }},
		{"content out of range", func(x *toc.TOC) { at(x, "/bin/copy").Content = 99 }},
		{"content negative", func(x *toc.TOC) { at(x, "/etc/empty").Content = -2 }},
		{"content of directory", func(x *toc.TOC) { x.Inodes[0].Content = 0 }},
		{"content unused", func(x *toc.TOC) { n := at(x, "/etc/large"); n.Content, n.Size = -1, 0 }},
		{"no target", func(x *toc.TOC) { n := at(x, "/loop"); n.Target, n.Size = "", 0 }},
		{"target of another", func(x *toc.TOC) { at(x, "/bin/copy").Target = "a" }},
		{"device number of another", func(x *toc.TOC) { at(x, "/bin/copy").Minor = 1 }},
		{"content twice", func(x *toc.TOC) { x.Contents[1].ID = x.Contents[0].ID }},
		{"content zero ID", func(x *toc.TOC) { x.Contents[0].ID = segment.ID{} }},
		{"content size", func(x *toc.TOC) { x.Contents[0].Size = 0 }},
		{"segments shared", func(x *toc.TOC) { x.Contents[1].First = 0 }},
		{"no segments", func(x *toc.TOC) { x.Contents[0].Segments = 0 }},
		{"segments out of range", func(x *toc.TOC) { x.Contents[len(x.Contents)-1].Segments = 1 << 31 }},
		{"segment too many", func(x *toc.TOC) { x.Segments = append(x.Segments, toc.Segment{Length: 1}) }},
		{"segment ID", func(x *toc.TOC) { x.Segments[0].ID[0]++ }},
		{"segment offset", func(x *toc.TOC) { x.Segments[0].Offset++ }},
		{"segment empty", func(x *toc.TOC) { x.Segments[0].Length = 0 }},
		{"segment sum", func(x *toc.TOC) { x.Segments[len(x.Segments)-1].Length++ }},
		{"segment too long", func(x *toc.TOC) {
			n := at(x, "/etc/hole")
			n.Size = segment.MaxLength + 1
			x.Contents[n.Content].Size = n.Size
			x.Segments[x.Contents[n.Content].First].Length = uint32(n.Size)
		}},
		{"no xattr sets", func(x *toc.TOC) { x.Xattrs = nil }},
		{"first xattr set", func(x *toc.TOC) { x.Xattrs[0] = x.Xattrs[1] }},
		{"xattrs unsorted", func(x *toc.TOC) { x.Xattrs[1][0].Name = "user.c" }},
		{"xattr name", func(x *toc.TOC) { x.Xattrs[1][0].Name = "" }},
		{"xattr value", func(x *toc.TOC) { x.Xattrs[1][0].Value = make([]byte, toc.MaxXattr+1) }},
		{"xattr set unused", func(x *toc.TOC) { x.Xattrs = append(x.Xattrs, []toc.Xattr{{Name: "user.z"}}) }},
		{"xattr set out of range", func(x *toc.TOC) { x.Inodes[1].Xattrs = 9 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := build(t, everything())
			c.damage(x)
			if b, err := toc.Encode(x); err == nil {
				t.Errorf("encoded to %d bytes", len(b))
			}
		})
	}
}

func at(x *toc.TOC, path string) *toc.Inode {
	i, ok := x.Lookup(path)
	if !ok {
		panic("no " + path)
	}
	return &x.Inodes[i]
}

func TestDecodeDamaged(t *testing.T) {
	b, err := toc.Encode(build(t, everything()))
	if err != nil {
		t.Fatal(err)
	}
	for n := range b {
		if _, err := toc.Decode(b[:n]); !errors.Is(err, toc.ErrCorrupt) {
			t.Errorf("cut after %d bytes: %v", n, err)
		}
	}
	if _, err := toc.Decode(append(bytes.Clone(b), 0)); !errors.Is(err, toc.ErrCorrupt) {
		t.Errorf("one byte more: %v", err)
	}
	b[len("HFTOC\r\n")] = 3
	if _, err := toc.Decode(b); err == nil || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("another version: %v", err)
	}
}

// TestRules: a TOC by later rules names them, one by the first is as it always was.
func TestRules(t *testing.T) {
	x := build(t, everything())
	first, err := toc.Encode(x)
	if err != nil {
		t.Fatal(err)
	}
	x.Rules = 7
	later, err := toc.Encode(x)
	if err != nil {
		t.Fatal(err)
	}
	head := len("HFTOC\r\n")
	if first[head] != 1 || later[head] != 2 || later[head+1] != 7 || !bytes.Equal(first[head+1:], later[head+2:]) {
		t.Errorf("TOCs start with %x and %x", first[:head+3], later[:head+3])
	}
	for _, rules := range []uint8{1, 7} {
		encoded := map[uint8][]byte{1: first, 7: later}[rules]
		got, err := toc.Decode(encoded)
		if err != nil || got.Rules != rules {
			t.Errorf("rules %d: decoded %v, %v", rules, got, err)
		}
		if got, err := toc.DecodeContents(encoded); err != nil || got.Rules != rules {
			t.Errorf("rules %d: contents %v, %v", rules, got, err)
		}
	}
	for _, rules := range []byte{0, 1} {
		later[head+1] = rules
		if _, err := toc.Decode(later); !errors.Is(err, toc.ErrCorrupt) {
			t.Errorf("version 2 with rules %d: %v", rules, err)
		}
	}
	if _, err := toc.Decode(later[:head+1]); !errors.Is(err, toc.ErrCorrupt) {
		t.Errorf("version 2 without rules: %v", err)
	}
	x.Rules = 0
	if _, err := toc.Encode(x); err == nil {
		t.Error("a TOC by no rules was encoded")
	}
}

// TestGolden decodes a TOC as it was written when the format was fixed.
func TestGolden(t *testing.T) {
	want := build(t, everything())
	name := filepath.Join("testdata", "everything.toc")
	if *update {
		b, err := toc.Encode(want)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	got, err := toc.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, equate); d != "" {
		t.Error(d)
	}
	// Another compressor may write other bytes; then TOCs get new digests, and
	// workers' old ones are sent again. Change this file with open eyes.
	if again, err := toc.Encode(want); err != nil || !bytes.Equal(again, b) {
		t.Errorf("encodes to other bytes, %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, root := range []*toc.File{dir(nil), everything()} {
		x, err := toc.Build(chain, root)
		if err != nil {
			f.Fatal(err)
		}
		b, err := toc.Encode(x)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, read := range []func() error{
			func() error { _, err := toc.DecodeContents(b); return err },
			func() error { _, err := toc.CountSegments(b); return err },
		} {
			if err := read(); err != nil && !errors.Is(err, toc.ErrCorrupt) {
				t.Fatal(err)
			}
		}
		x, err := toc.Decode(b)
		if err != nil {
			if !errors.Is(err, toc.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		roundTrip(t, x)
		x.Walk(func(path string, i int) {
			if got, ok := x.Lookup(path); !ok || got != i {
				t.Fatalf("Lookup(%q) is %d, %v; want %d", path, got, ok, i)
			}
		})
	})
}

const benchFiles = 84_000

func BenchmarkEncode(b *testing.B) {
	x := toctest.Synthetic(benchFiles, 1)
	var encoded []byte
	for b.Loop() {
		var err error
		if encoded, err = toc.Encode(x); err != nil {
			b.Fatal(err)
		}
	}
	digests := len(x.Contents)
	for _, c := range x.Contents {
		for _, s := range x.Segments[c.First : c.First+c.Segments] {
			if c.Segments > 1 && !s.ID.IsHole() {
				digests++
			}
		}
	}
	b.ReportMetric(float64(len(encoded)), "bytes")
	b.ReportMetric(float64(len(encoded)-32*digests)/benchFiles, "bytes/file")
}

func BenchmarkDecode(b *testing.B) {
	encoded, err := toc.Encode(toctest.Synthetic(benchFiles, 1))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := toc.Decode(encoded); err != nil {
			b.Fatal(err)
		}
	}
}
