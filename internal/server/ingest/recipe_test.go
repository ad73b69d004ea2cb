package ingest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/restore"
)

// tarOf makes the tar stream of a layer again, from what is stored of it.
func tarOf(g *ingest.Ingester, row catalog.Layer) ([]byte, recipe.End, error) {
	r, err := restore.OpenTar(context.Background(), &dedup.Store{Objects: g.Objects, Catalog: g.Catalog}, row)
	if err != nil {
		return nil, recipe.End{}, err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return b, r.End(), err
}

type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
	Errorf(string, ...any)
}

// wantTar holds that the recipe of a layer gives its diff ID, and is as its row says.
func wantTar(t fataler, s *server, row catalog.Layer) recipe.End {
	t.Helper()
	if row.Recipe.Key == "" {
		t.Fatal("no recipe")
	}
	b, end, err := tarOf(s.Ingester, row)
	if err != nil {
		t.Fatal(err)
	}
	if digest.FromBytes(b) != row.DiffID || int64(len(b)) != row.Size || end.DiffID != row.DiffID {
		t.Errorf("%d bytes of %s, want %d of %s; end %+v", len(b), digest.FromBytes(b), row.Size, row.DiffID, end)
	}
	r, err := s.Objects.Open(context.Background(), row.Recipe.Key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	encoded, err := io.ReadAll(r)
	if err != nil || int64(len(encoded)) != row.Recipe.Size || digest.FromBytes(encoded) != row.Recipe.Digest {
		t.Errorf("recipe of %d bytes, %v; its row says %+v", len(encoded), err, row.Recipe)
	}
	return end
}

// drawLayer draws a tar stream of all kinds of entries that a layer may have.
func drawLayer(t *rapid.T, tb testing.TB) []byte {
	var out []byte
	var names []string
	data := func() string {
		var data string
		for range rapid.IntRange(0, 3).Draw(t, "parts") {
			size := rapid.SampledFrom([]int{1, 1000, segment.HoleLength, segment.MinLength, segment.MaxLength}).Draw(t, "size") + rapid.IntRange(-1, 1).Draw(t, "more")
			if rapid.Bool().Draw(t, "zeros") {
				data += string(make([]byte, size))
			} else {
				data += noise(rapid.Uint64Range(0, 5).Draw(t, "seed"), size)
			}
		}
		return data
	}
	for i := range rapid.IntRange(0, 6).Draw(t, "entries") {
		name := fmt.Sprint(rapid.StringMatching(`[a-z]{1,3}/[a-z]{0,120}`).Draw(t, "name"), i)
		var l lt.Layer
		switch rapid.IntRange(0, 5).Draw(t, "kind") {
		case 0:
			l = lt.Layer{lt.Dir(name, 0o755)}
		case 1:
			if len(names) > 0 {
				l = lt.Layer{lt.Link(name, rapid.SampledFrom(names).Draw(t, "target"))}
			}
		case 2:
			l = lt.Layer{lt.Symlink(name, "../x"), lt.Whiteout(name + "w")}
		case 3:
			var list []lt.Fragment
			at := int64(0)
			for range rapid.IntRange(0, 25).Draw(t, "fragments") {
				at += rapid.Int64Range(1, 300_000).Draw(t, "hole")
				list = append(list, lt.Fragment{Offset: at, Data: noise(uint64(at), rapid.IntRange(1, 2000).Draw(t, "length"))})
				at += int64(len(list[len(list)-1].Data))
			}
			out = append(out, lt.Sparse(rapid.SampledFrom(lt.SparseKinds).Draw(t, "sparse"), fmt.Sprint("s", i), at+1000, list...)...)
			continue
		default:
			f := lt.File(name, 0o644, data())
			if rapid.Bool().Draw(t, "xattr") {
				f = f.Xattr("user.x", noise(1, 700))
			}
			l = lt.Layer{f}
			names = append(names, name)
		}
		b := l.TarBytes(tb)
		out = append(out, b[:len(b)-1024]...)
	}
	return append(out, make([]byte, rapid.SampledFrom([]int{0, 512, 1024, 10240, 100_000}).Draw(t, "end"))...)
}

// TestTarIsMadeAgain: what is stored of a layer gives its tar stream, whatever is in it.
func TestTarIsMadeAgain(t *testing.T) {
	s := newServer(t)
	rapid.Check(t, func(rt *rapid.T) {
		stream := drawLayer(rt, t)
		var blob lt.Blob
		switch rapid.IntRange(0, 2).Draw(rt, "format") {
		case 0:
			blob = lt.TarBlob(stream)
		case 1:
			blob = lt.GzipBlob(t, stream, rapid.IntRange(0, len(stream)).Draw(rt, "cut"))
		default:
			blob = lt.ZstdBlob(t, stream)
		}
		row, err := s.Layer(context.Background(), push(t, s.memory, blob))
		if err != nil {
			rt.Fatal(err)
		}
		end := wantTar(rt, s, row)
		if plain := blob.Digest == blob.DiffID; plain != (end.Compression == recipe.Plain) {
			rt.Errorf("compression %d, plain %v", end.Compression, plain)
		}
	})
}

// old makes a layer one that was ingested before there were recipes.
func old(t testing.TB, s *server, row catalog.Layer) catalog.Layer {
	t.Helper()
	if err := s.Objects.Delete(context.Background(), row.Recipe.Key); err != nil {
		t.Fatal(err)
	}
	row.Recipe = catalog.Recipe{}
	if err := s.Catalog.PutLayer(context.Background(), row); err != nil {
		t.Fatal(err)
	}
	return row
}

// oldLayers ingests n layers without recipes.
func oldLayers(t testing.TB, s *server, n int) (layers []ingest.Descriptor) {
	t.Helper()
	for i := range n {
		l := lt.Layer{lt.Dir("d", 0o755), lt.File("a", 0o644, noise(uint64(i), 300_000)), lt.File("b", 0o644, "small")}
		d := push(t, s.memory, l.Gzip(t))
		row, err := s.Layer(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		old(t, s, row)
		layers = append(layers, d)
	}
	return layers
}

func TestRecipeOnDemand(t *testing.T) {
	s := newServer(t)
	d := oldLayers(t, s, 1)[0]
	var opened atomic.Int32
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpOpen && strings.HasPrefix(key, "blobs/") {
			opened.Add(1)
			time.Sleep(20 * time.Millisecond) // let the others come
		}
		return nil
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			row, err := s.Recipe(context.Background(), d)
			if err != nil || row.Recipe.Key == "" {
				t.Errorf("%+v, %v", row, err)
			}
		})
	}
	wg.Wait()
	row, err := s.Recipe(context.Background(), d)
	if err != nil {
		t.Fatal(err)
	}
	wantTar(t, s, row)
	if opened.Load() != 1 {
		t.Errorf("the blob was read %d times", opened.Load())
	}
	// A layer that nobody has seen is ingested, and has one.
	d = push(t, s.memory, lt.Layer{lt.File("new", 0o644, "x")}.Gzip(t))
	if row, err = s.Recipe(context.Background(), d); err != nil {
		t.Fatal(err)
	}
	wantTar(t, s, row)
}

// TestRecipeOfAnotherList: numbers that another parser gave are not those of the recipe.
func TestRecipeOfAnotherList(t *testing.T) {
	s := newServer(t)
	d := oldLayers(t, s, 2)
	other, err := s.Layer(context.Background(), push(t, s.memory, lt.Layer{lt.File("other", 0o644, "x")}.Gzip(t)))
	if err != nil {
		t.Fatal(err)
	}
	first, err := s.Layer(context.Background(), d[0])
	if err != nil {
		t.Fatal(err)
	}
	put(t, s.memory, first.Entries, get(t, s.memory, other.Entries))
	if _, err := s.Recipe(context.Background(), d[0]); err == nil || !strings.Contains(err.Error(), "entry list") {
		t.Errorf("a recipe was made: %v", err)
	}
	var failures []digest.Digest
	err = s.MakeRecipes(context.Background(), s.memory, func(blob digest.Digest, _ error) { failures = append(failures, blob) })
	if err != nil || len(failures) != 1 || failures[0] != d[0].Digest {
		t.Errorf("failed %v, %v", failures, err)
	}
	row, err := s.Layer(context.Background(), d[1])
	if err != nil {
		t.Fatal(err)
	}
	wantTar(t, s, row)
}

func TestRecipesInTheBackground(t *testing.T) {
	s := newServer(t)
	layers := oldLayers(t, s, 5)
	// It is ended after the second, and goes on where it was.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var made atomic.Int32
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpCommit && strings.HasPrefix(key, "recipes/") && made.Add(1) == 2 {
			cancel()
		}
		return nil
	})
	failed := func(blob digest.Digest, err error) { t.Errorf("%s: %v", blob, err) }
	if err := s.MakeRecipes(ctx, s.memory, failed); !errors.Is(err, context.Canceled) {
		t.Errorf("ended: %v", err)
	}
	if err := s.MakeRecipes(context.Background(), s.memory, failed); err != nil {
		t.Fatal(err)
	}
	if n := made.Load(); n < 5 || n > 6 { // the second may not have been told to the catalog
		t.Errorf("%d recipes were made", n)
	}
	for _, d := range layers {
		row, err := s.Layer(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		wantTar(t, s, row)
	}
	// Blobs that are not here are left alone.
	row, err := s.Layer(context.Background(), layers[0])
	if err != nil {
		t.Fatal(err)
	}
	old(t, s, row)
	if err := s.Objects.Delete(context.Background(), catalog.BlobKey(row.Blob)); err != nil {
		t.Fatal(err)
	}
	if err := s.MakeRecipes(context.Background(), s.memory, failed); err != nil {
		t.Error(err)
	}
}

// TestDamagedContents: a tar stream that is not the layer's is never taken for it.
func TestDamagedContents(t *testing.T) {
	s := newServer(t)
	l := lt.Layer{lt.File("a", 0o644, noise(1, 2<<20)), lt.File("b", 0o644, "small")}
	row, err := s.Layer(context.Background(), push(t, s.memory, l.Gzip(t)))
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for _, prefix := range []string{"packs/", "recipes/", "entries/"} {
		for _, key := range added(t, s.memory) {
			if !strings.HasPrefix(key, prefix) {
				continue
			}
			whole := get(t, s.memory, key)
			for range 20 {
				b := bytes.Clone(whole)
				b[r.IntN(len(b))] ^= 1 << r.IntN(8)
				put(t, s.memory, key, b[:len(b)-r.IntN(2)])
				got, _, err := tarOf(s.Ingester, row)
				if int64(len(got)) > row.Size {
					t.Errorf("%s: %d bytes of %d, %v", key, len(got), row.Size, err)
				}
			}
			put(t, s.memory, key, whole)
		}
	}
	wantTar(t, s, row)
}
