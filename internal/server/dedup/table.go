package dedup

import (
	"bytes"
	"cmp"
	"context"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/cache"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Table is the table of a pack, in memory: some 40 bytes for each segment.
type Table struct {
	catalog.Pack
	segments []catalog.FrameSegment // of all frames, which share it
	first    []uint32               // by frame, into segments
	order    []uint32               // into segments, by ID; of equal ones the first
}

func newTable(p catalog.Pack) *Table {
	t := &Table{Pack: p}
	n := 0
	for i := range p.Frames {
		n += len(p.Frames[i].Segments)
	}
	t.segments = make([]catalog.FrameSegment, 0, n)
	for i := range p.Frames {
		from := len(t.segments)
		t.first = append(t.first, uint32(from))
		t.segments = append(t.segments, p.Frames[i].Segments...)
		p.Frames[i].Segments = t.segments[from:len(t.segments):len(t.segments)]
	}
	t.order = make([]uint32, n)
	for i := range t.order {
		t.order[i] = uint32(i)
	}
	compare := func(a, b uint32) int { return bytes.Compare(t.segments[a].ID[:], t.segments[b].ID[:]) }
	slices.SortFunc(t.order, func(a, b uint32) int { return cmp.Or(compare(a, b), cmp.Compare(a, b)) })
	t.order = slices.CompactFunc(t.order, func(a, b uint32) bool { return compare(a, b) == 0 })
	return t
}

// Find returns where in the pack a segment is.
func (t *Table) Find(id segment.ID) (catalog.Location, bool) {
	i, ok := slices.BinarySearchFunc(t.order, id, func(n uint32, id segment.ID) int { return bytes.Compare(t.segments[n].ID[:], id[:]) })
	if !ok {
		return catalog.Location{}, false
	}
	n := t.order[i]
	f, exact := slices.BinarySearch(t.first, n)
	if !exact {
		f--
	}
	return catalog.Location{Frame: &t.Frames[f], Index: int(n - t.first[f])}, true
}

// memory is about how many bytes a table takes.
func (t *Table) memory() int64 {
	return int64(len(t.segments)*40+len(t.Frames)*68) + 256
}

// TableMemory bounds the tables of packs that are kept in memory, bytes: those of some 12 GiB of packs.
const TableMemory = 64 << 20

// Tables keeps tables of packs in memory. Packs do not change, so it never has to forget one.
type Tables struct{ kept *cache.Cache[*Table] }

// NewTables returns one that is empty, and keeps so many bytes.
func NewTables(limit int64) *Tables { return &Tables{cache.New(limit, (*Table).memory)} }

// Close ends what is being read for it.
func (t *Tables) Close() error {
	t.kept.Close()
	return nil
}

// Table returns the table of a pack. Errors: ErrBadPack, objects.ErrNotFound.
func (s *Store) Table(ctx context.Context, key string) (*Table, error) {
	s.once.Do(func() {
		if s.Tables == nil {
			s.Tables = NewTables(TableMemory)
		}
	})
	return s.Tables.kept.Get(ctx, key, func(ctx context.Context) (*Table, error) {
		p, err := s.ReadPack(ctx, key)
		if err != nil {
			return nil, err
		}
		return newTable(p), nil
	})
}
