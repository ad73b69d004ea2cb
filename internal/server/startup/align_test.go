package startup

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// aligned aligns two contents of one segment each.
func aligned(t interface{ Fatalf(string, ...any) }, from, to []byte) alignment {
	spacing := spacingOf(int64(max(len(from), len(to))))
	a := match(appendAnchors(nil, from, 0, spacing), appendAnchors(nil, to, 0, spacing), int64(len(from)), int64(len(to)))
	if a[0] != (point{}) || len(from) > 0 && len(to) > 0 && a[len(a)-1] != (point{int64(len(from)), int64(len(to))}) {
		t.Fatalf("ends %v, %v", a[0], a[len(a)-1])
	}
	for i := 1; i < len(a); i++ {
		if a[i].from <= a[i-1].from || a[i].to <= a[i-1].to {
			t.Fatalf("point %v after %v", a[i], a[i-1])
		}
	}
	last := int64(0)
	for off := int64(0); off <= int64(len(from)); off += 1 + int64(len(from))/1000 {
		at := a.at(off)
		if at < last || at > int64(len(to)) {
			t.Fatalf("%d is at %d of %d, after %d", off, at, len(to), last)
		}
		last = at
	}
	return a
}

// What was cut out, put in and overwritten moves the rest, and no more.
func TestAlign(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const part = 6_000
		var from, to strings.Builder
		type kept struct{ from, to int64 }
		var all []kept
		for i := range rapid.IntRange(1, 5).Draw(t, "parts") {
			all = append(all, kept{int64(from.Len()), int64(to.Len())})
			same := text(uint64(100+i), part)
			from.WriteString(same)
			to.WriteString(same)
			from.WriteString(text(uint64(200+i), rapid.IntRange(0, 3000).Draw(t, "old")))
			to.WriteString(text(uint64(300+i), rapid.IntRange(0, 3000).Draw(t, "new")))
		}
		a := aligned(t, []byte(from.String()), []byte(to.String()))
		for _, k := range all {
			// Anchors are a few dozen bytes apart, seldom hundreds.
			for _, off := range []int64{1000, part / 2, part - 1000} {
				if d := a.at(k.from+off) - (k.to + off); d < -2*alignSlack || d > 2*alignSlack {
					t.Fatalf("byte %d of %v is %d bytes off: %v", off, k, d, a)
				}
			}
		}
	})
}

func TestAlignTable(t *testing.T) {
	// All entries of a table differ, and there are more of them.
	var from, to bytes.Buffer
	for i := range 4000 {
		from.WriteString(text(uint64(1000+i), 8))
	}
	for i := range 5000 {
		to.WriteString(text(uint64(9000+i), 8))
	}
	head, tail := text(1, 8000), text(2, 8000)
	a := aligned(t, []byte(head+from.String()+tail), []byte(head+to.String()+tail))
	for in, want := range map[int64]int64{4000: 4000, 8000 + 16000: 8000 + 20000, 8000 + 32000 + 4000: 8000 + 40000 + 4000} {
		if got := a.at(in); got < want-600 || got > want+600 {
			t.Errorf("%d is at %d, want about %d", in, got, want)
		}
	}
}

// Bytes can be made to have an anchor everywhere.
func TestAnchorsAreBounded(t *testing.T) {
	list := appendAnchors(make([]anchor, anchorsMost), make([]byte, 1000), 0, 0)
	if len(list) != anchorsMost {
		t.Errorf("%d anchors", len(list))
	}
	same := bytes.Repeat([]byte{7}, 1<<20)
	if a := aligned(t, same, same[:1<<19]); len(a) != 2 {
		t.Errorf("anchors in bytes that are all equal: %v", a)
	}
}

func FuzzAlign(f *testing.F) {
	f.Add([]byte(text(1, 2000)), []byte(text(1, 1500)))
	f.Add([]byte{}, []byte{1})
	f.Add([]byte(text(1, 1000)+text(2, 1000)), []byte(text(2, 1000)+text(1, 1000)))
	f.Fuzz(func(t *testing.T, from, to []byte) { aligned(t, from, to) })
}
