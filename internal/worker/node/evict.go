package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/ledger"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/store"
)

// candidate is a rootfs that could go with all images that name it.
type candidate struct {
	rootfs *store.Rootfs
	refs   []string // sorted
	used   time.Time
}

// evictable returns what nothing uses, least recently used first, and for every
// other rootfs with an image why it stays.
func (n *Node) evictable() (list []*candidate, stays map[*store.Rootfs]string) {
	all := make(map[*store.Rootfs]*candidate)
	stays = make(map[*store.Rootfs]string)
	on := n.containers.On()
	for _, img := range n.images.List() {
		r := n.store.Get(img.Rootfs)
		if r == nil {
			continue
		}
		c := all[r]
		if c == nil {
			c = &candidate{rootfs: r}
			all[r] = c
		}
		c.refs = append(c.refs, img.Ref)
		if img.Used.After(c.used) {
			c.used = img.Used
		}
		if why := n.stays(img.Ref, img.Rootfs, r); why != "" {
			stays[r] = why
		}
		if img.Made {
			stays[r] = "it was made here, and may be nowhere else"
		}
		if ids := on[img.Rootfs]; len(ids) > 0 {
			stays[r] = "container " + ids[0] + " uses it"
		}
	}
	for r, c := range all {
		if stays[r] == "" {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b *candidate) int {
		if c := a.used.Compare(b.used); c != 0 {
			return c
		}
		return strings.Compare(a.refs[0], b.refs[0])
	})
	return list, stays
}

// stays says why an image stays; empty: nothing uses it.
func (n *Node) stays(ref string, key origin.Key, r *store.Rootfs) string {
	switch {
	case n.Held(key):
		return "containerd uses it"
	case n.pulls.Running(ref):
		return "it is being pulled"
	case n.pulls.Blocked(ref):
		return "it is being removed"
	case r.Broken() != nil:
		return "it is broken: pull it again, or remove it with `foil rm`"
	case !r.Complete():
		return "it is not complete"
	case r.Used():
		return "a pull or a verification uses it"
	}
	return ""
}

// evict removes the images of a candidate, unless one is used by now.
func (n *Node) evict(c *candidate, why string) bool {
	// From here on no pull of them begins, and no container on them.
	for _, ref := range c.refs {
		running, unblock, err := n.pulls.Block(ref)
		if err != nil {
			return false
		}
		defer unblock()
		img := n.images.Get(ref)
		if running != nil || img == nil || img.Made || n.Held(img.Rootfs) || len(n.ContainersOn(img.Rootfs)) > 0 {
			return false
		}
	}
	r := c.rootfs
	if len(n.images.Of(r.Key())) != len(c.refs) || r.Broken() != nil || !r.Complete() || r.Used() {
		return false
	}
	var errs []error
	for _, ref := range c.refs {
		err := n.forget(ref)
		if err == nil {
			n.metrics.evicted.Inc()
			n.log.Info("image evicted", "ref", ref, "last_used", c.used.UTC().Format(time.RFC3339), "why", why)
		}
		errs = append(errs, err)
	}
	n.store.Collect()
	if err := errors.Join(errs...); err != nil {
		n.log.Warn("evict an image", "refs", c.refs, "error", err)
		return false
	}
	return true
}

// StartEviction makes the limit of Options count. Before it is called nothing is
// evicted: whoever takes holds again from an earlier daemon does so first.
func (n *Node) StartEviction() {
	n.mu.Lock()
	n.evicting = n.opts.DiskLimit.set
	n.mu.Unlock()
	leave, err := n.enter()
	if err != nil {
		return
	}
	go func() {
		defer leave()
		for n.makeRoom(0) {
		}
	}()
}

// over returns how many bytes are too many.
func over(d store.Space, l Limit) int64 {
	return max(d.Used+d.Pending-l.of(d.Size), d.Pending+d.Reserve()-d.Free)
}

// makeRoom evicts one image if more than the limit is taken, or at least least
// bytes too much, and reports whether it did.
func (n *Node) makeRoom(least int64) bool {
	n.eviction.Lock()
	defer n.eviction.Unlock()
	n.mu.Lock()
	on := n.evicting && !n.closing
	n.mu.Unlock()
	if !on {
		return false
	}
	d, err := n.store.Disk(nil)
	if err != nil {
		n.log.Warn("find out what images take of the disk", "error", err)
		return false
	}
	tooMany := max(over(d, n.opts.DiskLimit), least)
	if tooMany <= 0 {
		return false
	}
	defer n.prover.Pause()() // it keeps what it proves, and what lends to that
	list, _ := n.evictable()
	why := fmt.Sprintf("images take %d bytes, %d are on their way, %d are free, and %d are too many", d.Used, d.Pending, d.Free, tooMany)
	for _, c := range list {
		if n.evict(c, why) {
			return true
		}
	}
	n.log.Warn("nothing is left to evict: what is here is used", "limit", n.opts.DiskLimit.of(d.Size), "used", d.Used, "pending", d.Pending, "free", d.Free)
	return false
}

// GC frees what it can, and says of everything what becomes of it and why.
func (n *Node) GC(ctx context.Context, req api.GCRequest) (*api.GCReport, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	limit := n.opts.DiskLimit
	if req.Limit != "" {
		if limit, err = ParseLimit(req.Limit); err != nil {
			return nil, api.Errorf(api.CodeInvalid, "%w", err)
		}
	}
	n.eviction.Lock()
	defer n.eviction.Unlock()
	defer n.prover.Pause()() // it keeps what it proves, and what lends to that
	if !req.DryRun {
		n.store.Collect()
	}
	d, err := n.store.Disk(nil)
	if err != nil {
		return nil, err
	}
	report := &api.GCReport{DryRun: req.DryRun, Used: d.Used, Free: d.Free, Size: d.Size}
	if limit.set {
		l := limit.of(d.Size)
		report.Limit = &l
	}
	plan, err := n.plan(ctx, d, limit)
	if err != nil {
		return nil, err
	}
	report.Items = append(report.Items, plan.items...)
	for _, path := range append(n.store.Leftovers(), n.images.SetAside()...) {
		report.Items = append(report.Items, api.GCItem{Kind: "leftover", Name: path, Goes: true, Bytes: store.DirSize(path), Why: "no record names it: a crash, or a record that could not be read, left it"})
		if !req.DryRun {
			if err := os.RemoveAll(path); err != nil {
				n.log.Warn("remove a leftover", "path", path, "error", err)
			}
		}
	}
	if req.DryRun {
		for _, it := range report.Items {
			if it.Goes {
				report.Freed += it.Bytes
			}
		}
		return report, nil
	}
	for _, c := range plan.goes {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !n.evict(c, "foil gc") {
			for i := range report.Items {
				if it := &report.Items[i]; slices.Contains(c.refs, it.Name) {
					it.Goes, it.Why = false, "it is used by now"
				}
			}
		}
	}
	after, err := n.store.Disk(nil)
	if err != nil {
		return nil, err
	}
	report.Freed = max(0, d.Used-after.Used)
	report.Used, report.Free = after.Used, after.Free
	return report, nil
}

// plan is what a collection would do.
type plan struct {
	items []api.GCItem
	goes  []*candidate // in this order
}

// plan says what goes, so that images take no more than a limit, and of the rest
// why it stays.
func (n *Node) plan(ctx context.Context, d store.Space, limit Limit) (*plan, error) {
	l, err := n.store.Ledger(ctx)
	if err != nil {
		return nil, err
	}
	named := n.Named()
	candidates, stays := n.evictable()
	p := new(plan)
	gone := make(map[*store.Rootfs]bool)
	// What nothing names goes in any case, unless something has it open.
	for _, r := range l.All {
		chain := r.ChainID().String()
		switch {
		case named[r.Key()] != "" || r.Used() || r.Filler() != nil:
		case l.Of(r).Open:
			p.items = append(p.items, api.GCItem{Kind: "rootfs", Name: chain, Bytes: l.Of(r).Size, Why: "no image names it, but a process or container has it open"})
		default:
			p.step(l, gone, r, api.GCItem{Kind: "rootfs", Name: chain, Why: "no image names it"})
		}
	}
	for _, c := range candidates {
		now := d
		now.Used = l.Remains(gone)
		now.Free += d.Used - now.Used
		last := "last used " + c.used.UTC().Format("2006-01-02 15:04:05") + " UTC"
		switch tooMany := over(now, limit); {
		case !limit.set:
			stays[c.rootfs] = "nothing uses it, but no limit is set; " + last
		case tooMany <= 0:
			stays[c.rootfs] = "nothing uses it, but it fits; " + last
		default:
			p.goes = append(p.goes, c)
			p.step(l, gone, c.rootfs, api.GCItem{Kind: "image", Name: strings.Join(c.refs, " "), Why: fmt.Sprintf("nothing uses it, and %d bytes are too many; %s", tooMany, last)})
		}
	}
	for _, r := range l.All {
		if why := stays[r]; why != "" && !gone[r] {
			p.items = append(p.items, api.GCItem{Kind: "image", Name: n.Image(r.Key()), Bytes: l.Of(r).Size, Why: why})
		}
	}
	for _, r := range append(slices.DeleteFunc(slices.Clone(l.All), func(r *store.Rootfs) bool { return !gone[r] }), l.Lent...) {
		var users []string
		for _, b := range l.Borrowers(r, gone) {
			users = append(users, n.Image(b.Key()))
		}
		if len(users) > 0 {
			slices.Sort(users)
			p.items = append(p.items, api.GCItem{Kind: "contents", Name: r.ChainID().String(), Bytes: l.Lends(r, gone), Why: "of an image that is removed, and used by " + strings.Join(users, ", ")})
		}
	}
	return p, nil
}

// step notes that r goes, and what that frees.
func (p *plan) step(l *ledger.Ledger, gone map[*store.Rootfs]bool, r *store.Rootfs, item api.GCItem) {
	before := l.Remains(gone)
	gone[r] = true
	item.Goes, item.Bytes = true, before-l.Remains(gone)
	p.items = append(p.items, item)
}
