package flatten_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/log"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/fstest"
)

var update = flag.Bool("update", false, "write golden files anew")

func TestMain(m *testing.M) {
	_ = log.SetLevel("error") // containerd tells of each attribute that it passes over
	os.Exit(m.Run())
}

// entries keeps a list of entries as Flatten reads it.
type entries []layer.Entry

func (l *entries) Next() (*layer.Entry, error) {
	if len(*l) == 0 {
		return nil, io.EOF
	}
	e := (*l)[0]
	*l = (*l)[1:]
	return &e, nil
}

// readEntries reads a tar stream; each file is one segment.
func readEntries(stream []byte) (entries, error) {
	d := digest.FromBytes(stream)
	r, err := layer.NewReader(context.Background(), bytes.NewReader(stream), layer.Descriptor{Digest: d}, layer.Options{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var list entries
	for {
		e, err := r.Next()
		if err == io.EOF {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if e.Size > 0 {
			b, err := io.ReadAll(r)
			if err != nil {
				return nil, err
			}
			e.Content = segment.Sum(b)
			e.Segments = []layer.Segment{{ID: e.Content, Length: uint32(len(b))}}
		}
		list = append(list, *e)
	}
}

func flattened(streams [][]byte) (*toc.TOC, error) {
	layers, err := layersOf(streams)
	if err != nil {
		return nil, err
	}
	return flatten.Rootfs(context.Background(), layers)
}

func layersOf(streams [][]byte) (layers []flatten.Layer, err error) {
	for _, s := range streams {
		list, err := readEntries(s)
		if err != nil {
			return nil, err
		}
		d := digest.FromBytes(s)
		layers = append(layers, flatten.Layer{Digest: d, DiffID: d, Entries: &list})
	}
	return layers, nil
}

// unpack is the oracle.
func unpack(dir string, streams [][]byte) error {
	for _, s := range streams {
		if _, err := archive.Apply(context.Background(), dir, bytes.NewReader(s)); err != nil {
			return err
		}
	}
	return nil
}

// ignoreUnset leaves out the times that containerd sets to the time of
// unpacking, and the root's.
func ignoreUnset(start time.Time) func(string, *fstest.Node, *fstest.Node) {
	return func(path string, disk, ours *fstest.Node) {
		if path == "." {
			ours.Mtime, ours.MtimeNsec = disk.Mtime, disk.MtimeNsec
		}
		if disk.Mode&0o170000 == 0o040000 && disk.Mtime >= start.Unix()-2 {
			ours.Mtime, ours.MtimeNsec = disk.Mtime, disk.MtimeNsec
		}
	}
}

type fataler interface {
	Fatal(...any)
	Fatalf(string, ...any)
}

// compare holds Flatten against containerd and returns the TOC, which is nil
// when both refuse the layers.
func compare(t fataler, dir string, layers []lt.Layer, streams [][]byte) *toc.TOC {
	if os.Getuid() != 0 {
		t.Fatal("unpacking layers needs root")
	}
	start := time.Now()
	applied := unpack(dir, streams)
	got, err := flattened(streams)
	if (applied != nil) != (err != nil) {
		t.Fatalf("containerd: %v\nFlatten: %v\n%s", applied, err, describe(layers))
	}
	if err != nil {
		var refused *layer.RefusedError
		if !errors.As(err, &refused) {
			t.Fatalf("no refusal: %v", err)
		}
		return nil
	}
	disk, err := fstest.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := fstest.Diff(disk, fstest.FromTOC(got), ignoreUnset(start)); d != "" {
		t.Fatalf("containerd's directory and the TOC differ:\n%s\n%s", d, describe(layers))
	}
	return got
}

func describe(layers []lt.Layer) string {
	var s strings.Builder
	for i, l := range layers {
		fmt.Fprintf(&s, "layer %d:\n", i)
		for _, e := range l {
			h := e.Header
			fmt.Fprintf(&s, "  %c %q -> %q %#o %d:%d %v %q\n", h.Typeflag, h.Name, h.Linkname, h.Mode, h.Uid, h.Gid, h.PAXRecords, e.Data)
		}
	}
	return s.String()
}

func streamsOf(t testing.TB, layers []lt.Layer) [][]byte {
	var streams [][]byte
	for _, l := range layers {
		streams = append(streams, l.TarBytes(t))
	}
	return streams
}

const capability = "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// acl is user::rwx, user:1000:rw-, group::r-x, mask::rwx, other::r--.
const acl = "\x02\x00\x00\x00" + "\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\xe8\x03\x00\x00" +
	"\x04\x00\x05\x00\xff\xff\xff\xff" + "\x10\x00\x07\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

// example are layers, and what has to come of them.
type example struct {
	layers []lt.Layer
	has    []string // paths that must be there
	hasNot []string
	fails  bool
}

func examples() map[string]example {
	return map[string]example{
		"whiteout": {
			layers: []lt.Layer{{lt.Dir("d", 0o755), lt.File("d/x", 0o644, "1"), lt.File("d/y", 0o644, "2")}, {lt.Whiteout("d/x")}},
			has:    []string{"d/y"}, hasNot: []string{"d/x", "d/.wh.x"},
		},
		"whiteout of a directory": {
			layers: []lt.Layer{{lt.File("d/a/b/c", 0o644, "1")}, {lt.Whiteout("d/a")}},
			has:    []string{"d"}, hasNot: []string{"d/a"},
		},
		"whiteout of nothing":             {layers: []lt.Layer{{lt.Whiteout("d/x")}}, has: []string{"d"}},
		"whiteout in its own layer":       {layers: []lt.Layer{{lt.File("x", 0o644, "1"), lt.Whiteout("x")}}, hasNot: []string{"x"}},
		"whiteout and again":              {layers: []lt.Layer{{lt.File("x", 0o644, "1")}, {lt.Whiteout("x"), lt.File("x", 0o600, "2")}}, has: []string{"x"}},
		"whiteout of a listed directory":  {layers: []lt.Layer{{lt.Dir("d", 0o755), lt.Whiteout("d")}}, fails: true},
		"whiteout without a name":         {layers: []lt.Layer{{lt.File(".wh.", 0o644, "")}}, fails: true},
		"whiteout of the directory":       {layers: []lt.Layer{{lt.File("d/.wh..", 0o644, "")}}, fails: true},
		"whiteout of the parent":          {layers: []lt.Layer{{lt.File("d/.wh...", 0o644, "")}}, fails: true},
		"whiteout of a name of 255 bytes": {layers: []lt.Layer{{lt.File(strings.Repeat("n", 255), 0o644, "")}, {lt.Whiteout(strings.Repeat("n", 255))}}, hasNot: []string{strings.Repeat("n", 255)}},
		"other whiteout names":            {layers: []lt.Layer{{lt.File("d/.wh..wh.aufs", 0o644, "x"), lt.Dir(".wh..wh.plnk", 0o700), lt.File(".wh..wh.orph/1", 0o600, "x")}}, hasNot: []string{"d/.wh..wh.aufs", ".wh..wh.plnk"}},
		"opaque": {
			layers: []lt.Layer{{lt.File("d/low", 0o644, "1"), lt.File("d/sub/low", 0o644, "1")}, {lt.Dir("d", 0o700), lt.Opaque("d"), lt.File("d/new", 0o644, "2")}},
			has:    []string{"d/new"}, hasNot: []string{"d/low", "d/sub"},
		},
		"opaque after what the layer adds": {
			layers: []lt.Layer{{lt.File("d/low", 0o644, "1"), lt.File("d/sub/low", 0o644, "1")}, {lt.Dir("d/sub", 0o700), lt.File("d/sub/new", 0o644, "2"), lt.File("d/new", 0o644, "2"), lt.Opaque("d")}},
			has:    []string{"d/new", "d/sub/new"}, hasNot: []string{"d/low", "d/sub/low"},
		},
		"opaque over parents that are not listed": {
			layers: []lt.Layer{{lt.File("d/sub/new", 0o644, "2"), lt.Opaque("d")}},
			has:    []string{"d"}, hasNot: []string{"d/sub"},
		},
		"opaque twice": {
			layers: []lt.Layer{{lt.File("d/low", 0o644, "1")}, {lt.Opaque("d"), lt.File("d/a/b", 0o644, "2"), lt.Opaque("d")}},
			has:    []string{"d/a/b"},
		},
		"opaque root": {layers: []lt.Layer{{lt.File("low", 0o644, "1")}, {lt.Opaque("."), lt.File("new", 0o644, "")}}, has: []string{"new"}, hasNot: []string{"low"}},
		"hard links":  {layers: []lt.Layer{{lt.File("a", 0o644, "1"), lt.Dir("d", 0o755), lt.Link("d/b", "a"), lt.Link("c", "d/b")}}, has: []string{"a", "d/b", "c"}},
		"hard link of a lower layer": {
			layers: []lt.Layer{{lt.File("a", 0o4755, "1").Owner(5, 6).Xattr("security.capability", capability)}, {lt.Link("b", "a").Mode(0o600).Owner(7, 8).Xattr("user.k", "v")}},
			has:    []string{"a", "b"},
		},
		"hard link, then the first name replaced": {layers: []lt.Layer{{lt.File("a", 0o644, "1"), lt.Link("b", "a")}, {lt.File("a", 0o644, "2")}}, has: []string{"a", "b"}},
		"hard link, then a whiteout":              {layers: []lt.Layer{{lt.File("a", 0o644, "1"), lt.Link("b", "a")}, {lt.Whiteout("a")}}, has: []string{"b"}},
		"hard link to a symlink":                  {layers: []lt.Layer{{lt.Symlink("s", "/etc/x"), lt.Link("l", "s")}}, has: []string{"s", "l"}},
		"hard link through a symlink":             {layers: []lt.Layer{{lt.File("d/f", 0o644, "1"), lt.Symlink("s", "/d"), lt.Link("l", "s/f")}}, has: []string{"l"}},
		"hard link, absolute target":              {layers: []lt.Layer{{lt.File("d/f", 0o644, "1"), lt.Link("l", "/d/f")}}, has: []string{"l"}},
		"hard link to itself":                     {layers: []lt.Layer{{lt.File("a", 0o644, "1"), lt.Link("a", "a")}}, fails: true},
		"hard link to nothing":                    {layers: []lt.Layer{{lt.Link("a", "b")}}, fails: true},
		"hard link to a directory":                {layers: []lt.Layer{{lt.Dir("d", 0o755), lt.Link("a", "d")}}, fails: true},
		"hard link to a device":                   {layers: []lt.Layer{{lt.Char("c", 0o600, 1, 3), lt.Link("a", "c")}}, has: []string{"a"}},
		"kinds": {
			layers: []lt.Layer{{lt.Char("c", 0o620, 5, 1).Owner(0, 5), lt.Block("b", 0o660, 259, 70000), lt.Fifo("p", 0o1666), lt.Symlink("s", "\xff"), lt.Char("whiteout of overlayfs", 0, 0, 0)}},
			has:    []string{"c", "b", "p", "s"},
		},
		"modes and owners": {
			layers: []lt.Layer{{lt.File("f", 0o6755, "1").Owner(70000, 4294967294), lt.Dir("t", 0o1777), lt.Dir("g", 0o2755).Owner(0, 50), lt.Dir("g/d", 0o755), lt.File("g/implicit/f", 0o600, ""), lt.File("g/keep", 0o644, "").Owner(4294967295, 4294967295)}},
			has:    []string{"g/implicit/f"},
		},
		"times": {layers: []lt.Layer{{
			lt.File("nano", 0o644, "").Mtime(time.Unix(1_500_000_000, 123456789)), lt.File("zero", 0o644, "").Mtime(time.Unix(0, 0)),
			lt.File("before", 0o644, "").Mtime(time.Unix(-100, 5)), lt.File("late", 0o644, "").Mtime(time.Unix(1<<33, 7)),
			lt.File("too late", 0o644, "").Mtime(time.Unix(1<<34, 0)), lt.Dir("d", 0o755).Mtime(time.Unix(9, 9)), lt.File("d/f", 0o644, ""),
		}}, has: []string{"d/f"}},
		"attributes": {layers: []lt.Layer{{
			lt.File("f", 0o755, "1").Xattr("security.capability", capability).Xattr("user.b", "\x00\xff").Xattr("user.empty", "").Xattr("trusted.x", "y").Xattr("odd", "y").Xattr("system.odd", "y"),
			lt.Dir("d", 0o755).Xattr("user.low", "1").Xattr("user.both", "1"), lt.Symlink("s", "x").Xattr("user.no", "1").Xattr("security.yes", "1"),
			lt.Fifo("p", 0o644).Xattr("user.no", "1"),
		}, {lt.Dir("d", 0o700).Xattr("user.both", "2").Xattr("user.high", "2"), lt.File("f", 0o755, "2")}}},
		"ACL":                             {layers: []lt.Layer{{lt.File("f", 0o640, "1").Xattr("system.posix_acl_access", acl), lt.Dir("d", 0o750).Xattr("system.posix_acl_access", acl), lt.Dir("e", 0o750).Xattr("system.posix_acl_default", acl)}}},
		"file over directory":             {layers: []lt.Layer{{lt.File("d/a/b", 0o644, "1")}, {lt.File("d", 0o644, "2")}}, hasNot: []string{"d/a"}},
		"directory over file":             {layers: []lt.Layer{{lt.File("d", 0o644, "1")}, {lt.Dir("d", 0o700), lt.File("d/a", 0o644, "2")}}, has: []string{"d/a"}},
		"symlink over directory":          {layers: []lt.Layer{{lt.File("d/a", 0o644, "1")}, {lt.Symlink("d", "e"), lt.File("d/b", 0o644, "2")}}, has: []string{"e/b"}, hasNot: []string{"e/a"}},
		"directory over symlink":          {layers: []lt.Layer{{lt.Dir("e", 0o755), lt.Symlink("d", "e")}, {lt.Dir("d", 0o700), lt.File("d/b", 0o644, "2")}}, has: []string{"d/b"}, hasNot: []string{"e/b"}},
		"entry repeated":                  {layers: []lt.Layer{{lt.File("a", 0o644, "1"), lt.File("a", 0o600, "22"), lt.Dir("d", 0o755), lt.Dir("d", 0o711).Mtime(time.Unix(7, 7))}}},
		"directory replaced in a layer":   {layers: []lt.Layer{{lt.Dir("d", 0o755).Mtime(time.Unix(3, 3)), lt.File("d", 0o644, "1")}}},
		"parent is a file":                {layers: []lt.Layer{{lt.File("a", 0o644, "1")}, {lt.File("a/b", 0o644, "1")}}, fails: true},
		"parent is a symlink":             {layers: []lt.Layer{{lt.Dir("usr/lib", 0o755), lt.Symlink("lib", "usr/lib")}, {lt.File("lib/x", 0o644, "1"), lt.Dir("lib/d", 0o700)}}, has: []string{"usr/lib/x", "usr/lib/d"}},
		"parent is a symlink to nothing":  {layers: []lt.Layer{{lt.Symlink("lib", "/usr/lib"), lt.File("lib/x", 0o644, "1")}}, has: []string{"usr/lib/x"}},
		"parent is a symlink upwards":     {layers: []lt.Layer{{lt.Symlink("up", "../../../.."), lt.File("up/x", 0o644, "1")}}, has: []string{"x"}},
		"parents are symlinks in a chain": {layers: []lt.Layer{{lt.Symlink("a", "b"), lt.Symlink("b", "/c/d"), lt.Symlink("c", "e"), lt.File("a/x", 0o644, "1")}}, has: []string{"e/d/x"}},
		"symlinks in a loop":              {layers: []lt.Layer{{lt.Symlink("a", "b"), lt.Symlink("b", "a"), lt.File("a/x", 0o644, "1")}}, fails: true},
		"whiteout through a symlink":      {layers: []lt.Layer{{lt.File("d/x", 0o644, "1"), lt.Symlink("s", "d")}, {lt.Whiteout("s/x")}}, hasNot: []string{"d/x"}},
		"opaque through a symlink":        {layers: []lt.Layer{{lt.File("d/x", 0o644, "1"), lt.Symlink("s", "d")}, {lt.File("d/y", 0o644, "1"), lt.Opaque("s")}}, hasNot: []string{"d/x"}, has: []string{"d/y"}},
		"names":                           {layers: []lt.Layer{{lt.Dir("./", 0o700), lt.File("./a//b", 0o644, "1"), lt.File("\xff\xfe", 0o644, ""), lt.File("a/"+strings.Repeat("long/", 100)+"x", 0o644, "1")}}, has: []string{"a/b"}},
		"global header":                   {layers: []lt.Layer{{lt.File("pax_global_header", 0o644, "1")}, {{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "c"}}}}}, hasNot: []string{"pax_global_header"}},
		"empty layer":                     {layers: []lt.Layer{{}}},
	}
}

func TestFlattenEqualsContainerd(t *testing.T) {
	for name, tc := range examples() {
		t.Run(name, func(t *testing.T) {
			if os.Getuid() != 0 {
				t.Skip("unpacking layers needs root")
			}
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			got := compare(t, dir, tc.layers, streamsOf(t, tc.layers))
			if (got == nil) != tc.fails {
				t.Fatalf("refused: %v, want %v", got == nil, tc.fails)
			}
			if got == nil {
				return
			}
			tree := fstest.FromTOC(got)
			for _, p := range tc.has {
				if _, ok := tree[p]; !ok {
					t.Errorf("%q is missing", p)
				}
			}
			for _, p := range tc.hasNot {
				if _, ok := tree[p]; ok {
					t.Errorf("%q is there", p)
				}
			}
		})
	}
}

// TestReleasedRules: what the rules of each version make of layers stays as it was when that was released. Workers prove by it
// what an older server, or this one long ago, has flattened. With -update only the newest version's is written anew.
func TestReleasedRules(t *testing.T) {
	all := examples()
	for rules := uint8(1); rules <= flatten.Version; rules++ {
		var made strings.Builder
		for _, name := range slices.Sorted(maps.Keys(all)) {
			what := "refused"
			layers, err := layersOf(streamsOf(t, all[name].layers))
			if err == nil {
				var x *toc.TOC
				if x, err = flatten.By(t.Context(), rules, layers); err == nil && x.Rules != rules {
					t.Errorf("%s: by rules %d, want %d", name, x.Rules, rules)
				}
				if err == nil {
					what = treeDigest(x).Encoded()
				}
			}
			if err != nil && !all[name].fails {
				t.Errorf("%s: %v", name, err)
			}
			fmt.Fprintf(&made, "%s %s\n", what, name)
		}
		golden := filepath.Join("testdata", fmt.Sprintf("rules%d.txt", rules))
		if *update && rules == flatten.Version {
			if err := os.WriteFile(golden, []byte(made.String()), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), made.String()); d != "" {
			t.Errorf("rules %d make other trees than when they were released: a change is a new Version (-want +got):\n%s", rules, d)
		}
	}
	if len(released(t)) != flatten.Version {
		t.Errorf("testdata has the rules of versions %v, the newest is %d", released(t), flatten.Version)
	}
	for _, rules := range []uint8{0, flatten.Version + 1} {
		layers, err := layersOf(streamsOf(t, all["empty layer"].layers))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := flatten.By(t.Context(), rules, layers); !errors.Is(err, flatten.ErrRules) {
			t.Errorf("by rules %d: %v", rules, err)
		}
	}
}

// released are the versions of rules that testdata has.
func released(t *testing.T) []string {
	list, err := filepath.Glob("testdata/rules*.txt")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// treeDigest is of all that a tree is, however TOCs are encoded.
func treeDigest(x *toc.TOC) digest.Digest {
	h := digest.SHA256.Digester()
	fmt.Fprintf(h.Hash(), "%+v", *x)
	return h.Digest()
}

// Small alphabets make names meet.
func drawName(t *rapid.T, label string) string {
	return strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c"}), 1, 3).Draw(t, label), "/")
}

func drawEntry(t *rapid.T) lt.Entry {
	name := drawName(t, "name")
	mode := int64(rapid.SampledFrom([]int{0o644, 0o755, 0o4755, 0o2775, 0o1777, 0}).Draw(t, "mode"))
	var e lt.Entry
	switch rapid.SampledFrom([]string{"file", "file", "dir", "dir", "link", "symlink", "char", "fifo", "whiteout", "opaque"}).Draw(t, "type") {
	case "file":
		e = lt.File(name, mode, rapid.SampledFrom([]string{"", "1", "22"}).Draw(t, "data"))
	case "dir":
		e = lt.Dir(name, mode)
	case "link":
		e = lt.Link(name, drawName(t, "target")).Mode(mode)
	case "symlink":
		prefix := rapid.SampledFrom([]string{"", "/", "../", "../../", "./"}).Draw(t, "prefix")
		e = lt.Symlink(name, prefix+drawName(t, "target")+rapid.SampledFrom([]string{"", "/..", "/"}).Draw(t, "suffix"))
	case "char":
		e = lt.Char(name, mode, 1, 3)
	case "fifo":
		e = lt.Fifo(name, mode)
	case "whiteout":
		return lt.Whiteout(name)
	case "opaque":
		return lt.Opaque(name)
	}
	e = e.Owner(rapid.IntRange(0, 2).Draw(t, "uid"), rapid.IntRange(0, 2).Draw(t, "gid")).
		Mtime(time.Unix(rapid.Int64Range(-1, 1000).Draw(t, "mtime"), rapid.Int64Range(0, 999_999_999).Draw(t, "nsec")))
	switch rapid.IntRange(0, 5).Draw(t, "xattr") {
	case 0:
		e = e.Xattr("user.k", rapid.SampledFrom([]string{"", "v"}).Draw(t, "value"))
	case 1:
		e = e.Xattr("security.capability", capability)
	}
	return e
}

func TestFlattenEqualsContainerdOnRandomLayers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("unpacking layers needs root")
	}
	base, n, taken := t.TempDir(), 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		dir := filepath.Join(base, fmt.Sprint(n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		var layers []lt.Layer
		for range rapid.IntRange(1, 3).Draw(rt, "layers") {
			layers = append(layers, rapid.SliceOfN(rapid.Custom(drawEntry), 1, 10).Draw(rt, "layer"))
		}
		if compare(rt, dir, layers, streamsOf(t, layers)) != nil {
			taken++
		}
	})
	t.Logf("%d of %d images were not refused by either", taken, n)
	if taken < n/10 {
		t.Error("nearly all images were refused: nothing was compared")
	}
}

func TestFlattenNamesLayerAndEntry(t *testing.T) {
	layers := []lt.Layer{{lt.File("a", 0o644, "1")}, {lt.Link("x", "nowhere")}}
	streams := streamsOf(t, layers)
	_, err := flattened(streams)
	var refused *layer.RefusedError
	if !errors.As(err, &refused) || refused.Layer != digest.FromBytes(streams[1]) || refused.Entry != "x" {
		t.Errorf("got %v", err)
	}
	if _, err := flatten.Rootfs(context.Background(), nil); !errors.Is(err, flatten.ErrNoLayers) {
		t.Errorf("no layers: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := flatten.Rootfs(ctx, []flatten.Layer{{Entries: &entries{}}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestChainID(t *testing.T) {
	a, b := digest.FromString("a"), digest.FromString("b")
	want := digest.FromString(a.String() + " " + b.String())
	if got := flatten.ChainID([]digest.Digest{a, b}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func BenchmarkFlatten(b *testing.B) {
	const files = 84_000
	var list entries
	for i := range files {
		if i%20 == 0 {
			list = append(list, layer.Entry{Type: layer.Directory, Name: fmt.Sprintf("usr/share/d%d/d%d", i/400, i/20), Mode: 0o755})
		}
		id := segment.Sum(fmt.Append(nil, i))
		list = append(list, layer.Entry{
			Type: layer.Regular, Name: fmt.Sprintf("usr/share/d%d/d%d/file%d", i/400, i/20, i), Mode: 0o644, Mtime: 1_700_000_000,
			Size: 1000, Content: id, Segments: []layer.Segment{{ID: id, Length: 1000}},
		})
	}
	d := digest.FromString("layer")
	b.ReportAllocs()
	for b.Loop() {
		l := list
		if _, err := flatten.Rootfs(context.Background(), []flatten.Layer{{Digest: d, DiffID: d, Entries: &l}}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(files, "files")
}
