package startup

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// oneFile is a table of contents with a file of so many pages.
func oneFile(pages int64) *toc.TOC {
	return &toc.TOC{Contents: []toc.Content{{Size: pages * trace.BlockSize}}}
}

func at(first, blocks, at uint32) ranked {
	return ranked{trace.Run{First: first, Blocks: blocks}, at}
}

func TestFill(t *testing.T) {
	certain := at(0, 400, 0) // makes the set large enough for what is filled in
	for name, c := range map[string]struct {
		doubtful []ranked
		also     []ranked // in the set
		want     []ranked
	}{
		"nothing": {},
		"two runs are no table": {
			doubtful: []ranked{at(1000, 1, 7), at(1010, 1, 9)},
		},
		"neighbours are one run": {
			doubtful: []ranked{at(1000, 1, 7), at(1001, 1, 9), at(1010, 1, 9)},
		},
		"a table, and its ends": {
			doubtful: []ranked{at(1000, 1, 30), at(1004, 1, 10), at(1010, 2, 20)},
			want:     []ranked{at(992, 8, 30), at(1001, 3, 10), at(1005, 5, 10), at(1012, 8, 20)},
		},
		"what others have already": {
			doubtful: []ranked{at(1000, 1, 1), at(1004, 1, 1), at(1010, 2, 1)},
			also:     []ranked{at(990, 9, 0), at(1001, 3, 0), at(1012, 100, 0)},
			want:     []ranked{at(992, 8, 1), at(1005, 5, 1)},
		},
		"far apart": {
			doubtful: []ranked{at(1000, 1, 1), at(1129, 1, 1), at(1258, 1, 1), at(1387, 1, 1)},
			want:     []ranked{at(872, 128, 1)},
		},
		"too far apart": {
			doubtful: []ranked{at(1000, 1, 1), at(1130, 1, 1), at(1260, 1, 1), at(1390, 1, 1)},
		},
		"where the file ends": {
			doubtful: []ranked{at(1990, 1, 1), at(1995, 1, 1), at(1998, 1, 1)},
			want:     []ranked{at(1984, 6, 1), at(1991, 4, 1), at(1996, 2, 1), at(1999, 1, 1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			set := slices.Concat([]ranked{certain}, c.doubtful, c.also)
			inOrder(set)
			got := fill(set, c.doubtful, oneFile(2000))
			inOrder(got)
			for i := range got {
				if got[i].at < filledAt {
					t.Errorf("%v is needed before pages that were touched", got[i])
				}
				got[i].at -= filledAt
			}
			if name == "far apart" {
				// As many as half of the set, the nearest first.
				if n := pages(got); n > pages(set)/2 || n < pages(set)/2-fillGap {
					t.Errorf("%d pages are filled into %d", n, pages(set))
				}
				return
			}
			if d := cmp.Diff(c.want, got, cmp.AllowUnexported(ranked{}), cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(want, got):\n%s", d)
			}
		})
	}
}

// Files that are nearly whole in a set get the rest.
func TestFillRest(t *testing.T) {
	files := &toc.TOC{Contents: []toc.Content{{Size: 40*trace.BlockSize - 5}, {Size: 40 * trace.BlockSize}, {Size: 400 * trace.BlockSize}, {Size: 7}}}
	in := func(content, first, blocks, at uint32) ranked {
		return ranked{trace.Run{Content: content, First: first, Blocks: blocks}, at}
	}
	set := []ranked{
		in(0, 2, 20, 5), in(0, 25, 10, 9), // 30 of 40
		in(1, 0, 29, 1),   // of 40: too few
		in(2, 0, 335, 20), // 65 lack: too many
		in(3, 0, 1, 30),   // all of it
	}
	want := []ranked{in(0, 0, 2, filledAt+5), in(0, 22, 3, filledAt+5), in(0, 35, 5, filledAt+9)}
	got := fill(set, nil, files)
	inOrder(got)
	if d := cmp.Diff(want, got, cmp.AllowUnexported(ranked{})); d != "" {
		t.Errorf("(want, got):\n%s", d)
	}
	if got := fill(set[:3], nil, files); len(got) != len(want) {
		t.Errorf("without the last file: %v", got)
	}
}

// Few filled pages that are needed early come with those around them, many or late ones after all.
func TestAdvance(t *testing.T) {
	in := func(content, first, blocks, at uint32) ranked {
		return ranked{trace.Run{Content: content, First: first, Blocks: blocks}, at}
	}
	set := []ranked{in(0, 10, 1, 5), in(0, 20, 1, 7), in(1, 0, 998, 8)}
	for name, c := range map[string]struct{ filled, want []ranked }{
		"nothing":                 {},
		"few, early":              {[]ranked{in(0, 11, 9, filledAt+5), in(0, 21, 2, filledAt+7)}, []ranked{in(0, 11, 9, 5), in(0, 21, 2, 7)}},
		"few, and nothing later":  {[]ranked{in(0, 11, 9, filledAt+990)}, []ranked{in(0, 11, 9, filledAt+990)}},
		"more than a twentieth":   {[]ranked{in(0, 21, 51, filledAt+7)}, []ranked{in(0, 21, 51, filledAt+7)}},
		"one file's, not another": {[]ranked{in(2, 0, 30, filledAt+7), in(0, 21, 21, filledAt+7)}, []ranked{in(2, 0, 30, filledAt+7), in(0, 21, 21, 7)}},
		"what is in the set":      {[]ranked{in(1, 0, 998, filledAt+7)}, []ranked{in(1, 0, 998, 7)}},
	} {
		if d := cmp.Diff(c.want, advance(c.filled, set), cmp.AllowUnexported(ranked{}), cmpopts.EquateEmpty()); d != "" {
			t.Errorf("%s (want, got):\n%s", name, d)
		}
	}
}

// inOrder sorts runs by content and page.
func inOrder(list []ranked) {
	slices.SortFunc(list, func(a, b ranked) int {
		return int(a.Content)*1e6 + int(a.First) - int(b.Content)*1e6 - int(b.First)
	})
}

// Traces that disagree about a table have what lies between filled in, those that agree nothing,
// nor what a single client's reports name.
func TestChooseFills(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	libc, app := m.run(t, "/usr/lib/libc.so.6", 0, 0), m.run(t, "/usr/bin/app", 0, 0)
	in := func(pages ...uint32) (out []trace.Run) {
		out = append(out, app)
		for _, p := range pages {
			out = append(out, trace.Run{Content: libc.Content, First: p, Blocks: 1})
		}
		return out
	}
	kind := func(kind trace.Kind, touched ...[]trace.Run) (list []*trace.Trace) {
		for _, r := range touched {
			list = append(list, m.trace(kind, nil, r, nil))
		}
		return list
	}
	a, b, c := in(100, 104, 108), in(102, 104, 110), in()
	table := append(in(), trace.Run{Content: libc.Content, First: 95, Blocks: 20})
	for name, e := range map[string]struct {
		recorded, reports []*trace.Trace
		clients           []string // of reports
		set               []trace.Run
	}{
		"one trace":              {recorded: kind(trace.Recorded, a), set: a},
		"two that are alike":     {recorded: kind(trace.Recorded, a, a), set: a},
		"two that differ":        {recorded: kind(trace.Recorded, a, b), set: table},
		"one reads another file": {recorded: kind(trace.Recorded, a, c), set: a},
		"reports that differ":    {reports: kind(trace.Reported, a, b), clients: []string{"a", "b"}, set: table},
		"reports of one among many": {
			reports: kind(trace.Reported, a, b, c, c, c), clients: []string{"a", "a", "b", "c", "d"}, set: in(),
		},
		// They lack what was in the page cache before it was asked for.
		"reports beside traces": {
			recorded: kind(trace.Recorded, a, a), reports: kind(trace.Reported, in(100), in(104)), clients: []string{"a", "b"}, set: a,
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := evidence{recorded: voters(e.recorded, make([]string, len(e.recorded))), reports: voters(e.reports, e.clients)}
			set, late := v.choose(m.TOC)
			got := trace.Merge(bare(set))
			if name == "two that differ" || name == "reports that differ" {
				for _, p := range trace.Merge(table) {
					if p.Content == libc.Content {
						p.First, p.Blocks = 100, 11 // its ends are TestFill's matter
					}
					if !trace.Contains(got, p) {
						t.Errorf("%v is not in the set %v", p, got)
					}
				}
			} else if d := cmp.Diff(trace.Merge(e.set), got); d != "" {
				t.Errorf("pages (want, got):\n%s", d)
			}
			for _, r := range late {
				if trace.Contains(got, r.Run) {
					t.Errorf("%v is in the set, and late", r)
				}
			}
		})
	}
}

// Whatever traces say: a set has at most half as many pages again, each once, and all that
// was chosen.
func TestFillProperty(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	rapid.Check(t, func(rt *rapid.T) {
		var set, doubtful, late []ranked
		for c := range m.Contents {
			size := trace.Pages(m.Contents[c].Size)
			for next := uint32(0); next < size; {
				next += rapid.Uint32Range(0, 200).Draw(rt, "gap")
				n := rapid.Uint32Range(1, 20).Draw(rt, "blocks")
				if next+n > size {
					break
				}
				r := ranked{trace.Run{Content: uint32(c), First: next, Blocks: n}, rapid.Uint32Range(0, 1000).Draw(rt, "at")}
				next += n
				switch rapid.IntRange(0, 2).Draw(rt, "kind") {
				case 0:
					late = append(late, r)
					continue
				case 1:
					doubtful = append(doubtful, r)
				}
				set = append(set, r)
			}
		}
		filled := fill(set, doubtful, m.TOC)
		more, rest := insert(set, filled, late)
		if err := trace.Check(bare(more), m.TOC); err != nil {
			rt.Fatal(err)
		}
		merged := trace.Merge(bare(more))
		for _, r := range set {
			if !trace.Contains(merged, r.Run) {
				rt.Fatalf("%v has gone", r)
			}
		}
		n := int64(0)
		for _, r := range merged {
			n += int64(r.Blocks)
		}
		if n != pages(more) {
			rt.Fatalf("%d pages, %d different ones", pages(more), n)
		}
		if n > pages(set)+pages(set)/fillShare {
			rt.Fatalf("%d pages of %d", n, pages(set))
		}
		if all := trace.Merge(slices.Concat(bare(more), bare(rest))); len(late) > 0 {
			for _, r := range late {
				if !trace.Contains(all, r.Run) {
					rt.Fatalf("late: %v has gone", r)
				}
			}
		}
		for _, r := range rest {
			if lacking(more, r.Run) != r.Blocks {
				rt.Fatalf("%v is late and in the set", r)
			}
		}
	})
}
