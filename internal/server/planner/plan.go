package planner

import (
	"bytes"
	"cmp"
	"math"
	"slices"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
)

// Order says how soon each segment of a TOC is needed: its rank by number of
// the segment, lower ranks first.
type Order []uint32

// Plan is what a bundle's frames are made from.
type Plan struct {
	// Wire is what the worker is told.
	Wire bundle.Plan
	// Sources are the frames' origins, in the order of Wire.Frames.
	Sources []Source
}

// Source is where one frame of a plan comes from: one frame of a pack as it is,
// or what is picked from some.
type Source struct {
	// Parts are the stored frames; exactly one, with no picks, when it is sent
	// as it is.
	Parts []Part
}

// Whole reports whether the frame is sent as it is stored.
func (s Source) Whole() bool { return s.Parts[0].Picks == nil }

// Part is one stored frame.
type Part struct {
	Pack      string
	Offset    int64
	Length    uint32 // bytes, stored
	RawLength uint32 // bytes, decoded
	Picks     []Pick // in order; nil: all of it, as it is
}

// Pick is one segment inside a decoded frame.
type Pick struct {
	ID     segment.ID
	From   uint32 // bytes from the start
	Length uint32
}

// Difference finds what is missing of a rootfs. The use: NewDifference, Have for every
// rootfs that the worker has, then, where there is a startup set, Lacks and
// Arrive, then Plan.
type Difference struct {
	x      *Index
	order  Order    // nil: that of the TOC
	number []uint32 // by segment that is no hole: the lowest number of an equal one
	want   []bool   // by segment: to be sent; only the lowest of equal ones
}

// NewDifference starts with everything missing, but nothing twice.
func NewDifference(x *Index) *Difference {
	n := len(x.segments)
	d := &Difference{x: x, number: make([]uint32, n), want: make([]bool, n)}
	for a := 0; a < len(x.order); {
		b := x.group(a)
		for _, s := range x.order[a:b] {
			d.number[s] = x.order[a]
		}
		d.want[x.order[a]] = true
		a = b
	}
	return d
}

// Have takes away what a rootfs of the worker holds: all of it, or the segments
// whose bits are set in present (see bundle.Have).
func (d *Difference) Have(x *Index, present []byte) {
	here := func(s uint32) bool {
		return present == nil || int(s/8) < len(present) && present[s/8]>>(s%8)&1 != 0
	}
	intersect(d.x, x, func(mine, theirs []uint32) {
		if slices.ContainsFunc(theirs, here) {
			for _, s := range mine {
				d.want[s] = false
			}
		}
	})
}

// group returns the end of the run of equal IDs that starts at place a of order.
func (x *Index) group(a int) int {
	b := a + 1
	for b < len(x.order) && x.prefix[b] == x.prefix[a] && x.segments[x.order[b]].ID == x.segments[x.order[a]].ID {
		b++
	}
	return b
}

// intersect calls fn for each ID in both indices, with the numbers of its
// segments in each, ascending.
func intersect(x, y *Index, fn func(inX, inY []uint32)) {
	a, b := 0, 0
	for a < len(x.order) && b < len(y.order) {
		if x.prefix[a] < y.prefix[b] {
			a++
			continue
		}
		if x.prefix[a] > y.prefix[b] {
			b++
			continue
		}
		switch bytes.Compare(x.segments[x.order[a]].ID[:], y.segments[y.order[b]].ID[:]) {
		case -1:
			a++
		case 1:
			b++
		default:
			endA, endB := x.group(a), y.group(b)
			fn(x.order[a:endA], y.order[b:endB])
			a, b = endA, endB
		}
	}
}

// candidate is a stored frame that holds something wanted.
type candidate struct {
	frame uint32
	rank  uint32
	slots uint32 // its first in Plan's tables by slot
}

const (
	unknown = math.MaxUint32

	// mergeWindow is how many bytes of whole frames may go between two picks
	// that are put into one frame.
	mergeWindow = 1 << 20
)

// SetOrder sets the order; what it has too few ranks for keeps that of the TOC.
func (d *Difference) SetOrder(o Order) { d.order = o }

// Plan puts the frames that hold what is missing into order. A frame goes as it
// is stored when at least half of its bytes are wanted and all of it belongs to
// the image: a worker must not get what it did not ask for (it may
// not be allowed to have it). Of other frames the wanted segments are picked
// and put together into new ones.
func (d *Difference) Plan() *Plan {
	list, local := d.candidates()

	// What each slot of those frames holds, as far as this image knows.
	slots := uint32(0)
	for i := range list {
		list[i].slots = slots
		slots += d.x.frames[list[i].frame].count
	}
	number := make([]uint32, slots)
	for i := range number {
		number[i] = unknown
	}
	want := make([]bool, slots)
	for s, f := range d.x.frameOf {
		if f == noFrame || local[f] == unknown {
			continue
		}
		at := list[local[f]].slots + d.x.slotOf[s]
		number[at] = d.number[s]
		want[at] = want[at] || d.want[s]
	}

	sorted := make([]uint32, len(list))
	for i := range sorted {
		sorted[i] = uint32(i)
	}
	slices.SortFunc(sorted, func(a, b uint32) int {
		return cmp.Or(cmp.Compare(list[a].rank, list[b].rank), cmp.Compare(a, b))
	})

	b := planBuilder{x: d.x, sent: make([]bool, len(d.number)), list: make([]planned, 0, len(list)), parts: make([]Part, 0, len(list)), open: -1}
	for _, i := range sorted {
		c := &list[i]
		f := &d.x.frames[c.frame]
		b.add(f, number[c.slots:c.slots+f.count], want[c.slots:c.slots+f.count])
	}
	return b.finish()
}

// candidates lists the frames that hold something wanted, and gives the place in the
// list of each frame of the index, or unknown.
func (d *Difference) candidates() (list []candidate, local []uint32) {
	local = make([]uint32, len(d.x.frames))
	for f := range local {
		local[f] = unknown
	}
	for s, want := range d.want {
		if !want {
			continue
		}
		f := d.x.frameOf[s]
		if local[f] == unknown {
			local[f] = uint32(len(list))
			list = append(list, candidate{frame: f, rank: math.MaxUint32})
		}
		rank := uint32(s)
		if s < len(d.order) {
			rank = d.order[s]
		}
		c := &list[local[f]]
		c.rank = min(c.rank, rank)
	}
	return list, local
}

// planBuilder puts frames together in their order.
type planBuilder struct {
	x     *Index
	sent  []bool // by number
	list  []planned
	parts []Part // room for the parts of whole frames

	open  int // place in list of the frame of picks that is being filled, or -1
	since uint64
}

type planned struct {
	raw, max uint32
	numbers  []uint32
	parts    []Part
}

// add adds what is wanted of one stored frame. number and want are by segment
// of the frame.
func (b *planBuilder) add(f *frame, number []uint32, want []bool) {
	x := b.x
	lengths := x.lengths[f.first : f.first+f.count]
	part := Part{Pack: x.packs[f.pack], Offset: f.offset, Length: f.length, RawLength: f.raw}

	whole, missing, marked := true, uint32(0), 0
	for i, n := range number {
		if whole = n != unknown && !b.sent[n]; !whole {
			break
		}
		b.sent[n] = true
		marked++
		if want[i] {
			missing += lengths[i]
		}
	}
	if whole && 2*uint64(missing) >= uint64(f.raw) {
		b.parts = append(b.parts, part)
		n := len(b.parts)
		b.list = append(b.list, planned{f.raw, f.length, number, b.parts[n-1 : n : n]})
		b.since += uint64(f.length)
		return
	}
	for _, n := range number[:marked] {
		b.sent[n] = false
	}

	var numbers []uint32
	from, raw := uint32(0), uint32(0)
	for i, n := range number {
		if want[i] && !b.sent[n] {
			b.sent[n] = true
			part.Picks = append(part.Picks, Pick{x.segments[n].ID, from, lengths[i]})
			numbers = append(numbers, n)
			raw += lengths[i]
		}
		from += lengths[i]
	}
	if raw == 0 {
		return // sent with another frame
	}
	if b.open < 0 || b.list[b.open].raw+raw > segment.FrameTarget || b.since > mergeWindow {
		b.open, b.since = len(b.list), 0
		b.list = append(b.list, planned{})
	}
	p := &b.list[b.open]
	p.raw += raw
	p.max = uint32(segment.MaxEncoded(int(p.raw)))
	p.numbers = append(p.numbers, numbers...)
	p.parts = append(p.parts, part)
}

func (b *planBuilder) finish() *Plan {
	n := 0
	for _, f := range b.list {
		n += len(f.numbers)
	}
	p := &Plan{Sources: make([]Source, len(b.list))}
	p.Wire.Frames, p.Wire.Segments = make([]bundle.PlanFrame, len(b.list)), make([]uint32, 0, n)
	for i, f := range b.list {
		p.Sources[i] = Source{f.parts}
		p.Wire.Frames[i] = bundle.PlanFrame{
			MaxLength: f.max, RawLength: f.raw,
			First: uint32(len(p.Wire.Segments)), Segments: uint32(len(f.numbers)),
		}
		p.Wire.Segments = append(p.Wire.Segments, f.numbers...)
		p.Wire.MaxBytes += bundle.SectionLength(int(f.max))
		p.Wire.ContentBytes += int64(f.raw)
	}
	return p
}
