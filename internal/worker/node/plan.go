package node

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// plan is what a collection would do.
type plan struct {
	items []api.GCItem
	goes  []*candidate // in this order
}

// ledger knows what every directory takes and who needs what of it, so that it
// can be said what remains when some rootfs go.
type ledger struct {
	all    []*rootfs // that can be mounted
	lent   []*rootfs
	size   map[*rootfs]int64 // bytes its directory takes
	needed map[*rootfs]map[*rootfs][]arena.Range
	blind  map[*rootfs]bool // it is not known what somebody needs of it
}

// remains returns what directories take when those that are gone are.
func (l *ledger) remains(gone map[*rootfs]bool) (total int64) {
	for _, r := range l.all {
		if !gone[r] {
			total += l.size[r]
		} else {
			total += l.lends(r, gone)
		}
	}
	for _, r := range l.lent {
		total += l.lends(r, gone)
	}
	return total
}

// lends returns what of an arena those need who are not gone, in whole blocks.
func (l *ledger) lends(r *rootfs, gone map[*rootfs]bool) int64 {
	var all []arena.Range
	for b, need := range l.needed[r] {
		if !gone[b] {
			all = append(all, need...)
		}
	}
	if len(all) == 0 {
		return 0
	}
	if l.blind[r] {
		return l.size[r]
	}
	slices.SortFunc(all, func(a, b arena.Range) int { return int(min(max(a.Off-b.Off, -1), 1)) })
	var total int64
	for _, k := range slices.Compact(all) {
		total += (k.Len + arena.BlockSize - 1) / arena.BlockSize * arena.BlockSize
	}
	return min(total, l.size[r])
}

// plan says what goes, so that images take no more than a limit, and of the rest
// why it stays.
func (n *Node) plan(ctx context.Context, d disk, limit Limit) (*plan, error) {
	n.layout.Lock()
	defer n.layout.Unlock()
	l := &ledger{size: make(map[*rootfs]int64), needed: make(map[*rootfs]map[*rootfs][]arena.Range), blind: make(map[*rootfs]bool)}
	n.mu.Lock()
	for _, r := range n.rootfs {
		l.all = append(l.all, r)
	}
	for _, r := range n.lent {
		l.lent = append(l.lent, r)
	}
	named := n.named()
	candidates, stays := n.evictable()
	names := make(map[*rootfs]string)
	for _, r := range l.all {
		names[r] = n.chainOf(r)
	}
	n.mu.Unlock()
	sortByChain(l.all)
	sortByChain(l.lent)
	for _, r := range append(slices.Clone(l.all), l.lent...) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		l.size[r], _ = usage(r.dir)
		l.needed[r] = make(map[*rootfs][]arena.Range)
		for _, b := range n.borrowers(r) {
			var keep []arena.Range
			if r.contents == nil {
				l.blind[r] = true
			} else if k, err := r.needed([]*rootfs{b}); err != nil {
				l.blind[r] = true
			} else {
				keep = k
			}
			if len(keep) == 0 {
				keep = []arena.Range{{}} // it is a borrower all the same
			}
			l.needed[r][b] = keep
		}
	}

	p := new(plan)
	gone := make(map[*rootfs]bool)
	// What nothing names goes in any case, unless something has it open.
	for _, r := range l.all {
		if named[r] != "" {
			continue
		}
		if r.mounted || r.inUse() {
			p.items = append(p.items, api.GCItem{Kind: "rootfs", Name: r.rec.ChainID.String(), Bytes: l.size[r], Why: "no image names it, but a process or container has it open"})
			continue
		}
		p.step(l, gone, r, api.GCItem{Kind: "rootfs", Name: r.rec.ChainID.String(), Why: "no image names it"})
	}
	for _, c := range candidates {
		used := l.remains(gone)
		over := disk{used: used, pending: d.pending, free: d.free + d.used - used, size: d.size}.over(limit)
		last := "last used " + c.used.UTC().Format("2006-01-02 15:04:05") + " UTC"
		switch {
		case !limit.set:
			stays[c.rootfs] = "nothing uses it, but no limit is set; " + last
		case over <= 0:
			stays[c.rootfs] = "nothing uses it, but it fits; " + last
		default:
			p.goes = append(p.goes, c)
			p.step(l, gone, c.rootfs, api.GCItem{Kind: "image", Name: strings.Join(c.refs, " "), Why: fmt.Sprintf("nothing uses it, and %d bytes are too many; %s", over, last)})
		}
	}
	for _, r := range l.all {
		if why := stays[r]; why != "" && !gone[r] {
			p.items = append(p.items, api.GCItem{Kind: "image", Name: names[r], Bytes: l.size[r], Why: why})
		}
	}
	for _, r := range append(slices.DeleteFunc(slices.Clone(l.all), func(r *rootfs) bool { return !gone[r] }), l.lent...) {
		var users []string
		for b := range l.needed[r] {
			if !gone[b] {
				users = append(users, names[b])
			}
		}
		if len(users) > 0 {
			slices.Sort(users)
			p.items = append(p.items, api.GCItem{Kind: "contents", Name: r.rec.ChainID.String(), Bytes: l.lends(r, gone), Why: "of an image that is removed, and used by " + strings.Join(users, ", ")})
		}
	}
	return p, nil
}

// step notes that r goes, and what that frees.
func (p *plan) step(l *ledger, gone map[*rootfs]bool, r *rootfs, item api.GCItem) {
	before := l.remains(gone)
	gone[r] = true
	item.Goes, item.Bytes = true, before-l.remains(gone)
	p.items = append(p.items, item)
}
