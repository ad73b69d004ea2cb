package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/internal/worker/api"
)

// worker is Hydrofoil's own side: a node daemon at the edge, and foil run.
type worker struct {
	demo   *demo
	root   string
	daemon *process
}

func (d *demo) startWorker(ctx context.Context) (*worker, error) {
	w := &worker{demo: d, root: filepath.Join(d.dir, "node")}
	daemon, err := d.start(link.Edge, nil, d.options.Foil, "node", "--root", w.root)
	if err != nil {
		return nil, err
	}
	w.daemon = daemon
	client := api.Dial(w.root)
	defer client.Close()
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errTooLong)
	defer cancel()
	return w, daemon.until(ctx, "start foil node", func() bool {
		_, err := client.Status(ctx)
		return err == nil
	})
}

func (w *worker) name() string { return "foil run" }

// events are what one foil run has told so far.
type events struct {
	mu   sync.Mutex
	seen map[api.EventKind]api.Event // the last of each kind
}

func (e *events) get(kind api.EventKind) (api.Event, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	event, ok := e.seen[kind]
	return event, ok
}

func (e *events) read(from *os.File) {
	defer from.Close()
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		var event api.Event
		if json.Unmarshal(lines.Bytes(), &event) == nil {
			e.mu.Lock()
			e.seen[event.Event] = event
			e.mu.Unlock()
		}
	}
}

// run starts an image by foil run.
func (w *worker) run(ref string) (*process, *events, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("demo: %w", err)
	}
	args := []string{"run", "--root", w.root, "--rm", "--plain-http", "--events", "fd:3", "--probe", w.demo.ready.probe, ref}
	if len(w.demo.options.Command) > 0 {
		args = append(append(args, "--"), w.demo.options.Command...)
	}
	p, err := w.demo.start(link.Edge, []*os.File{write}, w.demo.options.Foil, args...)
	write.Close()
	if err != nil {
		read.Close()
		return nil, nil, err
	}
	e := &events{seen: map[api.EventKind]api.Event{}}
	go e.read(read) // until all that hold the other end are gone
	return p, e, nil
}

// pullAndRun is one measured run: until the container is ready, and on until
// the image is complete.
func (w *worker) pullAndRun(ctx context.Context, ref string, built *images.Built) (r result, err error) {
	m := w.demo.measure()
	p, e, err := w.run(ref)
	if err != nil {
		return r, err
	}
	defer func() {
		if stopErr := p.stop(syscall.SIGTERM); err == nil {
			err = stopErr
		}
	}()
	if err := w.demo.ready.wait(ctx, w.demo.link, p); err != nil {
		return r, err
	}
	r = m.ready()
	if err := w.complete(ctx, ref, p, e); err != nil {
		return r, err
	}
	r.moved = m.moved()
	if event, ok := e.get(api.Ready); ok {
		r.waits, r.waited = event.Waits, time.Duration(event.Waited*float64(time.Second))
	}
	return r, w.check(ctx, ref, built)
}

// complete waits until every byte of the image is on the worker.
func (w *worker) complete(ctx context.Context, ref string, p *process, e *events) error {
	client := api.Dial(w.root)
	defer client.Close()
	return w.daemon.until(ctx, "wait until "+ref+" is complete", func() bool {
		if event, ok := e.get(api.Complete); ok {
			return event.Err == ""
		}
		select {
		case <-p.done: // a container that ends by itself takes its events along
			list, err := client.Images(ctx)
			if err != nil {
				return false
			}
			for _, image := range list {
				if image.Ref == ref && image.State == "complete" {
					return true
				}
			}
		default:
		}
		return false
	})
}

// check compares what is on the worker with what was built.
func (w *worker) check(ctx context.Context, ref string, built *images.Built) error {
	client := api.Dial(w.root)
	defer client.Close()
	list, err := client.Images(ctx)
	if err != nil {
		return fmt.Errorf("demo: list the worker's images: %w", err)
	}
	found := false
	for _, image := range list {
		if image.Ref == ref {
			found = true
			if image.Digest != built.Digest.String() {
				return fmt.Errorf("demo: the worker's %s is %s, not %s", ref, image.Digest, built.Digest)
			}
		}
	}
	if !found {
		return fmt.Errorf("demo: the worker does not know %s", ref)
	}
	_, err = w.demo.run(ctx, link.Edge, w.demo.options.Foil, "verify", "--root", w.root, ref)
	return err
}

// warm is the time to ready of an image that is here, in the page cache as well.
func (w *worker) warm(ctx context.Context, ref string) (time.Duration, error) {
	best := time.Duration(0)
	for range 3 {
		m := w.demo.measure()
		p, _, err := w.run(ref)
		if err != nil {
			return 0, err
		}
		err = w.demo.ready.wait(ctx, w.demo.link, p)
		took := m.ready().time
		if stopErr := p.stop(syscall.SIGTERM); err == nil {
			err = stopErr
		}
		if err != nil {
			return 0, err
		}
		if best == 0 || took < best {
			best = took
		}
	}
	return best, nil
}

func (w *worker) stop() error { return w.daemon.stop(syscall.SIGTERM) }
