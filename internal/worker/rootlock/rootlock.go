// Package rootlock gives a worker's root to one daemon, and knows what is to be done when the last one hangs.
//
// A process that was killed while it unmounts an image goes when the reads of that have ended. By way of a FUSE gate
// they have when somebody answers them, which only this process did; and while it is there the kernel does not end the
// connection, nor give back the lock, nor does the keeper hear that its daemon is gone. So that unmount, and every
// sync(2) of the host with it, would wait for ever. The next daemon ends the connection: reads of incomplete images fail
// until they are mounted anew.
package rootlock

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// name is the lock's in its root.
const name = "lock"

// hungFor is how long a process that hangs may take to end when its reads have failed.
const hungFor = 30 * time.Second

// Lock is held by this process until it is closed, or the process ends.
type Lock struct{ file *os.File }

// Take takes the lock of a root. A process that was killed, has the lock, and cannot end has its FUSE
// connection ended.
//
// Errors: api.CodeConflict when another daemon has it.
func Take(root string, log *slog.Logger) (*Lock, error) {
	path := filepath.Join(root, name)
	f, err := take(path)
	if errors.Is(err, unix.EWOULDBLOCK) {
		if h, readErr := read(path); readErr == nil && h.hangs() {
			if err := h.end(log); err != nil {
				return nil, err
			}
			f, err = take(path)
		}
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return nil, api.Errorf(api.CodeConflict, "another daemon uses %s (lock %s: %w): use its socket, or give this one another --root", root, path, err)
	case err != nil:
		return nil, err
	}
	l := &Lock{f}
	if err := l.note(0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

func take(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Note notes which FUSE connection this process has, at dir, if it has one. It is called before anything is
// mounted over that.
func (l *Lock) Note(dir string) error {
	mounts, err := kernel.Mounts(dir)
	if err != nil {
		return err
	}
	connection := 0
	for _, m := range mounts {
		if m.Target == dir && m.Type == "fuse" {
			connection = m.Minor
		}
	}
	return l.note(connection)
}

// Close gives the lock back.
func (l *Lock) Close() error { return l.file.Close() }

// Hanging says what is to be done about a daemon of a root that was killed while it unmounted an image, and hangs; "":
// there is none.
func Hanging(root string) string {
	h, err := read(filepath.Join(root, name))
	if err != nil || !h.hangs() {
		return ""
	}
	return fmt.Sprintf("process %d was killed while it unmounted an image, and waits in the kernel, with every sync(2) of this host: nobody serves its FUSE connection %d", h.PID, h.Connection)
}

// holder is what the lock's file says, in JSON: which process has it.
type holder struct {
	Boot  string `json:"boot"` // the kernel's boot_id
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // of the process, as kernel.Process has it
	// Connection of the FUSE gate, as kernel.AbortFuse names it; 0: there is none. The number is that connection's as
	// long as the process is there, which has it open.
	Connection int `json:"fuse_connection,omitempty"`
}

// note notes in the lock's file that it is this process's.
func (l *Lock) note(connection int) error {
	boot, err := kernel.ReadBootID()
	if err != nil {
		return err
	}
	own, err := kernel.ReadProcess("/proc/self")
	if err != nil {
		return err
	}
	b, err := json.Marshal(holder{Boot: boot.String(), PID: os.Getpid(), Start: own.Start, Connection: connection})
	if err == nil {
		// One write in place of what is there: who reads half of it knows nothing of the process, and leaves it alone.
		if err = l.file.Truncate(0); err == nil {
			_, err = l.file.WriteAt(b, 0)
		}
	}
	return err
}

func read(path string) (*holder, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	h := new(holder)
	return h, json.Unmarshal(b, h)
}

// end ends the FUSE connection of a process that hangs, and waits until it has gone.
func (h *holder) end(log *slog.Logger) error {
	var err error
	if h.Connection != 0 {
		err = kernel.AbortFuse(h.Connection)
	}
	for begun := time.Now(); h.lives(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > hungFor {
			return errors.Join(api.Errorf(api.CodeConflict, "the last daemon, process %d, was killed, and waits in the kernel: what it waits for is in /proc/%d/task/*/stack; if nothing helps, boot this host again", h.PID, h.PID), err)
		}
	}
	log.Warn("the last daemon was killed while it unmounted an image; the FUSE connection that nobody served was ended", "pid", h.PID, "connection", h.Connection)
	return nil
}

// dir is the process's directory of /proc.
func (h *holder) dir() string { return fmt.Sprintf("/proc/%d", h.PID) }

// lives reports whether a thread of the process is there that has not ended.
func (h *holder) lives() bool { return h.has(func(byte) bool { return true }) }

// hangs reports whether the process was killed, and cannot end: one of its threads is still in the kernel.
func (h *holder) hangs() bool {
	p, err := kernel.ReadProcess(h.dir())
	return err == nil && (p.State == 'Z' || kernel.Killed(h.dir())) && h.has(func(state byte) bool { return state == 'D' })
}

// has reports whether it is the process that is there now by its number, with a thread that has not ended, in a state.
func (h *holder) has(in func(state byte) bool) bool {
	boot, err := kernel.ReadBootID()
	if err != nil || h.PID <= 0 || boot.String() != h.Boot {
		return false
	}
	if p, err := kernel.ReadProcess(h.dir()); err != nil || p.Start != h.Start {
		return false
	}
	threads, _ := filepath.Glob(filepath.Join(h.dir(), "task", "*")) // the pattern is right
	for _, dir := range threads {
		if p, err := kernel.ReadProcess(dir); err == nil && !p.Ended() && in(p.State) {
			return true
		}
	}
	return false
}
