package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// Where images are proven first, containerd has a container when its image is complete and proven. If it gives up before,
// the log says what was waited for.
func TestContainerdWaitsForTheProof(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 200, 60_000)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref := k.via(s.push("app", "1", img))
	w := startWorker(t, workerRoot(t), "--policy", registryOf(ref)+"=proven")
	c := startContainerd(t, containerd2, w)
	c.pull(t, ref)

	gives := exec.Command(c.ctrBin, "--address", c.socket(), "--namespace", c.namespace, "run", "--rm", "--snapshotter", "hydrofoil", ref, "impatient", "/bin/sh", "-c", "true")
	if err := gives.Start(); err != nil {
		t.Fatal(err)
	}
	w.logged("a container waits until its image is proven", "--policy says so")
	if err := gives.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = gives.Wait()
	w.logged("no container starts on an image that is not proven", " bytes here", "gave up")
	if strings.Contains(w.log.String(), "image proven") {
		t.Fatal("it is proven, and only a part of it is here")
	}

	k.open()
	if diff := cmp.Diff(wantData(t, img), c.run(t, ref, "c", dataSums)); diff != "" {
		t.Errorf("a container of it (-want +got):\n%s", diff)
	}
	w.logged("image proven")
	for _, image := range w.imageRefs() {
		if got := w.imageOf(image); got.Proof != "proven" || got.Policy != "proven" {
			t.Errorf("%s is %s, its policy %s", image, got.Proof, got.Policy)
		}
	}
}

// Where images are proven first nothing is held back for a start: its container begins when all is here.
func TestAProofIsNotHeldUp(t *testing.T) {
	_, ref, _ := withStartupSet(t)
	// Else the server holds back the rest of the image, for 20 seconds or until somebody says that the service is ready. A busy
	// machine may take as long, though not each time.
	const held = 20 * time.Second
	var took time.Duration
	for try := 0; try < 3 && (try == 0 || took >= held); try++ {
		w := startWorker(t, workerRoot(t), "--policy", registryOf(ref)+"=proven")
		began := time.Now()
		args := append([]string{"run", "--root", w.root, "--rm", "--probe", "stdout:^up$", "--until", "ready", ref, "--"}, service...)
		if out, errOut, code := command(t, args...); code != 0 {
			t.Fatalf("foil run: code %d, %q, %q", code, out, errOut)
		}
		took = time.Since(began)
		if got := w.imageOf(ref); got.Proof != "proven" {
			t.Errorf("it is %s", got.Proof)
		}
	}
	if took >= held {
		t.Errorf("each time it takes as long as it would be held up, now %v", took)
	}
}

// logged waits until a line of the daemon's log has all parts.
func (w *worker) logged(parts ...string) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("the log says %q", parts), func() error {
		for line := range strings.Lines(w.log.String()) {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
				return nil
			}
		}
		return fmt.Errorf("it does not")
	})
}

// TestCRIStartsWhatIsProven does what a kubelet does where images of a registry are proven first: of one that lies, and of
// one that is what it says.
func TestCRIStartsWhatIsProven(t *testing.T) {
	for _, v := range []containerdVersion{containerd2, containerd1} {
		t.Run(v.name, func(t *testing.T) {
			needBusybox(t)
			pause := startServer(t, t.TempDir()).push("pause", "1", pauseImage(t))
			n := &strictNode{server: bundletest.New(t)}
			n.w = n.startWorker(t, "--policy", "registry.example=proven")
			c := startContainerdCRI(t, v, n.w, pause)
			n.c, n.images, n.runtime = c, imageService(t, c.socket()), runtimeService(t, c.socket())
			t.Run("a lie", n.refusesALie)
			t.Run("the truth", n.waitsForTheProof)
		})
	}
}

// strictNode is one whose images of registry.example are proven before they start. A test plays their server.
type strictNode struct {
	server  *bundletest.Server
	w       *worker
	c       *containerd
	images  cri.ImageServiceClient
	runtime cri.RuntimeServiceClient
}

// startWorker starts the worker, with a mirror for registry.example.
func (n *strictNode) startWorker(t *testing.T, flags ...string) *worker {
	t.Helper()
	hosts, root, at := t.TempDir(), workerRoot(t), freeAddr(t)
	key := filepath.Join(root, "mirror", "key.pem")
	if err := os.Mkdir(filepath.Join(hosts, "registry.example"), 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("server = \"http://%s\"\n[host.\"https://%s\"]\ncapabilities = [\"pull\", \"resolve\"]\nca = %q\nclient = %q\n", n.server.Addr, at, key, key)
	if err := os.WriteFile(filepath.Join(hosts, "registry.example", "hosts.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	w := startWorker(t, root, append(flags, "--hosts-dir", hosts, "--docker-config", "", "--mirror-listen", at, "--keep-servers", "0")...)
	w.hosts = hosts
	return w
}

// pull pulls an image unless it is here, as a kubelet does whose policy is IfNotPresent, and reports whether it did.
func (n *strictNode) pull(t *testing.T, ref string) (pulled bool) {
	t.Helper()
	spec := &cri.ImageSpec{Image: ref}
	status, err := n.images.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: spec})
	if err == nil && status.Image != nil {
		return false
	}
	if err == nil {
		_, err = n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec})
	}
	if err != nil {
		t.Fatal(err)
	}
	return true
}

// image is what the worker has of an image.
func (n *strictNode) image(t *testing.T, m *bundletest.Image) (ref, state, proof string) {
	t.Helper()
	images, err := n.w.client.Images(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range images {
		if img.Digest == m.Manifest.Digest.String() {
			return img.Ref, img.State, img.Proof
		}
	}
	return "", "", ""
}

// An image that fails its proof never starts. It comes anew, and nothing of what was here, now and then when a container is to
// start, and when it was removed.
func (n *strictNode) refusesALie(t *testing.T) {
	layers := shellLayers(t, 20, 10_000)
	truth := bundletest.NewLayers(t, layers...)
	lie := bundletest.NewLayers(t, append(slices.Clone(layers), layertest.Layer{layertest.File("evil", 0o755, "what the rogue wants to run")})...)
	lie.As(t, truth)
	lie.Layers = truth.Layers
	const ref = "registry.example/lie:1"
	n.server.Serve("lie:1", lie)
	if !n.pull(t, ref) {
		t.Fatal("it is here")
	}
	p := startSandbox(t, "lie", n.c, n.runtime, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
	for range 2 {
		if id, err := p.start(t.Context(), ref); err == nil || !strings.Contains(err.Error(), "/evil is not as in the layers") {
			t.Errorf("a container %s of it: %v", id, err)
		}
		if n.pull(t, ref) {
			t.Error("it is not here any more")
		}
	}
	if _, _, proof := n.image(t, lie); !strings.HasPrefix(proof, "failed: ") {
		t.Errorf("its proof is %q", proof)
	}
	failed := func(name string) bool {
		return strings.HasPrefix(n.c.info(t, name).Labels[snapshotter.LabelProof], "failed: ")
	}
	if names := n.c.names(t); !slices.ContainsFunc(names, failed) {
		t.Errorf("no snapshot among %q says that it failed", names)
	}

	// Its server is honest by now. containerd has snapshots of its layers, and asks for no others.
	n.server.Serve("lie:1", truth)
	before := n.server.Sent()
	var id string
	eventually(t, "the image comes anew, though it is present", func() (err error) {
		if n.pull(t, ref) {
			t.Fatal("it is not here any more")
		}
		id, err = p.start(t.Context(), ref)
		return err
	})
	n.reads(t, id, imageOf(t, layers))
	if sent := n.server.Sent() - before; sent != len(truth.Data) {
		t.Errorf("%d frames came for it, want all %d", sent, len(truth.Data))
	}
	if _, _, proof := n.image(t, truth); proof != "proven" {
		t.Errorf("its proof is %q", proof)
	}
}

// A start waits until the image is complete, and then until it is proven.
func (n *strictNode) waitsForTheProof(t *testing.T) {
	layers := shellLayers(t, 200, 30_000)
	m := bundletest.NewLayers(t, layers...)
	reached, opened := make(chan struct{}), make(chan struct{})
	open := sync.OnceFunc(func() { close(opened) })
	t.Cleanup(open)
	met := sync.OnceFunc(func() { close(reached) })
	m.Layers[0].Meets = func() {
		met()
		<-opened
	}
	const ref = "registry.example/app:1"
	n.server.SetLimit(50)
	n.server.Serve("app:1", m)
	n.pull(t, ref)
	p := startSandbox(t, "app", n.c, n.runtime, &cri.NamespaceOption{Network: cri.NamespaceMode_NODE})
	type started struct {
		id  string
		err error
	}
	starts := make(chan started, 1)
	go func() {
		id, err := p.start(t.Context(), ref)
		starts <- started{id, err}
	}()
	waits := func(while string) {
		t.Helper()
		select {
		case s := <-starts:
			t.Fatalf("while %s it started: %+v", while, s)
		default:
		}
	}
	name, state, _ := n.image(t, m)
	n.w.logged("a container waits until its image is proven", "ref="+name, "--policy says so")
	if state != "pulling" {
		t.Errorf("while its server sends nothing it is %s", state)
	}
	waits("it arrives")
	n.server.SetLimit(-1)
	<-reached
	if _, state, proof := n.image(t, m); state != "complete" || !strings.HasPrefix(proof, "proving ") {
		t.Errorf("while its first layer is proven it is %s, %s", state, proof)
	}
	waits("it is proven")
	open()
	s := <-starts
	if s.err != nil {
		t.Fatal(s.err)
	}
	n.reads(t, s.id, imageOf(t, layers))
	if _, _, proof := n.image(t, m); proof != "proven" {
		t.Errorf("when its container runs it is %s", proof)
	}
}

// reads has a container read all of its image.
func (n *strictNode) reads(t *testing.T, id string, img image) {
	t.Helper()
	out, err := n.runtime.ExecSync(t.Context(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", dataSums}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(wantData(t, img), string(out.Stdout)); diff != "" {
		t.Errorf("a container of it (-want +got):\n%s", diff)
	}
}
