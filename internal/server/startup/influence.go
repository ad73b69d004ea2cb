package startup

import (
	"cmp"
	"slices"
)

// influence is what few reports would change of a set that is known from traces, or from
// another version of the image. A start that was none, such as of a container that only
// sleeps under the service's name, or one report that names every page there is, must not
// change it much. What little changes with a version they teach at once.
type influence struct {
	// settled: there is nothing to change, or enough clients have reported for the votes alone
	// to decide.
	settled        bool
	added, dropped []ranked
	inherited      int64 // pages
}

func newInfluence(e *evidence) *influence {
	return &influence{
		settled:   len(e.recorded)+len(e.inherited) == 0 || total(e.reports) >= quorum*share,
		inherited: pages(e.inherited),
	}
}

// add notes what only reports have.
func (f *influence) add(r ranked) { f.added = appendRanked(f.added, r) }

// cut notes what is inherited, and was not used by more reports than used it, who are few, or
// the fewer.
func (f *influence) cut(r ranked) { f.dropped = appendRanked(f.dropped, r) }

// apply adds to a set what few may add, the pages that are needed first, and puts back what
// they may not take away.
func (f *influence) apply(set, late []ranked) (newSet, newLate []ranked) {
	if n := pages(f.dropped); n > max(cutLeast, f.inherited/cutShare) {
		set = append(set, f.dropped...)
	}
	left := max(growLeast, pages(set))
	byNeed(f.added)
	for _, r := range f.added {
		if left < int64(r.Blocks) {
			late = append(late, r.clip(r.First+uint32(left), r.End()))
			r = r.clip(r.First, r.First+uint32(left))
		}
		if left -= int64(r.Blocks); r.Blocks > 0 {
			set = append(set, r)
		}
	}
	return byPlace(set), byPlace(late)
}

// byPlace sorts by content and page, and joins what lies together.
func byPlace(list []ranked) (out []ranked) {
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(a.Content, b.Content), cmp.Compare(a.First, b.First))
	})
	for _, r := range list {
		out = appendRanked(out, r)
	}
	return out
}
