package runner

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// capabilities are those that Docker and containerd leave to root in a
// container.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID",
	"CAP_KILL", "CAP_MKNOD", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP",
	"CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// maskedPaths and readonlyPaths keep parts of /proc and /sys that are not
// confined to a namespace from the container.
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
		"/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
	}
	readonlyPaths = []string{
		"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
	}
)

// Spec returns the OCI runtime configuration of a container of the image. It
// reads /etc/passwd and /etc/group of the rootfs, never following a symbolic
// link out of it, so the rootfs must be mounted.
//
// What the image leaves open is as Docker has it: capabilities, mounts, masked
// paths, devices; namespaces for everything but users and, by default, the
// network; limits and OOM score of the caller. There is no seccomp profile: the
// useful ones are lists of several hundred system calls that must follow kernel
// and C library, and belong to an engine that does; a container that is not
// trusted should be run by one. /run is the image's, not a tmpfs.
func Spec(image ocispec.Image, o SpecOptions) (*specs.Spec, error) {
	s, err := spec(image, o)
	if err != nil {
		return nil, fmt.Errorf("configure container %s: %w", o.ID, err)
	}
	return s, nil
}

func spec(image ocispec.Image, o SpecOptions) (*specs.Spec, error) {
	if !filepath.IsAbs(o.Rootfs) || !filepath.IsAbs(o.Dir) {
		return nil, fmt.Errorf("rootfs %q and bundle directory %q must be absolute paths", o.Rootfs, o.Dir)
	}
	if o.Net == "" {
		o.Net = HostNetwork
	}
	if o.Net != HostNetwork && o.Net != NoNetwork {
		return nil, fmt.Errorf("unknown network %q, there are %s and %s", o.Net, HostNetwork, NoNetwork)
	}
	if o.Hostname == "" {
		o.Hostname = o.ID
		if o.Net == HostNetwork {
			var err error
			if o.Hostname, err = os.Hostname(); err != nil {
				return nil, err
			}
		}
	}
	args, err := commandLine(image.Config, o)
	if err != nil {
		return nil, err
	}
	user := image.Config.User
	if o.User != "" {
		user = o.User
	}
	execUser, err := lookUpUser(o.Rootfs, user)
	if err != nil {
		return nil, err
	}
	files, err := writeNetworkFiles(o)
	if err != nil {
		return nil, err
	}
	cwd := "/"
	for _, dir := range []string{image.Config.WorkingDir, o.Cwd} {
		if dir != "" {
			// Relative ones count from the root; runc makes what is missing.
			cwd = path.Join("/", dir)
		}
	}
	return &specs.Spec{
		Version:  "1.0.2",
		Hostname: o.Hostname,
		Root:     &specs.Root{Path: o.Rootfs},
		Process: &specs.Process{
			Terminal: o.TTY,
			User:     execUser,
			Args:     args,
			Env:      environment(image.Config.Env, o),
			Cwd:      cwd,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
		},
		Mounts: slices.Concat(defaultMounts(), files, o.Mounts),
		Linux: &specs.Linux{
			CgroupsPath:   path.Join("/foil", o.ID),
			Namespaces:    namespaces(o),
			Resources:     &specs.LinuxResources{Devices: deviceRules()},
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
		},
	}, nil
}

// configName is that of a container's configuration in its bundle directory.
const configName = "config.json"

// WriteSpec writes s as config.json into the bundle directory.
func WriteSpec(dir string, s *specs.Spec) error {
	b, err := encodeSpec(s)
	if err != nil {
		return err
	}
	return replaceSpec(dir, b)
}

func encodeSpec(s *specs.Spec) ([]byte, error) {
	b, err := json.MarshalIndent(s, "", "\t")
	if err != nil {
		return nil, fmt.Errorf("encode container configuration: %w", err)
	}
	return b, nil
}

// replaceSpec puts an encoded configuration in the place of whatever config.json is: who
// opens it finds all of it.
func replaceSpec(dir string, b []byte) error {
	made := filepath.Join(dir, configName+".new")
	err := os.WriteFile(made, b, 0o600)
	if err == nil {
		err = os.Rename(made, filepath.Join(dir, configName))
	}
	if err != nil {
		return fmt.Errorf("write container configuration: %w", err)
	}
	return nil
}

func commandLine(c ocispec.ImageConfig, o SpecOptions) ([]string, error) {
	entrypoint, cmd := c.Entrypoint, c.Cmd
	if o.Entrypoint != nil {
		entrypoint, cmd = o.Entrypoint, nil
	}
	if o.Args != nil {
		cmd = o.Args
	}
	args := slices.Concat(entrypoint, cmd)
	if len(args) == 0 {
		return nil, errors.New("the image has neither entrypoint nor command: give a command")
	}
	return args, nil
}

// environment merges, later ones winning: defaults, image, options.
func environment(image []string, o SpecOptions) []string {
	env := []string{defaultPath, "HOSTNAME=" + o.Hostname}
	if o.TTY {
		env = append(env, "TERM=xterm")
	}
	set := func(kv string) {
		key, _, ok := strings.Cut(kv, "=")
		if !ok {
			return
		}
		for i, old := range env {
			if strings.HasPrefix(old, key+"=") {
				env[i] = kv
				return
			}
		}
		env = append(env, kv)
	}
	for _, kv := range image {
		set(kv)
	}
	for _, kv := range o.Env {
		if !strings.Contains(kv, "=") {
			value, ok := os.LookupEnv(kv)
			if !ok {
				continue
			}
			kv += "=" + value
		}
		set(kv)
	}
	return env
}

func namespaces(o SpecOptions) []specs.LinuxNamespace {
	ns := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace},
		{Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
	}
	if o.Net == NoNetwork {
		ns = append(ns, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	}
	// With cgroup v1 and hybrid, programs expect to find their cgroup under
	// the path that /proc/self/cgroup of the host shows.
	var st unix.Statfs_t
	if unix.Statfs("/sys/fs/cgroup", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return ns
}

func defaultMounts() []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
}

// deviceRules deny every device but making nodes; runc adds the usual ones
// (null, zero, full, random, urandom, tty, console, pts).
func deviceRules() []specs.LinuxDeviceCgroup {
	return []specs.LinuxDeviceCgroup{
		{Allow: false, Access: "rwm"},
		{Allow: true, Type: "c", Access: "m"},
		{Allow: true, Type: "b", Access: "m"},
	}
}

// writeNetworkFiles writes what a container shall find as /etc/resolv.conf,
// /etc/hosts and /etc/hostname, and returns the mounts of them. They are copies:
// what the container does to them stays in its bundle directory.
func writeNetworkFiles(o SpecOptions) ([]specs.Mount, error) {
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if o.Net == HostNetwork {
		if b, err := os.ReadFile("/etc/hosts"); err == nil {
			hosts = string(b)
		}
	} else {
		hosts += "127.0.0.1\t" + o.Hostname + "\n"
		resolv = nil
	}
	var mounts []specs.Mount
	for _, f := range []struct{ name, text string }{
		{"resolv.conf", string(resolv)}, {"hosts", hosts}, {"hostname", o.Hostname + "\n"},
	} {
		file := filepath.Join(o.Dir, f.name)
		if err := os.WriteFile(file, []byte(f.text), 0o644); err != nil {
			return nil, err
		}
		mounts = append(mounts, specs.Mount{
			Destination: "/etc/" + f.name, Type: "bind", Source: file,
			Options: []string{"rbind", "rprivate"},
		})
	}
	return mounts, nil
}
