package launch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// eachTest runs Each over n images, with a command for each of them by the shell, and collects what it tells.
type eachTest struct {
	EachOptions
	mu    sync.Mutex // guards what follows
	ends  map[string]Outcome
	order []string // in which they ended
	out   []*output
}

// output is what a container has written. It is read when that has ended.
type output struct {
	mu     sync.Mutex // a container has two outputs
	buf    bytes.Buffer
	closed bool
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) Close() error { o.closed = true; return nil }

func newEachTest(script string, n int) *eachTest {
	e := &eachTest{ends: make(map[string]Outcome)}
	for i := range n {
		e.Refs = append(e.Refs, fmt.Sprintf("registry.example/busybox:%d", i))
		e.out = append(e.out, new(output))
	}
	e.Jobs = 1
	e.Run.Spec.Args = []string{"sh", "-c", script}
	e.Run.Grace = 50 * time.Millisecond
	e.Output = func(i int) (io.WriteCloser, error) { return e.out[i], nil }
	e.Ended = func(_ int, o Outcome) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.ends[o.Ref] = o
		e.order = append(e.order, o.Ref)
	}
	return e
}

// tag has the images' shell say which one it is.
const tag = `tag=${FOIL_IMAGE##*:}; `

// ended says how each image ended, in their order.
func (e *eachTest) ended() (ends []string) {
	for _, ref := range e.Refs {
		o := e.ends[ref]
		s := o.End
		if o.Code != nil {
			s = fmt.Sprint(s, " ", *o.Code)
		}
		ends = append(ends, s)
	}
	return ends
}

func TestEach(t *testing.T) {
	h := newHost(t)
	h.images = []api.Image{{Ref: "registry.example/busybox:1", State: "pulling"}}
	h.status.Pulls = []api.PullStatus{
		{Event: api.Event{Ref: "registry.example/busybox:2", Event: api.Progress}},
		{Event: api.Event{Ref: "registry.example/busybox:3", Event: api.Failed}},
	}
	e := newEachTest(tag+`echo out $tag; echo err >&2; exit $((tag % 3))`, 6)
	totals, err := h.Each(t.Context(), e.EachOptions)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := e.ended(), []string{"exited 0", "exited 1", "exited 2", "exited 0", "exited 1", "exited 2"}; !slices.Equal(got, want) {
		t.Errorf("ended %q, want %q", got, want)
	}
	for i, out := range e.out {
		if s := out.buf.String(); !strings.Contains(s, fmt.Sprintf("out %d\n", i)) || !strings.Contains(s, "err\n") || !out.closed {
			t.Errorf("output of %s: %q, closed %v", e.Refs[i], s, out.closed)
		}
	}
	// Those that were here, or on their way, stay; the others go, each when one more has ended after it.
	if got, want := h.removed, []string{e.Refs[0], e.Refs[3], e.Refs[4], e.Refs[5]}; !slices.Equal(got, want) {
		t.Errorf("removed %q, want %q", got, want)
	}
	if totals.Elapsed <= 0 {
		t.Errorf("%+v", totals)
	}
	if o := e.ends[e.Refs[4]]; o.Digest == "" || o.Started <= 0 || o.Ended < o.Started || o.BytesMoved == 0 || o.Began <= 0 {
		t.Errorf("%+v", o)
	}
}

func TestEachKeepsImages(t *testing.T) {
	h := newHost(t)
	e := newEachTest("true", 2)
	e.Keep = true
	if totals, err := h.Each(t.Context(), e.EachOptions); err != nil || totals.Removed != 0 || len(h.removed) > 0 {
		t.Errorf("%+v, %v, removed %q", totals, err, h.removed)
	}
}

func TestEachFailFast(t *testing.T) {
	h := newHost(t)
	e := newEachTest(tag+`exit $tag`, 4)
	e.FailFast = true
	if _, err := h.Each(t.Context(), e.EachOptions); err != nil {
		t.Fatal(err)
	}
	if got, want := e.ended(), []string{"exited 0", "exited 1", "skipped", "skipped"}; !slices.Equal(got, want) {
		t.Errorf("ended %q, want %q", got, want)
	}
	if got := h.removed; !slices.Equal(got, e.Refs[:2]) {
		t.Errorf("removed %q", got)
	}
}

func TestEachTimesOut(t *testing.T) {
	h := newHost(t)
	// The first does not hear of SIGTERM, being the first of its namespace; the second does.
	e := newEachTest(tag+`if [ $tag = 1 ]; then trap "exit 7" TERM; fi; while true; do sleep 0.01; done`, 2)
	e.Timeout = 700 * time.Millisecond
	if _, err := h.Each(t.Context(), e.EachOptions); err != nil {
		t.Fatal(err)
	}
	for _, o := range e.ends {
		if o.End != EndTimedOut || o.OK() {
			t.Errorf("%+v", o)
		}
	}
}

func TestEachIsInterrupted(t *testing.T) {
	h := newHost(t)
	e := newEachTest(`echo up; while true; do sleep 0.01; done`, 4)
	e.Jobs = 2
	ctx, interrupt := context.WithCancel(t.Context())
	up := make(chan struct{}, 4)
	e.Event = func(_ int, ev api.Event) {
		if ev.Event == api.Started {
			up <- struct{}{}
		}
	}
	go func() {
		<-up
		<-up
		interrupt()
	}()
	if _, err := h.Each(ctx, e.EachOptions); err != nil {
		t.Fatal(err)
	}
	for _, o := range e.ends {
		if o.End != EndInterrupted {
			t.Errorf("%+v", o)
		}
	}
	if len(e.ends) != 4 || len(h.containers) > 0 {
		t.Errorf("%d ended, containers %v", len(e.ends), h.containers)
	}
	// Two never began: nothing of them is here.
	if slices.Sort(h.removed); !slices.Equal(h.removed, e.Refs[:2]) {
		t.Errorf("removed %q", h.removed)
	}
}

// What cannot be pulled is told of, and the others run.
func TestEachWithoutAnImage(t *testing.T) {
	h := newHost(t)
	first := true
	var mu sync.Mutex
	h.pull = func(_ context.Context, emit func(api.Event) error) error {
		mu.Lock()
		defer mu.Unlock()
		if first {
			first = false
			return &api.Error{Code: api.CodeNotFound, Message: "no such tag"}
		}
		return story(emit, api.Resolved, api.Mounted, api.Complete)
	}
	e := newEachTest("true", 2)
	if _, err := h.Each(t.Context(), e.EachOptions); err != nil {
		t.Fatal(err)
	}
	if o := e.ends[e.Refs[0]]; o.End != EndFailed || !strings.Contains(o.Err, "no such tag") {
		t.Errorf("%+v", o)
	}
	if o := e.ends[e.Refs[1]]; !o.OK() {
		t.Errorf("%+v", o)
	}
}
