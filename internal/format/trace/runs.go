package trace

import (
	"cmp"
	"slices"
	"sort"
)

// Merge returns the pages of runs as the fewest runs there can be, in the order
// of content and page. runs is not changed.
func Merge(runs []Run) []Run {
	sorted := slices.Clone(runs)
	slices.SortFunc(sorted, func(a, b Run) int {
		return cmp.Or(cmp.Compare(a.Content, b.Content), cmp.Compare(a.First, b.First))
	})
	out := sorted[:0]
	for _, r := range sorted {
		if n := len(out); n > 0 && out[n-1].Content == r.Content && out[n-1].End() >= r.First {
			out[n-1].Blocks = max(out[n-1].End(), r.End()) - out[n-1].First
			continue
		}
		out = append(out, r)
	}
	return out
}

// Contains reports whether all pages of r are in runs, which Merge returned.
func Contains(runs []Run, r Run) bool {
	i := sort.Search(len(runs), func(i int) bool {
		return runs[i].Content > r.Content || runs[i].Content == r.Content && runs[i].End() > r.First
	})
	return i < len(runs) && runs[i].Content == r.Content && runs[i].First <= r.First && runs[i].End() >= r.End()
}
