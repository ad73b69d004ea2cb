// Package kerneltest prepares test binaries that mount filesystems, and looks into sockets.
package kerneltest

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// ownEnv says to the binary, and to what it starts, that it has been done.
const ownEnv = "FOIL_TEST_OWN_MOUNTS"

// OwnMounts gives the test binary a mount namespace of its own: call it first in
// TestMain. Processes elsewhere on the host, among them containers of tests that
// run at the same time, begin with a copy of the mounts that they find; while
// they have one an unmounted image is in use still, and what a test expects to
// go stays. What a killed test leaves mounted goes with the namespace.
//
// It does nothing without root.
func OwnMounts() {
	if os.Geteuid() != 0 || os.Getenv(ownEnv) != "" {
		return
	}
	if err := reexec(); err != nil {
		fmt.Fprintln(os.Stderr, "a mount namespace for the tests:", err)
		os.Exit(1)
	}
}

// reexec starts the program again, as the same process, in a new namespace: a
// thread can leave that of its process, and execve makes it the only one.
func reexec() error {
	runtime.LockOSThread()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return fmt.Errorf("execute %s: %w", self, unix.Exec(self, os.Args, append(os.Environ(), ownEnv+"=1")))
}
