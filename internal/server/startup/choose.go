package startup

import (
	"cmp"
	"slices"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// ranked is a run of pages and how soon the first of them is needed; the next
// one is needed 1 later.
type ranked struct {
	trace.Run
	at uint32
}

// clip returns the part of r from one page up to another.
func (r ranked) clip(first, end uint32) ranked {
	return ranked{trace.Run{Content: r.Content, First: first, Blocks: end - first}, r.at + first - r.First}
}

// span is a ranked run that belongs to something.
type span struct {
	ranked
	of int
}

// sweep cuts spans where any of them starts or ends, and calls fn for each piece
// with the spans that it is a part of, in the order of content and page.
func sweep(spans []span, fn func(piece trace.Run, of []span)) {
	slices.SortFunc(spans, func(a, b span) int {
		return cmp.Or(cmp.Compare(a.Content, b.Content), cmp.Compare(a.First, b.First), cmp.Compare(a.of, b.of))
	})
	var cuts []uint32
	var active []span
	for len(spans) > 0 {
		n := 1
		for n < len(spans) && spans[n].Content == spans[0].Content {
			n++
		}
		here := spans[:n]
		spans = spans[n:]
		cuts = cuts[:0]
		for _, s := range here {
			cuts = append(cuts, s.First, s.End())
		}
		slices.Sort(cuts)
		cuts = slices.Compact(cuts)
		active = active[:0]
		for i, first := range cuts[:len(cuts)-1] {
			active = slices.DeleteFunc(active, func(s span) bool { return s.End() <= first })
			for len(here) > 0 && here[0].First == first {
				active = append(active, here[0])
				here = here[1:]
			}
			if len(active) > 0 {
				fn(trace.Run{Content: active[0].Content, First: first, Blocks: cuts[i+1] - first}, active)
			}
		}
	}
}

// evidence is what is known about one service.
type evidence struct {
	recorded, reports []voter
	// inherited is the set of the same service of another version of the image.
	inherited []ranked
}

// voter is one trace.
type voter struct {
	*trace.Trace
	// weight of its vote: the traces of one client weigh as much as one.
	weight int
}

// share is what the traces of one client weigh; every number of traces up to 16
// divides it.
const share = 720720

// voters gives the traces their weights; clients are those that sent them.
func voters(traces []*trace.Trace, clients []string) []voter {
	count := map[string]int{}
	for _, c := range clients {
		count[c]++
	}
	out := make([]voter, len(traces))
	for i, t := range traces {
		out[i] = voter{t, share / count[clients[i]]}
	}
	return out
}

func total(list []voter) (n int) {
	for _, v := range list {
		n += v.weight
	}
	return n
}

// touching returns the weight of those that touched something of a content.
func touching(list []voter) map[uint32]int {
	out := map[uint32]int{}
	last := map[uint32]int{} // voter, from 1
	for i, v := range list {
		for _, r := range v.Touched {
			if last[r.Content] != i+1 {
				last[r.Content] = i + 1
				out[r.Content] += v.weight
			}
		}
	}
	return out
}

// What spans are of, in choose: which list, and which of its voters.
const (
	ofRecorded = iota
	ofReport
	ofUnused
	ofInherited
	kinds
)

// choose returns the startup set of a service in the order of need, and what
// else was touched, in that order. A page is in the set when
//
//   - a quarter or more of the recorded traces touched it: runs that somebody took are few and
//     good, and a page too few costs a round trip, one too many next to nothing; or
//   - half or more of the reports touched it; or
//   - it is inherited, and no more reports say that it was sent early for nothing
//     than touched it; or
//   - it is inherited, and few reports would change much (influence.go); or
//   - it lies among pages that some traces have and others have not, or is filled in for another reason (policy.go).
//
// Its place is the median of what the traces say, in pages touched before it:
// times depend on who measured them.
func (e *evidence) choose(t *toc.TOC) (set, late []ranked) {
	var spans []span
	add := func(list []voter, kind int) {
		for i, v := range list {
			at := uint32(0)
			for _, r := range v.Touched {
				spans = append(spans, span{ranked{r.Run, at}, kinds*i + kind})
				at += r.Blocks
			}
			if kind == ofReport {
				for _, r := range v.Unused {
					spans = append(spans, span{ranked{r, 0}, kinds*i + ofUnused})
				}
			}
		}
	}
	add(e.recorded, ofRecorded)
	add(e.reports, ofReport)
	for _, r := range e.inherited {
		spans = append(spans, span{r, ofInherited})
	}
	inRecorded, inReports := total(e.recorded), total(e.reports)
	// Who disagrees: reports of traced sets say nothing of what was in the page cache already.
	among := touching(e.recorded)
	if inRecorded == 0 {
		among = touching(e.reports)
	}
	few := newInfluence(e)
	var doubtful []ranked
	var places []uint32
	sweep(spans, func(piece trace.Run, of []span) {
		var recorded, reported, unused int
		inherited := false
		places = places[:0]
		for _, s := range of {
			at := s.clip(piece.First, piece.End()).at
			switch s.of % kinds {
			case ofRecorded:
				recorded += e.recorded[s.of/kinds].weight
			case ofReport:
				reported += e.reports[s.of/kinds].weight
			case ofUnused:
				unused += e.reports[s.of/kinds].weight
				continue
			case ofInherited:
				inherited = true
			}
			places = append(places, at)
		}
		if len(places) == 0 {
			return
		}
		slices.Sort(places)
		if i, _ := slices.BinarySearch(places, filledAt); i > 0 {
			places = places[:i] // it was filled in another version, and touched here
		}
		r := ranked{piece, places[len(places)/2]}
		switch {
		case recorded > 0 && 4*recorded >= inRecorded,
			reported > 0 && 2*reported >= inReports,
			inherited && unused <= reported:
			if inherited || recorded > 0 && 4*recorded >= inRecorded || few.settled {
				set = appendRanked(set, r)
			} else {
				few.add(r)
			}
			votes := recorded
			if inRecorded == 0 {
				votes = reported
			}
			if votes > 0 && votes < among[r.Content] {
				doubtful = append(doubtful, r)
			}
		case inherited && !(few.settled && 2*unused >= inReports):
			few.cut(r)
		case unused <= reported+recorded:
			late = appendRanked(late, r)
		}
	})
	set, late = few.apply(set, late)
	set, late = insert(set, advance(fill(set, doubtful, t), set), late)
	set, late = withoutHoles(set, t), withoutHoles(late, t)
	byNeed(set)
	byNeed(late)
	return set, late
}

// appendRanked appends r, which may continue the last run.
func appendRanked(list []ranked, r ranked) []ranked {
	if n := len(list); n > 0 {
		l := &list[n-1]
		if l.Content == r.Content && l.End() == r.First && l.at+l.Blocks == r.at {
			l.Blocks += r.Blocks
			return list
		}
	}
	return append(list, r)
}

func byNeed(list []ranked) {
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.Content, b.Content), cmp.Compare(a.First, b.First))
	})
}

// limit cuts a set at a number of bytes, and returns what had to go.
func limit(set []ranked, t *toc.TOC, most int64) (kept, rest []ranked) {
	for i, r := range set {
		_, n := r.Range(t.Contents[r.Content].Size)
		if n <= most {
			most -= n
			continue
		}
		kept, rest = set[:i:i], set[i:]
		if pages := uint32(most / trace.BlockSize); pages > 0 {
			kept = append(kept, r.clip(r.First, r.First+pages))
			rest = slices.Clone(rest)
			rest[0] = r.clip(r.First+pages, r.End())
		}
		return kept, rest
	}
	return set, nil
}

// withoutHoles takes out the pages that lie in holes.
func withoutHoles(list []ranked, t *toc.TOC) []ranked {
	var out []ranked
	for _, r := range list {
		c := &t.Contents[r.Content]
		next := r.First // the first page that is not decided yet
		segments := t.Segments[c.First : c.First+c.Segments]
		for i := 0; i < len(segments) && next < r.End(); i++ {
			if !segments[i].ID.IsHole() {
				continue
			}
			from := segments[i].Offset
			for i+1 < len(segments) && segments[i+1].ID.IsHole() {
				i++
			}
			to := segments[i].Offset + int64(segments[i].Length)
			first, end := trace.Pages(from), uint32(to/trace.BlockSize)
			if to == c.Size {
				end = trace.Pages(to)
			}
			first, end = max(first, next), min(end, r.End())
			if first >= end {
				continue
			}
			if first > next {
				out = append(out, r.clip(next, first))
			}
			next = end
		}
		if next < r.End() {
			out = append(out, r.clip(next, r.End()))
		}
	}
	return out
}

func bare(list []ranked) []trace.Run {
	out := make([]trace.Run, len(list))
	for i, r := range list {
		out[i] = r.Run
	}
	return out
}

func pages(list []ranked) (n int64) {
	for _, r := range list {
		n += int64(r.Blocks)
	}
	return n
}
