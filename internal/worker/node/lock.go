package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// holder is what the lock's file says, in JSON: which process has it.
//
// A process that was killed while it unmounts an image goes when the reads of that have ended. By way of a FUSE gate
// they have when somebody answers them, which only this process did; and while it is there the kernel does not end the
// connection, nor give back the lock, nor does the keeper hear that its daemon is gone. So that unmount, and every
// sync(2) of the host with it, would wait for ever. The next daemon ends the connection: reads of incomplete images fail
// until they are mounted anew. Its number is noted before anything is mounted over it, and is that connection's
// as long as the process is there, which has it open.
type holder struct {
	Boot  string `json:"boot"` // the kernel's boot_id
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // of the process, since the boot, in clock ticks
	// Connection of the FUSE gate, as kernel.AbortFuse names it; 0: there is none.
	Connection int `json:"fuse_connection,omitempty"`
}

// self is this process.
func self() (h holder, err error) {
	boot, err := kernel.ReadBootID()
	if err != nil {
		return h, err
	}
	st, err := processOf(fmt.Sprintf("/proc/%d/stat", os.Getpid()))
	return holder{Boot: boot.String(), PID: os.Getpid(), Start: st.start}, err
}

// hungFor is how long a process that hangs may take to end when its reads have failed.
const hungFor = 30 * time.Second

// lockRoot takes the lock of a root. A process that was killed, has the lock, and cannot end has its FUSE
// connection ended.
//
// Errors: api.CodeConflict when another daemon has it.
func lockRoot(path string, log *slog.Logger) (*os.File, error) {
	f, err := takeLock(path)
	if errors.Is(err, unix.EWOULDBLOCK) {
		if h, readErr := readHolder(path); readErr == nil && h.hangs() {
			if err := h.end(log); err != nil {
				return nil, err
			}
			f, err = takeLock(path)
		}
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return nil, api.Errorf(api.CodeConflict, "another daemon uses %s (lock %s: %w): use its socket, or give this one another --root", filepath.Dir(path), path, err)
	case err != nil:
		return nil, err
	}
	if err := noteHolder(f, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func takeLock(path string) (*os.File, error) {
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

// noteHolder notes in the lock's file that it is this process's.
func noteHolder(f *os.File, connection int) error {
	h, err := self()
	if err != nil {
		return err
	}
	h.Connection = connection
	b, err := json.Marshal(h)
	if err == nil {
		// One write in place of what is there: who reads half of it knows nothing of the process, and leaves it alone.
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt(b, 0)
		}
	}
	return err
}

func readHolder(path string) (*holder, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	h := new(holder)
	return h, json.Unmarshal(b, h)
}

// lives reports whether a thread of the process is there that has not ended.
func (h *holder) lives() bool { return h.is(func(byte) bool { return true }) }

// hangs reports whether the process was killed, and cannot end: one of its threads is still in the kernel.
func (h *holder) hangs() bool {
	dir := fmt.Sprintf("/proc/%d", h.PID)
	st, err := processOf(filepath.Join(dir, "stat"))
	return err == nil && (st.state == 'Z' || killed(filepath.Join(dir, "status"))) && h.is(func(state byte) bool { return state == 'D' })
}

// is reports whether it is the process that is there now by its number, with a thread that has not ended, in a state.
func (h *holder) is(in func(state byte) bool) bool {
	boot, err := kernel.ReadBootID()
	if err != nil || h.PID <= 0 || boot.String() != h.Boot {
		return false
	}
	dir := fmt.Sprintf("/proc/%d", h.PID)
	if st, err := processOf(filepath.Join(dir, "stat")); err != nil || st.start != h.Start {
		return false
	}
	threads, _ := filepath.Glob(filepath.Join(dir, "task", "*", "stat")) // the pattern is right
	for _, path := range threads {
		if st, err := processOf(path); err == nil && st.state != 'Z' && st.state != 'X' && in(st.state) {
			return true
		}
	}
	return false
}

// process is what is asked of a file stat of /proc.
type process struct {
	state byte
	start uint64
}

func processOf(path string) (p process, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return p, err
	}
	// The second field is the program's name, in brackets, with whatever is in it.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 20 {
		return p, fmt.Errorf("%s has %d fields", path, len(fields))
	}
	p.state = fields[0][0]
	p.start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	return p, err
}

// killed reports whether SIGKILL waits for a process, by its file status of /proc.
func killed(path string) bool {
	b, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		name, mask, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		if v, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64); err == nil && v&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
}

// noteConnection notes which FUSE connection this process has, at dir, before anything is mounted over it.
func (n *Node) noteConnection(dir string) error {
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
	return noteHolder(n.lock, connection)
}

// Hanging says what is to be done about a daemon of a root that was killed while it unmounted an image, and hangs; "":
// there is none.
func Hanging(root string) string {
	h, err := readHolder(filepath.Join(root, "lock"))
	if err != nil || !h.hangs() {
		return ""
	}
	return fmt.Sprintf("process %d was killed while it unmounted an image, and waits in the kernel, with every sync(2) of this host: nobody serves its FUSE connection %d", h.PID, h.Connection)
}
