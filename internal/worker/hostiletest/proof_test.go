package hostiletest

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// layered is an image of real layers. The upper one hides a file.
func layered(t *testing.T) *bundletest.Image {
	return bundletest.NewLayers(t,
		layertest.Layer{layertest.File("program", 0o755, toctest.Blob(1, 3<<20)), layertest.File("old", 0o644, toctest.Blob(2, 5000)), layertest.File("secret", 0o600, secret)},
		layertest.Layer{layertest.Whiteout("old"), layertest.File("new", 0o644, toctest.Blob(3, 7000))},
	)
}

// lying is what a rogue server says of m: its manifest, config, layers and recipes are the real ones, the files are not.
func lying(t *testing.T, m *bundletest.Image) *bundletest.Image {
	liar := bundletest.NewLayers(t, layertest.Layer{layertest.File("program", 0o755, toctest.Blob(666, 3<<20)), layertest.File("evil", 0o755, "what the rogue wants to run")})
	liar.As(t, m)
	liar.Layers = m.Layers
	return liar
}

// gate holds the proof of a layer until it is opened.
func gate(l *bundletest.Layer) (reached <-chan struct{}, open func()) {
	met, opened := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(met) })
	l.Meets = func() {
		once()
		<-opened
	}
	return met, sync.OnceFunc(func() { close(opened) })
}

// proven waits until an image is proven, or cannot be.
func (w *worker) proven(ref string) error {
	w.t.Helper()
	return w.n.Prove(w.t.Context(), ref, func(api.VerifyEvent) error { return nil })
}

// proof is how `foil images` has it.
func (w *worker) proof(ref string) string {
	w.t.Helper()
	list, err := w.n.Images(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, img := range list {
		if img.Ref == ref {
			return img.Proof
		}
	}
	return ""
}

// refused fails the test unless no new container of an image can be made.
func (w *worker) refused(ref, why string) {
	w.t.Helper()
	_, err := w.n.CreateContainer(w.t.Context(), api.ContainerRequest{ID: "new", Ref: ref})
	if err == nil {
		err = w.n.RemoveContainer(w.t.Context(), "new")
		w.t.Errorf("a container starts on it, %v", err)
	} else if !strings.Contains(err.Error(), why) {
		w.t.Errorf("a container is refused with %q, want %q", err, why)
	}
}

// The whole way: what came is proven, by itself, and stays so.
func TestAnImageIsProven(t *testing.T) {
	s := bundletest.New(t)
	ref := s.Serve("app:1", layered(t))
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	w.eventually(func() bool { return w.proof(ref) == "proven" })
	w.restart()
	s.Stop() // nobody is asked any more
	if err := w.proven(ref); err != nil || w.records(ref).Proof != rootfs.Proven {
		t.Errorf("after a restart: %v, %q", err, w.proof(ref))
	}
	w.reads(ref, "secret", secret)
}

// Fault 4: by the digest of a real manifest, and with the real layers, every byte was the rogue's choice.
func TestARogueTreeOfARealManifestIsFound(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	ref := s.Serve("app:1", lying(t, good))
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err == nil || !strings.Contains(err.Error(), "/evil is not as in the layers") {
		t.Fatalf("a rogue's tree: %v", err)
	}
	w.refused(ref, "not as in the layers")
	w.restart()
	if got := w.proof(ref); !strings.HasPrefix(got, "failed: /evil is not as in the layers") {
		t.Errorf("after a restart it is %q", got)
	}
	w.refused(ref, "not as in the layers")
	st, err := w.n.Status(t.Context())
	if err != nil || len(st.Proofs) != 1 || st.Proofs[0].Proof != w.proof(ref) {
		t.Errorf("the status has %+v, %v", st.Proofs, err)
	}
	// The next pull begins with nothing.
	s.Serve("app:1", good)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err != nil {
		t.Error(err)
	}
	w.reads(ref, "secret", secret)
}

// The same server, asked again, gets no further.
func TestARogueIsFoundEachTime(t *testing.T) {
	s := bundletest.New(t)
	ref := s.Serve("app:1", lying(t, layered(t)))
	w := newWorker(t)
	for range 2 {
		w.mustPull(ref, api.Complete)
		if err := w.proven(ref); err == nil {
			t.Fatal("it is proven")
		}
		w.refused(ref, "not as in the layers")
	}
}

// Containers that run on what turns out to be a lie are named.
func TestWhatRunsOnALieIsNamed(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	ref := s.Serve("app:1", lying(t, good))
	reached, open := gate(good.Layers[0])
	t.Cleanup(open)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	<-reached
	if _, err := w.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "victim", Ref: ref}); err != nil {
		t.Fatal(err)
	}
	open()
	if err := w.proven(ref); err == nil {
		t.Fatal("it is proven")
	}
	st, err := w.n.Status(t.Context())
	if err != nil || !strings.Contains(strings.Join(st.Warnings, "\n"), "END THESE CONTAINERS, which run what its server made up: victim") {
		t.Errorf("the status warns of %q, %v", st.Warnings, err)
	}
	if err := w.n.RemoveContainer(t.Context(), "victim"); err != nil {
		t.Error(err)
	}
}

// A metadata image that is not the one that was made here shows another tree.
func TestARogueMetadataImageIsFound(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	ref := s.Serve("app:1", m)
	reached, open := gate(m.Layers[1])
	t.Cleanup(open)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	<-reached
	h, err := w.n.Hold(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(filepath.Dir(h.Mount), mounts.Image)
	w.n.Release(h.Rootfs)
	b, err := os.ReadFile(path)
	if err == nil {
		b[len(b)-1]++
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	open()
	if err := w.proven(ref); err == nil || !strings.Contains(err.Error(), "metadata image") {
		t.Errorf("another metadata image: %v", err)
	}
}

// Where recipes are withheld, or lie, the blobs are fetched; without these nothing is known, and nothing has failed.
func TestWithheldRecipes(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	m.Layers[0].Recipe = nil
	m.Layers[1].Recipe = []byte("a lie")
	blob := m.Layers[1].Blob.Bytes
	m.Layers[1].Blob.Bytes = nil
	ref := s.Serve("app:1", m)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); api.AsError(err).Code != api.CodeUnavailable || !strings.HasPrefix(w.proof(ref), "unproven: layer 2: ") {
		t.Errorf("without a blob: %v, %q", err, w.proof(ref))
	}
	w.reads(ref, "secret", secret)
	m.Layers[1].Blob.Bytes = blob
	if err := w.proven(ref); err != nil {
		t.Error(err)
	}
}

// A proof that a restart has interrupted goes on where it was.
func TestAProofOutlivesTheDaemon(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	var first atomic.Int32
	m.Layers[0].Meets = func() { first.Add(1) }
	reached, open := gate(m.Layers[1])
	t.Cleanup(open)
	ref := s.Serve("app:1", m)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	<-reached
	w.restart()
	open()
	if err := w.proven(ref); err != nil || first.Load() != 1 {
		t.Errorf("%v; the lower layer was asked for %d times", err, first.Load())
	}
}

// What a pull has shown to the registry is not kept over a restart: of a private image nobody can find out more, and it says
// what to do, until it is pulled again.
func TestAProofAfterARestartSaysWhatItLacks(t *testing.T) {
	s := bundletest.New(t)
	var open atomic.Bool
	s.Accept(func(r *http.Request) bool {
		user, _, _ := r.BasicAuth()
		asksForLayers := strings.Contains(r.URL.Path, "/blobs/") || r.URL.Path == bundle.RecipePath
		return user == "owner" && (open.Load() || !asksForLayers)
	})
	ref := s.Serve("app:1", layered(t))
	w := newWorker(t)
	pull := func() {
		t.Helper()
		req := api.PullRequest{Ref: ref, Until: api.Complete, Credential: credentials.Credential{Username: "owner", Secret: "s"}}
		if err := w.n.Pull(t.Context(), req, func(api.Event) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	pull()
	w.restart()
	open.Store(true)
	err := w.proven(ref)
	if got := w.proof(ref); err == nil || !strings.HasPrefix(got, "unproven: ") || !strings.Contains(got, "pull the image again with them") {
		t.Errorf("after a restart it is %q: %v", got, err)
	}
	pull()
	w.eventually(func() bool { return w.proof(ref) == "proven" })
}

// An image goes while it is proven.
func TestAnImageIsRemovedWhileItIsProven(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	reached, open := gate(m.Layers[0])
	t.Cleanup(open)
	ref := s.Serve("app:1", m)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	<-reached
	if err := w.n.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(filepath.Join(w.root, "rootfs", "*")); len(left) > 0 {
		t.Errorf("it leaves %q", left)
	}
}

// What is withheld for too long starts nothing; of what an older version left that is so from the upgrade on.
func TestWhatStaysUnprovenStartsNothing(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	for _, l := range m.Layers {
		l.Recipe, l.Blob.Bytes = nil, nil
	}
	ref := s.Serve("app:1", m)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err == nil {
		t.Fatal("it is proven")
	}
	create := func() error {
		_, err := w.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "new", Ref: ref})
		if err == nil {
			err = w.n.RemoveContainer(t.Context(), "new")
		}
		return err
	}
	w.opts.ProveWithin = time.Hour
	w.restart()
	if err := create(); err != nil {
		t.Errorf("in time: %v", err)
	}
	since := func(at time.Time) {
		t.Helper()
		paths, _ := filepath.Glob(filepath.Join(w.root, "rootfs", "*", rootfs.RecordName))
		if len(paths) != 1 {
			t.Fatal(paths)
		}
		w.change(paths[0], func(rec *rootfs.Record) { rec.Since = at })
		w.restart()
	}
	since(time.Now().Add(-2 * time.Hour))
	w.refused(ref, "was not proven within 1h0m0s (")
	since(time.Time{}) // an older version's
	if err := create(); err != nil {
		t.Errorf("just after an upgrade: %v", err)
	}
	if rec := w.records(ref); time.Since(rec.Since) > time.Hour {
		t.Errorf("after an upgrade the time counts since %v", rec.Since)
	}
}

// Where images are proven first, no container ever starts on a lie, and one on the truth waits for it.
func TestProvenBeforeItStarts(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	truth, lie := s.Serve("good:1", good), s.Serve("bad:1", lying(t, good))
	w := newWorker(t)
	policies, err := origin.ParsePolicies([]string{s.Addr + "=proven"})
	if err != nil {
		t.Fatal(err)
	}
	w.opts.Policies = policies
	w.restart()
	w.mustPull(lie, api.Mounted)
	w.refused(lie, "not as in the layers")
	w.mustPull(truth, api.Mounted)
	if _, err := w.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "good", Ref: truth}); err != nil || w.proof(truth) != "proven" {
		t.Errorf("%v, %q", err, w.proof(truth))
	}
	if err := w.n.RemoveContainer(t.Context(), "good"); err != nil {
		t.Error(err)
	}
}
