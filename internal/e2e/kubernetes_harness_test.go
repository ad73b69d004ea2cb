package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/kubelettest"
)

// cluster is a control plane of the test's own, in the network of the test.
type cluster struct {
	dir, kubeconfig string
	client          *http.Client
}

const (
	apiServer  = "https://127.0.0.1:6443"
	adminToken = "of-a-test"
)

// startCluster starts etcd, an API server, a scheduler and the controllers.
func startCluster(t *testing.T, bin string) *cluster {
	t.Helper()
	for _, program := range []string{"etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"} {
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			t.Skipf("skip: %v: make test-kubernetes builds a control plane", err)
		}
	}
	c := &cluster{dir: t.TempDir()}
	c.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	t.Cleanup(c.client.CloseIdleConnections)
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	c.kubeconfig = filepath.Join(c.dir, "kubeconfig")
	for name, text := range map[string]string{
		"sa.key":     string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		"tokens.csv": adminToken + ",admin,1,system:masters\n",
		"kubeconfig": fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "test",
			"clusters": [{"name": "test", "cluster": {"server": %q, "insecure-skip-tls-verify": true}}],
			"users": [{"name": "admin", "user": {"token": %q}}],
			"contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}]}`, apiServer, adminToken),
	} {
		if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	serviceKey := filepath.Join(c.dir, "sa.key")
	startProgram(t, filepath.Join(bin, "etcd"), "--data-dir", filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
	server := startProgram(t, filepath.Join(bin, "kube-apiserver"), "--etcd-servers", "http://127.0.0.1:2379", "--secure-port", "6443", "--bind-address", "127.0.0.1",
		"--advertise-address", nodeAddress, "--cert-dir", c.dir, "--token-auth-file", filepath.Join(c.dir, "tokens.csv"), "--authorization-mode", "AlwaysAllow",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", serviceKey, "--service-account-signing-key-file", serviceKey,
		"--service-cluster-ip-range", "10.96.0.0/24", "--allow-privileged")
	eventually(t, "the API server answers", func() error {
		select {
		case <-server.done:
			t.Fatalf("the API server ended: %v", server.err)
		default:
		}
		_, err := c.call(http.MethodGet, "/readyz", "", "")
		return err
	})
	startProgram(t, filepath.Join(bin, "kube-scheduler"), "--kubeconfig", c.kubeconfig, "--leader-elect=false", "--secure-port", "0")
	startProgram(t, filepath.Join(bin, "kube-controller-manager"), "--kubeconfig", c.kubeconfig, "--leader-elect=false", "--secure-port", "0",
		"--service-account-private-key-file", serviceKey, "--flex-volume-plugin-dir", filepath.Join(c.dir, "plugins"), "--root-ca-file", filepath.Join(c.dir, "apiserver.crt"))
	eventually(t, "there is an account for pods", func() error {
		_, err := c.call(http.MethodGet, "/api/v1/namespaces/default/serviceaccounts/default", "", "")
		return err
	})
	return c
}

// call asks the API server.
func (c *cluster) call(method, path, contentType, body string) ([]byte, error) {
	req, err := http.NewRequest(method, apiServer+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(b))
	}
	return b, err
}

// create makes an object of a manifest, in which every field must be known.
func (c *cluster) create(t *testing.T, collection, manifest string) {
	t.Helper()
	eventually(t, "the API server takes "+collection, func() error {
		_, err := c.call(http.MethodPost, collection+"?fieldValidation=Strict", "application/yaml", manifest)
		if err != nil && (strings.Contains(err.Error(), "400 Bad") || strings.Contains(err.Error(), "422 ")) {
			t.Fatalf("%v\n%s", err, manifest)
		}
		return err
	})
}

// collections are where the API has objects of a kind.
var collections = map[string]string{
	"Namespace":      "/api/v1/namespaces",
	"ConfigMap":      "/api/v1/namespaces/%s/configmaps",
	"Secret":         "/api/v1/namespaces/%s/secrets",
	"ServiceAccount": "/api/v1/namespaces/%s/serviceaccounts",
	"Pod":            "/api/v1/namespaces/%s/pods",
	"DaemonSet":      "/apis/apps/v1/namespaces/%s/daemonsets",
	"Deployment":     "/apis/apps/v1/namespaces/%s/deployments",
}

// apply makes all objects of a file.
func (c *cluster) apply(t *testing.T, manifests string) {
	t.Helper()
	for _, text := range strings.Split(manifests, "\n---\n") {
		kind, namespace := "", "default"
		for line := range strings.Lines(text) {
			if v, ok := strings.CutPrefix(line, "kind: "); ok {
				kind = strings.TrimSpace(v)
			}
			if v, ok := strings.CutPrefix(line, "  namespace: "); ok {
				namespace = strings.TrimSpace(v)
			}
		}
		path := collections[kind]
		if path == "" {
			t.Fatalf("no kind that is known: %s", text)
		}
		if strings.Contains(path, "%s") {
			path = fmt.Sprintf(path, namespace)
		}
		c.create(t, path, text)
	}
}

// get reads an object.
func (c *cluster) get(path string, into any) error {
	b, err := c.call(http.MethodGet, path, "", "")
	if err != nil {
		return err
	}
	return json.Unmarshal(b, into)
}

// run makes a pod, whose spec is as in kubelet.run.
func (c *cluster) run(t *testing.T, name, spec string) {
	t.Helper()
	c.apply(t, "apiVersion: v1\nkind: Pod\nmetadata:\n  name: "+name+"\nspec:\n  terminationGracePeriodSeconds: 0\n  automountServiceAccountToken: false\n"+spec)
}

// pod waits until a pod is as wanted.
func (c *cluster) pod(t *testing.T, name, what string, as func(kubelettest.Pod) bool) {
	t.Helper()
	eventually(t, "the pod "+name+" is "+what, func() error {
		var p kubelettest.Pod
		err := c.get("/api/v1/namespaces/default/pods/"+name, &p)
		if err == nil && !as(p) {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
}

// waits reports whether the container of a pod waits for this reason.
func waits(p kubelettest.Pod, reason string) bool {
	for _, c := range p.Status.ContainerStatuses {
		if strings.Contains(string(c.State), reason) {
			return true
		}
	}
	return false
}

// nodeReady waits for the one node.
func (c *cluster) nodeReady(t *testing.T) {
	t.Helper()
	eventually(t, "the node is ready", func() error {
		var node kubelettest.Pod // it has conditions like a pod's
		err := c.get("/api/v1/nodes/foil-test", &node)
		if err == nil && !node.Ready() {
			err = fmt.Errorf("%+v", node.Status)
		}
		return err
	})
}
