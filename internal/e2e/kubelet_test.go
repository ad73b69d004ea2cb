package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kubelettest"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// node is a node of Kubernetes: a worker with its containerd and a kubelet, and the server
// that it pulls from.
type node struct {
	t *testing.T // what is started again ends with this one, not with a part of it
	s *server
	f *front // registry.example, which lets in who has frontSecret
	w *worker
	c *containerd
	k *kubelet
	// flags of the worker
	flags []string
}

// startNode starts a node, whose images may also come by links.
func startNode(t *testing.T, bin string, settings map[string]any, links ...*link) *node {
	t.Helper()
	n := &node{t: t, s: startServer(t, t.TempDir())}
	n.f = newFront(t, n.s, false)
	// containerd takes no file without a table of hosts.
	table := fmt.Sprintf("[host.%q]\nca = \"../ca.pem\"\n", n.f.URL)
	hosts := hostsDir(t, n.f, "registry.example", table)
	// The same, by a name for which the kubelet has no credentials.
	other := filepath.Join(hosts, "stranger.example")
	if err := errors.Join(os.Mkdir(other, 0o700), os.WriteFile(filepath.Join(other, "hosts.toml"), []byte(table), 0o600)); err != nil {
		t.Fatal(err)
	}
	trusted := []string{n.s.addr, "registry.example"}
	for _, k := range links {
		k.target = n.s.addr
		trusted = append(trusted, k.addr)
	}
	dir, proxy := containerdDir(t), filepath.Join(t.TempDir(), "proxy.sock")
	n.flags = []string{"--hosts-dir", hosts, "--docker-config", "", "--log-level", "debug", "--cri-proxy-socket", proxy,
		"--cri-endpoint", socketIn(dir), "--origin-group", strings.Join(trusted, " ")}
	root := workerRoot(t)
	n.w = startWorker(t, root, n.flags...)
	n.w.hosts, n.w.containerd = hosts, dir
	pause := n.s.push("pause", "1", pauseImage(t))
	n.c = startContainerdCRI(t, kubeletHost(t), n.w, pause)
	all := map[string]any{"imageServiceEndpoint": "unix://" + proxy}
	for name, value := range settings {
		all[name] = value
	}
	n.k = startKubelet(t, bin, n.c, all)
	return n
}

// restartWorker starts a daemon in place of one that has ended.
func (n *node) restartWorker() {
	n.t.Helper()
	hosts, dir := n.w.hosts, n.w.containerd
	n.w = startWorker(n.t, n.w.root, n.flags...)
	n.w.hosts, n.w.containerd = hosts, dir
}

// served is the spec of a pod that reads all its data, and then serves it, which its probe asks for.
func served(ref, more string) string {
	return fmt.Sprintf(`  containers:
  - name: app
    image: %s
    command: [/bin/sh, -c, "cat /data/* >/dev/null && exec /bin/busybox httpd -f -p 80 -h /data"]
    readinessProbe: {httpGet: {port: 80, path: /00001}, periodSeconds: 1}
`, ref) + more
}

// TestKubelet has a kubelet run static pods, while their images are on the way, on both gates. The two nodes have nothing
// in common, and wait most of the time, so that they need not wait for each other.
func TestKubelet(t *testing.T) {
	gates := []string{cmp.Or(os.Getenv(gateEnv), bestGate())}
	if os.Getenv(gateEnv) == "" && gates[0] != kernel.GateFUSE {
		gates = append(gates, kernel.GateFUSE)
	}
	for _, gate := range gates {
		t.Run(gate, func(t *testing.T) {
			if os.Getenv(insideEnv) == "" {
				t.Parallel()
			}
			if ownNetwork(t, gateEnv+"="+gate) {
				testKubelet(t)
			}
		})
	}
}

func testKubelet(t *testing.T) {
	bin := needKubelet(t)
	k := newLink(t, "", 0)
	n := startNode(t, bin, nil, k)
	img := owned(t)
	want := wantData(t, img)
	ref := k.via(n.s.push("app", "1", img))

	k.stallAfter(2 << 20)
	n.k.run(t, "lazy", served(ref, ""))
	eventually(t, "the container runs", func() error {
		_, err := n.k.container(t.Context(), "lazy")
		return err
	})
	if p, err := n.k.pod("lazy"); err != nil || p.Ready() {
		t.Errorf("what the pod reads is on its way, and the kubelet says %+v, %v", p, err)
	}
	if st := n.imageState(t, ref); st != "pulling" {
		t.Errorf("when the container runs, its image is %s, want it on its way", st)
	}
	k.open()
	n.k.ready(t, "lazy")
	if got := n.k.exec(t, "lazy", dataSums); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
	for _, name := range n.c.names(t) {
		if l := n.c.info(t, name).Labels; l[snapshotter.LabelPath] == snapshotter.PathPlain {
			t.Errorf("labels of snapshot %s: %q", name, l)
		}
	}
	t.Run("image filesystem", func(t *testing.T) { testSummary(t, n, "lazy") })
	t.Run("volumes", func(t *testing.T) { testVolumes(t, n) })
	t.Run("user namespace", func(t *testing.T) { testUserNamespace(t, n, ref, want) })
	t.Run("pull secret", func(t *testing.T) { testPullSecret(t, n) })
	t.Run("daemon crash", func(t *testing.T) { testDaemonCrash(t, n, k) })
	t.Run("reboot", func(t *testing.T) { testReboot(t, n, k, "lazy", want) })
}

// imageState is what the worker says of an image that came for a reference.
func (n *node) imageState(t *testing.T, ref string) string {
	t.Helper()
	repository := ref[:strings.LastIndexByte(ref, ':')]
	for _, name := range n.w.imageRefs() {
		if strings.HasPrefix(name, repository+"@") || strings.HasPrefix(name, repository+":") {
			return n.w.imageOf(name).State
		}
	}
	return fmt.Sprintf("not among %q", n.w.imageRefs())
}

// The kubelet measures the filesystem of images, and what a pod writes there.
func testSummary(t *testing.T, n *node, pod string) {
	var on syscall.Statfs_t
	if err := syscall.Statfs(n.w.root, &on); err != nil {
		t.Fatal(err)
	}
	n.k.exec(t, pod, "dd if=/dev/zero of=/written bs=1M count=3 2>/dev/null")
	eventually(t, "the summary has the pod", func() error {
		var s struct {
			Node struct {
				Runtime struct {
					ImageFs struct{ CapacityBytes, UsedBytes, AvailableBytes, InodesFree *uint64 }
				}
			}
			Pods []struct {
				PodRef     struct{ Name string }
				Containers []struct{ Rootfs struct{ UsedBytes *uint64 } }
			}
		}
		if err := n.k.get("/stats/summary", &s); err != nil {
			return err
		}
		fs := s.Node.Runtime.ImageFs
		if fs.CapacityBytes == nil || fs.UsedBytes == nil || fs.AvailableBytes == nil || fs.InodesFree == nil || *fs.UsedBytes == 0 {
			return fmt.Errorf("the filesystem of images is %+v", fs)
		}
		if size := on.Blocks * uint64(on.Frsize); *fs.CapacityBytes != size || *fs.AvailableBytes == 0 || *fs.AvailableBytes >= size {
			t.Fatalf("the filesystem of images has %d bytes, %d available; the worker's has %d", *fs.CapacityBytes, *fs.AvailableBytes, size)
		}
		for _, p := range s.Pods {
			if p.PodRef.Name == pod+"-"+kubelettest.Host && len(p.Containers) == 1 && p.Containers[0].Rootfs.UsedBytes != nil {
				if used := *p.Containers[0].Rootfs.UsedBytes; used < 3<<20 {
					return fmt.Errorf("the pod's container has written %d bytes", used)
				}
				return nil
			}
		}
		return fmt.Errorf("pods: %+v", s.Pods)
	})
}

// An image is a volume of a container of another, whose own root is read-only. Before it an init container writes to a
// volume that both have, of which the container has a part.
func testVolumes(t *testing.T, n *node) {
	img := runnable(t, 20, 10_000)
	data := n.s.push("data", "1", img)
	app := n.s.push("reader", "1", runnable(t, 0, 0))
	n.k.run(t, "volume", fmt.Sprintf(`  securityContext: {fsGroup: 4321}
  initContainers:
  - name: before
    image: %[1]s
    command: [/bin/sh, -c, "/bin/busybox mkdir -m 2775 /all/part && cat /version >/all/part/made && cat /version >/own"]
    volumeMounts: [{name: all, mountPath: /all}]
  containers:
  - name: app
    image: %[1]s
    command: [/bin/sleep, "100000"]
    securityContext: {readOnlyRootFilesystem: true, runAsUser: 1000, runAsGroup: 1000}
    volumeMounts: [{name: data, mountPath: /volume}, {name: all, mountPath: /part, subPath: part}]
  volumes: [{name: data, image: {reference: %[2]q, pullPolicy: IfNotPresent}}, {name: all, emptyDir: {}}]
`, app, data))
	n.k.ready(t, "volume")
	if got, want := n.k.exec(t, "volume", strings.ReplaceAll(dataSums, "/", "/volume/")), wantData(t, img); got != want {
		t.Errorf("in a volume that is an image a container read\n%s\nwant\n%s", got, want)
	}
	const seen = `cat /part/made; echo; echo more >/part/more && /bin/busybox stat -c %g /part/more
ls /own 2>&1 >/dev/null | /bin/busybox grep -o 'No such file.*'
for path in /new /version /volume/new; do /bin/busybox touch $path 2>&1 | /bin/busybox grep -o 'Read-only file system'; done`
	const readOnly = "Read-only file system\n"
	if diff := gocmp.Diff("1\n4321\nNo such file or directory\n"+readOnly+readOnly+readOnly, n.k.exec(t, "volume", seen)); diff != "" {
		t.Errorf("what an init container made, and what cannot be written (-want +got):\n%s", diff)
	}
	n.k.remove(t, "volume")
}

// A pod with hostUsers: false. Nothing of its image is copied.
func testUserNamespace(t *testing.T, n *node, ref, want string) {
	n.k.run(t, "mapped", served(ref, "  hostUsers: false\n"))
	n.k.ready(t, "mapped")
	mapped := strings.Fields(n.k.exec(t, "mapped", "cat /proc/self/uid_map"))
	if len(mapped) != 3 || mapped[0] != "0" || mapped[1] == "0" {
		t.Fatalf("user IDs of the pod: %q", mapped)
	}
	if diff := gocmp.Diff(ownersSeen+want, n.k.exec(t, "mapped", "ID=mapped; "+ownersScript)); diff != "" {
		t.Errorf("a pod in a user namespace (-want +got):\n%s", diff)
	}
	if owners := ownersOf(t, n.w, "mapped"); owners[0] != "new "+mapped[1]+" "+mapped[1] {
		t.Errorf("owners on the host: %q, want what the pod made to be of %s", owners, mapped[1])
	}
	n.k.remove(t, "mapped")
}

// A private image, with the credentials that the kubelet has for its registry.
func testPullSecret(t *testing.T, n *node) {
	img := runnable(t, 20, 10_000)
	n.s.push("private", "1", img)
	const ref = "registry.example/private:1"
	n.k.run(t, "refused", served("stranger.example/private:1", ""))
	eventually(t, "the kubelet is refused", func() error {
		p, err := n.k.pod("refused")
		if err != nil {
			return err
		}
		for _, c := range p.Status.ContainerStatuses {
			if strings.Contains(string(c.State), "ErrImagePull") || strings.Contains(string(c.State), "ImagePullBackOff") {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.Status)
	})
	n.k.remove(t, "refused")
	n.k.run(t, "allowed", served(ref, ""))
	n.k.ready(t, "allowed")
	if got, want := n.k.exec(t, "allowed", dataSums), wantData(t, img); got != want {
		t.Errorf("a container of a private image read\n%s\nwant\n%s", got, want)
	}
	if st := n.imageState(t, ref); st != "pulling" && st != "complete" {
		t.Errorf("a private image came lazily, and is %s", st)
	}
	for _, leak := range []string{frontSecret, frontAuth} {
		if strings.Contains(n.w.log.String(), leak) {
			t.Errorf("the daemon's log has %q", leak)
		}
	}
	n.k.remove(t, "allowed")
}

// The daemon is killed while a pod starts; the next one goes on, and the pod is ready.
func testDaemonCrash(t *testing.T, n *node, k *link) {
	img := runnable(t, 200, 30_000)
	ref := k.via(n.s.push("crash", "1", img))
	before := k.bytesMoved()
	k.stallAfter(2 << 20)
	n.k.run(t, "crash", served(ref, ""))
	stalls(t, k, before+2<<20)
	n.w.kill()
	n.restartWorker()
	k.open()
	n.k.ready(t, "crash")
	if got, want := n.k.exec(t, "crash", dataSums), wantData(t, img); got != want {
		t.Errorf("through a crash of the daemon a container read\n%s\nwant\n%s", got, want)
	}
	if p, err := n.k.pod("crash"); err != nil || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the kubelet has started its container again: %+v, %v", p.Status, err)
	}
	n.k.remove(t, "crash")
}

// The node reboots, and has no network: pods of images that are here start.
func testReboot(t *testing.T, n *node, k *link, pod, want string) {
	for _, ref := range n.w.imageRefs() {
		eventually(t, "all images are complete", func() error {
			if got := n.w.imageOf(ref).State; got != "complete" {
				return errors.New(got)
			}
			return nil
		})
	}
	old, err := n.k.container(t.Context(), pod)
	if err != nil {
		t.Fatal(err)
	}
	n.k.kill()
	n.c.kill()
	n.c.killShims(t)
	n.w.kill()
	endKeeper(t, n.w.root)
	k.setCut(true)
	rebooted(t, n.w.root, n.c.dir)
	if err := os.RemoveAll(filepath.Join(n.c.dir, "state")); err != nil {
		t.Fatal(err)
	}
	n.restartWorker()
	n.c.start(n.t)
	n.k.start(n.t)
	eventually(t, "the kubelet has made the pod again", func() error {
		id, err := n.k.container(t.Context(), pod)
		if err == nil && id == old {
			err = errors.New("it is that of before")
		}
		return err
	})
	n.k.ready(t, pod)
	if got := n.k.exec(t, pod, dataSums); got != want {
		t.Errorf("after a reboot without a network a container read\n%s\nwant\n%s", got, want)
	}
	if st, err := n.w.client.Status(t.Context()); err != nil || len(st.Warnings) > 0 {
		t.Errorf("after a reboot: %+v, %v", st, err)
	}
	if err := n.k.get("/stats/summary", new(any)); err != nil {
		t.Error(err)
	}
}
