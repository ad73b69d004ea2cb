package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/kernel"
)

const (
	// kubeletEnv names a directory with kubelet, and perhaps the programs of a control plane.
	kubeletEnv = "FOIL_TEST_KUBELET"
	// insideEnv is the name of the test that runs in a network of its own.
	insideEnv = "FOIL_E2E_OWN_NETWORK"
	// nodeAddress is the node's, for pods that have addresses of their own.
	nodeAddress = "192.0.2.1"
)

// ownNetwork runs a test once more, in a process that has a network and mounts of its own:
// what a kubelet makes of iptables and routes, and what it and its pods listen on, ends with it.
// It reports whether this is that process; else the test has been run.
func ownNetwork(t *testing.T) (inside bool) {
	t.Helper()
	if os.Getenv(insideEnv) == t.Name() {
		for _, args := range [][]string{{"link", "set", "lo", "up"}, {"address", "add", nodeAddress + "/32", "dev", "lo"}} {
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
			}
		}
		return true
	}
	args := []string{"-test.run", "^" + regexp.QuoteMeta(t.Name()) + "$", "-test.v"}
	if deadline, ok := t.Deadline(); ok {
		// It ends before this process would be, and says why.
		args = append(args, "-test.timeout", (time.Until(deadline) - 20*time.Second).String())
	}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), insideEnv+"="+t.Name(), programEnv+"="+foil)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("in a network of its own: %v\n%s", err, out)
	}
	if strings.Contains(string(out), "--- SKIP: "+t.Name()+" ") {
		t.Skipf("%s", out)
	}
	if !strings.Contains(string(out), "--- PASS: "+t.Name()+" ") {
		t.Fatalf("it did not run:\n%s", out)
	}
	t.Logf("%s", out)
	return false
}

// needKubelet skips the test, or returns the directory of the kubelet. It puts runc on the path.
func needKubelet(t *testing.T) (bin string) {
	t.Helper()
	needBusybox(t)
	bin = os.Getenv(kubeletEnv)
	if _, err := os.Stat(filepath.Join(bin, "kubelet")); bin == "" || err != nil {
		t.Skipf("skip: %s names no directory with a kubelet", kubeletEnv)
	}
	for _, program := range []string{"iptables", "mount", "ip"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("skip: a kubelet calls %s: %v", program, err)
		}
	}
	if dir := os.Getenv("FOIL_TEST_RUNC"); dir != "" {
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	}
	out, err := exec.Command("runc", "--version").Output()
	if err != nil || !strings.Contains(string(out), "libseccomp") {
		t.Skipf("skip: every pod of a kubelet has a profile for seccomp, and FOIL_TEST_RUNC names no runc that knows it; here is %q, %v", out, err)
	}
	return bin
}

// kubelet is one of the test's own, which no API server tells what to do, unless kubeconfig is set.
type kubelet struct {
	*process
	bin, dir   string
	group      string // below which its control groups are, in each hierarchy
	config     map[string]any
	kubeconfig string
	runtime    cri.RuntimeServiceClient
	gone       bool // its pods
}

const (
	kubeletPort = 10250
	readPort    = 10255
	// kubeconfigSetting is none of the kubelet's file, but a flag.
	kubeconfigSetting = "kubeconfig"
)

// kubeletHost is a containerd as a kubelet needs it, whose pods have addresses.
func kubeletHost(t *testing.T) containerdVersion {
	t.Helper()
	dir := networkDir(t)
	v := containerd2
	v.sandbox += fmt.Sprintf("netns_mounts_under_state_dir = true\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nuse_internal_loopback = true\nbin_dirs = ['%s']\nconf_dir = '%s'\n", dir, dir)
	return v
}

// networkDir makes a directory with networkPlugin and its configuration.
func networkDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	list := `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "foil-test"}]}`
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "foil-test"), []byte(networkPlugin), 0o755), os.WriteFile(filepath.Join(dir, "foil-test.conflist"), []byte(list), 0o644)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// networkPlugin is a CNI plugin that gives each pod a pair of devices and an address for tests (RFC 2544).
const networkPlugin = `#!/bin/sh
set -e
case $CNI_COMMAND in
VERSION)
	echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}'
	;;
ADD)
	here=$(dirname "$0")
	n=$(flock "$here" sh -c "n=\$((\$(cat $here/last 2>/dev/null || echo 0) + 1)); echo \$n >$here/last; echo \$n")
	address=198.18.0.$n
	ip link add "pod$n" type veth peer name eth0 netns "$CNI_NETNS"
	ip link set "pod$n" up
	ip route add "$address/32" dev "pod$n"
	nsenter --net="$CNI_NETNS" sh -c "ip link set eth0 up && ip address add $address/32 dev eth0 &&
		ip route add ` + nodeAddress + ` dev eth0 && ip route add default via ` + nodeAddress + `"
	echo '{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "'"$CNI_NETNS"'"}], "ips": [{"address": "'"$address"'/32", "interface": 0}]}'
	;;
esac
`

// startKubelet starts a kubelet for containerd, whose static pods are files in k.dir/pods.
func startKubelet(t *testing.T, bin string, c *containerd, settings map[string]any) *kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "foil-kubelet-")
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{bin: bin, dir: dir, group: fmt.Sprintf("foil-kubelet-%d", os.Getpid())}
	for _, sub := range []string{"pods", "logs", "plugins", "root"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// Root of a user namespace has to get to its pods' files.
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	groups := k.groups(t)
	// What it mounts for a pod containerd has to see, and the reverse.
	if err := errors.Join(syscall.Mount(dir, dir, "", syscall.MS_BIND, ""), syscall.Mount("", dir, "", syscall.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, g := range groups {
			killGroups(g)
			removeGroups(t, g)
		}
		mounts, err := kernel.Mounts(dir)
		for i := len(mounts) - 1; i >= 0; i-- {
			err = errors.Join(err, kernel.Unmount(mounts[i].Target, true))
		}
		if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix:"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	k.runtime = cri.NewRuntimeServiceClient(conn)
	t.Cleanup(func() { conn.Close() })
	k.config = kubeletConfig(dir, c.socket(), "/"+k.group)
	for name, value := range settings {
		if name == kubeconfigSetting {
			k.kubeconfig = value.(string)
			continue
		}
		k.config[name] = value
	}
	// What it knows for pulls, whatever pod they are for.
	secret := fmt.Sprintf(`{"auths": {"registry.example": {"auth": %q}}}`, frontAuth)
	if err := os.WriteFile(filepath.Join(dir, "root", "config.json"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	k.start(t)
	return k
}

// kubeletConfig is the configuration of a kubelet that keeps its files in dir.
func kubeletConfig(dir, socket, group string) map[string]any {
	return map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": "127.0.0.1", "port": kubeletPort, "readOnlyPort": readPort, "healthzPort": 0,
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

// groups makes a control group in each hierarchy, all by the same name, as a kubelet wants them.
func (k *kubelet) groups(t *testing.T) (dirs []string) {
	t.Helper()
	found, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		found = []string{"/sys/fs/cgroup/cgroup.procs"} // cgroup v2
	}
	for _, procs := range found {
		dir := filepath.Join(filepath.Dir(procs), k.group)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Skipf("skip: no control groups can be made here: %v", err)
		}
		dirs = append(dirs, dir)
	}
	if len(dirs) == 0 {
		t.Skip("skip: no control groups can be made here")
	}
	return dirs
}

// killGroups ends what is left in the control groups of a kubelet's pods, where a test has failed.
func killGroups(dir string) {
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

// kernelSettings are what a kubelet sets for the whole host. It finds them set.
var kernelSettings = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// ownHost is a script that gives a mount namespace directories and files of its own, in dir, where a kubelet
// writes outside of its root.
func ownHost(t *testing.T, dir string) string {
	t.Helper()
	script := "set -e; mount -t tmpfs tmpfs /var/lib; mount -t tmpfs tmpfs /var/log; test ! -d /usr/libexec || mount -t tmpfs tmpfs /usr/libexec\n"
	for name, value := range kernelSettings {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		script += fmt.Sprintf("test ! -e /proc/sys/%s || mount --bind %s /proc/sys/%s\n", name, file, name)
	}
	return script
}

// start starts the kubelet, also again. It sees directories of its own where it writes outside of
// its root, and files of its own in place of the kernel's settings.
func (k *kubelet) start(t *testing.T) {
	t.Helper()
	b, err := json.Marshal(k.config)
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(k.dir, "config.json")
	if err := os.WriteFile(config, b, 0o600); err != nil {
		t.Fatal(err)
	}
	script := ownHost(t, k.dir)
	script += fmt.Sprintf("exec %s --config %s --root-dir %s --hostname-override foil-test --node-ip %s -v 2",
		filepath.Join(k.bin, "kubelet"), config, filepath.Join(k.dir, "root"), nodeAddress)
	if k.kubeconfig != "" {
		script += " --kubeconfig " + k.kubeconfig
	}
	t.Cleanup(func() {
		if k.gone {
			return // one that was started later has done it
		}
		k.gone = true
		if err := k.removePods(); err != nil {
			t.Errorf("remove what the kubelet's pods were: %v", err)
		}
	})
	k.process = startCommand(t, exec.Command("unshare", "--mount", "--propagation", "unchanged", "/bin/sh", "-c", script))
	eventually(t, "the kubelet answers", func() error {
		select {
		case <-k.done:
			t.Fatalf("the kubelet ended: %v\n%s", k.err, k.log)
		default:
		}
		return k.get("/pods", new(any))
	})
}

// get asks the kubelet for something, in JSON.
func (k *kubelet) get(path string, into any) error {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", readPort, path))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// podState is what is looked at of a pod.
type podState struct {
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

func (p podState) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			return true
		}
	}
	return false
}

// pod returns the state of a static pod.
func (k *kubelet) pod(name string) (podState, error) {
	var list struct{ Items []podState }
	if err := k.get("/pods", &list); err != nil {
		return podState{}, err
	}
	for _, p := range list.Items {
		if p.Metadata.Name == name+"-foil-test" {
			return p, nil
		}
	}
	return podState{}, fmt.Errorf("no pod %s", name)
}

// run has the kubelet run a static pod: spec is what is below spec, in YAML, each line indented by two spaces.
func (k *kubelet) run(t *testing.T, name, spec string) {
	t.Helper()
	text := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: " + name + "\nspec:\n  terminationGracePeriodSeconds: 0\n  automountServiceAccountToken: false\n" + spec
	// By its name at once, or the kubelet reads a half.
	file := filepath.Join(k.dir, "pods", name+".yaml")
	hidden := filepath.Join(k.dir, name+".yaml")
	if err := errors.Join(os.WriteFile(hidden, []byte(text), 0o600), os.Rename(hidden, file)); err != nil {
		t.Fatal(err)
	}
}

// ready waits until a static pod is.
func (k *kubelet) ready(t *testing.T, name string) {
	t.Helper()
	eventually(t, "the pod "+name+" is ready", func() error {
		p, err := k.pod(name)
		if err == nil && !p.ready() {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
}

// remove has the kubelet end a static pod, and waits for it.
func (k *kubelet) remove(t *testing.T, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(k.dir, "pods", name+".yaml")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pod "+name+" is gone", func() error {
		if _, err := k.container(t.Context(), name); err == nil {
			return errors.New("its container runs")
		}
		return nil
	})
}

// container returns the ID of the running container of a pod of one.
func (k *kubelet) container(ctx context.Context, pod string) (string, error) {
	list, err := k.runtime.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}})
	if err != nil {
		return "", err
	}
	for _, c := range list.Containers {
		if name := c.Labels["io.kubernetes.pod.name"]; name == pod+"-foil-test" || name == pod {
			return c.Id, nil
		}
	}
	return "", fmt.Errorf("no container of pod %s runs", pod)
}

// exec returns what a script prints in the container of a pod.
func (k *kubelet) exec(t *testing.T, pod, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	id, err := k.container(ctx, pod)
	if err != nil {
		t.Fatal(err)
	}
	out, err := k.runtime.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", script}})
	if err != nil || out.ExitCode != 0 {
		t.Fatalf("in pod %s: %s: %v, %s", pod, script, err, out)
	}
	return string(out.Stdout)
}

// removePods removes all pods, which no kubelet minds any more.
func (k *kubelet) removePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := k.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range list.Items {
		_, stopErr := k.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id})
		_, removeErr := k.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id})
		err = errors.Join(err, stopErr, removeErr)
	}
	return err
}
