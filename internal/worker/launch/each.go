package launch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// EachOptions describe one command that runs over several images.
type EachOptions struct {
	// Refs are the images, none twice.
	Refs []string
	// Run is how each runs. Its image, ID, IO, Signals and Emit are Each's to set.
	Run Options
	// Jobs is how many run side by side; at least 1.
	Jobs int
	// Timeout is how long an image may take, its pull and its container together; 0: as long as it likes.
	Timeout time.Duration
	// FailFast begins no more images once one has failed; those that run go on.
	FailFast bool
	// Keep leaves the images on the worker, and their pulls running. Else those go that were not here before.
	Keep bool

	// Output is where image i writes both its outputs to, which may come at the same time. It is closed when the
	// container has ended.
	Output func(i int) (io.WriteCloser, error)
	// Event is told of each event of image i, Ended how it ended, Removing how many images there are to be removed when the
	// last one has ended. Calls for different images come side by side. Event and Removing may be nil.
	Event    func(i int, ev api.Event)
	Ended    func(i int, o Outcome)
	Removing func(images int)
}

// How an image of Each has ended.
const (
	EndExited      = "exited"      // its container did; Code says how
	EndFailed      = "failed"      // it was not started, or foil failed; Err says why
	EndTimedOut    = "timed out"   // before it was through
	EndInterrupted = "interrupted" // while it ran, or before
	EndSkipped     = "skipped"     // not begun, after another one's failure
)

// Outcome is how one image has ended. Times are seconds.
type Outcome struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest,omitempty"`
	End    string `json:"end"`
	// Code is the exit code, if there is one.
	Code *int   `json:"exit_code,omitempty"`
	Err  string `json:"error,omitempty"`
	// Began counts from when Each was called; Started and Ended from then on, until the container's process ran, and
	// until its end.
	Began   float64 `json:"began"`
	Started float64 `json:"started,omitempty"`
	Ended   float64 `json:"ended"`
	// BytesMoved, Waits and Waited are those of the image's pull, when the container ended.
	BytesMoved int64   `json:"bytes_moved"`
	Waits      int64   `json:"waits,omitempty"`
	Waited     float64 `json:"waited,omitempty"`
}

// OK reports whether the container has ended with 0.
func (o Outcome) OK() bool { return o.End == EndExited && *o.Code == 0 }

// EachTotals are what Each took. Times are seconds.
type EachTotals struct {
	Elapsed float64 `json:"elapsed"`
	Removed int     `json:"removed"` // images
	// Removing is what the removal of images took that no container waited for: after the last one's end.
	Removing float64 `json:"removing"`
}

// Each runs a command over several images, some side by side, each as Run does, and removes containers and images
// behind itself. When ctx ends it begins no more, ends what runs (SIGTERM, then SIGKILL), and removes as ever. The error
// is that of removing; what became of an image is told to Ended alone.
//
// Of what they share nothing moves twice: an image whose container has ended stays until as many others as run
// side by side have ended after it, so that those that begin meanwhile have what it has.
func (w *Worker) Each(ctx context.Context, o EachOptions) (EachTotals, error) {
	e := &each{Worker: w, o: o, begun: time.Now(), id: "each-" + strings.ToLower(rand.Text()[:10])}
	if o.Run.Grace == 0 {
		e.o.Run.Grace = 10 * time.Second
	}
	var err error
	if !o.Keep {
		if e.stay, err = w.there(ctx); err != nil {
			return EachTotals{}, err
		}
	}
	work := make(chan int)
	var jobs sync.WaitGroup
	for range min(max(o.Jobs, 1), len(o.Refs)) {
		jobs.Go(func() {
			for i := range work {
				end := e.one(ctx, i)
				o.Ended(i, end)
				e.ended(ctx, i, end)
			}
		})
	}
	for i := range o.Refs {
		work <- i
		// What they share comes with the first of those that begin together.
		if i < o.Jobs {
			time.Sleep(apart)
		}
	}
	close(work)
	jobs.Wait()
	done := time.Now()
	if o.Removing != nil && len(e.spent) > 0 {
		o.Removing(len(e.spent))
	}
	for _, ref := range e.spent {
		e.remove(ctx, ref)
	}
	now := time.Now()
	return EachTotals{Elapsed: now.Sub(e.begun).Seconds(), Removed: e.removed, Removing: now.Sub(done).Seconds()}, errors.Join(e.errs...)
}

// apart is how long after the first of those that begin together the next one does.
const apart = 10 * time.Millisecond

// each is one call of Each.
type each struct {
	*Worker
	o     EachOptions
	begun time.Time
	id    string          // what the containers' IDs begin with
	stay  map[string]bool // images that were here before

	mu      sync.Mutex
	failed  bool     // one was
	spent   []string // images to be removed, the first that ended first
	removed int
	errs    []error // of removing
}

// there is the set of the images that are here, or on their way.
func (w *Worker) there(ctx context.Context) (map[string]bool, error) {
	images, err := w.Client.Images(ctx)
	if err != nil {
		return nil, err
	}
	st, err := w.Client.Status(ctx)
	if err != nil {
		return nil, err
	}
	set := make(map[string]bool)
	for _, img := range images {
		set[img.Ref] = true
	}
	for _, p := range st.Pulls {
		if p.Event.Event != api.Failed {
			set[p.Ref] = true
		}
	}
	return set, nil
}

// one sees one image from its pull to its container's end.
func (e *each) one(ctx context.Context, i int) Outcome {
	began := time.Now()
	end := Outcome{Ref: e.o.Refs[i], Began: began.Sub(e.begun).Seconds()}
	e.mu.Lock()
	failed := e.failed
	e.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		end.End = EndInterrupted
		return end
	case failed && e.o.FailFast:
		end.End = EndSkipped
		return end
	}
	out, err := e.o.Output(i)
	if err != nil {
		end.End, end.Err = EndFailed, err.Error()
		return end
	}
	o := e.o.Run
	o.Pull.Ref, o.Remove, o.Begun = end.Ref, true, began
	o.Spec.ID = fmt.Sprintf("%s-%d", e.id, i+1)
	o.Spec.Env = append([]string{"FOIL_IMAGE=" + end.Ref}, o.Spec.Env...)
	o.IO = runner.IO{Stdout: out, Stderr: out}
	o.Emit = func(ev api.Event) {
		switch ev.Event {
		case api.Resolved:
			end.Digest = ev.Digest
		case api.Started:
			end.Started = ev.Elapsed
		}
		end.BytesMoved, end.Waits, end.Waited = ev.BytesMoved, ev.Waits, ev.Waited
		if e.o.Event != nil {
			e.o.Event(i, ev)
		}
	}
	signals := make(chan os.Signal, 2)
	o.Signals = signals
	stopped := e.watch(ctx, o.Grace, signals)
	code, err := e.Run(context.WithoutCancel(ctx), o)
	why := stopped()
	err = errors.Join(err, out.Close())
	end.Ended = time.Since(began).Seconds()
	never := errors.Is(err, ErrInterrupted)
	switch {
	case why != "":
		end.End = why
		if !never && err != nil {
			end.Err = err.Error()
		}
	case err != nil:
		end.End, end.Err = EndFailed, err.Error()
	default:
		end.End = EndExited
	}
	if err == nil {
		end.Code = &code
	}
	return end
}

// watch ends a run when ctx ends, or its time is over: by SIGTERM, and SIGKILL after a while. stopped ends
// the watch, and says why it did that, or "".
func (e *each) watch(ctx context.Context, grace time.Duration, signals chan<- os.Signal) (stopped func() string) {
	over, done := make(chan struct{}), make(chan struct{})
	why := ""
	go func() {
		defer close(done)
		var late <-chan time.Time
		if e.o.Timeout > 0 {
			timer := time.NewTimer(e.o.Timeout)
			defer timer.Stop()
			late = timer.C
		}
		select {
		case <-ctx.Done():
			why = EndInterrupted
		case <-late:
			why = EndTimedOut
		case <-over:
			return
		}
		signals <- syscall.SIGTERM
		hard := time.NewTimer(grace)
		defer hard.Stop()
		select {
		case <-hard.C:
			signals <- syscall.SIGKILL
		case <-over:
		}
	}()
	return func() string {
		close(over)
		<-done
		return why
	}
}

// ended notes that an image has ended, and removes the one whose turn it is.
func (e *each) ended(ctx context.Context, i int, end Outcome) {
	e.mu.Lock()
	e.failed = e.failed || !end.OK()
	var ref string
	begun := end.End != EndSkipped && (end.End != EndInterrupted || end.Ended > 0)
	if !e.o.Keep && begun && !e.stay[end.Ref] {
		e.spent = append(e.spent, end.Ref)
		if len(e.spent) > e.o.Jobs {
			ref = e.spent[0]
			e.spent = slices.Delete(e.spent, 0, 1)
		}
	}
	e.mu.Unlock()
	if ref != "" {
		e.remove(ctx, ref)
	}
}

// remove removes an image, and ends its pull. That it has gone, or that somebody uses it now, is as well.
func (e *each) remove(ctx context.Context, ref string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	err := e.Client.RemoveImage(ctx, ref)
	e.mu.Lock()
	defer e.mu.Unlock()
	refused, ok := errors.AsType[*api.Error](err)
	switch {
	case err == nil:
		e.removed++
	case ok && (refused.Code == api.CodeNotFound || refused.Code == api.CodeConflict):
	default:
		e.errs = append(e.errs, fmt.Errorf("remove image %s: %w", ref, err))
	}
}

// removeWithin is how long the removal of one image may take.
const removeWithin = time.Minute
