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

	closeOnce sync.Once
	closeErr  error
}

// Start makes the container of a bundle directory and executes its first process.
// The IDs of one StateRoot are unique. Streams are described at IO; a container
// with a terminal (process.terminal in config.json) needs IO.TTY. When ctx ends
// before Start returns, the container is removed, whether its process ran or not.
func (r *Runner) Start(ctx context.Context, id, dir string, o IO) (*Container, error) {
	c, err := r.start(ctx, id, dir, o)
	if err != nil {
		return nil, fmt.Errorf("start container %s: %w", id, err)
	}
	return c, nil
}

func (r *Runner) start(ctx context.Context, id, dir string, o IO) (*Container, error) {
	if err := os.MkdirAll(r.StateRoot, 0o711); err != nil {
		return nil, err
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a subreaper: %w", err)
	}
	s, err := openStreams(dir, o)
	if err != nil {
		return nil, err
	}
	log := filepath.Join(dir, "runc.log")
	pidFile, dropPIDFile := pidFile(dir)
	defer dropPIDFile()
	if err := os.Remove(log); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errors.Join(err, s.abort())
	}
	// One command is faster than two. A terminal must have its size before a
	// process can ask for it, and that is set in between.
	args := []string{"run", "--detach"}
	if s.console != nil {
		args = []string{"create", "--console-socket", s.console.path}
	}
	cmd := r.command(ctx, log, append(args, "--bundle", dir, "--pid-file", pidFile, id)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.files()
	err = cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, errors.Join(errNoRunc(err), s.abort())
	}
	if err != nil && ctx.Err() == nil {
		if b, readErr := os.ReadFile(log); readErr == nil && lastError(b) != "" {
			err = errors.New(lastError(b))
		}
		return nil, errors.Join(err, s.abort())
	}
	// From here on there may be a container to be removed when something fails.
	fail := func(err error) (*Container, error) {
		return nil, errors.Join(err, r.Delete(context.WithoutCancel(ctx), id), s.abort())
	}
	if err != nil { // runc was killed
		return fail(fmt.Errorf("%w: %w", context.Cause(ctx), err))
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return fail(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fail(fmt.Errorf("read %s: %w", pidFile, err))
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return fail(err)
	}
	if err := s.begin(); err != nil {
		return fail(err)
	}
	if s.console != nil {
		if _, err := r.run(ctx, "start", id); err != nil {
			return fail(err)
		}
	}
	c := &Container{ID: id, runner: r, process: process, streams: s, ended: make(chan struct{})}
	go c.follow()
	return c, nil
}

// pidFile returns where runc shall write the number of the container's first
// process, and what removes it. runc waits until it is on the disk, and a start for
// runc, so that it is in memory where that can be.
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
	})
	return c.closeErr
}

// Exec runs a command in the container, without streams; see Runner.Exec.
func (c *Container) Exec(ctx context.Context, args []string) (int, error) {
	return c.runner.Exec(ctx, c.ID, args, IO{})
}
