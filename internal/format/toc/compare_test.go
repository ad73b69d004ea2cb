package toc

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
)

func TestCompare(t *testing.T) {
	file := func(content byte) *File {
		f := &File{Mode: unix.S_IFREG | 0o644}
		if content > 0 {
			id := segment.ID{content}
			f.Content = &Bytes{ID: id, Size: 10, Segments: []Segment{{ID: id, Length: 10}}}
		}
		return f
	}
	dir := func(children map[string]*File) *File { return &File{Mode: unix.S_IFDIR | 0o755, Children: children} }
	with := func(f *File, change func(*File)) *File { change(f); return f }
	link := func(target string) *File { return &File{Mode: unix.S_IFLNK | 0o777, Target: target} }
	build := func(root *File) *TOC {
		made, err := Build(digest.FromString("x"), root)
		if err != nil {
			t.Fatal(err)
		}
		return made
	}
	a := build(dir(map[string]*File{
		"bytes": file(1), "same": file(2), "mode": file(0), "time": file(0), "attr": file(0), "link": link("a"), "empty": file(0),
		"gone": dir(map[string]*File{"file": file(3)}), "became-dir": file(0), "became-file": dir(map[string]*File{"x": file(0)}),
		"kept": dir(map[string]*File{"a": file(4), "c": file(0)}), "dir": dir(nil),
	}))
	b := build(dir(map[string]*File{
		"bytes": file(9), "same": file(2), "mode": with(file(0), func(f *File) { f.Mode |= 0o111 }), "time": with(file(0), func(f *File) { f.MtimeNsec = 1 }),
		"attr": with(file(0), func(f *File) { f.Xattrs = []Xattr{{"user.a", []byte("1")}} }), "link": link("b"), "empty": file(5),
		"became-dir": dir(map[string]*File{"y": file(0)}), "became-file": file(0),
		"kept": dir(map[string]*File{"a": file(4), "b": dir(map[string]*File{"z": file(0)})}), "dir": with(dir(nil), func(f *File) { f.UID = 1 }),
	}))
	told := func(a, b *TOC) (lines []string) {
		Compare(a, b, func(path string, x, y int) {
			lines = append(lines, fmt.Sprintf("%s %v %v", path, x >= 0, y >= 0))
			if got, ok := a.Lookup(path); ok != (x >= 0) || ok && got != x {
				t.Errorf("%s: inode %d of the first, want %d", path, x, got)
			}
			if got, ok := b.Lookup(path); ok != (y >= 0) || ok && got != y {
				t.Errorf("%s: inode %d of the second, want %d", path, y, got)
			}
		})
		return lines
	}
	want := []string{
		"/attr true true", "/became-dir true true", "/became-dir/y false true", "/became-file true true", "/bytes true true", "/dir true true",
		"/empty true true", "/gone true false", "/kept/b false true", "/kept/b/z false true", "/kept/c true false",
		"/link true true", "/mode true true", "/time true true",
	}
	if d := cmp.Diff(want, told(a, b)); d != "" {
		t.Error(d)
	}
	if lines := told(a, a); len(lines) > 0 {
		t.Errorf("a tree differs from itself: %q", lines)
	}
	if back := told(b, a); !slices.Contains(back, "/gone false true") || !slices.Contains(back, "/gone/file false true") {
		t.Errorf("the other way: %q", back)
	}
}
