// Package kubelettest prepares kubelets of tests and benchmarks: real ones, that run static pods, beside whatever else
// runs on this host. Control groups are all that others see of one.
package kubelettest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	port = 10250
	// ReadPort is where one answers, by HTTP at its loopback, to whoever asks.
	ReadPort = 10255
	// Host is the name of the node, with which names of static pods end.
	Host = "foil-test"
)

// Config is the configuration of a kubelet that keeps its files in dir, for the containerd on a socket. group is below
// which control group its own are.
func Config(dir, socket, group string) map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": "127.0.0.1", "port": port, "readOnlyPort": ReadPort, "healthzPort": 0,
		"authentication":           map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization":            map[string]any{"mode": "AlwaysAllow"},
		"containerRuntimeEndpoint": "unix://" + socket,
		"staticPodPath":            filepath.Join(dir, "pods"),
		"podLogsDir":               filepath.Join(dir, "logs"),
		"volumePluginDir":          filepath.Join(dir, "plugins"),
		"failCgroupV1":             false, "cgroupDriver": "cgroupfs", "cgroupRoot": group,
		"failSwapOn": false, "resolvConf": "", "serializeImagePulls": false,
		// Whatever else fills this machine's disk and memory.
		"evictionHard": map[string]string{"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"},
		// What is tried again is tried soon.
		"syncFrequency": "1s", "volumeStatsAggPeriod": "1s", "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
		"crashLoopBackOff": map[string]any{"maxContainerRestartPeriod": "1s"},
	}
}

// Prepare makes the directories of a kubelet in dir.
func Prepare(dir string) error {
	for _, sub := range []string{"pods", "logs", "plugins", "root"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	// Root of a user namespace has to get to its pods' files.
	return os.Chmod(dir, 0o711)
}

// Script writes the configuration, and returns a shell script that becomes the kubelet in a mount namespace of its own.
// It sees directories of its own where it writes outside of its root, and files of its own in place of the kernel's
// settings.
func Script(program, dir, address string, config map[string]any) (string, error) {
	b, err := json.Marshal(config)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "config.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return "", err
	}
	script, err := OwnHost(dir)
	return script + fmt.Sprintf("exec %s --config %s --root-dir %s --hostname-override %s --node-ip %s -v 2",
		program, path, filepath.Join(dir, "root"), Host, address), err
}

// kernelSettings are what a kubelet sets for the whole host. It finds them set.
var kernelSettings = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// OwnHost is the part of Script that gives a mount namespace directories and files of its own, in dir.
func OwnHost(dir string) (script string, err error) {
	script = "set -e; mount -t tmpfs tmpfs /var/lib; mount -t tmpfs tmpfs /var/log; test ! -d /usr/libexec || mount -t tmpfs tmpfs /usr/libexec\n"
	for name, value := range kernelSettings {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return "", err
		}
		script += fmt.Sprintf("test ! -e /proc/sys/%s || mount --bind %s /proc/sys/%s\n", name, file, name)
	}
	return script, nil
}

// Groups makes a control group in each hierarchy, all by the same name, as a kubelet wants them.
func Groups(name string) (dirs []string, err error) {
	found, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		found = []string{"/sys/fs/cgroup/cgroup.procs"} // cgroup v2
	}
	for _, procs := range found {
		dir := filepath.Join(filepath.Dir(procs), name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return dirs, err
		}
		dirs = append(dirs, dir)
	}
	if len(dirs) == 0 {
		return nil, errors.New("there is no hierarchy of control groups at /sys/fs/cgroup")
	}
	return dirs, nil
}

// KillGroup ends what is left in a control group and those below it.
func KillGroup(dir string) {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil
		}
		b, _ := os.ReadFile(path)
		for _, field := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		return nil
	})
}

// RemoveGroup removes a control group and those below it; the error says that they are not empty yet.
func RemoveGroup(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- {
		err = errors.Join(err, syscall.Rmdir(dirs[i]))
	}
	if _, gone := os.Stat(dir); errors.Is(gone, fs.ErrNotExist) {
		return nil
	}
	return err
}

// WritePod has a kubelet run a static pod. The file has its name at once, or the kubelet reads a half.
func WritePod(dir, name, manifest string) error {
	hidden := filepath.Join(dir, name+".yaml")
	if err := os.WriteFile(hidden, []byte(manifest), 0o600); err != nil {
		return err
	}
	return os.Rename(hidden, PodFile(dir, name))
}

// PodFile is the file of a static pod, which ends when it is removed.
func PodFile(dir, name string) string { return filepath.Join(dir, "pods", name+".yaml") }

// Pod is what is looked at of a pod.
type Pod struct {
	Metadata struct {
		Name              string
		DeletionTimestamp *string
	}
	Status struct {
		Phase, Reason, Message string
		Conditions             []struct{ Type, Status string }
		ContainerStatuses      []struct {
			Name         string
			Ready        bool
			RestartCount int
			State        json.RawMessage
		}
	}
}

// Ready reports whether a pod is.
func (p Pod) Ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			return true
		}
	}
	return false
}

// PodsPath is where a kubelet lists its pods.
const PodsPath = "/pods"

// Pods is that list.
type Pods struct{ Items []Pod }

// Named returns a static pod.
func (l Pods) Named(name string) (Pod, error) {
	for _, p := range l.Items {
		if p.Metadata.Name == name+"-"+Host {
			return p, nil
		}
	}
	return Pod{}, fmt.Errorf("no pod %s", name)
}
