package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Feature is something that Hydrofoil can use, or needs, of a host.
type Feature struct {
	Name string
	Have bool
	// Need says that a worker does not run without it. Without the others it
	// is slower, or some command is missing.
	Need bool
	// Min is the first version of Linux, or of the program, that has it; empty
	// when that is no matter of versions.
	Min string
	// Detail is what was found: a version, an amount, or the error.
	Detail string
	// Fix is what to do about it; empty when Have.
	Fix string
}

// Names of features that callers branch on.
const (
	FeatureErofs      = "EROFS from files"
	FeaturePreContent = "fanotify pre-content events"
	FeatureGated      = "gate on the root directory"
	FeatureFUSE       = "FUSE"
	// FeatureGate's detail begins with the gate that the host gets, one of
	// GateFanotify, GateFUSE and GateLoop, then, if it is not the best, ": why".
	FeatureGate = "a gate"
)

const preContentFix = "use Linux 6.14 or newer with CONFIG_FANOTIFY_ACCESS_PERMISSIONS"

// missing is why a feature is not there, with a remedy that is better than the
// table's.
type missing struct {
	detail, fix string
}

func (m *missing) Error() string { return m.detail }

// probed is one line of the table. Its probe tries the thing itself, in dir, a
// fresh directory on the filesystem of the worker's root directory; it leaves
// nothing behind.
type probed struct {
	name  string
	need  bool
	min   string
	fix   string
	probe func(ctx context.Context, dir string) (detail string, err error)
}

var table = []probed{
	{"root", true, "", "run as root (sudo)", probeRoot},
	{FeatureErofs, false, "Linux 6.12", "use Linux 6.12 or newer with CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE", probeErofs},
	{FeaturePreContent, false, "Linux 6.14", preContentFix, probePreContent},
	{FeatureGated, false, "Linux 6.14", "put the root directory on ext4, XFS or btrfs: tmpfs and overlayfs cannot be gated", probeGated},
	{FeatureGate, true, "Linux 6.12", "use Linux 6.14 or newer, or 6.12 or newer with FUSE (modprobe fuse), and put the root directory on ext4, XFS or btrfs", probeGate},
	{"root directory", true, "", "put the root directory on ext4, XFS or btrfs", probeFilesystem},
	{"overlayfs", true, "Linux 6.8", "load the module (modprobe overlay), and put the root directory on ext4, XFS or btrfs", probeOverlay},
	{"overlayfs metacopy", false, "Linux 4.19", "load the module without nfs_export=on: until then a container's chown copies files whole", probeMetacopy},
	{"runc", true, "runc 1.1", "install it (on Debian and Ubuntu: apt-get install runc)", probeRunc},
	{"cgroups", true, "", "mount cgroup2 at /sys/fs/cgroup", probeCgroup},
	{"memfd", true, "Linux 3.17", "use a kernel with CONFIG_MEMFD_CREATE", probeMemfd},
	{"free space", false, "", "make room, or put the root directory elsewhere", probeSpace},
	{"open files", false, "", "raise the limit (LimitNOFILE= of the unit, ulimit -n): each read that waits takes one", probeFiles},
	{FeatureFUSE, false, "Linux 2.6.14", "load the module (modprobe fuse)", probeFUSE},
	{"FUSE passthrough", false, "Linux 6.9", "use Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH", probePassthrough},
	{"loop devices", false, "Linux 2.6", "load the module (modprobe loop)", probeLoop},
	{"SELinux", false, "", "install the policy for containers (container-selinux): without it the processes of confined containers may not read what their image is kept in", probeSELinux},
	{"TCP with BBR", false, "Linux 4.9", BBRFix, probeBBR},
	{"TCP over long paths", false, "", FlightFix, probeFlight},
	{"TCP's first flight", false, "Linux 5.15", "on a host of foil serve: " + FirstFlightFix, probeFirstFlight},
}

// Features tries every feature once and returns them in a fixed order. root is
// the worker's root directory; when it does not exist yet, the nearest
// directory above it stands for it. An error means that nothing could be tried.
func Features(ctx context.Context, root string) ([]Feature, error) {
	root, err := existing(root)
	if err != nil {
		return nil, fmt.Errorf("probe features of this host: %w", err)
	}
	features := []Feature{{Name: "kernel", Have: true, Detail: release()}}
	for _, p := range table {
		f := Feature{Name: p.name, Need: p.need, Min: p.min}
		f.Detail, err = p.try(ctx, root)
		f.Have = err == nil
		if err != nil {
			f.Detail, f.Fix = err.Error(), p.fix
			if m := (*missing)(nil); errors.As(err, &m) && m.fix != "" {
				f.Fix = m.fix
			}
		}
		features = append(features, f)
	}
	return features, nil
}

func (p *probed) try(ctx context.Context, root string) (detail string, err error) {
	dir, err := os.MkdirTemp(root, ".foil-probe-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	return p.probe(ctx, dir)
}

// existing returns the nearest directory at or above path.
func existing(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	for {
		st, err := os.Stat(path)
		switch {
		case err == nil && st.IsDir():
			return path, nil
		case err == nil:
			return "", fmt.Errorf("%s is no directory", path)
		case !errors.Is(err, os.ErrNotExist) || path == "/":
			return "", err
		}
		path = filepath.Dir(path)
	}
}

// release is the kernel's name, version and architecture.
func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s %s %s", unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:]))
}

func probeRoot(context.Context, string) (string, error) {
	if uid := os.Geteuid(); uid != 0 {
		return "", fmt.Errorf("user ID %d", uid)
	}
	// Root of a container has the user ID but not the power.
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(status)) {
		value, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		var caps uint64
		if _, err := fmt.Sscanf(value, "%x", &caps); err != nil {
			return "", fmt.Errorf("read capabilities: %w", err)
		}
		if caps&(1<<unix.CAP_SYS_ADMIN) == 0 {
			return "", &missing{"root, without CAP_SYS_ADMIN", "leave the container, or run it privileged"}
		}
	}
	return "", nil
}

func probeMemfd(context.Context, string) (string, error) {
	fd, err := unix.MemfdCreate("foil-probe", unix.MFD_CLOEXEC)
	if err != nil {
		return "", fmt.Errorf("memfd_create: %w", err)
	}
	return "", unix.Close(fd)
}

func probeRunc(ctx context.Context, _ string) (string, error) {
	out, err := exec.CommandContext(ctx, "runc", "--version").Output()
	if err != nil {
		return "", err
	}
	version, _, _ := strings.Cut(string(out), "\n")
	version = strings.TrimSpace(version)
	var major, minor int
	if _, err := fmt.Sscanf(version, "runc version %d.%d", &major, &minor); err == nil && (major < 1 || major == 1 && minor < 1) {
		return "", fmt.Errorf("%s is too old", version)
	}
	return version, nil
}

func probeCgroup(context.Context, string) (string, error) {
	is2 := func(path string) bool {
		var st unix.Statfs_t
		return unix.Statfs(path, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
	}
	switch {
	case is2("/sys/fs/cgroup"):
		return "version 2", nil
	case is2("/sys/fs/cgroup/unified"):
		return "hybrid", nil
	}
	// Version 1 has one mount for each controller.
	if st, err := os.Stat("/sys/fs/cgroup/devices"); err == nil && st.IsDir() {
		return "version 1", nil
	}
	return "", errors.New("none at /sys/fs/cgroup")
}

// wantFiles is the limit of open files below which many waiting reads can run
// into it.
const wantFiles = 16384

func probeFiles(context.Context, string) (string, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return "", fmt.Errorf("getrlimit: %w", err)
	}
	if l.Max < wantFiles {
		return "", fmt.Errorf("limit %d, %d wanted", l.Max, wantFiles)
	}
	return fmt.Sprintf("limit %d", l.Max), nil
}

func probeLoop(context.Context, string) (string, error) {
	f, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	// Finds or makes a free device; it stays free.
	n, err := unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return "", fmt.Errorf("find a free loop device: %w", err)
	}
	return fmt.Sprintf("loop%d is free", n), nil
}
