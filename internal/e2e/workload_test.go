package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"hydrofoil.dev/foil/internal/kubelettest"
)

const (
	// audience is that of the registry, in deploy/kubernetes/credential-provider.yaml.
	audience = "registry.example"
	// mayPull is the service account that may.
	mayPull = "puller"
	// clusterIssuer is what the cluster's tokens say is their issuer.
	clusterIssuer = "https://kubernetes.default.svc"
)

// private is a registry that knows service accounts of a cluster, and nobody else, with an image for one of them.
type private struct {
	*server
	ref, audit string
}

// startPrivate starts one; keys are the cluster's, a JSON web key set.
func startPrivate(t *testing.T, keys string) *private {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p := &private{server: startServer(t, t.TempDir()), audit: filepath.Join(dir, "audit.jsonl")}
	p.ref = p.push("team/app", "1", runnable(t, 20, 5_000))
	p.signal(syscall.SIGINT)
	<-p.done
	p.guard(t, write("access.toml", fmt.Sprintf(`[[issuer]]
name = "cluster"
url = %q
keys = %q
audience = %q
[[issuer.identity]]
name = "{kubernetes.io/namespace}/{kubernetes.io/serviceaccount/name}"

[[rule]]
to = ["cluster:default/%s"]
allow = ["pull"]
repositories = ["team/**"]
`, clusterIssuer, write("keys.json", keys), audience, mayPull)), p.audit)
	return p
}

// provider is what a kubelet is told to run for images of the registry: the file that is deployed.
func (p *private) provider(t *testing.T) map[string]any {
	t.Helper()
	b, err := os.ReadFile("../../deploy/kubernetes/credential-provider.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const images = "matchImages: [registry.example]"
	if strings.Count(string(b), images) != 1 {
		t.Fatalf("the file does not say once: %s", images)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "credential-provider.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(b), images, fmt.Sprintf("matchImages: [%q]", p.addr))), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(foil, filepath.Join(dir, "foil")); err != nil {
		t.Fatal(err)
	}
	return map[string]any{"--image-credential-provider-config": file, "--image-credential-provider-bin-dir": dir}
}

// check looks at who has pulled the image, by a token of the registry, and that no log has a token.
func (p *private) check(t *testing.T, n *node) {
	t.Helper()
	b, err := os.ReadFile(p.audit)
	if err != nil {
		t.Fatal(err)
	}
	decisions := map[string]bool{}
	for text := range strings.Lines(string(b)) {
		var line struct{ Msg, Subject, Way, Decision, Repository string }
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatal(err)
		}
		if line.Msg == "access" && line.Repository == "team/app" {
			decisions[line.Subject+" "+line.Decision] = true
			if line.Decision == "allowed" && line.Way != "token" {
				t.Errorf("the image was pulled by way of %s, want the registry's own token", line.Way)
			}
		}
	}
	mine := "cluster:default/" + mayPull
	if !decisions[mine+" allowed"] || decisions[mine+" denied"] || !decisions["cluster:default/stranger denied"] || decisions["cluster:default/stranger allowed"] {
		t.Errorf("decisions: %v", decisions)
	}
	for of, log := range map[string]string{"registry": p.log.String() + string(b), "worker": n.w.log.String(), "kubelet": n.k.log.String(), "containerd": n.c.log.String()} {
		if strings.Contains(log, "eyJ") {
			t.Errorf("the log of %s has a token", of)
		}
	}
}

// fakeAPI is of an API server what a kubelet needs that runs pods of service accounts: their tokens. What it has does not change,
// whatever it is told.
type fakeAPI struct {
	t          *testing.T
	signer     jose.Signer
	keys       string // a JSON web key set
	kubeconfig string

	mu    sync.Mutex
	pods  []any                        // guarded by mu
	told  map[string][]kubelettest.Pod // guarded by mu: what the kubelet has told of each pod
	given []string                     // guarded by mu: of whom tokens were asked for
}

// startFakeAPI starts one.
func startFakeAPI(t *testing.T) *fakeAPI {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &fakeAPI{t: t, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), told: make(map[string][]kubelettest.Pod)}
	if a.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, new(jose.SignerOptions).WithHeader("kid", "1")); err != nil {
		t.Fatal(err)
	}
	set, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "1"}}})
	if err != nil {
		t.Fatal(err)
	}
	a.keys = string(set)
	l, err := net.Listen("tcp", freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: a}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // until it is closed
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
	config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "test", "clusters": [{"name": "test", "cluster": {"server": "http://%s"}}],
		"users": [{"name": "node", "user": {}}], "contexts": [{"name": "test", "context": {"cluster": "test", "user": "node"}}]}`, l.Addr())
	if err := os.WriteFile(a.kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

// registered is the node, which has room for pods.
var registered = json.RawMessage(`{"kind": "Node", "apiVersion": "v1",
	"metadata": {"name": "` + kubelettest.Host + `", "uid": "node", "resourceVersion": "1", "labels": {"kubernetes.io/os": "linux", "kubernetes.io/hostname": "` + kubelettest.Host + `"}},
	"spec": {}, "status": {"allocatable": {"cpu": "2", "memory": "4Gi", "pods": "10"}, "capacity": {"cpu": "2", "memory": "4Gi", "pods": "10"}}}`)

// kinds are those of lists; kubelets do not ask for some by their type.
var kinds = map[string]string{"pods": "PodList", "nodes": "NodeList", "services": "ServiceList", "runtimeclasses": "RuntimeClassList", "csidrivers": "CSIDriverList"}

// run has the kubelet run a pod as a service account. The defaults are an API server's.
func (a *fakeAPI) run(account, ref string) {
	name := "of-" + account
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pods = append(a.pods, map[string]any{
		"metadata": map[string]any{"name": name, "namespace": "default", "uid": name, "resourceVersion": "1", "creationTimestamp": time.Now().UTC().Format(time.RFC3339)},
		"spec": map[string]any{
			"nodeName": kubelettest.Host, "serviceAccountName": account, "automountServiceAccountToken": false, "enableServiceLinks": false,
			"restartPolicy": "Always", "dnsPolicy": "Default", "terminationGracePeriodSeconds": 0, "securityContext": map[string]any{}, "schedulerName": "none",
			"containers": []any{map[string]any{"name": "app", "image": ref, "imagePullPolicy": "Always", "command": []string{"/bin/sleep", "100000"}, "resources": map[string]any{},
				"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}},
		},
		"status": map[string]any{"phase": "Pending"},
	})
}

// pod waits until the kubelet has told that a pod is as wanted.
func (a *fakeAPI) pod(t *testing.T, name, what string, as func(kubelettest.Pod) bool) {
	t.Helper()
	eventually(t, "the pod "+name+" is "+what, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !slices.ContainsFunc(a.told[name], as) {
			return fmt.Errorf("%+v", a.told[name])
		}
		return nil
	})
}

// ServeHTTP answers as an API server does. What it does not know is not there.
func (a *fakeAPI) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	answer := func(status int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v) // the kubelet has gone if this fails
	}
	failed := func(status int, reason string) {
		answer(status, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status, "message": req.Method + " " + req.URL.Path})
	}
	path, query := strings.Split(strings.Trim(req.URL.Path, "/"), "/"), req.URL.Query()
	last := path[len(path)-1]
	a.mu.Lock()
	pods := a.pods
	a.mu.Unlock()
	find := func(name string) any {
		for _, p := range pods {
			if p.(map[string]any)["metadata"].(map[string]any)["name"] == name {
				return p
			}
		}
		return nil
	}
	switch {
	case query.Get("sendInitialEvents") == "true": // reflectors list then, and watch
		failed(http.StatusUnprocessableEntity, "Invalid")
	case query.Get("watch") != "": // nothing happens
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
	case req.Method == http.MethodPost && last == "token":
		var body struct {
			Spec struct {
				Audiences      []string
				BoundObjectRef struct{ Name string }
			}
		}
		if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
			a.t.Errorf("a request for a token: %v", err)
		}
		account, namespace, now := path[len(path)-2], path[len(path)-4], time.Now()
		token, err := jwt.Signed(a.signer).Claims(jwt.Claims{Issuer: clusterIssuer, Subject: "system:serviceaccount:" + namespace + ":" + account, Audience: body.Spec.Audiences,
			IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(time.Hour))}).Claims(map[string]any{"kubernetes.io": map[string]any{
			"namespace": namespace, "serviceaccount": map[string]any{"name": account, "uid": account}}}).Serialize()
		if err != nil {
			a.t.Error(err)
		}
		a.mu.Lock()
		a.given = append(a.given, fmt.Sprintf("%s for %s to %s", account, body.Spec.BoundObjectRef.Name, strings.Join(body.Spec.Audiences, " ")))
		a.mu.Unlock()
		answer(http.StatusCreated, map[string]any{"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "metadata": map[string]any{"name": account},
			"spec":   map[string]any{"audiences": body.Spec.Audiences, "expirationSeconds": 3600},
			"status": map[string]any{"token": token, "expirationTimestamp": now.Add(time.Hour).UTC().Format(time.RFC3339)}})
	case req.Method == http.MethodPost && last == "nodes":
		failed(http.StatusConflict, "AlreadyExists")
	case req.Method == http.MethodPost, req.Method == http.MethodPut, req.Method == http.MethodPatch:
		var v json.RawMessage
		if err := json.NewDecoder(req.Body).Decode(&v); err != nil {
			a.t.Errorf("%s %s: %v", req.Method, req.URL.Path, err)
		}
		name := path[max(0, len(path)-2)]
		switch {
		case req.Method != http.MethodPatch:
			answer(http.StatusCreated, v)
		case strings.Contains(req.URL.Path, "/nodes/"):
			answer(http.StatusOK, registered)
		case last == "status" && find(name) != nil: // against what find returns, so that it is all of the status
			var p kubelettest.Pod
			if err := json.Unmarshal(v, &p); err != nil {
				a.t.Errorf("the status of a pod: %v", err)
			}
			a.mu.Lock()
			a.told[name] = append(a.told[name], p)
			a.mu.Unlock()
			answer(http.StatusOK, find(name))
		default:
			answer(http.StatusOK, v)
		}
	case req.Method != http.MethodGet:
		answer(http.StatusOK, map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Success"})
	case len(path) > 1 && path[len(path)-2] == "nodes":
		answer(http.StatusOK, registered)
	case len(path) > 1 && path[len(path)-2] == "serviceaccounts":
		answer(http.StatusOK, map[string]any{"metadata": map[string]any{"name": last, "namespace": path[len(path)-3], "uid": last}})
	case len(path) > 1 && (path[len(path)-2] == "v1" || path[len(path)-2] == "v1beta1"): // a list
		items := []any{}
		if last == "pods" {
			items = pods
		}
		if last == "nodes" {
			items = append(items, registered)
		}
		list := map[string]any{"metadata": map[string]any{"resourceVersion": "1"}, "items": items}
		if kind := kinds[last]; kind != "" {
			list["kind"], list["apiVersion"] = kind, strings.Join(path[1:len(path)-1], "/")
		}
		answer(http.StatusOK, list)
	case len(path) > 1 && path[len(path)-2] == "pods" && find(last) != nil:
		answer(http.StatusOK, find(last))
	default:
		failed(http.StatusNotFound, "NotFound")
	}
}

// TestKubeletPlugin has a real kubelet run foil as its credential provider plugin: pods pull as their service account. Who its
// pods and accounts are it is told by an API server of the test's own; make test-kubernetes has a real one.
func TestKubeletPlugin(t *testing.T) {
	if !ownNetwork(t) {
		return
	}
	bin := needKubelet(t)
	api := startFakeAPI(t)
	private := startPrivate(t, api.keys)
	settings := private.provider(t)
	settings[kubeconfigFlag] = api.kubeconfig
	settings["contentType"] = "application/json"
	api.run("stranger", private.ref)
	api.run(mayPull, private.ref)
	n := startNode(t, bin, settings)

	refused := func(p kubelettest.Pod) bool { return waits(p, "ImagePullBackOff") || waits(p, "ErrImagePull") }
	api.pod(t, "of-"+mayPull, "ready", kubelettest.Pod.Ready)
	api.pod(t, "of-stranger", "refused", refused)
	private.check(t, n)
	api.mu.Lock()
	given := strings.Join(api.given, "\n")
	api.mu.Unlock()
	for _, account := range []string{mayPull, "stranger"} {
		if !strings.Contains(given, account+" for of-"+account+" to "+audience) {
			t.Errorf("the kubelet has asked for tokens of\n%s\nand for none of %s", given, account)
		}
	}
	// A pod without a service account has no token, and nobody's credentials.
	n.k.run(t, "static", sleeper(private.ref, "Always"))
	eventually(t, "the static pod is refused", func() error {
		p, err := n.k.pod("static")
		if err == nil && !refused(p) {
			err = fmt.Errorf("%+v", p.Status)
		}
		return err
	})
}
