package e2e

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kubelettest"
)

// TestKubernetes has a whole Kubernetes of one node run pods, while their images are on the way.
func TestKubernetes(t *testing.T) {
	if !ownNetwork(t) {
		return
	}
	bin := needKubelet(t)
	cl := startCluster(t, bin)
	k := newLink(t, "", 4<<20)
	keys, err := cl.call(http.MethodGet, "/openid/v1/jwks", "", "")
	if err != nil {
		t.Fatal(err)
	}
	private := startPrivate(t, string(keys))
	settings := private.provider(t)
	settings[kubeconfigFlag] = cl.kubeconfig
	n := startNode(t, bin, settings, k)
	cl.nodeReady(t)
	t.Run("manifests", func(t *testing.T) { testManifests(t, cl) })
	t.Run("pull policies", func(t *testing.T) { testPullPolicies(t, cl, n) })
	t.Run("pull secret", func(t *testing.T) { testImagePullSecret(t, cl, n) })
	t.Run("service account", func(t *testing.T) { testServiceAccount(t, cl, n, private) })
	t.Run("deployment", func(t *testing.T) { testDeployment(t, cl, n, k) })
	t.Run("eviction by limit", func(t *testing.T) { testEviction(t, cl, n) })
}

// An API server takes what deploy/kubernetes has, to the last field.
func testManifests(t *testing.T, cl *cluster) {
	for _, name := range []string{"foil-node.yaml", "foil-undo.yaml"} {
		b, err := os.ReadFile("../../deploy/kubernetes/" + name)
		if err != nil {
			t.Fatal(err)
		}
		// No node has this label: --enter 1 is no test's to run on its host.
		text := strings.ReplaceAll(string(b), "kubernetes.io/os: linux", "kubernetes.io/os: none")
		if strings.Count(string(b), "kubernetes.io/os: linux") != 1 {
			t.Fatalf("%s does not say once which nodes it is for", name)
		}
		cl.apply(t, text)
	}
	var ds struct {
		Spec struct {
			Template struct {
				Spec struct{ NodeSelector map[string]string }
			}
		}
	}
	if err := cl.get("/apis/apps/v1/namespaces/hydrofoil/daemonsets/foil-node", &ds); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"kubernetes.io/os": "none"}, ds.Spec.Template.Spec.NodeSelector); diff != "" {
		t.Errorf("nodes of the DaemonSet:\n%s", diff)
	}
}

// versioned is runnable with another version.
func versioned(t *testing.T, img image, version string) image {
	t.Helper()
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, img.layers[0], layertest.Layer{layertest.File("version", 0o644, version)}.Gzip(t))
}

// sleeper is the spec of a pod that only waits.
func sleeper(ref, policy string) string {
	return fmt.Sprintf("  containers:\n  - name: app\n    image: %s\n    imagePullPolicy: %s\n    command: [/bin/sleep, \"100000\"]\n", ref, policy)
}

// A tag that moves means what the policy of a pod says.
func testPullPolicies(t *testing.T, cl *cluster, n *node) {
	base := runnable(t, 20, 5_000)
	ref := n.s.push("policy", "1", versioned(t, base, "one"))
	cl.run(t, "missing", sleeper(ref, "Never"))
	cl.pod(t, "missing", "refused", func(p kubelettest.Pod) bool { return waits(p, "ErrImageNeverPull") })
	want := "one"
	for _, step := range []struct{ name, policy, pushed string }{{"first", "IfNotPresent", "two"}, {"second", "IfNotPresent", ""}, {"third", "Always", ""}, {"fourth", "Never", ""}} {
		if step.policy == "Always" {
			want = "two"
		}
		cl.run(t, step.name, sleeper(ref, step.policy))
		cl.pod(t, step.name, "ready", kubelettest.Pod.Ready)
		if got := n.k.exec(t, step.name, "cat /version"); got != want {
			t.Errorf("the %s pod, with the policy %s, has version %q, want %q", step.name, step.policy, got, want)
		}
		if step.pushed != "" {
			n.s.push("policy", "1", versioned(t, base, step.pushed))
		}
	}
	for _, name := range []string{"missing", "first", "second", "third", "fourth"} {
		if _, err := cl.call(http.MethodDelete, "/api/v1/namespaces/default/pods/"+name, "", ""); err != nil {
			t.Error(err)
		}
	}
}

// A private image, with the credentials of a pod's secret.
func testImagePullSecret(t *testing.T, cl *cluster, n *node) {
	n.s.push("secret", "1", runnable(t, 20, 5_000))
	const ref = "stranger.example/secret:1"
	cl.run(t, "without", sleeper(ref, "Always"))
	cl.pod(t, "without", "refused", func(p kubelettest.Pod) bool { return waits(p, "ImagePullBackOff") || waits(p, "ErrImagePull") })
	secret := base64.StdEncoding.EncodeToString(fmt.Appendf(nil, `{"auths": {"stranger.example": {"auth": %q}}}`, frontAuth))
	cl.apply(t, "apiVersion: v1\nkind: Secret\nmetadata:\n  name: pull\ntype: kubernetes.io/dockerconfigjson\ndata:\n  .dockerconfigjson: "+secret+"\n")
	cl.run(t, "with", sleeper(ref, "Always")+"  imagePullSecrets: [{name: pull}]\n")
	cl.pod(t, "with", "ready", kubelettest.Pod.Ready)
	if strings.Contains(n.w.log.String(), frontSecret) || strings.Contains(n.w.log.String(), frontAuth) {
		t.Error("the daemon's log has the credentials of a pod's secret")
	}
	for _, name := range []string{"without", "with"} {
		if _, err := cl.call(http.MethodDelete, "/api/v1/namespaces/default/pods/"+name, "", ""); err != nil {
			t.Error(err)
		}
	}
}

// A private image, for a pod that logs in as its service account.
func testServiceAccount(t *testing.T, cl *cluster, n *node, private *private) {
	cl.apply(t, "apiVersion: v1\nkind: ServiceAccount\nmetadata:\n  name: "+mayPull+"\n---\napiVersion: v1\nkind: ServiceAccount\nmetadata:\n  name: stranger\n")
	for _, account := range []string{"stranger", mayPull} {
		cl.run(t, "of-"+account, sleeper(private.ref, "Always")+"  serviceAccountName: "+account+"\n")
	}
	cl.pod(t, "of-"+mayPull, "ready", kubelettest.Pod.Ready)
	cl.pod(t, "of-stranger", "refused", func(p kubelettest.Pod) bool { return waits(p, "ImagePullBackOff") || waits(p, "ErrImagePull") })
	private.check(t, n)
	for _, account := range []string{"stranger", mayPull} {
		if _, err := cl.call(http.MethodDelete, "/api/v1/namespaces/default/pods/of-"+account, "", ""); err != nil {
			t.Error(err)
		}
	}
}

// A Deployment rolls from an image to the next one. Its pods are ready before these have arrived.
func testDeployment(t *testing.T, cl *cluster, n *node, k *link) {
	base := runnable(t, 200, 30_000)
	const text = `apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: web
        image: %s
        command: [/bin/busybox, httpd, -f, -p, "80", -h, /]
        startupProbe: {httpGet: {port: 80, path: /version}, periodSeconds: 1, failureThreshold: 60}
        livenessProbe: {exec: {command: [/bin/cat, /version]}, periodSeconds: 1}
        readinessProbe: {httpGet: {port: 80, path: /version}, periodSeconds: 1}
`
	for i, version := range []string{"one", "two"} {
		ref := k.via(n.s.push("web", version, versioned(t, base, version)))
		if i == 0 {
			cl.apply(t, fmt.Sprintf(text, ref))
		} else if _, err := cl.call(http.MethodPatch, "/apis/apps/v1/namespaces/default/deployments/web", "application/strategic-merge-patch+json",
			fmt.Sprintf(`{"spec": {"template": {"spec": {"containers": [{"name": "web", "image": %q}]}}}}`, ref)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "all pods have version "+version, func() error {
			var d struct {
				Metadata struct{ Generation int64 }
				Status   struct {
					ObservedGeneration                       int64
					Replicas, UpdatedReplicas, ReadyReplicas int
				}
			}
			err := cl.get("/apis/apps/v1/namespaces/default/deployments/web", &d)
			if s := d.Status; err == nil && (s.ObservedGeneration < d.Metadata.Generation || s.Replicas != 3 || s.UpdatedReplicas != 3 || s.ReadyReplicas != 3) {
				err = fmt.Errorf("%+v", d)
			}
			return err
		})
		var list struct {
			Items []struct {
				Status struct {
					PodIP             string
					ContainerStatuses []struct{ RestartCount int }
				}
				Metadata struct{ DeletionTimestamp *string }
			}
		}
		if err := cl.get("/api/v1/namespaces/default/pods?labelSelector=app%3Dweb", &list); err != nil {
			t.Fatal(err)
		}
		served := 0
		for _, p := range list.Items {
			if p.Metadata.DeletionTimestamp != nil {
				continue
			}
			served++
			resp, err := http.Get("http://" + p.Status.PodIP + "/version")
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 100)
			c, _ := resp.Body.Read(b)
			resp.Body.Close()
			if string(b[:c]) != version || p.Status.ContainerStatuses[0].RestartCount != 0 {
				t.Errorf("a pod serves version %q, want %q; it was restarted %d times", b[:c], version, p.Status.ContainerStatuses[0].RestartCount)
			}
		}
		if served != 3 {
			t.Errorf("%d pods serve, want 3", served)
		}
	}
	if _, err := cl.call(http.MethodDelete, "/apis/apps/v1/namespaces/default/deployments/web?propagationPolicy=Background", "", ""); err != nil {
		t.Error(err)
	}
}

// The kubelet evicts a pod that writes more into its rootfs than it may. What the image takes does not count.
func testEviction(t *testing.T, cl *cluster, n *node) {
	ref := n.s.push("writer", "1", runnable(t, 100, 100_000))
	const limit = "    resources: {limits: {ephemeral-storage: 4Mi}}\n"
	pod := func(megabytes int) string {
		return fmt.Sprintf("  restartPolicy: Never\n  containers:\n  - name: app\n    image: %s\n    command: [/bin/sh, -c, \"/bin/busybox dd if=/dev/urandom of=/written bs=1M count=%d && sleep 100000\"]\n", ref, megabytes) + limit
	}
	cl.run(t, "within", pod(1))
	cl.run(t, "beyond", pod(20))
	cl.pod(t, "beyond", "evicted", func(p kubelettest.Pod) bool {
		return p.Status.Reason == "Evicted" && strings.Contains(p.Status.Message, "ephemeral")
	})
	cl.pod(t, "within", "ready", kubelettest.Pod.Ready)
	for _, name := range []string{"within", "beyond"} {
		if _, err := cl.call(http.MethodDelete, "/api/v1/namespaces/default/pods/"+name, "", ""); err != nil {
			t.Error(err)
		}
	}
}
