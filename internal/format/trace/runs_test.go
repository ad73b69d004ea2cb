package trace_test

import (
	"testing"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/trace"
)

func TestMergeAndContains(t *testing.T) {
	run := rapid.Custom(func(t *rapid.T) trace.Run {
		return trace.Run{
			Content: rapid.Uint32Range(0, 2).Draw(t, "content"), First: rapid.Uint32Range(0, 20).Draw(t, "first"), Blocks: rapid.Uint32Range(1, 9).Draw(t, "blocks"),
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		runs := rapid.SliceOfN(run, 0, 12).Draw(t, "runs")
		pages := map[trace.Run]bool{}
		for _, r := range runs {
			for n := r.First; n < r.End(); n++ {
				pages[trace.Run{Content: r.Content, First: n, Blocks: 1}] = true
			}
		}
		merged := trace.Merge(runs)
		left := len(pages)
		for i, r := range merged {
			left -= int(r.Blocks)
			for n := r.First; n < r.End(); n++ {
				if !pages[trace.Run{Content: r.Content, First: n, Blocks: 1}] {
					t.Fatalf("%v has page %d, which is in none of %v", r, n, runs)
				}
			}
			if i == 0 {
				continue
			}
			if b := merged[i-1]; b.Content > r.Content || b.Content == r.Content && b.End() >= r.First {
				t.Fatalf("%v does not follow %v, or belongs to it", r, b)
			}
		}
		if left != 0 {
			t.Fatalf("%d pages are missing or twice", left)
		}
		r := run.Draw(t, "r")
		want := true
		for n := r.First; n < r.End(); n++ {
			want = want && pages[trace.Run{Content: r.Content, First: n, Blocks: 1}]
		}
		if got := trace.Contains(merged, r); got != want {
			t.Fatalf("%v in %v: %v, want %v", r, merged, got, want)
		}
	})
}
