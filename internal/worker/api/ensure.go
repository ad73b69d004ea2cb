package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/kernel"
)

// LogPath is where a daemon that EnsureDaemon started writes its log.
func LogPath(root string) string { return filepath.Join(root, "run", "node.log") }

// EnsureOptions says how EnsureDaemon starts a daemon.
type EnsureOptions struct {
	// Command is the daemon's program and its arguments. Empty: this program,
	// with "node --root ROOT".
	Command []string
	// Timeout bounds the wait for the socket to answer. 0: 30 s, which a daemon
	// that takes over many mounts after a reboot does not need.
	Timeout time.Duration
	// SystemdRun is the program systemd-run. Empty: that of a host whose service manager
	// is systemd, or none.
	SystemdRun string
}

// startTail is how much of the log an error quotes, in bytes.
const startTail = 2048

// EnsureDaemon returns a client of the daemon at root, and starts that daemon when
// nobody listens on its socket: as a transient unit of systemd, or else in a session of its own, so that it
// outlives the command and its terminal, with its output in LogPath(root). Commands that
// start at the same time start one daemon between them. When the daemon ends
// instead of answering, the error quotes the end of its log.
func EnsureDaemon(ctx context.Context, root string, opts EnsureOptions) (*Client, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("start a daemon: %w", err)
	}
	c := Dial(root)
	if err := c.listens(ctx); !isNoDaemon(err) {
		return orClose(c, err)
	}
	if err := os.MkdirAll(filepath.Join(root, "run"), 0o700); err != nil {
		return nil, fmt.Errorf("start a daemon: %w; --root (or FOIL_ROOT) chooses another directory", err)
	}
	timeout := opts.Timeout
	if timeout == 0 {
		timeout = 30 * time.Second
	}
	limit, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	lock, err := lockFile(limit, filepath.Join(root, "run", "start.lock"))
	if err != nil {
		return nil, fmt.Errorf("start a daemon: wait for another command that starts one: %w", err)
	}
	defer lock.Close()
	// Another command may have started it while this one waited for the lock.
	if err := c.listens(limit); !isNoDaemon(err) {
		return orClose(c, err)
	}
	return orClose(c, start(limit, c, root, opts))
}

func isNoDaemon(err error) bool {
	_, none := errors.AsType[*NoDaemonError](err)
	return none
}

func orClose(c *Client, err error) (*Client, error) {
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// start starts the daemon and waits until it answers c.
func start(ctx context.Context, c *Client, root string, opts EnsureOptions) error {
	command := opts.Command
	if len(command) == 0 {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("start a daemon: find this program: %w", err)
		}
		command = []string{self, "node", "--root", root}
	}
	log, err := os.OpenFile(LogPath(root), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("start a daemon: open its log: %w", err)
	}
	defer log.Close()
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("start a daemon: open its log: %w", err)
	}
	run := opts.SystemdRun
	if run == "" && kernel.Systemd() {
		run, _ = exec.LookPath("systemd-run") // without it there is no unit
	}
	if run != "" {
		err := startUnit(ctx, run, root, command)
		if err == nil {
			return answers(ctx, c, root, unitOf(root), func() error { return nil }, log, from)
		}
		if said := tail(log, from); said != nil {
			return fmt.Errorf("the daemon ended at once (%w); the end of %s:\n%s", err, LogPath(root), said)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// It was never started: systemd does not take units from here.
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = "/" // keeps no filesystem of the caller's busy
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start a daemon: %w", err)
	}
	pid := cmd.Process.Pid
	// The daemon stays when this command ends, so nobody waits for it; until it
	// answers, wait4 asks whether it is still there.
	defer cmd.Process.Release()
	return answers(ctx, c, root, fmt.Sprintf("process %d", pid), func() error {
		var ws unix.WaitStatus
		if done, werr := unix.Wait4(pid, &ws, unix.WNOHANG, nil); werr == nil && done == pid {
			return errors.New(ending(ws))
		}
		return nil
	}, log, from)
}

// answers waits until a daemon answers c. ended says how it has ended; nil: it has not.
func answers(ctx context.Context, c *Client, root, name string, ended func() error, log *os.File, from int64) error {
	pauses := backoff.Backoff{First: time.Millisecond, Most: 50 * time.Millisecond}
	for n := 1; ; n++ {
		_, err := c.Status(ctx)
		if err == nil {
			return nil
		}
		if how := ended(); how != nil {
			return fmt.Errorf("the daemon ended at once (%w); the end of %s:\n%s", how, LogPath(root), orNothing(tail(log, from)))
		}
		if cause := backoff.Wait(ctx, pauses.Pause(n)); cause != nil {
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("the daemon (%s) does not answer on %s (%w); the end of %s:\n%s",
					name, c.socket, err, LogPath(root), orNothing(tail(log, from)))
			}
			return cause
		}
	}
}

func ending(ws unix.WaitStatus) string {
	if ws.Signaled() {
		return "signal " + ws.Signal().String()
	}
	return fmt.Sprintf("exit code %d", ws.ExitStatus())
}

// orNothing is b, or says that it is empty.
func orNothing(b []byte) []byte {
	if b == nil {
		return []byte("(nothing)")
	}
	return b
}

// tail returns the last lines of what was written to log after from; nil: nothing was.
func tail(log *os.File, from int64) []byte {
	end, err := log.Seek(0, io.SeekEnd)
	if err != nil || end == from {
		return nil
	}
	cut := end-from > startTail
	if cut {
		from = end - startTail
	}
	b := make([]byte, end-from)
	n, _ := log.ReadAt(b, from)
	b = b[:n]
	if i := bytes.IndexByte(b, '\n'); cut && i >= 0 {
		b = b[i+1:]
	}
	return bytes.TrimRight(b, "\n")
}

// lockFile takes an exclusive lock on the file at path, made if it is not
// there; closing the file gives the lock back. It polls: flock(2) that blocks
// does not heed a context.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), f.Close())
		case <-time.After(10 * time.Millisecond):
		}
	}
}
