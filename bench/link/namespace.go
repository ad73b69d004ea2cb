package link

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Where iproute2 keeps named namespaces: bind mounts of /proc/PID/ns/net.
const namespaceDir = "/run/netns"

// A namespace's name is foil-PID-START-N-NAME: N counts the process's own, and
// START is the process's start time in clock ticks since boot, which tells it
// from a later process with the same ID.
const namePrefix = "foil-"

var namespaces atomic.Int64

// namespace is a network namespace with a name in namespaceDir.
type namespace struct {
	path string
	fd   int
}

func newNamespace(name string) (_ *namespace, err error) {
	start, err := startTime(os.Getpid())
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	if err := os.MkdirAll(namespaceDir, 0o755); err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	ns := &namespace{fd: -1, path: filepath.Join(namespaceDir,
		fmt.Sprintf("%s%d-%s-%d-%s", namePrefix, os.Getpid(), start, namespaces.Add(1), name))}
	if err := os.WriteFile(ns.path, nil, 0o444); err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ns.remove())
		}
	}()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("link: unshare network namespace: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", ns.path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("link: name network namespace %s: %w", ns.path, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if ns.fd, err = unix.Open(ns.path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("link: open %s: %w", ns.path, err)
	}
	if err := ns.do(configure); err != nil {
		return nil, fmt.Errorf("link: configure %s: %w", ns.path, err)
	}
	return ns, nil
}

// configure sets what belongs to a namespace and not to a device.
func configure() error {
	for _, setting := range [][2]string{
		// Neighbour discovery would be traffic of its own.
		{"ipv6/conf/all/disable_ipv6", "1"},
		{"ipv6/conf/default/disable_ipv6", "1"},
		// What a connection learned about the path helps the next one: with
		// it the order of two runs would matter.
		{"ipv4/tcp_no_metrics_save", "1"},
		// A round trip's worth of 1 Gbit/s at 300 ms is 38 MB.
		{"ipv4/tcp_rmem", "4096 131072 67108864"},
		{"ipv4/tcp_wmem", "4096 65536 67108864"},
	} {
		path := filepath.Join("/proc/sys/net", setting[0])
		err := os.WriteFile(path, []byte(setting[1]), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a kernel without IPv6
			return err
		}
	}
	return setUp("lo")
}

// do runs fn in the namespace, on a thread that comes back from it.
func (ns *namespace) do(fn func() error) error {
	return onThread(func() error {
		if err := unix.Setns(ns.fd, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("link: enter %s: %w", ns.path, err)
		}
		return fn()
	})
}

func (ns *namespace) remove() error {
	if ns.fd >= 0 {
		unix.Close(ns.fd)
		ns.fd = -1
	}
	return removeName(ns.path)
}

func removeName(path string) error {
	// EINVAL: nothing was mounted there yet.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("link: unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("link: %w", err)
	}
	return nil
}

// onThread runs fn on a thread of its own whose network namespace fn may
// change. The goroutine is the caller's, so that fn may use its variables.
func onThread(fn func() error) error {
	runtime.LockOSThread()
	origin, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("link: open own network namespace: %w", err)
	}
	defer unix.Close(origin)
	// Deferred, so that a panic in fn, or runtime.Goexit by a test that ended
	// itself, leaves no thread astray.
	defer func() {
		// A thread that cannot come back stays locked: the runtime ends it
		// with the goroutine instead of using it for others.
		if unix.Setns(origin, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return fn()
}

// collect removes the namespaces of processes that are gone. What cannot be
// removed now is left to the next collection.
func collect() {
	entries, err := os.ReadDir(namespaceDir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		rest, ours := strings.CutPrefix(entry.Name(), namePrefix)
		fields := strings.SplitN(rest, "-", 4)
		if !ours || len(fields) != 4 {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		if err != nil {
			continue
		}
		if start, err := startTime(pid); err == nil && start == fields[1] {
			continue
		}
		removeName(filepath.Join(namespaceDir, entry.Name()))
	}
}

// startTime is field 22 of /proc/PID/stat, see proc(5). Field 2, the command,
// may hold blanks and brackets; what follows its last bracket does not.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return "", fmt.Errorf("/proc/%d/stat: no start time", pid)
	}
	return fields[19], nil
}
