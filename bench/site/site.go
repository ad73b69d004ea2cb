// Package site is the place where all measurements happen: a cloud and an edge
// that are network namespaces joined by an emulated link (package link), and a
// scratch directory, inside mount and PID namespaces of their own.
//
// Whatever runs here ends with those namespaces: see Confine. Programs are
// started on a side of the link; the processor time of those that ran at the
// edge is counted, since it is part of what an engine costs.
//
// Readiness tells when a container does what it is there for, from outside, in
// the same way for whoever started it.
package site

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/link"
)

// Site is where a measurement happens.
type Site struct {
	Dir  string // scratch, on a disk; logs of processes are kept here
	Link *link.Link

	spent atomic.Int64 // nanoseconds of processor time, see Spent
}

// Scratch makes a directory below parent for this run, and removes those of
// dead ones: a run holds a lock on its own as long as its process lives.
func Scratch(parent, prefix string) (string, error) {
	if err := RemoveUnlocked(filepath.Join(parent, prefix+"*")); err != nil {
		return "", err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	// runc takes no rootfs below a symlink, and mounts are listed without.
	parent, err := filepath.EvalSymlinks(parent)
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	dir, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	// Held until the process ends.
	if _, err := Lock(dir); err != nil {
		return "", err
	}
	// Containers with users of their own must find the way to their rootfs.
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	return dir, nil
}

// Lock locks a directory, until unlock is called or the process ends. The error is
// unix.EWOULDBLOCK if another process, or this one, has it locked.
func Lock(dir string) (unlock func(), err error) {
	fd, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	return func() { unix.Close(fd) }, nil
}

// RemoveUnlocked removes the directories that a pattern names, but for those that
// are locked.
func RemoveUnlocked(pattern string) error {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for _, dir := range found {
		lock, err := lockDir(dir)
		if err != nil {
			continue
		}
		err = RemoveTree(dir)
		unix.Close(lock)
		if err != nil {
			return err
		}
	}
	return nil
}

// lockDir locks a directory and gives the descriptor that holds the lock. It is
// no os.File, which would let go of the lock when it is collected as garbage.
func lockDir(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("bench: open %s: %w", dir, err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bench: lock %s: %w", dir, err)
	}
	return fd, nil
}

// RemoveTree removes a directory in which file systems may still be mounted.
func RemoveTree(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	var below []string
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			below = append(below, fields[4])
		}
	}
	var errs []error
	for i := len(below) - 1; i >= 0; i-- {
		if err := unix.Unmount(below[i], unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("bench: unmount %s: %w", below[i], err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// DiskBytes is what the files below dir take on the disk, each link once, and
// nothing of what is mounted there.
func DiskBytes(dir string) (n int64, err error) {
	var top unix.Stat_t
	if err := unix.Lstat(dir, &top); err != nil {
		return 0, fmt.Errorf("bench: stat %s: %w", dir, err)
	}
	seen := map[uint64]bool{}
	var walk func(path string) error
	walk = func(path string) error {
		entries, err := os.ReadDir(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			path := filepath.Join(path, entry.Name())
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil || st.Dev != top.Dev || seen[st.Ino] {
				continue // gone meanwhile, mounted, or known
			}
			seen[st.Ino] = true
			n += st.Blocks * 512
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				if err := walk(path); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := walk(dir); err != nil {
		return 0, fmt.Errorf("bench: measure %s: %w", dir, err)
	}
	return n, nil
}
