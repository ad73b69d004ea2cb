package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
)

// Enter runs this program once more, with the mounts of another process: of process 1 in a pod with
// hostPID, those of the host. It waits for it, and tells it to end when ctx does. The settings are a
// file here, or "".
//
// This process stays where it is: who executes something in its container gets its mounts.
func Enter(ctx context.Context, pid int, args []string, settings string) error {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		return enter(ctx, pid, args, settings)
	}
	// The first thread's mounts are those of the process. It is held by this goroutine.
	errs := make(chan error)
	go func() {
		runtime.LockOSThread()
		errs <- enter(ctx, pid, args, settings)
	}()
	return <-errs
}

// enter gives this thread other mounts, for ever, and starts a process from it.
func enter(ctx context.Context, pid int, args []string, settings string) error {
	// Opened before, since they are not there.
	mounts, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return fmt.Errorf("find the mounts of process %d: %w", pid, err)
	}
	defer mounts.Close()
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	files := []*os.File{self} // from 3 on
	if settings != "" {
		f, err := os.Open(settings)
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
		args = append(args, "--settings", "/proc/self/fd/4")
	}
	// Threads that share their working directory cannot.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("leave the working directory of the process: %w", err)
	}
	if err := unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the mounts of process %d: %w: it takes a privileged container, with hostPID", pid, err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", args...)
	cmd.Dir, cmd.ExtraFiles = "/", files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	err = cmd.Run()
	if cmd.ProcessState != nil && cmd.ProcessState.Success() {
		return nil // also when it was told to end
	}
	return err
}

// mark begins the text files that this package has written. Others are the administrator's.
const mark = "# Written by \"foil install\": it overwrites this file, and \"foil install --undo\" removes it.\n"

// errForeign is a file that somebody else has written.
var errForeign = errors.New("it is not of foil install, which leaves it alone: move it away, or go on by hand (deploy/containerd/README.md)")

// file is one that is put on the host.
type file struct {
	path   string
	text   []byte // without the mark
	mode   os.FileMode
	binary bool // it has no mark
}

func (f file) data() []byte {
	if f.binary {
		return f.text
	}
	return append([]byte(mark), f.text...)
}

// ours reports whether a text file is there, and is this package's.
func (f file) ours() (exists, ours bool, err error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, false, nil
	}
	return err == nil, bytes.HasPrefix(b, []byte(mark)), err
}

// put writes a file if it is not there, or is another version. It reports whether it did.
func (f file) put() (changed bool, err error) {
	old, err := os.ReadFile(f.path)
	switch {
	case err == nil && bytes.Equal(old, f.data()):
		return false, nil
	case err == nil && !f.binary && !bytes.HasPrefix(old, []byte(mark)):
		return false, fmt.Errorf("%s: %w", f.path, errForeign)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return false, err
	}
	if err := durable.Replace(f.path, f.data()); err != nil {
		return false, fmt.Errorf("write %s: %w", f.path, err)
	}
	return true, os.Chmod(f.path, f.mode)
}

// remove removes a text file if it is this package's, and reports whether it was there.
func (f file) remove() (bool, error) {
	_, ours, err := f.ours()
	if err != nil || !ours {
		return false, err
	}
	return true, os.Remove(f.path)
}

// A stamp says what was in force when it was written: files may be newer than the process that
// read them, where an install was broken off.
type stamp string

const (
	daemonStamp     stamp = Root + "/installed-daemon"
	containerdStamp stamp = Root + "/installed-containerd"
)

func sum(files ...file) string {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n", f.path, len(f.data()))
		h.Write(f.data())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// is reports whether these files are in force.
func (s stamp) is(files ...file) bool {
	b, err := os.ReadFile(string(s))
	return err == nil && string(b) == sum(files...)
}

func (s stamp) set(files ...file) error { return durable.Replace(string(s), []byte(sum(files...))) }

// exists reports whether anything of this package is in force.
func (s stamp) exists() bool {
	_, err := os.Stat(string(s))
	return err == nil
}

func (s stamp) remove() error {
	if err := os.Remove(string(s)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// call runs a program of the host, and returns what it printed.
func call(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}
