package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// Policy says when Run asks the image's server.
type Policy string

const (
	// PullMissing asks unless the image is here, complete. It is what the
	// empty Policy means.
	PullMissing Policy = "missing"
	PullAlways  Policy = "always"
	PullNever   Policy = "never"
)

// Options describe one run.
type Options struct {
	// Pull names the image. Its Until is ignored.
	Pull   api.PullRequest
	Policy Policy

	// Spec is what the user asks for on top of the image's config. ID is the
	// container's name; Dir and Rootfs are filled in.
	Spec runner.SpecOptions
	IO   runner.IO
	// Remove removes the container after its end.
	Remove bool

	// Probe tells when the container is ready; nil: nothing does. A stdout
	// probe sees the standard error too: many servers log there.
	Probe *probe.Probe
	// Until is Ready or Complete to stop the container at that event, and
	// return 0; "" runs it to its end. Complete waits for Ready as well when
	// there is a probe, and for the pull when the container has ended by itself.
	Until api.EventKind
	// Grace is how long a container that Until stops has between SIGTERM and
	// SIGKILL. 0: 10 s.
	Grace time.Duration

	// Signals are passed on to the container once it runs; before that, the
	// first one ends Run.
	Signals <-chan os.Signal
	// Emit is called for each event, one call at a time; nil: nobody listens.
	Emit func(api.Event)
	// Begun is when the command began; zero: when Run was called.
	Begun time.Time
}

// ErrInterrupted is returned by Run, in a *NotStartedError, when a signal came
// before the container was started.
var ErrInterrupted = errors.New("interrupted before the container started; the daemon goes on with the pull, if one was running")

// NotStartedError is an error that kept a container's process from running.
type NotStartedError struct{ Err error }

func (e *NotStartedError) Error() string { return e.Err.Error() }
func (e *NotStartedError) Unwrap() error { return e.Err }

// Run runs one container in the foreground and returns its exit code, or 128
// plus the signal that ended it. An error is a *NotStartedError when the
// container's process never ran. When ctx ends before the start, Run returns;
// after it, the container is none the wiser: Signals are the way to end it.
func (w *Worker) Run(ctx context.Context, o Options) (code int, err error) {
	if err := o.prepare(); err != nil {
		return 0, err
	}
	return w.newRun(o).run(ctx)
}

// prepare completes the options.
func (o *Options) prepare() (err error) {
	if o.Begun.IsZero() {
		o.Begun = time.Now()
	}
	if o.Grace == 0 {
		o.Grace = 10 * time.Second
	}
	if o.Pull.Ref, err = api.NormalRef(o.Pull.Ref); err != nil {
		return &NotStartedError{err}
	}
	if o.Probe != nil {
		o.IO.Stdout = o.Probe.Writer(o.IO.Stdout)
		if !o.IO.TTY {
			o.IO.Stderr = o.Probe.Writer(o.IO.Stderr)
		}
	}
	return nil
}

func (w *Worker) newRun(o Options) *run {
	r := &run{Worker: w, o: o, reserved: make(chan *api.Container, 1), mounted: make(chan *api.Container, 1), pulled: make(chan struct{})}
	r.counts.Ref = o.Pull.Ref
	return r
}

// run is one call of Run.
type run struct {
	*Worker
	o Options

	mu      sync.Mutex // guards pulling and counts, and serializes Emit
	pulling bool       // the run asked the daemon to pull
	counts  api.Event  // the latest event or status of the pull

	reserved chan *api.Container // what is there of the container before its image, unless that is here
	mounted  chan *api.Container // the container, once it can start; nil: it is still to be made
	pulled   chan struct{}       // closed when the pull has ended
	pullErr  error               // how; valid when pulled is closed

	tellExit sync.Once

	tracing *tracing // nil: a run that is not traced
	args    []string // of the container's first process
	began   time.Time

	container atomic.Bool // the daemon has something of the container, or had it
	starting  atomic.Bool // the container's process may run from now on
}

func (r *run) run(ctx context.Context) (code int, err error) {
	// always lasts until Run returns, whatever happens to ctx.
	always, end := context.WithCancel(context.WithoutCancel(ctx))
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer end()

	before, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	started := make(chan *runner.Container, 1)
	helpers.Go(func() { r.signals(always, started, interrupt) })
	pulling, letGo := context.WithCancel(always)
	defer letGo()
	helpers.Go(func() { r.pull(pulling) })
	helpers.Go(r.Runner.Warm)

	noted := make(chan struct{}) // closed when the daemon knows of the start
	defer func() {
		// One that never ran is of no use to anybody.
		_, never := errors.AsType[*NotStartedError](err)
		if !r.container.Load() || !r.o.Remove && !never {
			return
		}
		if never {
			letGo() // of what is not finished
		} else {
			<-noted
		}
		rerr := r.Client.RemoveContainer(always, r.o.Spec.ID)
		// It may have been removed by force, or nothing was made of it.
		if e, ok := errors.AsType[*api.Error](rerr); !ok || e.Code != api.CodeNotFound {
			err = errors.Join(err, rerr)
		}
	}()
	proc, err := r.start(before)
	if err != nil {
		return 0, notStarted(before, err)
	}
	defer func() { err = errors.Join(err, proc.Close()) }()
	started <- proc
	helpers.Go(func() {
		r.note(always, proc.ID, time.Time{})
		close(noted)
	})
	r.tell(always, api.Event{Event: api.Started})
	return r.follow(always, before, proc)
}

// follow sees a started container to its end. before ends when a signal comes
// after that.
func (r *run) follow(ctx, before context.Context, proc *runner.Container) (int, error) {
	goal := make(chan error, 1)
	var probes sync.WaitGroup
	defer probes.Wait()
	probing, stopProbing := context.WithCancel(ctx)
	defer stopProbing()
	probes.Go(func() { goal <- r.reach(probing, before, proc) })
	if r.tracing != nil && r.tracing.Progress != nil {
		probes.Go(func() { r.watchTrace(probing, proc) })
	}

	if r.o.Until == "" {
		<-proc.Done()
		<-goal // so that ready comes before exited, if it comes; a probe ends with its container
		return r.exited(ctx, proc)
	}
	missed := <-goal
	if missed == nil || !errors.Is(missed, probe.ErrExited) {
		if err := r.stop(proc); err != nil {
			return 0, err
		}
	}
	code, err := r.exited(ctx, proc)
	switch {
	case err != nil:
		return 0, err
	case missed == nil:
		return 0, nil
	case code != 0 && (errors.Is(missed, probe.ErrExited) || errors.Is(missed, errLeft)):
		return code, nil
	}
	return 0, missed
}

// errLeft is that of a run whose container has ended and which does not wait for
// the rest of the image, since a signal came.
var errLeft = errors.New("interrupted; the daemon goes on with the pull")

// note tells the daemon of the container's start, or that it is ready: it learns
// from that. That it fails is no reason to disturb anybody.
func (r *run) note(ctx context.Context, id string, ready time.Time) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_ = r.Client.ContainerStarted(ctx, id, api.Start{Args: r.args, Started: r.began, Probe: r.o.Probe != nil, Ready: ready})
}

// reach waits until the container is ready, and for what else Until asks.
func (r *run) reach(ctx, before context.Context, proc *runner.Container) error {
	if r.o.Probe != nil {
		limited, cancel := ctx, func() {}
		if r.tracing != nil && r.tracing.Timeout > 0 {
			limited, cancel = context.WithTimeout(ctx, r.tracing.Timeout)
		}
		err := r.o.Probe.Wait(limited, probed{proc, r.Runner})
		late := limited.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err != nil && late:
			return r.notReady()
		case err != nil:
			return err
		}
		ready := time.Now()
		r.tell(ctx, api.Event{Event: api.Ready, Time: ready})
		if r.tracing != nil {
			return r.trace(ctx, proc, ready)
		}
		r.note(ctx, proc.ID, ready)
	}
	if r.tracing != nil {
		return r.traceQuiet(ctx, proc)
	}
	if r.o.Until != api.Complete {
		return nil
	}
	select {
	case <-r.pulled:
	case <-proc.Done():
		if _, err := r.exited(ctx, proc); err != nil {
			return err
		}
		select {
		case <-r.pulled:
		case <-before.Done():
			return errLeft
		}
	}
	return r.pullErr
}

// stop ends the container.
func (r *run) stop(proc *runner.Container) error {
	if err := proc.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	grace := time.NewTimer(r.o.Grace)
	defer grace.Stop()
	select {
	case <-proc.Done():
		return nil
	case <-grace.C:
		return proc.Signal(syscall.SIGKILL)
	}
}

// exited waits for the container's end and tells it, once.
func (r *run) exited(ctx context.Context, proc *runner.Container) (int, error) {
	code, err := proc.Wait(ctx)
	if err != nil {
		return 0, err
	}
	r.tellExit.Do(func() { r.tell(ctx, api.Event{Event: api.Exited, ExitCode: &code}) })
	return code, nil
}

// probed is a container as probes see it.
type probed struct {
	*runner.Container
	runner *runner.Runner
}

func (p probed) Exec(ctx context.Context, args []string) (int, error) {
	return p.runner.Exec(ctx, p.ID, args, runner.IO{})
}

// startPatience is how long a signal waits for a container that is being started.
const startPatience = 2 * time.Second

// signals passes signals on to the container, or interrupts before there is one.
func (r *run) signals(ctx context.Context, started <-chan *runner.Container, interrupt context.CancelCauseFunc) {
	var proc *runner.Container
	for {
		select {
		case <-ctx.Done():
			return
		case proc = <-started:
		case sig := <-r.o.Signals:
			if proc == nil && r.starting.Load() {
				// The process may run already, though nobody has said so yet. If
				// nobody does, its start hangs.
				patience := time.NewTimer(startPatience)
				select {
				case <-ctx.Done():
				case proc = <-started:
				case <-patience.C:
				}
				patience.Stop()
			}
			if proc == nil {
				interrupt(ErrInterrupted)
				continue
			}
			select {
			case <-proc.Done():
				interrupt(errLeft)
			default:
				// The only error is a process that is just ending.
				_ = proc.Signal(sig)
			}
		}
	}
}

// start brings the container to where its process runs. runc is begun when there is a
// place for it, while the image is still coming, and is told what to run when the image
// is mounted.
func (r *run) start(ctx context.Context) (*runner.Container, error) {
	var begun *runner.Starting
	c, err := r.awaitImage(ctx, func(c *api.Container) (err error) {
		begun, err = r.Runner.Begin(ctx, c.ID, c.Dir, r.o.IO)
		return err
	})
	if err == nil && begun == nil {
		begun, err = r.Runner.Begin(ctx, c.ID, c.Dir, r.o.IO)
	}
	if err != nil {
		return nil, abort(begun, err)
	}
	spec, err := r.configuration(c)
	if err != nil {
		return nil, abort(begun, err)
	}
	r.began = time.Now()
	r.starting.Store(true)
	return begun.Configure(spec)
}

// abort gives up what was begun, if anything was.
func abort(begun *runner.Starting, err error) error {
	if begun == nil {
		return err
	}
	return errors.Join(err, begun.Abort())
}

// awaitImage waits until the container can start. reserved is called as soon as there is a
// directory for it, if that comes before.
func (r *run) awaitImage(ctx context.Context, reserved func(*api.Container) error) (*api.Container, error) {
	var c *api.Container
	for done := false; !done; {
		select {
		case c := <-r.reserved:
			// Its directory goes when the pull fails, which says why in a moment.
			if err := reserved(c); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		case c = <-r.mounted:
			done = true
		case <-r.pulled:
			select {
			case c = <-r.mounted:
			default:
				if r.pullErr != nil {
					return nil, r.pullErr
				}
			}
			done = true
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	if c != nil {
		return c, nil
	}
	req := api.ContainerRequest{ID: r.o.Spec.ID, Ref: r.o.Pull.Ref}
	if r.tracing != nil {
		req.Trace, req.Before = true, r.tracing.Before
	}
	c, err := r.Client.CreateContainer(ctx, req)
	if err == nil {
		r.container.Store(true)
	}
	return c, err
}

// configuration is what runc is told to run.
func (r *run) configuration(c *api.Container) (*specs.Spec, error) {
	var image ocispec.Image
	if err := json.Unmarshal(c.Config, &image); err != nil {
		return nil, fmt.Errorf("config of image %s: %w", c.Ref, err)
	}
	o := r.o.Spec
	o.Dir, o.Rootfs = c.Dir, c.Rootfs
	spec, err := runner.Spec(image, o)
	if err != nil {
		return nil, err
	}
	r.args = spec.Process.Args
	return spec, nil
}

// notStarted says why the container did not start; when it was interrupted, that
// is why, whatever failed as a consequence.
func notStarted(before context.Context, err error) error {
	if before.Err() != nil {
		err = ErrInterrupted
	}
	return &NotStartedError{err}
}
