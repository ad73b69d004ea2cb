// Package runner runs containers with runc: it turns an image's config into an
// OCI runtime configuration, and follows one container from its start to its
// exit code.
//
//	spec, err := runner.Spec(image, runner.SpecOptions{ID: id, Dir: dir, Rootfs: rootfs})
//	err = runner.WriteSpec(dir, spec)
//	r := &runner.Runner{StateRoot: "/run/foil/runc"}
//	c, err := r.Start(ctx, id, dir, runner.IO{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
//	defer c.Close()            // kills it if need be, and removes runc's state
//	stop := c.ForwardSignals() // of this process
//	defer stop()
//	code, err := c.Wait(ctx)   // exit code, or 128 + signal
//
// Run does all from Start on.
//
// runc ends after each of its commands: the container's process becomes a child
// of the process that called Start, which turns itself into a subreaper for
// that. So that process, and no other, learns the exit code.
package runner

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotFound is returned, wrapped, for a container that runc does not know.
var ErrNotFound = errors.New("no such container")

// Runner calls runc.
type Runner struct {
	// StateRoot is the directory of runc's state (its --root), best on a tmpfs.
	// It is made when missing.
	StateRoot string
	// Command is runc's path; empty means "runc" in PATH.
	Command string
}

// program is what runc is called by.
func (r *Runner) program() string {
	if r.Command == "" {
		return "runc"
	}
	return r.Command
}

// Warm has the kernel read runc into the page cache, without waiting for it: on a host
// that has not run it for a while a start would wait for its 10 MB. That it fails
// is noticed when runc is called.
func (r *Runner) Warm() {
	path, err := exec.LookPath(r.program())
	if err != nil {
		return
	}
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_WILLNEED)
}

func (r *Runner) command(ctx context.Context, log string, args ...string) *exec.Cmd {
	full := []string{"--root", r.StateRoot}
	if log != "" {
		full = append(full, "--log", log, "--log-format", "json")
	}
	return exec.CommandContext(ctx, r.program(), append(full, args...)...)
}

// run runs one of runc's commands that is not connected to the container's
// streams, and returns its output.
func (r *Runner) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := r.command(ctx, "", args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	switch {
	case err == nil:
		return stdout.Bytes(), nil
	case errors.Is(err, exec.ErrNotFound):
		return nil, errNoRunc(err)
	case strings.Contains(stderr.String(), "container does not exist"):
		return nil, ErrNotFound
	}
	return nil, fmt.Errorf("runc %s: %w: %s", args[0], err, lastError(stderr.Bytes()))
}

func errNoRunc(err error) error {
	return fmt.Errorf("runc is not installed (on Debian and Ubuntu: apt-get install runc): %w", err)
}

// lastError finds what went wrong in runc's log (JSON lines) or standard error.
func lastError(log []byte) string {
	last := ""
	for s := bufio.NewScanner(bytes.NewReader(log)); s.Scan(); {
		var line struct{ Level, Msg string }
		text := strings.TrimSpace(s.Text())
		if json.Unmarshal([]byte(text), &line) == nil && line.Msg != "" {
			if line.Level != "error" && line.Level != "fatal" {
				continue
			}
			text = line.Msg
		}
		if text != "" {
			last = text
		}
	}
	return last
}

// State returns what runc knows of a container. Errors: ErrNotFound.
func (r *Runner) State(ctx context.Context, id string) (State, error) {
	var s State
	out, err := r.run(ctx, "state", id)
	if err == nil {
		err = json.Unmarshal(out, &s)
	}
	if err != nil {
		return s, fmt.Errorf("state of container %s: %w", id, err)
	}
	return s, nil
}

// List returns the containers under StateRoot.
func (r *Runner) List(ctx context.Context) ([]State, error) {
	if _, err := os.Stat(r.StateRoot); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var list []State
	out, err := r.run(ctx, "list", "--format", "json")
	if err == nil {
		err = json.Unmarshal(out, &list)
	}
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return list, nil
}

// Kill sends a signal to the first process of a container. Errors: ErrNotFound.
func (r *Runner) Kill(ctx context.Context, id string, sig unix.Signal) error {
	if _, err := r.run(ctx, "kill", id, fmt.Sprint(int(sig))); err != nil {
		return fmt.Errorf("kill container %s: %w", id, err)
	}
	return nil
}

// Pause has all processes of a container stand still until Resume. Errors: ErrNotFound.
func (r *Runner) Pause(ctx context.Context, id string) error {
	for end := time.Now().Add(freezeWithin); ; {
		_, err := r.run(ctx, "pause", id)
		if err == nil {
			return nil
		}
		if !strings.Contains(err.Error(), "unable to freeze") || time.Now().After(end) {
			return fmt.Errorf("pause container %s: %w", id, err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// freezeWithin is how long runc is asked again to pause a container. With cgroup v1 it gives up after some
// milliseconds, which a process that is busy in the kernel on a busy host does not stop within.
const freezeWithin = 5 * time.Second

// Resume has them go on. Errors: ErrNotFound.
func (r *Runner) Resume(ctx context.Context, id string) error {
	if _, err := r.run(ctx, "resume", id); err != nil {
		return fmt.Errorf("resume container %s: %w", id, err)
	}
	return nil
}

// Delete kills what still runs of a container and removes runc's state of it.
// A container that is not there is no error.
func (r *Runner) Delete(ctx context.Context, id string) error {
	if _, err := r.run(ctx, "delete", "--force", id); err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("delete container %s: %w", id, err)
	}
	return nil
}

// Exec runs a further process in a container, with the environment, user and
// working directory of its first one, and returns the exit code. A process that
// could not be run is an error, as far as runc tells the two apart.
func (r *Runner) Exec(ctx context.Context, id string, args []string, streams IO) (int, error) {
	f, err := os.CreateTemp("", "foil-exec-")
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", id, err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	cmd := r.command(ctx, f.Name(), append([]string{"exec", id}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = streams.Stdin, streams.Stdout, streams.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		if b, readErr := io.ReadAll(f); readErr == nil {
			if msg := lastError(b); msg != "" {
				if strings.Contains(msg, "container does not exist") {
					return 0, fmt.Errorf("exec in container %s: %w", id, ErrNotFound)
				}
				return 0, fmt.Errorf("exec %q in container %s: %s", args, id, msg)
			}
		}
		return exitCode(exit.ProcessState), nil
	}
	if errors.Is(err, exec.ErrNotFound) {
		return 0, errNoRunc(err)
	}
	if err != nil {
		return 0, fmt.Errorf("exec %q in container %s: %w", args, id, err)
	}
	return 0, nil
}

// RunOptions are the parameters of Run.
type RunOptions struct {
	ID  string
	Dir string // OCI bundle directory with config.json
	IO  IO
	// Started, if given, is called when the container has been started. The
	// container goes on meanwhile; Run waits for the call to return.
	Started func(*Container)
}

// Run runs a container in the foreground: signals of this process are passed
// on, and the result is the container's exit code, or 128 plus the signal that
// ended it. When ctx ends, the container is killed. It is always deleted.
func (r *Runner) Run(ctx context.Context, o RunOptions) (code int, err error) {
	c, err := r.Start(ctx, o.ID, o.Dir, o.IO)
	if err != nil {
		return 0, err
	}
	defer func() {
		if closeErr := c.Close(); err == nil {
			err = closeErr
		}
	}()
	stop := c.ForwardSignals()
	defer stop()
	if o.Started != nil {
		o.Started(c)
	}
	return c.Wait(ctx)
}

func exitCode(s *os.ProcessState) int {
	if ws, ok := s.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return s.ExitCode()
}
