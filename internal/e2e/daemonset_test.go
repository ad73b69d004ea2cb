package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kubelettest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// TestKubernetesDaemonSet sets a node up by the manifest of deploy/kubernetes, runs a pod on it, and takes all of it
// away again. The node is a systemd with containerd and kubelet as its units, so that what a pod with hostPID finds as
// process 1 is not this machine's.
func TestKubernetesDaemonSet(t *testing.T) {
	if !ownNetwork(t) {
		return
	}
	bin := needKubelet(t)
	s := startServer(t, t.TempDir())
	pause := s.push("pause", "1", pauseImage(t))
	h := startSystemdHost(t, pause, fmt.Sprintf("[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  use_internal_loopback = true\n  bin_dir = %[1]q\n  conf_dir = %[1]q\n", networkDir(t)))
	cl := startCluster(t, bin)
	k := startKubeletUnit(t, h, cl, bin)
	before := h.tree(t)
	program, err := os.ReadFile(foil)
	if err != nil {
		t.Fatal(err)
	}
	own := s.push("foil", "1", newImage(t, ocispec.ImageConfig{Entrypoint: []string{"/foil"}},
		layertest.Layer{layertest.File("foil", 0o755, string(program))}.Gzip(t)))
	manifest := func(name string) string {
		b, err := os.ReadFile("../../deploy/kubernetes/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return strings.ReplaceAll(string(b), "registry.example/foil:VERSION", own)
	}
	const pods = "/api/v1/namespaces/hydrofoil/pods"

	cl.apply(t, manifest("foil-node.yaml"))
	cl.daemonSet(t, "foil-node")
	pids := h.pids(t)
	img := runnable(t, 50, 20_000)
	cl.run(t, "lazy", served(s.push("app", "1", img), ""))
	cl.pod(t, "lazy", "ready", kubelettest.Pod.Ready)
	worker := api.Dial(h.at("/var/lib/foil"))
	defer worker.Close()
	list, err := worker.Images(t.Context())
	if err != nil || !slices.ContainsFunc(list, func(img api.Image) bool { return strings.Contains(img.Ref, "/app@") }) {
		t.Errorf("what came lazily: %+v, %v, want the pod's image among it", list, err)
	}
	// The pods of the DaemonSet come and go. Nobody notices.
	if _, err := cl.call(http.MethodDelete, pods+"?labelSelector=app.kubernetes.io%2Fname%3Dfoil-node", "", ""); err != nil {
		t.Fatal(err)
	}
	cl.daemonSet(t, "foil-node")
	if now := h.pids(t); now != pids {
		t.Errorf("a pod of the DaemonSet was made anew; daemon and containerd are processes %q, before %q", now, pids)
	}
	if got, want := k.exec(t, "lazy", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}

	if _, err := cl.call(http.MethodDelete, "/apis/apps/v1/namespaces/hydrofoil/daemonsets/foil-node?propagationPolicy=Foreground", "", ""); err != nil {
		t.Fatal(err)
	}
	var b []byte
	_, undo, _ := strings.Cut(manifest("foil-undo.yaml"), "apiVersion:")
	cl.apply(t, "apiVersion:"+undo)
	eventually(t, "the pod that undoes finds containers", func() error {
		b, err = cl.call(http.MethodGet, pods+"?labelSelector=app.kubernetes.io%2Fname%3Dfoil-undo", "", "")
		if err == nil && !strings.Contains(string(b), `"exitCode":3`) {
			err = errors.New(string(b))
		}
		return err
	})
	for _, path := range []string{"/api/v1/namespaces/default/pods/lazy", pods + "?labelSelector=app.kubernetes.io%2Fname%3Dfoil-undo"} {
		if _, err := cl.call(http.MethodDelete, path, "", ""); err != nil {
			t.Fatal(err)
		}
	}
	cl.daemonSet(t, "foil-undo")
	if diff := cmp.Diff(before, h.tree(t)); diff != "" {
		t.Errorf("undone (-before +after):\n%s", diff)
	}
	cl.run(t, "plain", served(s.push("other", "1", img), ""))
	cl.pod(t, "plain", "ready", kubelettest.Pod.Ready)
}

// daemonSet waits until the one pod of a DaemonSet on the one node is ready, and no older one is there.
func (c *cluster) daemonSet(t *testing.T, name string) {
	t.Helper()
	eventually(t, "the pod of "+name+" is ready", func() error {
		var list struct{ Items []kubelettest.Pod }
		err := c.get("/api/v1/namespaces/hydrofoil/pods?labelSelector=app.kubernetes.io%2Fname%3D"+name, &list)
		if err == nil && (len(list.Items) != 1 || !list.Items[0].Ready() || list.Items[0].Metadata.DeletionTimestamp != nil) {
			err = fmt.Errorf("%+v", list.Items)
		}
		return err
	})
}

// startKubeletUnit starts a kubelet as a unit of a host, and waits for its node.
func startKubeletUnit(t *testing.T, h *systemdHost, cl *cluster, bin string) *kubelet {
	t.Helper()
	dir := filepath.Join(h.dir, "kubelet")
	for _, sub := range []string{"pods", "logs", "plugins", "root"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	config, err := json.Marshal(kubelettest.Config(dir, "/run/containerd/containerd.sock", "/"))
	if err != nil {
		t.Fatal(err)
	}
	unit := fmt.Sprintf("[Unit]\nDefaultDependencies=no\n[Service]\nEnvironment=PATH=%s\nDelegate=yes\nKillMode=process\nStandardError=file:%s/kubelet.log\n"+
		"ExecStart=%s/kubelet --config %s/config.json --root-dir %s/root --hostname-override foil-test --node-ip %s --kubeconfig %s\n",
		h.path, dir, bin, dir, dir, nodeAddress, cl.kubeconfig)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600), os.WriteFile(filepath.Join(h.dir, "units/kubelet.service"), []byte(unit), 0o644)); err != nil {
		t.Fatal(err)
	}
	// What a kubelet writes of /var/lib is the test's already.
	own, err := kubelettest.OwnHost(dir)
	if err != nil {
		t.Fatal(err)
	}
	h.inside(t, "sh", "-c", strings.Replace(own, "mount -t tmpfs tmpfs /var/lib;", "", 1))
	h.must(t, "daemon-reload")
	h.must(t, "start", "kubelet")
	conn, err := grpc.NewClient("unix:"+h.at("/run/containerd/containerd.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{runtime: cri.NewRuntimeServiceClient(conn)}
	t.Cleanup(func() {
		logs, _ := filepath.Glob(filepath.Join(dir, "logs/*/*/*.log"))
		for _, path := range append(logs, filepath.Join(dir, "kubelet.log")) {
			if b, err := os.ReadFile(path); t.Failed() && err == nil {
				t.Logf("%s:\n%s", strings.TrimPrefix(path, dir), b)
			}
		}
		_, _ = h.ctl("stop", "kubelet")
		if err := k.removePods(); err != nil {
			t.Error(err)
		}
		conn.Close()
	})
	cl.nodeReady(t)
	return k
}
