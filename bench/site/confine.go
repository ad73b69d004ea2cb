package site

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// confinedEnv marks the process that Confine has started.
const confinedEnv = "FOIL_BENCH_CONFINED"

// Confined reports whether this process is the first one of its namespaces.
func Confined() bool { return os.Getenv(confinedEnv) == "1" && os.Getpid() == 1 }

// Confine runs this program once more, with the same arguments, in mount and
// PID namespaces of its own, and returns what that comes to, an *exec.ExitError
// for a code other than 0. Daemons, their shims and every mount end with the
// namespaces, that is, however this process or the inner one ends.
func Confine() error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	args := append([]string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--", self}, os.Args[1:]...)
	// Signals are passed on, so that the inner process ends in order.
	cmd := exec.Command("unshare", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), confinedEnv+"=1")
	// In a group of its own, so that Ctrl-C reaches the inner process once: from
	// here. unshare itself ignores it, as it should.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("bench: enter namespaces of its own: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case err := <-ended:
			return err
		case <-signals:
			// unshare ignores SIGINT and SIGTERM while it waits, and so they
			// reach only who is meant.
			if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
				return err
			}
		}
	}
}

// Furnish gives what programs keep below /run, by compiled-in names, a place
// that is not the host's.
func Furnish() error {
	if !Confined() {
		return errors.New("bench: not in namespaces of its own: nothing would be cleaned up")
	}
	for _, dir := range []string{"netns", "containerd", "runc"} {
		path := filepath.Join("/run", dir)
		if err := os.MkdirAll(path, 0o711); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := unix.Mount("tmpfs", path, "tmpfs", 0, "mode=0711"); err != nil {
			return fmt.Errorf("bench: mount a private %s: %w", path, err)
		}
	}
	return nil
}

// DropCaches empties the page cache of the machine, so that no run finds what
// an earlier one has read or written.
func DropCaches() error {
	unix.Sync()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		return fmt.Errorf("bench: drop page caches: %w", err)
	}
	return nil
}
