package startup

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/cache"
	"hydrofoil.dev/foil/internal/server/planner"
)

// heir carries pages over from one version of an image to another: by content,
// and for a content that is gone, by path, to where its bytes are in what is
// there now.
type heir struct {
	from, to  *planner.Contents
	aligned   *cache.Cache[alignment] // by the IDs of both contents
	log       *slog.Logger
	byID      map[[32]byte]uint32  // contents of to
	place     []int64              // by content of from: the content of to, or one of these
	alignment map[uint32]alignment // of contents of from that have another one as their place
}

const (
	unknown = -1
	nowhere = -2
)

const (
	// alignMost is how many bytes of contents, old and new, are read for one version to inherit
	// from another; of what does not fit in only the segments tell what became of
	// it. A core compares some 100 MB a second.
	alignMost = 1 << 30
	// alignMemory bounds the alignments that are kept, bytes: a version inherits
	// again whenever something is reported.
	alignMemory = 16 << 20
	// sliver is how many bytes of what was on a page do not make it need another one.
	sliver = 2 * alignSlack
	// stretch is how many pages one page may become, since there are tables
	// without any anchors; where more was put in, its ends count.
	stretch = 256
	// growth is how many times as large as the set before an inherited one may
	// be. Nine pairs of versions had 0.99 to 1.25.
	growth = 2
)

// differsWildly reports whether a file has another size than before by so much
// that its pages are not likely to be used alike.
func differsWildly(before, now int64) bool { return now > 2*before || before > 2*now }

func newHeir(from, to *planner.Contents, aligned *cache.Cache[alignment], log *slog.Logger) *heir {
	h := &heir{from: from, to: to, aligned: aligned, log: log, byID: make(map[[32]byte]uint32, len(to.TOC.Contents)),
		place: make([]int64, len(from.TOC.Contents)), alignment: map[uint32]alignment{}}
	for i := range to.TOC.Contents {
		h.byID[to.TOC.Contents[i].ID] = uint32(i)
	}
	for i := range h.place {
		h.place[i] = unknown
	}
	return h
}

// carry returns what of a set and of what was touched besides, page runs of from,
// is there in to, in the order of need. Pages of contents that differ are in late
// as well: what is missing is near them. The error is that of ctx.
func (h *heir) carry(ctx context.Context, set, late []ranked) (newSet, newLate []ranked, err error) {
	var gone []uint32
	for _, list := range [][]ranked{set, late} {
		for _, r := range list {
			if h.place[r.Content] != unknown {
				continue
			}
			h.place[r.Content] = nowhere
			if c, ok := h.byID[h.from.TOC.Contents[r.Content].ID]; ok {
				h.place[r.Content] = int64(c)
			} else {
				gone = append(gone, r.Content)
			}
		}
	}
	h.byPath(gone)
	h.byName(gone)
	if err := h.align(ctx, gone); err != nil {
		return nil, nil, err
	}
	newSet, newLate = h.mapped(set), h.mapped(late)
	newSet, rest := limit(newSet, h.to.TOC, growth*pages(set)*trace.BlockSize)
	var differ []ranked
	for _, r := range set {
		if h.alignment[r.Content] != nil {
			differ = append(differ, r)
		}
	}
	return newSet, slices.Concat(rest, h.mapped(differ), newLate), nil
}

// mapped returns where pages are in to.
func (h *heir) mapped(list []ranked) []ranked {
	var out []ranked
	for _, r := range list {
		c := h.place[r.Content]
		if c < 0 {
			continue
		}
		a, now := h.alignment[r.Content], uint32(c)
		if a == nil {
			r.Content = now
			out = append(out, r)
			continue
		}
		before, pages := h.from.TOC.Contents[r.Content].Size, trace.Pages(h.to.TOC.Contents[now].Size)
		add := func(first, end, at uint32) {
			out = append(out, ranked{trace.Run{Content: now, First: first, Blocks: end - first}, at})
		}
		for p := r.First; p < r.End(); p++ {
			at := r.at + p - r.First
			start := int64(p) * trace.BlockSize
			stop := min(start+trace.BlockSize, before)
			first := uint32((a.at(start) + sliver) / trace.BlockSize)
			end := min(max(trace.Pages(a.at(stop)-sliver), first+1), pages)
			if stop == before {
				end = pages
			}
			switch {
			case first >= end:
			case end-first > stretch:
				add(first, first+stretch/2, at)
				add(end-stretch/2, end, at)
			default:
				add(first, end, at)
			}
		}
	}
	return distinct(out)
}

// align compares contents of from that are gone with those in their place, in the
// order in which they rest. The error is that of ctx: of what cannot be read,
// pages are where they were, in proportion.
func (h *heir) align(ctx context.Context, gone []uint32) error {
	first := func(c uint32) uint64 { return h.from.Place(h.from.TOC.Contents[c].First) }
	slices.SortFunc(gone, func(a, b uint32) int { return cmp.Compare(first(a), first(b)) })
	left := int64(alignMost)
	for _, c := range gone {
		if h.place[c] < 0 {
			continue
		}
		now := uint32(h.place[c])
		x, y := &h.from.TOC.Contents[c], &h.to.TOC.Contents[now]
		read := x.Size+y.Size <= left
		if read {
			left -= x.Size + y.Size
		}
		a, err := h.aligned.Get(ctx, string(x.ID[:])+string(y.ID[:]), func(context.Context) (alignment, error) {
			return align(ctx, h.from, h.to, c, now, read)
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			h.log.Warn("startup sets: two versions of a file cannot be compared", "before", x.ID, "now", y.ID, "error", err)
			a = match(nil, nil, x.Size, y.Size)
		}
		h.alignment[c] = a
	}
	return nil
}

// byPath finds contents of from by their names, those of symlinks to them too: a
// library's own name often has its version in it.
func (h *heir) byPath(gone []uint32) {
	from, to := h.from.TOC, h.to.TOC
	wanted := h.lost(gone)
	if len(wanted) == 0 {
		return
	}
	from.Walk(func(path string, inode int) {
		n := &from.Inodes[inode]
		if n.IsSymlink() {
			target, ok := from.Resolve(path)
			if !ok {
				return
			}
			n = &from.Inodes[target]
		}
		if !n.IsRegular() || n.Content < 0 || !wanted[uint32(n.Content)] {
			return
		}
		i, ok := to.Resolve(path)
		if !ok {
			return
		}
		now := &to.Inodes[i]
		if now.IsRegular() && now.Content >= 0 && !differsWildly(n.Size, now.Size) {
			h.place[n.Content] = int64(now.Content)
			delete(wanted, uint32(n.Content))
		}
	})
}

// byName finds contents of from whose names differ from those of new files in
// their versions only.
func (h *heir) byName(gone []uint32) {
	from, to := h.from.TOC, h.to.TOC
	wanted := h.lost(gone)
	if len(wanted) == 0 {
		return
	}
	type file struct {
		path    string
		content int32
		size    int64
	}
	left := map[string][]file{} // by versionless path
	from.Walk(func(path string, inode int) {
		if n := &from.Inodes[inode]; n.IsRegular() && n.Content >= 0 && wanted[uint32(n.Content)] {
			name := versionless(path)
			left[name] = append(left[name], file{path, n.Content, n.Size})
		}
	})
	alike := map[uint32]int{} // by content of from: how much the name of its place is like its own
	to.Walk(func(path string, inode int) {
		n := &to.Inodes[inode]
		if !n.IsRegular() || n.Content < 0 {
			return
		}
		list := left[versionless(path)]
		if len(list) == 0 {
			return
		}
		if _, ok := from.Lookup(path); ok {
			return // it is what that became
		}
		for _, f := range list {
			c := uint32(f.content)
			if like := 1 + likeness(f.path, path); like > alike[c] && !differsWildly(f.size, n.Size) {
				alike[c], h.place[c] = like, int64(n.Content)
			}
		}
	})
}

// lost returns those of contents that have no place.
func (h *heir) lost(gone []uint32) map[uint32]bool {
	wanted := map[uint32]bool{}
	for _, c := range gone {
		if h.place[c] == nowhere {
			wanted[c] = true
		}
	}
	return wanted
}

// versionless returns a path without what is likely to change from one version to
// the next: numbers, with dots in between, and hashes, which are words of at
// least six hexadecimal digits, or of sixteen letters and digits, with
// a digit in them.
func versionless(path string) string {
	var out strings.Builder
	number := func() {
		if s := out.String(); !strings.HasSuffix(s, "#") {
			out.WriteByte('#')
		}
	}
	isDigit := func(c byte) bool { return '0' <= c && c <= '9' }
	for i := 0; i < len(path); {
		end, digits, hex := i, false, true
		for ; end < len(path); end++ {
			c := path[end]
			switch {
			case isDigit(c):
				digits = true
				continue
			case 'a' <= c && c <= 'f':
				continue
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z':
				hex = false
				continue
			}
			break
		}
		word := path[i:end]
		switch {
		case word == "":
			// A dot between numbers belongs to them.
			if path[i] != '.' || i == 0 || !isDigit(path[i-1]) || i+1 == len(path) || !isDigit(path[i+1]) {
				out.WriteByte(path[i])
			}
			end = i + 1
		case digits && (len(word) >= 16 || hex && len(word) >= 6):
			number()
		default:
			for k := range len(word) {
				if isDigit(word[k]) {
					number()
				} else {
					out.WriteByte(word[k])
				}
			}
		}
		i = end
	}
	return out.String()
}

// likeness returns how many bytes two names have in common at their beginning and at their end.
func likeness(a, b string) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	a, b = a[n:], b[n:]
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
		n++
	}
	return n
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
