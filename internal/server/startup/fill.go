package startup

import (
	"cmp"
	"slices"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// gap is a run of pages that may be filled in.
type gap struct {
	ranked
	lacks uint32 // how many of them are not in the set
}

// fill returns the pages to be filled into a set, needed from filledAt on. doubtful are the runs of it that some traces have
// and others have not. Both are in the order of content and page. Short gaps go first.
func fill(set, doubtful []ranked, t *toc.TOC) []ranked {
	var gaps []gap
	for _, find := range fillers {
		gaps = append(gaps, find(set, doubtful, t)...)
	}
	slices.SortStableFunc(gaps, func(a, b gap) int { return cmp.Compare(a.lacks, b.lacks) })
	left := pages(set) / fillShare
	var out []ranked
	for _, g := range gaps {
		if left -= int64(g.lacks); left < 0 {
			break
		}
		out = append(out, g.ranked)
	}
	return out
}

// tables returns what a set lacks of the tables in which traces disagree, and of as much at both
// ends as a table is likely to go on.
func tables(set, doubtful []ranked, t *toc.TOC) (gaps []gap) {
	for len(doubtful) > 0 {
		table := doubtful[:1]
		runs, between := 1, uint32(0)
		for _, r := range doubtful[1:] {
			last := table[len(table)-1]
			if r.Content != last.Content || r.First-last.End() > fillGap {
				break
			}
			if r.First > last.End() {
				runs, between = runs+1, between+r.First-last.End()
			}
			table = doubtful[:len(table)+1]
		}
		doubtful = doubtful[len(table):]
		if runs < fillRuns {
			continue
		}
		content := table[0].Content
		add := func(first, end, at uint32) {
			r := trace.Run{Content: content, First: first, Blocks: end - first}
			if n := lacking(set, r); n > 0 {
				gaps = append(gaps, gap{ranked{r, filledAt + at%filledAt}, n})
			}
		}
		// Twice the mean gap.
		beyond := min(2*between/uint32(runs-1), fillGap)
		first, last := table[0], table[len(table)-1]
		add(first.First-min(first.First, beyond), first.First, first.at)
		for i, r := range table[1:] {
			add(table[i].End(), r.First, min(table[i].at, r.at))
		}
		add(last.End(), min(last.End()+beyond, trace.Pages(t.Contents[content].Size)), last.at)
	}
	return gaps
}

// advance has the filled pages of some files come with the pages around them: of files of which half of
// what is in the set after them is more than they are.
func advance(filled, set []ranked) []ranked {
	type file struct {
		content uint32
		pages   int64
		at      uint32 // of the first that is needed
	}
	var files []file
	for _, r := range filled {
		i := slices.IndexFunc(files, func(f file) bool { return f.content == r.Content })
		if i < 0 {
			i = len(files)
			files = append(files, file{r.Content, 0, r.at - filledAt})
		}
		files[i].pages += int64(lacking(set, r.Run))
		files[i].at = min(files[i].at, r.at-filledAt)
	}
	slices.SortStableFunc(files, func(a, b file) int { return cmp.Compare(a.pages, b.pages) })
	all := pages(set)
	left := all / advanceShare
	for _, f := range files {
		if 2*f.pages > all-int64(f.at) {
			continue
		}
		if left -= f.pages; left < 0 {
			break
		}
		for i := range filled {
			if filled[i].Content == f.content {
				filled[i].at -= filledAt
			}
		}
	}
	return filled
}

// remainders returns what a set lacks of the files that are nearly whole in it.
func remainders(set, _ []ranked, t *toc.TOC) (gaps []gap) {
	for len(set) > 0 {
		n := slices.IndexFunc(set, func(r ranked) bool { return r.Content != set[0].Content })
		if n < 0 {
			n = len(set)
		}
		file := set[:n]
		set = set[n:]
		content := file[0].Content
		all := trace.Pages(t.Contents[content].Size)
		touched := pages(file)
		if rest := int64(all) - touched; rest <= 0 || rest > remainderMost || rest*remainderShare > touched {
			continue
		}
		end, at := uint32(0), file[0].at
		add := func(until uint32) {
			if until > end {
				gaps = append(gaps, gap{ranked{trace.Run{Content: content, First: end, Blocks: until - end}, filledAt + at%filledAt}, until - end})
			}
		}
		for _, r := range file {
			add(r.First)
			end, at = r.End(), r.at
		}
		add(all)
	}
	return gaps
}

// lacking returns how many pages of r are not in set, which is in the order of content and page.
func lacking(set []ranked, r trace.Run) uint32 {
	n := r.Blocks
	i, _ := slices.BinarySearchFunc(set, r, func(s ranked, r trace.Run) int {
		if c := cmp.Compare(s.Content, r.Content); c != 0 {
			return c
		}
		return cmp.Compare(s.End(), r.First+1)
	})
	for ; i < len(set) && set[i].Content == r.Content && set[i].First < r.End(); i++ {
		n -= min(set[i].End(), r.End()) - max(set[i].First, r.First)
	}
	return n
}

// insert puts filled pages into a set, and takes them out of late. All are in the order of
// content and page afterwards.
func insert(set, filled, late []ranked) (newSet, newLate []ranked) {
	if len(filled) == 0 {
		return set, late
	}
	const ofLate = 2
	var spans []span
	for of, list := range [][]ranked{set, filled, late} {
		for _, r := range list {
			spans = append(spans, span{r, of})
		}
	}
	sweep(spans, func(piece trace.Run, of []span) {
		first := slices.MinFunc(of, func(a, b span) int { return cmp.Compare(a.of, b.of) })
		if r := first.clip(piece.First, piece.End()); first.of == ofLate {
			newLate = appendRanked(newLate, r)
		} else {
			newSet = appendRanked(newSet, r)
		}
	})
	return newSet, newLate
}
