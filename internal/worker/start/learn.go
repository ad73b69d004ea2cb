package start

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/recorder"
	"hydrofoil.dev/foil/internal/worker/store"
)

const (
	// reportReads bounds what is noted of one start: 2.5 MiB of memory. A start
	// that reads more in pieces is not reported.
	reportReads = 1 << 16
	// reportQuiet is for how long a container that nobody probes reads nothing new
	// when it counts as ready.
	reportQuiet = 3 * time.Second
	// reportPatience is how long a start is watched, reportLag how long after
	// everything is here: till then reads go by the gate that need not.
	reportPatience = 10 * time.Minute
	reportLag      = 30 * time.Second
	// reportTimeout bounds one try to send a report; there are two.
	reportTimeout = 30 * time.Second
	reportPoll    = 200 * time.Millisecond
)

// Learner notices what the first container on a rootfs reads of its arena, while
// that is behind the gate, until the container is ready; and tells the image's server,
// once. Nothing waits for it, except that the arena leaves the gate
// after a start that is under way.
//
// What lies in other arenas is not seen: it was here before. When a second
// container is made before the first is ready, whose reads are whose cannot be
// told, and nothing is reported. Neither is it where nobody has said what runs: the
// arguments of the process, as they are executed, are the service.
type Learner struct {
	opts   Options
	log    *slog.Logger
	r      *store.Rootfs
	reads  *recorder.Log
	woken  chan struct{}   // closed when something is read, or a container told of
	done   chan struct{}   // closed when nothing is noted any more
	daemon context.Context // ends with the daemon
	over   context.Context // ends with Stop, too
	end    context.CancelFunc
	wake   sync.Once

	mu        locks.Mutex[locks.Leaf]
	container string // that is watched; empty: none was told of
	several   bool
	gone      bool
	args      []string // of its process, once it was started
	probe     bool
	started   time.Time
	ready     time.Time
}

// Learn returns the learner of a rootfs that is laid out now, or nil when none is
// wanted. It lives until ctx ends, or Stop.
func (s *Start) Learn(ctx context.Context, r *store.Rootfs) store.Observer {
	// With read-ahead from the beginning, what is read are windows, twice as large
	// as the pages that were touched.
	if !s.opts.Learning || !s.opts.Set {
		return nil
	}
	l := &Learner{opts: s.opts, log: s.log, r: r, reads: recorder.NewLog(1, reportReads), woken: make(chan struct{}), done: make(chan struct{})}
	l.daemon = ctx
	l.over, l.end = context.WithCancel(ctx)
	if !s.opts.Go(l.run) {
		l.end()
		return nil
	}
	return l
}

// LearnerOf returns the learner of a rootfs, or nil. The methods of a nil Learner do
// nothing.
func LearnerOf(r *store.Rootfs) *Learner {
	l, _ := r.Observer().(*Learner)
	return l
}

// Read implements store.Observer.
func (l *Learner) Read(off, n int64, waited bool) {
	l.reads.Add(0, off, n, time.Now(), waited)
	l.wake.Do(func() { close(l.woken) })
}

// Over reports whether nothing is noted any more.
func (l *Learner) Over() bool {
	if l == nil {
		return true
	}
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// Watched returns what is closed when the start that is being watched is over; nil:
// none is, and none will be.
func (l *Learner) Watched() <-chan struct{} {
	if l == nil {
		return nil
	}
	select {
	case <-l.done:
		return nil
	case <-l.woken:
		return l.done
	default:
		l.end()
		return nil
	}
}

// Stop implements store.Observer: it ends the learner and waits until nothing is
// noted any more.
func (l *Learner) Stop() {
	l.end()
	<-l.done
}

// Created notes that a container was made on the rootfs.
func (l *Learner) Created(id string) {
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

// Removed notes that a container was removed.
func (l *Learner) Removed(id string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = l.gone || l.container == id
}

// Started takes what foil run says of a container.
func (l *Learner) Started(id string, s api.Start) {
	if l == nil {
		return
	}
	l.mu.Lock()
	if l.container == id {
		if l.started.IsZero() { // or it was started again
			l.args, l.probe, l.started = s.Args, s.Probe, s.Started
		}
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
func (l *Learner) judge(now time.Time) (verdict int, ready, until time.Time) {
	_, last, full := l.reads.State()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.several || full:
		return givenUp, time.Time{}, time.Time{}
	case !l.ready.IsZero() && (l.gone || now.Sub(l.ready) > readyAfter):
		return isReady, l.ready, l.ready.Add(readyAfter)
	case !l.ready.IsZero():
		return watching, time.Time{}, time.Time{}
	case l.probe && l.gone:
		return givenUp, time.Time{}, time.Time{}
	case l.probe:
		return watching, time.Time{}, time.Time{}
	case l.started.IsZero() && (l.gone || l.container == "" && !last.IsZero() && now.Sub(last) > reportQuiet):
		return givenUp, time.Time{}, time.Time{}
	case l.started.IsZero():
		return watching, time.Time{}, time.Time{} // being started
	case !last.IsZero() && now.Sub(last) > reportQuiet:
		return isReady, last, last
	}
	return watching, time.Time{}, time.Time{}
}

func (l *Learner) run() {
	t := l.watch()
	l.reads.End()
	close(l.done)
	l.end()
	if t != nil {
		l.send(l.daemon, t)
	}
}

// watch waits until the container is ready, and returns what to report, or nil.
func (l *Learner) watch() *trace.Trace {
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
				l.log.Debug("report what a start read", "rootfs", l.r.ChainID(), "error", err)
			}
			return t
		case verdict == givenUp || time.Since(since) > reportPatience || !complete.IsZero() && time.Since(complete) > reportLag:
			l.log.Debug("a start is not reported: it did not become ready, or it was not the only one", "rootfs", l.r.ChainID())
			return nil
		}
		select {
		case <-l.over.Done():
			return nil
		case <-tick.C:
		}
		if complete.IsZero() && l.r.Complete() {
			complete = time.Now()
		}
	}
}

// report puts together what was read until ready, and what came early and was
// not read.
func (l *Learner) report(ready, until time.Time) (*trace.Trace, error) {
	reads, full := l.reads.Reads()
	if full || len(reads) == 0 {
		l.log.Debug("a start is not reported: it read nothing of its arena, or too much", "rootfs", l.r.ChainID(), "reads", len(reads))
		return nil, nil
	}
	a := l.r.Arena()
	if a == nil {
		return nil, nil
	}
	have, err := l.r.Read()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	t := &trace.Trace{Kind: trace.Reported, ChainID: l.r.ChainID(), TOC: l.r.TOC(), Args: l.args}
	started := l.started
	l.mu.Unlock()
	if len(t.Args) == 0 {
		return nil, nil
	}
	t.Ready = max(ready.Sub(started), 0)
	t.Touched, t.Unused = compare(have, a, reads, started, until)
	early, unused := 0, 0
	for _, r := range a.EarlyRuns() {
		early += int(r.Blocks)
	}
	for _, r := range t.Unused {
		unused += int(r.Blocks)
	}
	if l.opts.Counted != nil {
		l.opts.Counted(max(0, early-unused), unused)
	}
	return t, nil
}

// compare returns what was read of an arena until then, and the pages that came
// early and were not.
func compare(have *store.Files, a *arena.Arena, reads []recorder.Read, started, until time.Time) (touched []trace.Touch, unused []trace.Run) {
	layout := a.Layout()
	own := make([]uint16, len(have.TOC.Contents))
	offsets := make([]int64, len(have.TOC.Contents))
	for c := range own {
		if off, ok := layout.Offset(c); ok {
			offsets[c] = off
		} else {
			own[c] = 1
		}
	}
	places := recorder.NewPlaces(have.TOC, own, offsets, 2)
	pages := make(map[uint32]map[uint32]bool) // that were read, by content
	for _, r := range reads {
		if r.At.After(until) {
			break
		}
		from := len(touched)
		touched = places.Touch(touched, r, max(r.At.Sub(started), 0))
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

// send sends a report, and tries once more. That it does not arrive is nobody's
// concern.
func (l *Learner) send(ctx context.Context, t *trace.Trace) {
	encoded, _ := t.Fit()
	if len(encoded) > trace.MaxEncoded || len(t.Args) > trace.MaxArgs {
		return
	}
	for try := 1; ; try++ {
		timed, cancel := context.WithTimeout(ctx, reportTimeout)
		err := l.opts.Report(timed, encoded)
		cancel()
		if err == nil {
			l.log.Debug("reported what a start read", "rootfs", l.r.ChainID(), "reads", len(t.Touched), "unused", len(t.Unused), "bytes", len(encoded))
			return
		}
		l.log.Debug("report what a start read", "rootfs", l.r.ChainID(), "try", try, "error", err)
		if try == 2 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}
