package dedup

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// TestReader reads segments of more frames than a Reader keeps, in any order.
func TestReader(t *testing.T) {
	s := newStore(t)
	ctx := context.Background()
	var ids []segment.ID
	var bodies [][]byte
	for i := range uint64(30) { // packs of a frame each
		a, b := pieces(i, 1000, 1+int(i), 70_000)
		publish(t, s, Options{}, a, b)
		ids, bodies = append(ids, a...), append(bodies, b...)
	}
	places := locate(t, s, ids)
	r, random := s.NewReader(), rand.New(rand.NewPCG(1, 1))
	recent := 0
	for n := range 3000 {
		i := random.IntN(len(ids))
		if n%3 > 0 { // often one of those that were read lately
			i = max(0, min(len(ids)-1, recent+random.IntN(20)-10))
		}
		recent = i
		b, err := r.Segment(ctx, places[i])
		if err != nil || !bytes.Equal(b, bodies[i]) {
			t.Fatalf("read %d: segment %d has other bytes, %v", n, i, err)
		}
	}
	if len(r.kept) != keptFrames {
		t.Errorf("%d frames are kept", len(r.kept))
	}
}

// TestReaderReadsFramesOnce: small segments in their order cost one read a frame, also where those of
// other frames are between them.
func TestReaderReadsFramesOnce(t *testing.T) {
	memory := objectstest.NewMemory()
	s := &Store{Objects: memory, Catalog: newCatalog(t)}
	ctx := context.Background()
	ids, bodies := pieces(1, lengths(40, 1000)...)
	publish(t, s, Options{}, ids[:20], bodies[:20])
	publish(t, s, Options{}, ids[20:], bodies[20:])
	places := locate(t, s, ids)
	reads := 0
	memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpOpen && strings.HasPrefix(key, prefix) {
			reads++
		}
		return nil
	})
	r := s.NewReader()
	for i := range 20 {
		for _, p := range []int{i, 20 + i} {
			if b, err := r.Segment(ctx, places[p]); err != nil || !bytes.Equal(b, bodies[p]) {
				t.Fatalf("segment %d: %v", p, err)
			}
		}
	}
	if reads != 2 {
		t.Errorf("%d reads of two frames", reads)
	}
}

func TestReaderOfDamage(t *testing.T) {
	s := newStore(t)
	ctx := context.Background()
	ids, bodies := pieces(1, 50_000, 50_000)
	publish(t, s, Options{}, ids, bodies)
	places := locate(t, s, ids)
	key := places[0].Frame.Pack
	b, err := s.read(ctx, key, 0, must(s.Objects.Stat(ctx, key)))
	if err != nil {
		t.Fatal(err)
	}
	for i := len(b) / 4; i < len(b)/2; i++ {
		b[i] ^= 0x55
	}
	put(t, s, key, b)
	r := s.NewReader()
	for range 2 { // it is not kept as if it were right
		if _, err := r.Segment(ctx, places[1]); !errors.Is(err, segment.ErrCorrupt) {
			t.Errorf("damaged: %v", err)
		}
	}
	if err := s.Objects.Delete(ctx, key); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Segment(ctx, places[0]); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("lost: %v", err)
	}
}
