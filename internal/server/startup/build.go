package startup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/bits"
	"slices"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

const (
	// readBytes is how many bytes of pages are in memory at once while a store
	// is built. The packs are read once for each batch.
	readBytes = 64 << 20
	// maxLate bounds the runs that are kept for the order of a service.
	maxLate = 1 << 15
)

// planned is a service whose set has been chosen.
type planned struct {
	Service
	set []ranked // by need
}

// lay puts the pages of services into frames: those that the same services have
// are together, in the order of need, and none is twice. Services get the frames
// they have, in the order in which they need them first; the common set, what
// half or more of the services have.
func lay(services []planned, t *toc.TOC) *Store {
	l := layout{t: t, s: &Store{ChainID: t.ChainID}, needs: make([][]need, len(services))}
	classes := classify(services)
	order := slices.SortedFunc(maps.Keys(classes), func(a, b class) int {
		return cmp.Or(cmp.Compare(bits.OnesCount64(b.of), bits.OnesCount64(a.of)), cmp.Compare(a.of, b.of), cmp.Compare(a.filled, b.filled))
	})
	for _, in := range order {
		list := classes[in]
		sortPieces(list, t)
		l.frames(in, list)
	}
	for i, v := range services {
		v.Frames, v.Filled = sorted(l.needs[i]), 0
		for _, n := range l.needs[i] {
			if n.at >= filledAt {
				v.Filled++
			}
		}
		l.s.Services = append(l.s.Services, v.Service)
	}
	l.s.Common = sorted(l.common)
	return l.s
}

// piece is pages that the same services have, and when each of these needs them.
type piece struct {
	ranked // at: the soonest
	needs  []uint32
}

// class is of pages that the same services have, and for the same of them are filled in: a bit each.
type class struct{ of, filled uint64 }

// classify cuts the sets of services into pieces.
func classify(services []planned) map[class][]piece {
	var spans []span
	for i, v := range services {
		for _, r := range v.set {
			spans = append(spans, span{r, i})
		}
	}
	classes := map[class][]piece{}
	sweep(spans, func(r trace.Run, of []span) {
		var in class
		p := piece{ranked: ranked{Run: r}, needs: make([]uint32, len(of))}
		slices.SortFunc(of, func(a, b span) int { return cmp.Compare(a.of, b.of) })
		for i, v := range of {
			in.of |= 1 << v.of
			if p.needs[i] = v.clip(r.First, r.End()).at; p.needs[i] >= filledAt {
				in.filled |= 1 << v.of
			}
		}
		p.at = slices.Min(p.needs)
		classes[in] = append(classes[in], p)
	})
	return classes
}

// sortPieces puts the pieces of a class in the order in which they are laid: that of need,
// and in what is needed late, within a batch, that of their places.
func sortPieces(list []piece, t *toc.TOC) {
	byPlace := func(a, b piece) int { return cmp.Or(cmp.Compare(a.Content, b.Content), cmp.Compare(a.First, b.First)) }
	slices.SortFunc(list, func(a, b piece) int { return cmp.Or(cmp.Compare(a.at, b.at), byPlace(a, b)) })
	for from, at := 0, int64(0); from < len(list); {
		end, next := from, at
		for ; end < len(list) && (next < batchFrom || next-at < at/batchShare); end++ {
			_, n := list[end].Range(t.Contents[list[end].Content].Size)
			next += n
		}
		if at >= batchFrom {
			slices.SortFunc(list[from:end], byPlace)
		}
		from, at = end, next
	}
}

// need is when a service needs a frame.
type need struct{ frame, at uint32 }

// sorted returns frames in the order of need.
func sorted(list []need) []uint32 {
	slices.SortStableFunc(list, func(a, b need) int { return cmp.Compare(a.at, b.at) })
	out := make([]uint32, len(list))
	for i, n := range list {
		out[i] = n.frame
	}
	return out
}

// layout is a store that is being laid out.
type layout struct {
	t      *toc.TOC
	s      *Store
	needs  [][]need // of each service
	common []need
}

// frames cuts the pieces of a class into frames.
func (l *layout) frames(in class, list []piece) {
	filled := in.of == in.filled // by all
	var open []trace.Run
	var first []uint32 // by service of the mask
	raw, gone := int64(0), int64(0)
	closeFrame := func() {
		if len(open) == 0 {
			return
		}
		f := uint32(len(l.s.Frames))
		merged := open
		if !filled {
			merged = trace.Merge(open)
		}
		l.s.Frames = append(l.s.Frames, Frame{Raw: uint32(raw), First: uint32(len(l.s.Runs)), Count: uint32(len(merged))})
		l.s.Runs = append(l.s.Runs, merged...)
		rest := in.of
		for _, at := range first {
			i := bits.TrailingZeros64(rest)
			rest &= rest - 1
			l.needs[i] = append(l.needs[i], need{f, at})
		}
		if 2*bits.OnesCount64(in.of&^in.filled) >= len(l.needs) {
			l.common = append(l.common, need{f, slices.Min(first)})
		}
		open, first, raw, gone = open[:0], nil, 0, gone+raw
	}
	for _, p := range list {
		for from := p.First; from < p.End(); {
			target := int64(frameTarget)
			switch {
			case filled:
				target = filledTarget
			case gone >= batchFrom:
				target = batchTarget
			}
			room := uint32((target - raw) / trace.BlockSize)
			if filled {
				room = min(room, filledRun-from%filledRun)
			}
			if room == 0 {
				closeFrame()
				continue
			}
			part := p.clip(from, min(p.End(), from+room))
			if first == nil {
				first = slices.Repeat([]uint32{^uint32(0)}, len(p.needs))
			}
			for i, at := range p.needs {
				first[i] = min(first[i], at+from-p.First)
			}
			_, n := part.Range(l.t.Contents[p.Content].Size)
			open, raw, from = append(open, part.Run), raw+n, part.End()
		}
	}
	closeFrame()
}

// write reads the pages of a store that was laid out from the packs, verified,
// and writes the object; it sets the frames' places and the runs' digests.
func (s *Store) write(ctx context.Context, store objects.Store, key string, t *toc.TOC, contents *planner.Contents) (err error) {
	w, err := store.Create(ctx, key)
	if err != nil {
		return fmt.Errorf("write startup pages %s: %w", key, err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write startup pages %s: %w", key, err)
		}
		err = errors.Join(err, w.Close())
	}()
	if _, err := w.Write([]byte(magic)); err != nil {
		return err
	}
	s.Digests = make([]segment.ID, len(s.Runs))
	offset := int64(len(magic))
	var encoded []byte
	for first := 0; first < len(s.Frames); {
		end, raw := first, int64(0)
		for ; end < len(s.Frames) && (end == first || raw+int64(s.Frames[end].Raw) <= readBytes); end++ {
			raw += int64(s.Frames[end].Raw)
		}
		batch := s.Frames[first:end]
		last := batch[len(batch)-1]
		runs := s.Runs[batch[0].First : last.First+last.Count]
		pages, err := readRuns(ctx, contents, t, runs)
		if err != nil {
			return err
		}
		for i := range batch {
			f := &batch[i]
			body := pages[:f.Raw]
			pages = pages[f.Raw:]
			rest := body
			for k, r := range s.Runs[f.First : f.First+f.Count] {
				_, n := r.Range(t.Contents[r.Content].Size)
				s.Digests[int(f.First)+k] = segment.Sum(rest[:n])
				rest = rest[n:]
			}
			if encoded, err = segment.AppendFrame(encoded[:0], segment.Zstd, body); err != nil {
				return err
			}
			f.Offset, f.Length, f.Sum = offset, uint32(len(encoded)), crc32.Checksum(encoded, castagnoli)
			offset += int64(f.Length)
			if _, err := w.Write(encoded); err != nil {
				return err
			}
		}
		first = end
	}
	index := s.encode(t)
	if _, err := w.Write(index); err != nil {
		return err
	}
	s.bytes = offset + int64(len(index))
	return w.Commit()
}

// readRuns returns the bytes of runs, one after the other, read from the packs
// in the order in which they rest there.
func readRuns(ctx context.Context, contents *planner.Contents, t *toc.TOC, runs []trace.Run) ([]byte, error) {
	type part struct {
		segment uint32
		from    uint32 // byte of the segment
		n       uint32
		to      int64 // place in the result
	}
	var parts []part
	all := int64(0)
	for _, r := range runs {
		c := &t.Contents[r.Content]
		off, n := r.Range(c.Size)
		list := t.Segments[c.First : c.First+c.Segments]
		i, _ := slices.BinarySearchFunc(list, off+1, func(g toc.Segment, off int64) int {
			return cmp.Compare(g.Offset+int64(g.Length), off)
		})
		for end := off + n; off < end; i++ {
			from := off - list[i].Offset
			take := min(int64(list[i].Length)-from, end-off)
			if !list[i].ID.IsHole() {
				parts = append(parts, part{c.First + uint32(i), uint32(from), uint32(take), all})
			}
			off += take
			all += take
		}
	}
	out := make([]byte, all)
	slices.SortFunc(parts, func(a, b part) int {
		return cmp.Or(cmp.Compare(contents.Place(a.segment), contents.Place(b.segment)), cmp.Compare(a.segment, b.segment), cmp.Compare(a.from, b.from))
	})
	for _, p := range parts {
		b, err := contents.Segment(ctx, p.segment)
		if err != nil {
			return nil, err
		}
		copy(out[p.to:], b[p.from:p.from+p.n])
	}
	return out, nil
}
