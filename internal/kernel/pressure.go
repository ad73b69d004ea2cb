package kernel

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Unlimited is a number of bytes that no memory has.
const Unlimited = math.MaxInt64

// Proc is a mount of procfs, as a directory; empty: /proc.
type Proc string

func (p Proc) read(name string) ([]byte, error) {
	if p == "" {
		p = "/proc"
	}
	return os.ReadFile(filepath.Join(string(p), name))
}

// Available returns how many bytes of memory there are, and how many can be had without swapping: free ones, and
// pages that can be read again (MemAvailable of proc_meminfo(5)).
func (p Proc) Available() (total, available int64, err error) {
	b, err := p.read("meminfo")
	if err != nil {
		return 0, 0, err
	}
	fields := numbers(b)
	total, ok := fields["MemTotal:"]
	available, also := fields["MemAvailable:"]
	if !ok || !also {
		return 0, 0, errors.New("meminfo has no MemTotal and MemAvailable")
	}
	return total << 10, available << 10, nil
}

// ErrNoPressure is returned, wrapped, where the kernel does not tell of pressure: it was built without CONFIG_PSI, or
// started with psi=0.
var ErrNoPressure = errors.New("the kernel does not tell of pressure (CONFIG_PSI)")

// MemoryPressure returns in which share of the last ten seconds some process waited for memory, from 0 to 1
// (PSI, Linux 4.20).
//
// Errors: ErrNoPressure.
func (p Proc) MemoryPressure() (share float64, err error) {
	b, err := p.read("pressure/memory")
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrNoPressure, err)
	}
	for line := range strings.Lines(string(b)) {
		for _, field := range strings.Fields(line) {
			if v, ok := strings.CutPrefix(field, "avg10="); ok && strings.HasPrefix(line, "some ") {
				percent, err := strconv.ParseFloat(v, 64)
				return percent / 100, err
			}
		}
	}
	return 0, fmt.Errorf("%w: pressure/memory has no line of some", ErrNoPressure)
}

// Cgroups is where cgroups are mounted, as a directory; empty: /sys/fs/cgroup. Below it is version 2; or version 1, a
// directory for each controller, perhaps with version 2 in the directory unified.
type Cgroups string

// memory returns the directory of the hierarchy that has the memory controller, and whether that is version 2.
func (c Cgroups) memory() (dir string, v2 bool, err error) {
	dir = string(c)
	if dir == "" {
		dir = "/sys/fs/cgroup"
	}
	for _, d := range []string{dir, filepath.Join(dir, "unified")} {
		b, err := os.ReadFile(filepath.Join(d, "cgroup.controllers"))
		if err == nil && slices.Contains(strings.Fields(string(b)), "memory") {
			return d, true, nil
		}
	}
	d := filepath.Join(dir, "memory")
	if _, err := os.Stat(d); err != nil {
		return "", false, fmt.Errorf("no cgroups with the memory controller: %w", err)
	}
	return d, false, nil
}

// MemoryLeft returns how many bytes the memory limits of a cgroup, and of those above it, leave: the least of each
// limit (memory.high and memory.max; memory.limit_in_bytes of version 1) less what is in use, where pages of
// files that nobody has used for a while do not count, since the kernel takes these first. Unlimited if no limit is
// set. Of cgroups that are not there, as before a container starts, those above count that are.
func (c Cgroups) MemoryLeft(cgroup string) (int64, error) {
	root, v2, err := c.memory()
	if err != nil {
		return 0, err
	}
	left := int64(Unlimited)
	for at := path.Join("/", cgroup); ; at = path.Dir(at) {
		n, err := memoryLeft(filepath.Join(root, at), v2)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, fmt.Errorf("memory of cgroup %s: %w", at, err)
		}
		if err == nil {
			left = min(left, n)
		}
		if at == "/" {
			return left, nil
		}
	}
}

// memoryLeft is MemoryLeft of one cgroup, whose directory is dir.
func memoryLeft(dir string, v2 bool) (int64, error) {
	limits, usage, idle := []string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"
	if v2 {
		limits, usage, idle = []string{"memory.high", "memory.max"}, "memory.current", "inactive_file"
	}
	if _, err := os.Stat(dir); err != nil {
		return 0, err
	}
	limit := int64(Unlimited)
	for _, name := range limits {
		n, err := readBytes(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // the root of version 2 has none
		}
		if err != nil {
			return 0, err
		}
		limit = min(limit, n)
	}
	if limit == Unlimited {
		return Unlimited, nil
	}
	used, err := readBytes(filepath.Join(dir, usage))
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return 0, err
	}
	used -= min(used, numbers(b)[idle])
	return max(0, limit-used), nil
}

// readBytes reads a file with a number of bytes, or max. Version 1 says max by the largest number of whole pages.
func readBytes(name string) (int64, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	s := strings.TrimSpace(string(b))
	if s == "max" {
		return Unlimited, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s has %q, which is no number of bytes", name, s)
	}
	if n >= Unlimited>>1 {
		n = Unlimited
	}
	return n, nil
}

// numbers reads lines of a name and a number.
func numbers(b []byte) map[string]int64 {
	m := make(map[string]int64)
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 2 {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
			m[f[0]] = n
		}
	}
	return m
}

// OwnMemory returns the cgroup of this process in the hierarchy that has the memory controller.
func (c Cgroups) OwnMemory(p Proc) (string, error) {
	_, v2, err := c.memory()
	if err != nil {
		return "", err
	}
	b, err := p.read("self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		// ID:CONTROLLERS:PATH; version 2 has no controllers here.
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) == 3 && (v2 && f[1] == "" || !v2 && slices.Contains(strings.Split(f[1], ","), "memory")) {
			return f[2], nil
		}
	}
	return "", errors.New("this process is in no cgroup of the memory controller")
}

// CgroupOf returns the cgroup that the cgroupsPath of an OCI configuration means: a path, or SLICE:PREFIX:NAME for
// systemd, which has the scope PREFIX-NAME.scope in the slice, and a slice a-b.slice in a.slice.
func CgroupOf(cgroupsPath string) string {
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return path.Join("/", cgroupsPath)
	}
	slice, unit := parts[0], parts[2]
	if slice == "" {
		slice = "system.slice"
	}
	if !strings.HasSuffix(unit, ".slice") {
		unit = strings.TrimPrefix(parts[1]+"-"+unit+".scope", "-")
	}
	dir, name := "/", strings.TrimSuffix(slice, ".slice")
	for i, r := range name {
		if r == '-' && i > 0 {
			dir = path.Join(dir, name[:i]+".slice")
		}
	}
	if name != "-" {
		dir = path.Join(dir, slice)
	}
	return path.Join(dir, unit)
}
