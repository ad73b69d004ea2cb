package node

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// Limit is how much of the disk images may take before those that nothing uses
// go, the least recently used first. It is no quota: what is used stays, and no
// pull is refused because of it. The zero value is no limit.
type Limit struct {
	set     bool
	bytes   int64
	percent float64 // of the filesystem's size, when bytes is negative
}

// ParseLimit reads "80%", of the size of the filesystem, or a number of bytes
// with or without a unit: "20GB", "512MiB", "0". Empty is no limit.
func ParseLimit(s string) (Limit, error) {
	if s == "" {
		return Limit{}, nil
	}
	bad := fmt.Errorf("%q is no limit: write for example 80%%, 50GB or 500MiB", s)
	if p, ok := strings.CutSuffix(s, "%"); ok {
		v, err := strconv.ParseFloat(strings.TrimSpace(p), 64)
		if err != nil || !(v >= 0 && v <= 100) {
			return Limit{}, bad
		}
		return Limit{set: true, bytes: -1, percent: v}, nil
	}
	num := strings.TrimRight(s, "kKMGTiB ")
	unit := strings.TrimSpace(s[len(num):])
	scale, ok := map[string]float64{
		"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
		"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	}[unit]
	v, err := strconv.ParseFloat(num, 64)
	if !ok || err != nil || !(v >= 0 && v*scale < math.MaxInt64) {
		return Limit{}, bad
	}
	return Limit{set: true, bytes: int64(v * scale)}, nil
}

// of returns the limit in bytes on a filesystem of a size.
func (l Limit) of(size int64) int64 {
	switch {
	case !l.set:
		return math.MaxInt64
	case l.bytes < 0:
		return int64(float64(size) * l.percent / 100)
	}
	return l.bytes
}

// disk is what images take of the filesystem, bytes.
type disk struct {
	used    int64 // by everything below rootfs
	pending int64 // that pulls which have begun will add
	free    int64 // of the filesystem, for whoever comes
	size    int64 // of the filesystem
}

// reserve is what is to stay free on a filesystem, for metadata of a pull that
// begins and for what containers write.
func (d disk) reserve() int64 { return min(d.size/20, 64<<20) }

// over returns how many bytes are too many.
func (d disk) over(l Limit) int64 {
	return max(d.used+d.pending-l.of(d.size), d.pending+d.reserve()-d.free)
}

// space is disk without what is used, which takes a look at every file.
func (n *Node) space() (disk, error) {
	space, err := kernel.StatSpace(n.opts.Root)
	if err != nil {
		return disk{}, err
	}
	d := disk{free: space.Free, size: space.Size}
	n.mu.Lock()
	for _, r := range n.rootfs {
		if r.arena != nil && r.pulled() {
			d.pending += r.arena.Layout().ContentBytes() - r.arena.ContentHere()
		}
	}
	n.mu.Unlock()
	return d, nil
}

// pulled reports whether a pull brings what the rootfs lacks, which one that nobody
// has claimed does not. Called with Node.mu held.
func (r *rootfs) pulled() bool { return r.filling != nil && !r.filling.unclaimed() }

func (n *Node) disk() (disk, error) {
	d, err := n.space()
	if err != nil {
		return disk{}, err
	}
	dirs, err := os.ReadDir(filepath.Join(n.opts.Root, "rootfs"))
	if err != nil {
		return disk{}, err
	}
	for _, e := range dirs {
		size, _ := usage(filepath.Join(n.opts.Root, "rootfs", e.Name()))
		d.used += size
	}
	return d, nil
}

// touch makes an image the one that was used last, on the disk by its record's time of
// change. The clock alone does not say which was: there are hosts whose clock is
// set after they have started containers, and clocks that were ahead. Called with
// Node.mu held.
func (n *Node) touch(img *image) {
	img.used = time.Now().Round(0) // by the clock that the others on the disk have
	for _, other := range n.images {
		if other.Ref != img.Ref && !other.used.Before(img.used) {
			img.used = other.used.Add(time.Millisecond)
		}
	}
	if err := os.Chtimes(n.imagePath(img.Ref), img.used, img.used); err != nil {
		n.log.Debug("note that an image is used", "ref", img.Ref, "error", err)
	}
}

// candidate is a rootfs that could go with all images that name it.
type candidate struct {
	rootfs *rootfs
	refs   []string // sorted
	used   time.Time
}

// evictable returns what nothing uses, least recently used first, and for every
// other rootfs with an image why it stays. Called with Node.mu held.
func (n *Node) evictable() (list []*candidate, stays map[*rootfs]string) {
	byRootfs := make(map[*rootfs]*candidate)
	stays = make(map[*rootfs]string)
	for _, img := range n.images {
		r := n.rootfs[img.ChainID]
		if r == nil {
			continue
		}
		c := byRootfs[r]
		if c == nil {
			c = &candidate{rootfs: r}
			byRootfs[r] = c
		}
		c.refs = append(c.refs, img.Ref)
		if img.used.After(c.used) {
			c.used = img.used
		}
		p := n.pulls[img.Ref]
		switch {
		case n.holds[img.ChainID] > 0:
			stays[r] = "containerd uses it"
		case p != nil && !p.ended():
			stays[r] = "it is being pulled"
		case n.removing[img.Ref]:
			stays[r] = "it is being removed"
		case r.broken != nil:
			stays[r] = "it is broken: pull it again, or remove it with `foil rm`"
		case !r.rec.Complete:
			stays[r] = "it is not complete"
		case r.users > 0:
			stays[r] = "a pull or a verification uses it"
		}
	}
	for _, c := range n.containers {
		if r := n.rootfs[c.ChainID]; r != nil {
			stays[r] = "container " + c.ID + " uses it"
		}
	}
	for r, c := range byRootfs {
		if stays[r] == "" {
			slices.Sort(c.refs)
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

// evict removes the images of a candidate, unless one is used by now.
func (n *Node) evict(c *candidate, why string) bool {
	n.mu.Lock()
	now, _ := n.evictable()
	i := slices.IndexFunc(now, func(o *candidate) bool { return o.rootfs == c.rootfs })
	if i < 0 {
		n.mu.Unlock()
		return false
	}
	refs := now[i].refs
	for _, ref := range refs {
		n.removing[ref] = true
	}
	n.mu.Unlock()
	var errs []error
	for _, ref := range refs {
		err := n.forgetImage(ref)
		n.mu.Lock()
		delete(n.removing, ref)
		n.mu.Unlock()
		if err == nil {
			n.metrics.evicted.Inc()
			n.log.Info("image evicted", "ref", ref, "last_used", now[i].used.UTC().Format(time.RFC3339), "why", why)
		}
		errs = append(errs, err)
	}
	n.collect()
	if err := errors.Join(errs...); err != nil {
		n.log.Warn("evict an image", "refs", refs, "error", err)
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
		n.makeRoom()
	}()
}

// makeRoom evicts until what is here and what is on its way fits, or nothing is
// left that may go.
func (n *Node) makeRoom() {
	for n.makeSome(0) {
	}
}

// makeSome evicts one image if more than the limit is taken, or at least least
// bytes too much, and reports whether it did.
func (n *Node) makeSome(least int64) bool {
	n.eviction.Lock()
	defer n.eviction.Unlock()
	n.mu.Lock()
	on := n.evicting && !n.closing
	n.mu.Unlock()
	if !on {
		return false
	}
	d, err := n.disk()
	if err != nil {
		n.log.Warn("find out what images take of the disk", "error", err)
		return false
	}
	over := max(d.over(n.opts.DiskLimit), least)
	if over <= 0 {
		return false
	}
	n.mu.Lock()
	list, _ := n.evictable()
	n.mu.Unlock()
	why := fmt.Sprintf("images take %d bytes, %d are on their way, %d are free, and %d are too many", d.used, d.pending, d.free, over)
	for _, c := range list {
		if n.evict(c, why) {
			return true
		}
	}
	n.log.Warn("nothing is left to evict: what is here is used", "limit", n.opts.DiskLimit.of(d.size), "used", d.used, "pending", d.pending, "free", d.free)
	return false
}

// shortage says that the disk has no room for what a rootfs lacks.
type shortage struct {
	rootfs  digest.Digest
	need    int64 // bytes
	free    int64 // for images
	reserve int64 // for everything else
}

func (s *shortage) Error() string {
	return fmt.Sprintf("rootfs %s needs %d more bytes, %d are left for images and %d are kept free: %v", s.rootfs, s.need, max(0, s.free), s.reserve, syscall.ENOSPC)
}

func (s *shortage) Unwrap() error { return syscall.ENOSPC }

// fits returns a shortage when the disk has no room for what a rootfs lacks: a
// pull that cannot succeed would fill the disk for everybody.
func (n *Node) fits(r *rootfs) error {
	if r.arena == nil {
		return nil
	}
	l := r.arena.Layout()
	var need int64
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() && !r.arena.HasSegment(i) {
			need += int64(s.Length)
		}
	}
	d, err := n.space()
	if err != nil {
		return err
	}
	n.mu.Lock()
	if n.rootfs[r.rec.ChainID] == r && r.pulled() { // it is counted
		d.pending -= l.ContentBytes() - r.arena.ContentHere()
	}
	n.mu.Unlock()
	if free := d.free - d.pending - d.reserve(); need > free {
		return &shortage{r.rec.ChainID, need, free, d.reserve()}
	}
	return nil
}

// again reports whether a pull that failed with err is worth another attempt:
// the disk was full, and something was evicted.
func (p *pull) again(err error) bool {
	p.mu.Lock()
	mountErr := p.mountErr
	p.mu.Unlock()
	if mountErr != nil || p.ctx.Err() != nil || !isAny(syscall.ENOSPC, syscall.EDQUOT)(err) {
		return false
	}
	p.letGo(nil)
	if !p.n.makeSome(1) {
		return false
	}
	p.n.log.Info("the disk was full, and something was evicted: the pull goes on", "ref", p.ref, "error", err)
	// Each attempt costs a round trip.
	if short, ok := errors.AsType[*shortage](err); ok {
		for {
			d, err := p.n.space()
			if err != nil || d.free-d.pending-d.reserve() >= short.need || !p.n.makeSome(1) {
				break
			}
		}
	}
	return true
}

// letGo ends the use of all that a pull uses but those given.
func (p *pull) letGo(keep map[*rootfs]bool) {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	for r := range p.used {
		if !keep[r] {
			r.letGo()
			delete(p.used, r)
		}
	}
}

// settled is called when a pull has taken from others what it can: those whose
// arenas its rootfs does not use may go.
func (p *pull) settled(r *rootfs) {
	n := p.n
	n.mu.Lock()
	keep := map[*rootfs]bool{r: true}
	for _, id := range r.rec.Arenas {
		keep[n.arenaLocked(id)] = true
	}
	n.mu.Unlock()
	p.letGo(keep)
	n.makeRoom()
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
			return nil, errorf(api.CodeInvalid, "%w", err)
		}
	}
	n.eviction.Lock()
	defer n.eviction.Unlock()
	if !req.DryRun {
		n.collect()
	}
	d, err := n.disk()
	if err != nil {
		return nil, err
	}
	report := &api.GCReport{DryRun: req.DryRun, Used: d.used, Free: d.free, Size: d.size}
	if limit.set {
		l := limit.of(d.size)
		report.Limit = &l
	}
	plan, err := n.plan(ctx, d, limit)
	if err != nil {
		return nil, err
	}
	report.Items = append(report.Items, plan.items...)
	for _, path := range n.leftovers() {
		report.Items = append(report.Items, api.GCItem{Kind: "leftover", Name: path, Goes: true, Bytes: treeSize(path), Why: "no record names it: a crash, or a record that could not be read, left it"})
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
	after, err := n.disk()
	if err != nil {
		return nil, err
	}
	report.Freed = max(0, d.used-after.used)
	report.Used, report.Free = after.used, after.free
	return report, nil
}

// leftovers returns what is below the root and has no record. Nothing is being
// made while it looks.
func (n *Node) leftovers() (paths []string) {
	n.layout.Lock()
	defer n.layout.Unlock()
	n.mu.Lock()
	known := make(map[string]bool)
	for _, r := range n.rootfs {
		known[r.dir] = true
	}
	for _, r := range n.lent {
		known[r.dir] = true
	}
	n.mu.Unlock()
	dirs, _ := filepath.Glob(filepath.Join(n.opts.Root, "rootfs", "*"))
	for _, dir := range dirs {
		if !known[dir] {
			paths = append(paths, dir)
		}
	}
	bad, _ := filepath.Glob(filepath.Join(n.opts.Root, "images", "*.bad"))
	return append(paths, bad...)
}

func treeSize(path string) (size int64) {
	if fi, err := os.Lstat(path); err == nil && fi.Mode().IsRegular() {
		return fi.Sys().(*syscall.Stat_t).Blocks * 512
	}
	size, _ = usage(path)
	return size
}

// chainOf is the name of a rootfs for people: an image that has it, or its chain
// ID. Called with Node.mu held.
func (n *Node) chainOf(r *rootfs) string {
	name := r.rec.ChainID.String()
	var refs []string
	for _, img := range n.images {
		if n.rootfs[img.ChainID] == r {
			refs = append(refs, img.Ref)
		}
	}
	if len(refs) > 0 {
		name = slices.Min(refs)
	}
	return name
}
