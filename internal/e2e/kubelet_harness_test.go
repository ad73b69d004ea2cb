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
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kubelettest"
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
// It reports whether this is that process; else the test has been run. That process has env in its environment.
func ownNetwork(t *testing.T, env ...string) (inside bool) {
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
	cmd.Env = append(append(os.Environ(), insideEnv+"="+t.Name(), programEnv+"="+foil), env...)
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

// kubelet is one of the test's own, which no API server tells what to do, unless it has kubeconfigFlag.
type kubelet struct {
	*process
	bin, dir string
	group    string // below which its control groups are, in each hierarchy
	config   map[string]any
	flags    string
	runtime  cri.RuntimeServiceClient
	gone     bool // its pods
}

// Settings that begin with -- are none of the kubelet's file, but flags.
const kubeconfigFlag = "--kubeconfig"

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
	if err := kubelettest.Prepare(dir); err != nil {
		t.Fatal(err)
	}
	groups, err := kubelettest.Groups(k.group)
	if err != nil {
		t.Skipf("skip: no control groups can be made here: %v", err)
	}
	// What it mounts for a pod containerd has to see, and the reverse.
	if err := errors.Join(syscall.Mount(dir, dir, "", syscall.MS_BIND, ""), syscall.Mount("", dir, "", syscall.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, g := range groups {
			kubelettest.KillGroup(g)
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
	k.runtime = runtimeService(t, c.socket())
	k.config = kubelettest.Config(dir, c.socket(), "/"+k.group)
	for name, value := range settings {
		if strings.HasPrefix(name, "--") {
			k.flags += fmt.Sprintf(" %s %s", name, value)
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

// start starts the kubelet, also again.
func (k *kubelet) start(t *testing.T) {
	t.Helper()
	script, err := kubelettest.Script(filepath.Join(k.bin, "kubelet"), k.dir, nodeAddress, k.config)
	if err != nil {
		t.Fatal(err)
	}
	script += k.flags
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
		return k.get(kubelettest.PodsPath, new(any))
	})
}

// get asks the kubelet for something, in JSON.
func (k *kubelet) get(path string, into any) error {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d%s", kubelettest.ReadPort, path))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// pod returns the state of a static pod.
func (k *kubelet) pod(name string) (kubelettest.Pod, error) {
	var list kubelettest.Pods
	if err := k.get(kubelettest.PodsPath, &list); err != nil {
		return kubelettest.Pod{}, err
	}
	return list.Named(name)
}

// run has the kubelet run a static pod: spec is what is below spec, in YAML, each line indented by two spaces.
func (k *kubelet) run(t *testing.T, name, spec string) {
	t.Helper()
	text := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: " + name + "\nspec:\n  terminationGracePeriodSeconds: 0\n  automountServiceAccountToken: false\n" + spec
	if err := kubelettest.WritePod(k.dir, name, text); err != nil {
		t.Fatal(err)
	}
}

// ready waits until a static pod is.
func (k *kubelet) ready(t *testing.T, name string) {
	t.Helper()
	eventually(t, "the pod "+name+" is ready", func() error {
		p, err := k.pod(name)
		if err == nil && !p.Ready() {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
}

// remove has the kubelet end a static pod, and waits for it.
func (k *kubelet) remove(t *testing.T, name string) {
	t.Helper()
	if err := os.Remove(kubelettest.PodFile(k.dir, name)); err != nil {
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
		if name := c.Labels["io.kubernetes.pod.name"]; name == pod+"-"+kubelettest.Host || name == pod {
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
