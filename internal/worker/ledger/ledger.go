// Package ledger knows what rootfs take of the disk, and who needs what of whose arena. So it can say what remains when
// some of them go.
package ledger

import (
	"cmp"
	"slices"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Ledger is about the rootfs that are here at one moment. Rootfs that are gone, in its methods, are
// those that are to go.
type Ledger struct {
	All     []*rootfs.Rootfs // that can be mounted, in the order in which they were entered
	Lent    []*rootfs.Rootfs // lenders, likewise
	entries map[*rootfs.Rootfs]Entry
}

// Entry is what is known of a rootfs.
type Entry struct {
	Size int64 // bytes that its directory takes
	Open bool  // a process or container has it open, or it is mounted
	// Needed is what each of those who have contents in its arena needs of it, in bytes of that.
	Needed map[*rootfs.Rootfs][]arena.Range
	Blind  bool // it is not known what somebody needs of it: all of it, then
}

// Enter enters a rootfs, which can be mounted or only lends.
func (l *Ledger) Enter(r *rootfs.Rootfs, lends bool, e Entry) {
	if l.entries == nil {
		l.entries = make(map[*rootfs.Rootfs]Entry)
	}
	l.entries[r] = e
	if lends {
		l.Lent = append(l.Lent, r)
	} else {
		l.All = append(l.All, r)
	}
}

// Of returns what is known of a rootfs.
func (l *Ledger) Of(r *rootfs.Rootfs) Entry { return l.entries[r] }

// Borrowers lists who needs something of an arena, and is not gone.
func (l *Ledger) Borrowers(r *rootfs.Rootfs, gone map[*rootfs.Rootfs]bool) (list []*rootfs.Rootfs) {
	for b := range l.entries[r].Needed {
		if !gone[b] {
			list = append(list, b)
		}
	}
	return list
}

// Remains returns what directories take when those that are gone are, bytes.
func (l *Ledger) Remains(gone map[*rootfs.Rootfs]bool) (total int64) {
	for _, r := range l.All {
		if !gone[r] {
			total += l.entries[r].Size
		} else {
			total += l.Lends(r, gone)
		}
	}
	for _, r := range l.Lent {
		total += l.Lends(r, gone)
	}
	return total
}

// Lends returns what of an arena those need who are not gone, in whole blocks, bytes.
func (l *Ledger) Lends(r *rootfs.Rootfs, gone map[*rootfs.Rootfs]bool) int64 {
	e := l.entries[r]
	var all []arena.Range
	needed := false
	for b, need := range e.Needed {
		if !gone[b] {
			all, needed = append(all, need...), true
		}
	}
	switch {
	case !needed:
		return 0
	case e.Blind:
		return e.Size
	}
	slices.SortFunc(all, func(a, b arena.Range) int { return cmp.Compare(a.Off, b.Off) })
	var total int64
	for _, k := range slices.Compact(all) {
		total += (k.Len + arena.BlockSize - 1) / arena.BlockSize * arena.BlockSize
	}
	return min(total, e.Size)
}
