package node

import (
	"context"
	"slices"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// keptWaits is of how many pulls that have ended it is remembered which reads
// waited: less than 1 MiB in all.
const keptWaits = 32

// keepWaits remembers the waits of a pull that ends, and forgets those of an
// older one. Called with Node.mu held.
func (n *Node) keepWaits(p *pull) {
	n.waited = append(n.waited, &p.waits)
	if len(n.waited) > keptWaits {
		n.waited[0].Forget()
		n.waited = slices.Delete(n.waited, 0, 1)
	}
}

// PullReport returns the running pull of an image, or its last one.
func (n *Node) PullReport(_ context.Context, name string) (*api.PullReport, error) {
	name, err := api.NormalRef(name)
	if err != nil {
		return nil, err
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	n.mu.Lock()
	p := n.pulls[name]
	var r *rootfs
	if p != nil {
		p.mu.Lock()
		r = p.rootfs
		p.mu.Unlock()
		if r != nil && n.rootfs[r.rec.ChainID] != r {
			r = nil
		}
	}
	n.mu.Unlock()
	if p == nil {
		return nil, errorf(api.CodeNotFound, "no pull of %s since this daemon began: `foil status` lists those that there are", name)
	}
	report := &api.PullReport{PullStatus: p.status(), Began: p.begun, Reads: []api.Read{}}
	first := p.waits.First()
	if len(first) == 0 {
		return report, nil
	}
	named := n.namer(r)
	for _, w := range first {
		read := api.Read{
			Began: w.Began, Took: w.Took.Seconds(), Waiting: w.Waiting,
			Pages:   (w.Length + trace.BlockSize - 1) / trace.BlockSize,
			Planned: w.Planned, Moved: w.Moved, Ahead: w.Ahead, Promoted: w.Promoted,
		}
		read.Path, read.Page = named(w.Offset, w.Length)
		if w.Err != nil {
			read.Err = w.Err.Error()
		}
		report.Reads = append(report.Reads, read)
	}
	return report, nil
}

// namer returns what names a range of a rootfs's own arena: the first file that has
// what begins there, and the page of it. A rootfs that has gone, or whose files
// cannot be read, has no names.
func (n *Node) namer(r *rootfs) func(off, length int64) (path string, page int64) {
	nameless := func(int64, int64) (string, int64) { return "", 0 }
	if r == nil {
		return nameless
	}
	have, err := r.read()
	var l *arena.Layout
	if err == nil {
		l, err = r.layout(have.toc, have.place)
	}
	if err != nil {
		n.log.Debug("name the reads that waited", "rootfs", r.rec.ChainID, "error", err)
		return nameless
	}
	names := namesOf(have.toc)
	return func(off, length int64) (string, int64) {
		first, end := l.SegmentsIn(off, length)
		if first >= end {
			return "", 0
		}
		content := l.Content(first)
		at, _ := l.Offset(content)
		path, _ := names.path(int32(content))
		return path, max(0, off-at) / trace.BlockSize
	}
}
