package restore_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/restore"
)

// Whether what is restored is right, for layers of all kinds, is shown where they are ingested.

// ingested returns a store with one layer of the files given.
func ingested(t *testing.T, files ...string) (*dedup.Store, catalog.Layer) {
	t.Helper()
	c, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "catalog"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	memory := objectstest.NewMemory()
	var l lt.Layer
	for i, f := range files {
		l = append(l, lt.File(string(rune('a'+i)), 0o644, f))
	}
	b := l.Gzip(t)
	put(t, memory, catalog.BlobKey(b.Digest), b.Bytes)
	g := &ingest.Ingester{Objects: memory, Catalog: c}
	defer g.Close()
	row, err := g.Layer(t.Context(), ingest.Descriptor{Digest: b.Digest})
	if err != nil {
		t.Fatal(err)
	}
	return &dedup.Store{Objects: memory, Catalog: c}, row
}

func put(t *testing.T, memory *objectstest.Memory, key string, b []byte) {
	t.Helper()
	w, err := memory.Create(context.Background(), key)
	if err == nil {
		_, err = w.Write(b)
	}
	if err == nil {
		err = w.Commit()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestContents(t *testing.T) {
	large := strings.Repeat("0123456789abcdef", 200_000)
	zeros := string(make([]byte, 1000))
	store, row := ingested(t, "one", "", zeros, "two", large, "one")
	contents, err := restore.Open(t.Context(), store, row, func(n int64) bool { return n != 2 })
	if err != nil {
		t.Fatal(err)
	}
	defer contents.Close()
	segments := store.NewReader()
	got := map[int64]string{}
	last := int64(-1)
	for {
		p, err := contents.Next(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if p.Content < last || p.Offset != int64(len(got[p.Content])) {
			t.Errorf("content %d at %d after content %d with %d bytes", p.Content, p.Offset, last, len(got[last]))
		}
		last = p.Content
		b := make([]byte, p.Length)
		if p.Place.Frame != nil {
			if b, err = segments.Segment(t.Context(), p.Place); err != nil || segment.Sum(b) != p.ID {
				t.Fatalf("content %d: other bytes, %v", p.Content, err)
			}
		} else if !p.ID.IsHole() {
			t.Errorf("content %d: segment %s has no place", p.Content, p.ID)
		}
		got[p.Content] += string(b)
	}
	if d := cmp.Diff(map[int64]string{0: "one", 1: zeros, 3: large, 4: "one"}, got); d != "" {
		t.Error(d)
	}
}

// relist gives a layer another entry list.
func relist(t *testing.T, store *dedup.Store, row catalog.Layer, change func(e *layer.Entry) bool) {
	t.Helper()
	object, err := store.Objects.Open(t.Context(), row.Entries, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	if err != nil {
		t.Fatal(err)
	}
	defer list.Close()
	var out bytes.Buffer
	w, err := layer.NewListWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	for {
		e, err := list.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if change(e) {
			if err := w.Write(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	put(t, store.Objects.(*objectstest.Memory), row.Entries, out.Bytes())
}

func readTar(t *testing.T, store *dedup.Store, row catalog.Layer) error {
	t.Helper()
	r, err := restore.OpenTar(t.Context(), store, row)
	if err != nil {
		return err
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	if err == nil && n != row.Size {
		t.Errorf("%d bytes, want %d", n, row.Size)
	}
	return err
}

// TestListOfAnotherLayer: recipe and entry list that do not go together are found out.
func TestListOfAnotherLayer(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(e *layer.Entry) bool
		want   string
	}{
		"the same": {func(*layer.Entry) bool { return true }, ""},
		"a content is shorter": {func(e *layer.Entry) bool {
			if e.Name == "b" {
				e.Size, e.Segments[0] = 2, layer.Segment{Length: 2}
			}
			return true
		}, "content 1 ends at byte 2, 3 more are wanted"},
		"the last content is missing": {func(e *layer.Entry) bool { return e.Name != "c" }, "content 2 ends at byte 0"},
		"a segment has another length": {func(e *layer.Entry) bool {
			if e.Name == "c" {
				e.Size, e.Segments[0].Length = 600, 600
			}
			return true
		}, "has 500 bytes, its entry list says 600"},
	} {
		store, row := ingested(t, "first", "secnd", strings.Repeat("third", 100))
		relist(t, store, row, tc.change)
		err := readTar(t, store, row)
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

func TestMissingSegments(t *testing.T) {
	store, row := ingested(t, "first", "second")
	packs, err := store.Catalog.PacksOf(t.Context(), []digest.Digest{row.Blob}, "")
	if err != nil || len(packs.Keys) != 1 {
		t.Fatalf("%+v, %v", packs, err)
	}
	if err := store.Catalog.Forget(t.Context(), []catalog.Resting{{Pack: packs.Keys[0], ID: segment.Sum([]byte("second"))}}); err != nil {
		t.Fatal(err)
	}
	if err := readTar(t, store, row); !errors.Is(err, restore.ErrMissing) {
		t.Errorf("got %v", err)
	}
}
