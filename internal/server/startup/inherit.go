package startup

import (
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// heir carries pages over from one version of an image to another: by content,
// and for a content that is gone, by path, to what is there now.
type heir struct {
	from, to *toc.TOC
	byID     map[[32]byte]uint32 // contents of to
	place    []int64             // by content of from: the content of to, or one of these
}

const (
	unknown = -1
	nowhere = -2
)

// differsWildly reports whether a file has another size than before by so much
// that its pages are not likely to be used alike.
func differsWildly(before, now int64) bool { return now > 2*before || before > 2*now }

func newHeir(from, to *toc.TOC) *heir {
	h := &heir{from: from, to: to, byID: make(map[[32]byte]uint32, len(to.Contents)), place: make([]int64, len(from.Contents))}
	for i := range to.Contents {
		h.byID[to.Contents[i].ID] = uint32(i)
	}
	for i := range h.place {
		h.place[i] = unknown
	}
	return h
}

// carry returns what of lists, which are page runs of from, is there in to, list
// by list, in the order of need.
func (h *heir) carry(lists ...[]ranked) [][]ranked {
	var gone []uint32
	for _, list := range lists {
		for _, r := range list {
			if h.place[r.Content] != unknown {
				continue
			}
			h.place[r.Content] = nowhere
			if c, ok := h.byID[h.from.Contents[r.Content].ID]; ok {
				h.place[r.Content] = int64(c)
			} else {
				gone = append(gone, r.Content)
			}
		}
	}
	h.byPath(gone)
	out := make([][]ranked, len(lists))
	for i, list := range lists {
		for _, r := range list {
			c := h.place[r.Content]
			if c < 0 {
				continue
			}
			pages := trace.Pages(h.to.Contents[c].Size)
			if r.First >= pages {
				continue
			}
			r = r.clip(r.First, min(r.End(), pages))
			r.Content = uint32(c)
			out[i] = append(out[i], r)
		}
		out[i] = distinct(out[i])
	}
	return out
}

// byPath finds contents of from by their names, those of symlinks to them too: a
// library's own name often has its version in it.
func (h *heir) byPath(gone []uint32) {
	if len(gone) == 0 {
		return
	}
	wanted := make(map[uint32]bool, len(gone))
	for _, c := range gone {
		wanted[c] = true
	}
	h.from.Walk(func(path string, inode int) {
		n := &h.from.Inodes[inode]
		if n.IsSymlink() {
			target, ok := h.from.Resolve(path)
			if !ok {
				return
			}
			n = &h.from.Inodes[target]
		}
		if !n.IsRegular() || n.Content < 0 || !wanted[uint32(n.Content)] {
			return
		}
		i, ok := h.to.Resolve(path)
		if !ok {
			return
		}
		now := &h.to.Inodes[i]
		if now.IsRegular() && now.Content >= 0 && !differsWildly(n.Size, now.Size) {
			h.place[n.Content] = int64(now.Content)
			delete(wanted, uint32(n.Content))
		}
	})
}

// distinct keeps the first need of each page: two contents may have become one.
func distinct(list []ranked) []ranked {
	spans := make([]span, len(list))
	for i, r := range list {
		spans[i] = span{r, i}
	}
	var out []ranked
	sweep(spans, func(piece trace.Run, of []span) {
		at := of[0].clip(piece.First, piece.End()).at
		for _, s := range of[1:] {
			at = min(at, s.clip(piece.First, piece.End()).at)
		}
		out = appendRanked(out, ranked{piece, at})
	})
	byNeed(out)
	return out
}
