package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

// Container is a container that this process has started.
type Container struct {
	ID string

	runner  *Runner
	process *os.Process // the container's first, a child of ours
	streams *streams

	ended chan struct{} // closed when the process and its streams have ended
	code  int           // valid then
	err   error         // valid then

	eased chan struct{} // closed when easeJoin has ended; nil: it was not called

	closeOnce sync.Once
	closeErr  error
}

// Start makes the container of a bundle directory and executes its first process.
// The IDs of one StateRoot are unique. Streams are described at IO; a container
// with a terminal (process.terminal in config.json) needs IO.TTY. When ctx ends
// before Start returns, the container is removed, whether its process ran or not.
func (r *Runner) Start(ctx context.Context, id, dir string, o IO) (*Container, error) {
	s, err := r.begin(ctx, id, dir, o, nil)
	if err != nil {
		return nil, err
	}
	return s.finish()
}

// Starting is a container whose start has begun, and waits for its configuration. One of
// Configure and Abort is called in the end.
type Starting struct {
	runner  *Runner
	ctx     context.Context
	id, dir string
	streams *streams
	cmd     *exec.Cmd
	log     string
	pidFile string
	drop    func()   // of the PID file
	config  *os.File // where runc reads its configuration from; nil: a file
}

// Begin is Start for a container whose configuration is not known yet: runc, which takes
// a while until it reads that, is begun, and Starting.Configure does the rest. dir need not
// hold anything. If the calling process is killed meanwhile, so that nobody configures the
// container, runc ends by itself.
func (r *Runner) Begin(ctx context.Context, id, dir string, o IO) (*Starting, error) {
	// A pipe that runc finds as config.json, and not a FIFO: opening that would wait
	// for a writer, for ever if there is none any more.
	from, to, err := os.Pipe()
	if err != nil {
		return nil, startError(id, err)
	}
	defer from.Close()
	if err := os.Symlink(fmt.Sprintf("/proc/self/fd/%d", firstExtra), filepath.Join(dir, configName)); err != nil {
		return nil, errors.Join(startError(id, err), to.Close())
	}
	s, err := r.begin(ctx, id, dir, o, from)
	if err != nil {
		_ = os.Remove(filepath.Join(dir, configName))
		return nil, errors.Join(err, to.Close())
	}
	s.config = to
	return s, nil
}

// firstExtra is the descriptor that the first of exec.Cmd.ExtraFiles is.
const firstExtra = 3

func startError(id string, err error) error { return fmt.Errorf("start container %s: %w", id, err) }

// begin begins runc. config is what it shall read its configuration from by
// descriptor firstExtra; nil: config.json is there.
func (r *Runner) begin(ctx context.Context, id, dir string, o IO, config *os.File) (_ *Starting, err error) {
	s := &Starting{runner: r, ctx: ctx, id: id, dir: dir, log: filepath.Join(dir, "runc.log"), drop: func() {}}
	defer func() {
		if err != nil {
			err = startError(id, errors.Join(err, s.close()))
		}
	}()
	if err := os.MkdirAll(r.StateRoot, 0o700); err != nil {
		return nil, err
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a subreaper: %w", err)
	}
	if s.streams, err = openStreams(dir, o); err != nil {
		return nil, err
	}
	s.pidFile, s.drop = pidFile(dir)
	if err := os.Remove(s.log); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// One command is faster than two. A terminal must have its size before a
	// process can ask for it, and that is set in between.
	args := []string{"run", "--detach"}
	if s.streams.console != nil {
		args = []string{"create", "--console-socket", s.streams.console.path}
	}
	s.cmd = r.command(ctx, s.log, append(args, "--bundle", dir, "--pid-file", s.pidFile, id)...)
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = s.streams.files()
	if config != nil {
		s.cmd.ExtraFiles = []*os.File{config}
	}
	if err := s.cmd.Start(); errors.Is(err, exec.ErrNotFound) {
		return nil, errNoRunc(err)
	} else if err != nil {
		return nil, err
	}
	return s, nil
}

// Configure gives runc the configuration, which is in config.json from then on, and waits
// until the container's first process is executed, as Start does.
func (s *Starting) Configure(spec *specs.Spec) (*Container, error) {
	b, err := encodeSpec(spec)
	if err == nil {
		err = replaceSpec(s.dir, b)
	}
	if err != nil {
		return nil, errors.Join(startError(s.id, err), s.Abort())
	}
	ctx, stop := context.WithCancel(s.ctx)
	defer stop()
	eased := easeJoin(ctx)
	// A runc that has ended reads nothing: why is what finish says. One that was slow has
	// found the file, and reads nothing either until it ends.
	_, _ = s.config.Write(b)
	_ = s.config.Close()
	c, err := s.finish()
	stop()
	if err != nil {
		<-eased
		return nil, err
	}
	c.eased = eased
	return c, nil
}

// easeEvery is shorter than the time for which kernel.RejoinCgroup has an effect.
const easeEvery = 5 * time.Millisecond

// easeJoin has the kernel prepared for what runc is about to do, until ctx ends: it puts the
// container into its cgroups, for which the kernel has a process wait some 8 ms unless
// another one has waited just before. While it waits here runc reads its configuration. gone
// is closed a while after ctx has ended.
//
// Without it starts of redis take 1.09 times as long (95%: 1.03 to 1.16), of node 1.15 times (1.07 to 1.23): 25 pairs
// each in turns, with a startup set, no limit on the link, 40 and 47 ms with it.
func easeJoin(ctx context.Context) (gone chan struct{}) {
	gone = make(chan struct{})
	go func() {
		defer close(gone)
		tick := time.NewTicker(easeEvery)
		defer tick.Stop()
		for kernel.RejoinCgroup() == nil { // without it runc waits itself
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	return gone
}

// Abort ends a start that comes to nothing. runc has done nothing yet.
func (s *Starting) Abort() error {
	_ = s.cmd.Process.Kill() // it may have ended
	_ = s.cmd.Wait()
	return errors.Join(s.config.Close(), s.close())
}

// close undoes what was prepared for a container that was not created.
func (s *Starting) close() error {
	s.drop()
	if s.streams == nil {
		return nil
	}
	return s.streams.abort()
}

// finish waits for runc.
func (s *Starting) finish() (*Container, error) {
	c, err := s.wait()
	if err != nil {
		return nil, startError(s.id, err)
	}
	return c, nil
}

func (s *Starting) wait() (*Container, error) {
	r, ctx := s.runner, s.ctx
	err := s.cmd.Wait()
	if err != nil && ctx.Err() == nil {
		if b, readErr := os.ReadFile(s.log); readErr == nil && lastError(b) != "" {
			err = errors.New(lastError(b))
		}
		return nil, errors.Join(err, s.close())
	}
	// From here on there may be a container to be removed when something fails.
	fail := func(err error) (*Container, error) {
		return nil, errors.Join(err, r.Delete(context.WithoutCancel(ctx), s.id), s.close())
	}
	if err != nil { // runc was killed
		return fail(fmt.Errorf("%w: %w", context.Cause(ctx), err))
	}
	b, err := os.ReadFile(s.pidFile)
	if err != nil {
		return fail(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fail(fmt.Errorf("read %s: %w", s.pidFile, err))
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return fail(err)
	}
	if err := s.streams.begin(); err != nil {
		return fail(err)
	}
	if s.streams.console != nil {
		if _, err := r.run(ctx, "start", s.id); err != nil {
			return fail(err)
		}
	}
	s.drop()
	c := &Container{ID: s.id, runner: r, process: process, streams: s.streams, ended: make(chan struct{})}
	go c.follow()
	return c, nil
}

// pidFile returns where runc shall write the number of the container's first
// process, and what removes it. runc waits until it is on the disk, and a start for
// runc, so that it is in memory where that can be. On the disk starts of redis took 1.05 times as long (95%: 0.99 to
// 1.12), of node 1.08 times (1.02 to 1.16), measured as easeJoin was.
func pidFile(dir string) (path string, drop func()) {
	memory, err := kernel.MemoryDir()
	if err != nil {
		return filepath.Join(dir, "pid"), func() {}
	}
	return fmt.Sprintf("/proc/%d/fd/%d/pid", os.Getpid(), memory.Fd()), func() { _ = memory.Close() }
}

// follow ends with the container; Close waits for it.
func (c *Container) follow() {
	defer close(c.ended)
	state, err := c.process.Wait()
	if err != nil {
		c.err = fmt.Errorf("wait for container %s: %w", c.ID, err)
	} else {
		c.code = exitCode(state)
	}
	c.streams.end()
}

// PID is that of the container's first process.
func (c *Container) PID() int { return c.process.Pid }

// Done is closed when the container has ended and all its output was written.
func (c *Container) Done() <-chan struct{} { return c.ended }

// Wait waits until the container has ended and all its output was written, and
// returns the exit code of its first process, or 128 plus the signal that ended
// it. It may be called several times. When ctx ends first, its error is
// returned and the container goes on.
func (c *Container) Wait(ctx context.Context) (int, error) {
	select {
	case <-c.ended:
		return c.code, c.err
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for container %s: %w", c.ID, context.Cause(ctx))
	}
}

// Signal sends a signal to the container's first process. That the process has
// ended is no error. As the first one of its namespace it gets no signal,
// SIGKILL excepted, that it has no handler for.
func (c *Container) Signal(sig os.Signal) error {
	if err := c.process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal container %s: %w", c.ID, err)
	}
	return nil
}

// forwarded are the signals by which people and supervisors talk to a program.
var forwarded = []os.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2}

// ForwardSignals passes signals that reach this process on to the container
// until stop is called.
func (c *Container) ForwardSignals() (stop func()) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for {
			select {
			case s := <-signals:
				c.Signal(s) // it ended, or will be killed
			case <-quit:
				return
			}
		}
	}()
	return sync.OnceFunc(func() {
		signal.Stop(signals)
		close(quit)
		<-gone
	})
}

// Close kills the container if it still runs, waits for its output, and removes
// runc's state of it. Wait works afterwards.
func (c *Container) Close() error {
	c.closeOnce.Do(func() {
		// Not bounded by a caller's context: state must not be left behind.
		c.closeErr = errors.Join(c.Signal(unix.SIGKILL), c.runner.Delete(context.Background(), c.ID))
		<-c.ended
		if c.eased != nil {
			<-c.eased
		}
	})
	return c.closeErr
}

// Exec runs a command in the container, without streams; see Runner.Exec.
func (c *Container) Exec(ctx context.Context, args []string) (int, error) {
	return c.runner.Exec(ctx, c.ID, args, IO{})
}
