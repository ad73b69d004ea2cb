package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// RejoinCgroup puts the calling process into the cgroup in which it is. That changes nothing,
// but the kernel then waits for all processors to have noticed that a process changes
// cgroups, some 8 ms at 250 Hz, and for some 12 ms after that it need not wait for
// whoever does so next (cgroup_threadgroup_rwsem; seen on Linux 6.18). It fails where cgroups are
// not mounted at their place, or not writable.
func RejoinCgroup() error {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	err = errors.New("no cgroup hierarchy is mounted")
	for _, procs := range cgroupProcs("/sys/fs/cgroup", b) {
		// 0 is the process that writes.
		if err = os.WriteFile(procs, []byte("0"), 0); err == nil {
			return nil
		}
	}
	return fmt.Errorf("join the cgroup of this process: %w", err)
}

// cgroupProcs returns the files that move a process into the cgroups that /proc/PID/cgroup
// says, where they may be: one of any hierarchy is enough.
func cgroupProcs(mounts string, proc []byte) []string {
	var list []string
	for line := range bytes.Lines(proc) {
		// ID:CONTROLLERS:PATH; version 2 has no controllers here.
		fields := strings.SplitN(strings.TrimSuffix(string(line), "\n"), ":", 3)
		if len(fields) != 3 {
			continue
		}
		at := []string{strings.TrimPrefix(fields[1], "name=")}
		if fields[1] == "" {
			at = []string{"", "unified"} // the latter beside version 1
		}
		for _, dir := range at {
			list = append(list, filepath.Join(mounts, dir, fields[2], "cgroup.procs"))
		}
	}
	return list
}

// ownCgroup2 is the directory of this process's cgroup of version 2.
func ownCgroup2() (string, error) {
	proc, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range bytes.Lines(proc) {
		path, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\n"), "0::")
		if !ok {
			continue
		}
		for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
			var on unix.Statfs_t
			if unix.Statfs(mount, &on) == nil && on.Type == unix.CGROUP2_SUPER_MAGIC {
				return filepath.Join(mount, path), nil
			}
		}
	}
	return "", errors.New("no cgroup of version 2 is mounted at its place")
}
