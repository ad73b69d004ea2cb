package layer_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

var update = flag.Bool("update", false, "write the golden files")

func encodeList(t interface{ Fatal(...any) }, list []layer.Entry) []byte {
	var buf bytes.Buffer
	w, err := layer.NewListWriter(&buf)
	if err != nil {
		t.Fatal(err)
	}
	for i := range list {
		if err := w.Write(&list[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func decodeList(b []byte) ([]layer.Entry, error) {
	r, err := layer.NewListReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var list []layer.Entry
	for {
		e, err := r.Next()
		if err == io.EOF {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		list = append(list, *e)
	}
}

func sampleList() []layer.Entry {
	one, two, whole := segment.Sum([]byte("one")), segment.Sum([]byte("two")), segment.Sum([]byte("whole"))
	return []layer.Entry{
		{Type: layer.Directory, Name: "usr", Mode: 0o755, Mtime: -5},
		{Type: layer.Directory, Name: "usr/lib", Mode: 0o2775, UID: 1<<32 - 1, GID: 70000, Mtime: 1 << 40, MtimeNsec: 999_999_999},
		{Type: layer.Regular, Name: "usr/lib/empty", Mode: 0o644},
		{
			Type: layer.Regular, Name: "usr/lib/small", Mode: 0o4755, Size: 5, Content: whole,
			Segments: []layer.Segment{{ID: whole, Length: 5}},
			Xattrs:   []toc.Xattr{{Name: "user.a", Value: []byte{}}, {Name: "user.b", Value: []byte("\x00\xff")}},
		},
		{
			Type: layer.Regular, Name: "usr/lib/large", Mode: 0o644, Size: 3 << 20, Content: whole,
			Segments: []layer.Segment{{ID: one, Length: 1 << 20}, {Length: 1 << 20}, {ID: two, Length: 1 << 20}},
		},
		{Type: layer.Regular, Name: "zeros", Size: 7, Content: whole, Segments: []layer.Segment{{Length: 7}}},
		{Type: layer.HardLink, Name: "l", Link: "usr/lib/small"},
		{Type: layer.Symlink, Name: "s", Link: "/../x", Mode: 0o777},
		{Type: layer.CharDevice, Name: "c", Major: 1, Minor: 3},
		{Type: layer.BlockDevice, Name: "b", Major: 4095, Minor: 1<<20 - 1},
		{Type: layer.Fifo, Name: "p"},
		{Type: layer.Global, Name: "pax_global_header"},
		{Type: layer.Regular, Name: "usr/.wh..wh..opq"},
		{Type: layer.Regular, Name: "caf\xe9\xff"},
	}
}

func TestListRoundTrip(t *testing.T) {
	want := sampleList()
	got, err := decodeList(encodeList(t, want))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got, err := decodeList(encodeList(t, nil)); err != nil || len(got) != 0 {
		t.Errorf("empty list: %v, %v", got, err)
	}
}

// The golden file is decoded, not compared: what zstd makes of equal records
// may differ between its releases.
func TestListGolden(t *testing.T) {
	path := filepath.Join("testdata", "entries.v1")
	if *update {
		if err := os.WriteFile(path, encodeList(t, sampleList()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeList(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(sampleList(), got); d != "" {
		t.Error(d)
	}
}

func TestListRoundTripsAnyNames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		element := rapid.StringMatching(`[a-c.]{1,4}`).Filter(func(s string) bool { return s != "." && s != ".." })
		names := rapid.SliceOf(rapid.Custom(func(t *rapid.T) string {
			return strings.Join(rapid.SliceOfN(element, 1, 4).Draw(t, "elements"), "/")
		})).Draw(t, "names")
		var want []layer.Entry
		for _, n := range names {
			want = append(want, layer.Entry{Type: layer.Directory, Name: n, Mtime: rapid.Int64().Draw(t, "mtime")})
		}
		got, err := decodeList(encodeList(t, want))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatal(d)
		}
	})
}

func TestListDamaged(t *testing.T) {
	good := encodeList(t, sampleList())
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		list, err := decodeList(bad)
		if err != nil {
			continue
		}
		// zstd's headers have bits that say nothing; the list must be whole.
		if d := cmp.Diff(sampleList(), list); d != "" {
			t.Fatalf("byte %d changed, and a list with other entries was read:\n%s", i, d)
		}
	}
	for n := range good {
		if _, err := decodeList(good[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes read as a list", n, len(good))
		}
	}
	if _, err := decodeList(append(bytes.Clone(good), good[8:]...)); !errors.Is(err, layer.ErrBadList) {
		t.Errorf("with a second frame: %v", err)
	}
}

func TestListRefusesWhatNoReaderOfLayersWrites(t *testing.T) {
	id := segment.Sum([]byte("x"))
	for name, e := range map[string]layer.Entry{
		"absolute":        {Type: layer.Directory, Name: "/a"},
		"dotdot":          {Type: layer.Directory, Name: "a/../b"},
		"empty name":      {Type: layer.Directory, Name: ""},
		"root":            {Type: layer.Directory, Name: "."},
		"NUL":             {Type: layer.Directory, Name: "a\x00"},
		"type":            {Type: 9, Name: "a"},
		"mode":            {Type: layer.Directory, Name: "a", Mode: 0o10000},
		"link out":        {Type: layer.HardLink, Name: "a", Link: "../b"},
		"empty symlink":   {Type: layer.Symlink, Name: "a"},
		"device":          {Type: layer.CharDevice, Name: "a", Major: 4096},
		"size":            {Type: layer.Regular, Name: "a", Size: 4, Content: id, Segments: []layer.Segment{{ID: id, Length: 5}}},
		"no segments":     {Type: layer.Regular, Name: "a", Size: 4, Content: id},
		"empty segment":   {Type: layer.Regular, Name: "a", Size: 4, Content: id, Segments: []layer.Segment{{ID: id, Length: 4}, {ID: id}}},
		"large segment":   {Type: layer.Regular, Name: "a", Size: 2 << 20, Content: id, Segments: []layer.Segment{{ID: id, Length: 2 << 20}}},
		"content of hole": {Type: layer.Regular, Name: "a", Size: 4, Segments: []layer.Segment{{Length: 4}}},
		"xattr order":     {Type: layer.Directory, Name: "a", Xattrs: []toc.Xattr{{Name: "user.b"}, {Name: "user.a"}}},
		"xattr space":     {Type: layer.Directory, Name: "a", Xattrs: []toc.Xattr{{Name: "trusted.a"}}},
	} {
		if _, err := decodeList(encodeList(t, []layer.Entry{e})); !errors.Is(err, layer.ErrBadList) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzList(f *testing.F) {
	f.Add(encodeList(f, sampleList()))
	f.Add(encodeList(f, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := decodeList(b)
		if err != nil {
			return
		}
		again, err := decodeList(encodeList(t, list))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(list, again); d != "" {
			t.Fatal(d)
		}
	})
}

func BenchmarkList(b *testing.B) {
	const files = 84_000
	var list []layer.Entry
	for i := range files {
		id := segment.Sum(fmt.Append(nil, i))
		list = append(list, layer.Entry{
			Type: layer.Regular, Name: fmt.Sprintf("usr/share/directory%d/file%d", i/50, i), Mode: 0o644, Mtime: 1_700_000_000,
			Size: 1000, Content: id, Segments: []layer.Segment{{ID: id, Length: 1000}},
		})
	}
	encoded := encodeList(b, list)
	b.Run("write", func(b *testing.B) {
		b.ReportMetric(float64(len(encoded))/files, "B/file")
		for b.Loop() {
			encodeList(b, list)
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if _, err := decodeList(encoded); err != nil {
				b.Fatal(err)
			}
		}
	})
}
