package node

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/recorder"
)

const (
	// reportReads bounds what is noted of one start: 2.5 MiB of memory. A start
	// that reads more in pieces is not reported.
	reportReads = 1 << 16
	// reportQuiet is for how long a container that nobody probes reads nothing new
	// when it counts as ready.
	reportQuiet = 3 * time.Second
	// reportAfter is how long a container that is ready by its probe is watched
	// on: what the first that use it need is part of the start.
	reportAfter = time.Second
	// reportPatience is how long a start is watched, reportLag how long after
	// everything is here: till then reads go by the gate that need not.
	reportPatience = 10 * time.Minute
	reportLag      = 30 * time.Second
	// reportTimeout bounds one try to send a report; there are two.
	reportTimeout = 30 * time.Second
	reportPoll    = 200 * time.Millisecond
)

// learner notices what the first container on a rootfs reads of its arena, while
// that is behind the gate, until the container is ready; and tells the image's server,
// once. Nothing waits for it, except that the arena leaves the gate
// after a start that is under way.
//
// What lies in other arenas is not seen: it was here before. When a second
// container is made before the first is ready, whose reads are whose cannot be
// told, and nothing is reported.
type learner struct {
	n     *Node
	r     *rootfs
	p     *pull
	log   *recorder.Log
	woken chan struct{} // closed when something is read, or a container told of
	done  chan struct{} // closed when nothing is noted any more
	over  context.Context
	end   context.CancelFunc
	wake  sync.Once

	mu        sync.Mutex
	container string // that is watched; empty: none was told of
	several   bool
	gone      bool
	args      []string // nil: the image's own
	probe     bool
	started   time.Time
	ready     time.Time
}

// learn returns the learner of a rootfs that p fills, or nil when none is
// wanted.
func (n *Node) learn(r *rootfs, p *pull) *learner {
	o := n.opts
	if o.NoReports || p == nil || o.ReportSample > 0 && rand.Float64() >= o.ReportSample {
		return nil
	}
	// With read-ahead from the beginning, what is read are windows, twice as large
	// as the pages that were touched.
	if o.NoStartup || p.req.NoStartup {
		return nil
	}
	l := &learner{n: n, r: r, p: p, log: recorder.NewLog(1, reportReads), woken: make(chan struct{}), done: make(chan struct{})}
	l.over, l.end = context.WithCancel(n.ctx)
	r.learning = l
	n.work.Go(l.run)
	return l
}

func (l *learner) read(off, n int64, waited bool) {
	l.log.Add(0, off, n, time.Now(), waited)
	l.wake.Do(func() { close(l.woken) })
}

// underway reports whether a start is being watched; it ends a learner that has
// seen none.
func (l *learner) underway() bool {
	if l == nil {
		return false
	}
	select {
	case <-l.done:
		return false
	case <-l.woken:
		return true
	default:
		l.end()
		return false
	}
}

// stop ends it and waits until nothing is noted any more.
func (l *learner) stop() {
	if l != nil {
		l.end()
		<-l.done
	}
}

// created notes that a container was made on the rootfs.
func (l *learner) created(id string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.container != "" {
		l.several = true
	}
	l.container = id
}

// removed notes that a container was removed.
func (l *learner) removed(id string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = l.gone || l.container == id
}

// told takes what foil run says of a container.
func (l *learner) told(id string, s api.Start) {
	if l == nil {
		return
	}
	l.mu.Lock()
	if l.container == id {
		l.args, l.probe, l.started = s.Args, s.Probe, s.Started
		if !s.Ready.IsZero() { // the two may come in the other order
			l.ready = s.Ready
		}
	}
	l.mu.Unlock()
	l.wake.Do(func() { close(l.woken) })
}

// verdicts on a start.
const (
	watching = iota
	isReady
	givenUp
)

// judge says whether the container is ready and has been for long enough, since
// when, and until when its reads count.
func (l *learner) judge(now time.Time) (verdict int, ready, until time.Time) {
	_, last, full := l.log.State()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.several || full:
		return givenUp, time.Time{}, time.Time{}
	case !l.ready.IsZero() && (l.gone || now.Sub(l.ready) > reportAfter):
		return isReady, l.ready, l.ready.Add(reportAfter)
	case !l.ready.IsZero():
		return watching, time.Time{}, time.Time{}
	case l.probe && l.gone:
		return givenUp, time.Time{}, time.Time{}
	case l.probe:
		return watching, time.Time{}, time.Time{}
	case l.container != "" && l.started.IsZero() && !l.gone:
		return watching, time.Time{}, time.Time{} // being started
	case !last.IsZero() && now.Sub(last) > reportQuiet:
		return isReady, last, last
	}
	return watching, time.Time{}, time.Time{}
}

func (l *learner) run() {
	t := l.watch()
	l.log.End()
	close(l.done)
	l.end()
	if t != nil {
		l.send(t)
	}
}

// watch waits until the container is ready, and returns what to report, or nil.
func (l *learner) watch() *trace.Trace {
	select {
	case <-l.over.Done():
		return nil
	case <-l.woken:
	}
	since, complete := time.Now(), time.Time{}
	tick := time.NewTicker(reportPoll)
	defer tick.Stop()
	for {
		switch verdict, ready, until := l.judge(time.Now()); {
		case verdict == isReady:
			t, err := l.report(ready, until)
			if err != nil {
				l.n.log.Debug("report what a start read", "rootfs", l.r.rec.ChainID, "error", err)
			}
			return t
		case verdict == givenUp || time.Since(since) > reportPatience || !complete.IsZero() && time.Since(complete) > reportLag:
			l.n.log.Debug("a start is not reported: it did not become ready, or it was not the only one", "rootfs", l.r.rec.ChainID)
			return nil
		}
		select {
		case <-l.over.Done():
			return nil
		case <-tick.C:
		}
		if complete.IsZero() && l.complete() {
			complete = time.Now()
		}
	}
}

// complete reports whether everything of the rootfs is here.
func (l *learner) complete() bool {
	l.n.mu.Lock()
	defer l.n.mu.Unlock()
	return l.r.rec.Complete
}

// report puts together what was read until ready, and what came early and was
// not read.
func (l *learner) report(ready, until time.Time) (*trace.Trace, error) {
	reads, full := l.log.Reads()
	if full || len(reads) == 0 {
		l.n.log.Debug("a start is not reported: it read nothing of its arena, or too much", "rootfs", l.r.rec.ChainID, "reads", len(reads))
		return nil, nil
	}
	l.n.mu.Lock()
	a := l.r.arena
	l.n.mu.Unlock()
	if a == nil {
		return nil, nil
	}
	have, err := l.r.read()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	t := &trace.Trace{Kind: trace.Reported, ChainID: l.r.rec.ChainID, TOC: l.r.rec.TOC, Args: l.args}
	started := l.started
	l.mu.Unlock()
	if started.IsZero() {
		started = reads[0].At
	}
	t.Ready = max(ready.Sub(started), 0)
	if t.Args == nil {
		if t.Args = l.imageArgs(); t.Args == nil {
			return nil, nil
		}
	}
	t.Touched, t.Unused = compare(have, a, reads, started, until)
	early, unused := 0, 0
	for _, r := range a.EarlyRuns() {
		early += int(r.Blocks)
	}
	for _, r := range t.Unused {
		unused += int(r.Blocks)
	}
	l.n.metrics.pages.WithLabelValues("unused").Add(float64(unused))
	l.n.metrics.pages.WithLabelValues("hit").Add(float64(max(0, early-unused)))
	return t, nil
}

// compare returns what was read of an arena until then, and the pages that came
// early and were not.
func compare(have *restored, a *arena.Arena, reads []recorder.Read, started, until time.Time) (touched []trace.Touch, unused []trace.Run) {
	layout := a.Layout()
	own := make(placement, len(have.toc.Contents))
	offsets := make([]int64, len(have.toc.Contents))
	for c := range own {
		if off, ok := layout.Offset(c); ok {
			offsets[c] = off
		} else {
			own[c] = 1
		}
	}
	places := newPlaces(have.toc, own, offsets, 2)
	pages := make(map[uint32]map[uint32]bool) // that were read, by content
	for _, r := range reads {
		if r.At.After(until) {
			break
		}
		from := len(touched)
		touched = places.touch(touched, r, max(r.At.Sub(started), 0))
		for i := from; i < len(touched); i++ {
			t := &touched[i]
			t.Waited = r.Waited
			if pages[t.Content] == nil {
				pages[t.Content] = make(map[uint32]bool)
			}
			for p := t.First; p < t.End(); p++ {
				pages[t.Content][p] = true
			}
		}
	}
	for _, r := range a.EarlyRuns() {
		for p := r.First; p < r.End(); p++ {
			// Whether what was read ahead of anybody was used is not known.
			if pages[r.Content][p] || a.IsAhead(offsets[r.Content]+int64(p)*trace.BlockSize) {
				continue
			}
			if n := len(unused); n > 0 && unused[n-1].Content == r.Content && unused[n-1].End() == p {
				unused[n-1].Blocks++
				continue
			}
			unused = append(unused, trace.Run{Content: r.Content, First: p, Blocks: 1})
		}
	}
	return touched, unused
}

// imageArgs are the entrypoint and command of the image; nil: there are none.
func (l *learner) imageArgs() []string {
	l.p.mu.Lock()
	img := l.p.image
	l.p.mu.Unlock()
	var config ocispec.Image
	if img == nil || json.Unmarshal(img.Config, &config) != nil {
		return nil
	}
	return slices.Concat(config.Config.Entrypoint, config.Config.Cmd)
}

// send sends a report, and tries once more. That it does not arrive is nobody's
// concern.
func (l *learner) send(t *trace.Trace) {
	n, p := l.n, l.p
	p.mu.Lock()
	img := p.image
	p.mu.Unlock()
	if img == nil {
		return
	}
	encoded, _ := t.Fit()
	if len(encoded) > trace.MaxEncoded || len(t.Args) > trace.MaxArgs {
		return
	}
	for try := 1; ; try++ {
		ctx, cancel := context.WithTimeout(n.ctx, reportTimeout)
		err := n.sendTrace(ctx, p.req, img.Digest.String(), encoded)
		cancel()
		if err == nil {
			n.log.Debug("reported what a start read", "ref", p.ref.name, "reads", len(t.Touched), "unused", len(t.Unused), "bytes", len(encoded))
			return
		}
		n.log.Debug("report what a start read", "ref", p.ref.name, "try", try, "error", err)
		if try == 2 {
			return
		}
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

// ContainerStarted takes what is known of a container's start. It is for learning
// only.
func (n *Node) ContainerStarted(_ context.Context, id string, s api.Start) error {
	n.mu.Lock()
	c := n.containers[id]
	var l *learner
	var p *pull
	if c != nil && !c.Traced {
		if r := n.rootfs[c.ChainID]; r != nil {
			l, p = r.learning, r.filling
		}
	}
	n.mu.Unlock()
	if p != nil && !s.Ready.IsZero() {
		p.isReady()
	}
	if c == nil {
		return errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	}
	if !s.Ready.IsZero() && s.Probe {
		n.metrics.ready.Observe(max(0, s.Ready.Sub(s.Started).Seconds()))
	}
	l.told(id, s)
	return nil
}
