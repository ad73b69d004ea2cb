package dedup

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// ingested stores segments as those of a layer.
func ingested(t testing.TB, s *Store, layer digest.Digest, ids []segment.ID, bodies [][]byte) Stats {
	t.Helper()
	keep := s.Catalog.Keep()
	defer keep.Release()
	stats := publish(t, s, Options{Keep: keep, PackSize: 1 << 20}, ids, bodies)
	if err := s.Catalog.PutLayer(context.Background(), catalog.Layer{Blob: layer, Entries: "entries/x"}, keep.Packs()...); err != nil {
		t.Fatal(err)
	}
	return stats
}

// placesOf returns the places of a layer, of a Store that has read nothing yet.
func placesOf(t testing.TB, s *Store, layers ...digest.Digest) *Places {
	t.Helper()
	p, err := (&Store{Objects: s.Objects, Catalog: s.Catalog}).Places(context.Background(), layers, "")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// missing returns how many segments have no place, and checks that the others have the right one.
func missing(t testing.TB, s *Store, p *Places, ids []segment.ID) (n int) {
	t.Helper()
	places, err := p.Locate(context.Background(), ids)
	if err != nil {
		t.Fatal(err)
	}
	r := s.NewReader()
	for i, at := range places {
		if at.Frame == nil {
			n++
			continue
		}
		if b, err := r.Segment(context.Background(), at); err != nil || segment.Sum(b) != ids[i] {
			t.Fatalf("segment %d has other bytes, %v", i, err)
		}
	}
	return n
}

// A layer's segments are found in its packs, those that others stored before as well, and nobody else's are.
func TestPlaces(t *testing.T) {
	s := newStore(t)
	a, b := digest.FromString("a"), digest.FromString("b")
	ids, bodies := pieces(1, lengths(300, 5000)...)
	ingested(t, s, a, ids[:200], bodies[:200])
	if stats := ingested(t, s, b, ids[150:], bodies[150:]); stats.NewSegments != 100 {
		t.Errorf("%+v", stats)
	}
	for name, test := range map[string]struct {
		layers []digest.Digest
		ids    []segment.ID
		want   int
	}{
		"the first layer":       {[]digest.Digest{a}, ids[:200], 0},
		"the second layer":      {[]digest.Digest{b}, ids[150:], 0},
		"what it does not need": {[]digest.Digest{a}, ids[200:], 100},
		"both":                  {[]digest.Digest{a, b}, append(ids[100:], ids[:100]...), 0},
		"nobody's":              {[]digest.Digest{digest.FromString("c")}, ids[:3], 3},
		"holes and repetitions": {[]digest.Digest{a}, []segment.ID{ids[0], {}, ids[0]}, 1},
	} {
		if n := missing(t, s, placesOf(t, s, test.layers...), test.ids); n != test.want {
			t.Errorf("%s: %d segments have no place, want %d", name, n, test.want)
		}
	}
}

// What is damaged in one pack is found in another; a pack whose table is lost or damaged holds nothing; and one that cannot
// be read now is an error.
func TestPlacesOfDamage(t *testing.T) {
	ctx := context.Background()
	s := newStore(t)
	layer := digest.FromString("layer")
	ids, bodies := pieces(2, lengths(40, 5000)...)
	ingested(t, s, layer, ids, bodies)
	pack := keys(t, s)[0]
	if err := s.Catalog.Forget(ctx, []catalog.Resting{{Pack: pack, ID: ids[7]}}); err != nil {
		t.Fatal(err)
	}
	if n := missing(t, s, placesOf(t, s, layer), ids); n != 1 {
		t.Errorf("%d segments have no place when one is damaged", n)
	}
	// Another layer brings it again: the first one finds it there.
	if stats := ingested(t, s, digest.FromString("other"), ids[:10], bodies[:10]); stats.NewSegments != 1 {
		t.Errorf("%+v", stats)
	}
	if n := missing(t, s, placesOf(t, s, layer), ids); n != 0 {
		t.Errorf("%d segments have no place after one was stored again", n)
	}

	memory := s.Objects.(*objectstest.Memory)
	memory.Inject(func(_ int, _ objectstest.Op, key string) error {
		if key == pack {
			return errors.New("try again")
		}
		return nil
	})
	if _, err := placesOf(t, s, layer).Locate(ctx, ids); err == nil {
		t.Error("a pack that cannot be read now is as good as lost")
	}
	memory.Inject(nil)
	b, err := s.read(ctx, pack, 0, must(s.Objects.Stat(ctx, pack)))
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func(){
		"a flipped bit in its table": func() {
			c := append([]byte{}, b...)
			c[len(c)-trailerSize-5] ^= 1
			put(t, s, pack, c)
		},
		"cut": func() { put(t, s, pack, b[:len(b)-1]) },
		"lost": func() {
			if err := s.Objects.Delete(ctx, pack); err != nil {
				t.Fatal(err)
			}
		},
	} {
		damage()
		if n := missing(t, s, placesOf(t, s, layer), ids); n != len(ids)-1 {
			t.Errorf("%s: %d segments have no place", name, n)
		}
		fresh := &Store{Objects: s.Objects, Catalog: s.Catalog}
		keep := s.Catalog.Keep()
		if places, err := fresh.NewFinder(keep).Locate(ctx, ids[20:21]); err != nil || places[0].Frame != nil {
			t.Errorf("%s: a segment is found: %v", name, err)
		}
		keep.Release()
	}
}

// Two writers at once may both store a segment. Each layer has its own then, and compacting leaves one.
func TestStoredAtOnce(t *testing.T) {
	ctx := context.Background()
	s := newStore(t)
	ids, bodies := pieces(3, lengths(50, 5000)...)
	layers := []digest.Digest{digest.FromString("a"), digest.FromString("b")}
	var keeps []catalog.Keep
	var writers []*Writer
	for range layers {
		keep := s.Catalog.Keep()
		defer keep.Release()
		w := s.NewWriter(ctx, Options{Keep: keep})
		defer w.Close()
		add(t, w, ids, bodies)
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		keeps, writers = append(keeps, keep), append(writers, w)
	}
	var packs []catalog.PackUse
	for i, w := range writers {
		if err := w.Publish(); err != nil {
			t.Fatal(err)
		}
		if err := s.Catalog.PutLayer(ctx, catalog.Layer{Blob: layers[i], Entries: "entries/x"}, keeps[i].Packs()...); err != nil {
			t.Fatal(err)
		}
		if n := missing(t, s, placesOf(t, s, layers[i]), ids); n != 0 || len(keeps[i].Packs()) != 1 {
			t.Errorf("layer %d needs %d packs, and %d segments have no place", i, len(keeps[i].Packs()), n)
		}
		p, err := s.ReadPack(ctx, keeps[i].Packs()[0])
		if err != nil {
			t.Fatal(err)
		}
		packs = append(packs, catalog.PackUse{Key: p.Key, Size: p.Size, Frames: p.Frames})
	}
	if packs[0].Key == packs[1].Key {
		t.Fatal("they stored it once: the test shows nothing")
	}
	by, err := s.Compact(ctx, packs, func(int, segment.ID) bool { return true }, func(context.Context, int) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range by.Frames {
		n += len(f.Segments)
	}
	if n != len(ids) {
		t.Errorf("%d segments are left of %d", n, len(ids))
	}
}

// When hooks are few, most duplicates of what was stored together are found all the same.
func TestFewHooks(t *testing.T) {
	s := newStore(t)
	s.Catalog = fewHooks{s.Catalog}
	ids, bodies := pieces(4, lengths(4000, 1500)...)
	ingested(t, s, digest.FromString("old"), ids[:3600], bodies[:3600])
	stats := ingested(t, s, digest.FromString("new"), ids[400:], bodies[400:])
	if stats.NewSegments < 400 || stats.NewSegments > 400+3600/8 {
		t.Errorf("of 3600 segments 3200 were there, and %d were stored", stats.NewSegments)
	}
	if n := missing(t, s, placesOf(t, s, digest.FromString("new")), ids[400:]); n != 0 {
		t.Errorf("%d segments have no place", n)
	}
}

// fewHooks finds packs by one segment of 128.
type fewHooks struct{ catalog.Dedup }

func (f fewHooks) Keep() catalog.Keep { return fewFound{f.Dedup.Keep()} }

type fewFound struct{ catalog.Keep }

func (f fewFound) Find(ctx context.Context, ids []segment.ID) (catalog.Packs, error) {
	var hooks []segment.ID
	for _, id := range ids {
		if id[7]&127 == 0 {
			hooks = append(hooks, id)
		}
	}
	return f.Keep.Find(ctx, hooks)
}

func TestTable(t *testing.T) {
	s := newStore(t)
	ids, bodies := pieces(5, append(lengths(2000, 900), 200_000, 300_000)...)
	publish(t, s, Options{}, ids, bodies)
	table, err := s.Table(context.Background(), keys(t, s)[0])
	if err != nil {
		t.Fatal(err)
	}
	for i, id := range ids {
		at, ok := table.Find(id)
		if !ok || at.Frame.Segments[at.Index].ID != id || int(at.Frame.Segments[at.Index].Length) != len(bodies[i]) {
			t.Fatalf("segment %d: %+v, %v", i, at, ok)
		}
	}
	for i := range 2000 {
		if _, ok := table.Find(segment.Sum(fmt.Append(nil, i))); ok {
			t.Fatal("a segment is found that is not there")
		}
	}
}
