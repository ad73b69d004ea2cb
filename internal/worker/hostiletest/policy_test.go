package hostiletest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// unauthenticated has a worker speak to a server without TLS, at an address that is not one of loopback, by the
// name of a registry.
func (w *worker) unauthenticated(t *testing.T, s *bundletest.Server, registry string) {
	t.Helper()
	if w.opts.Hosts.Dirs == "" {
		w.opts.Hosts.Dirs = t.TempDir()
	}
	_, port, _ := strings.Cut(s.Addr, ":")
	dir := filepath.Join(w.opts.Hosts.Dirs, registry)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte("server = \"http://0.0.0.0:"+port+"\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func policies(t *testing.T, list ...string) origin.Policies {
	t.Helper()
	p, err := origin.ParsePolicies(list)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// create makes a container of an image, and removes it.
func (w *worker) create(ref string) error {
	_, err := w.n.CreateContainer(w.t.Context(), api.ContainerRequest{ID: "new", Ref: ref})
	if err == nil {
		err = w.n.RemoveContainer(w.t.Context(), "new")
	}
	return err
}

// What a server sends that nothing authenticates runs only once it is proven, also after a restart, by whatever
// server it is asked for then; unless somebody says that it may.
func TestWhatNobodyAuthenticatedIsProvenFirst(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	s.Serve("app:1", good)
	s.Serve("lie:1", lying(t, good))
	const ref, lie = "registry.example/app:1", "registry.example/lie:1"
	w := newWorker(t)
	w.unauthenticated(t, s, "registry.example")
	w.restart()
	for _, l := range good.Layers {
		l.Recipe = nil
	}
	blobs := make([][]byte, len(good.Layers))
	for i, l := range good.Layers {
		blobs[i], l.Blob.Bytes = l.Blob.Bytes, nil
	}
	if err := w.pull(ref, api.Complete); err == nil || !strings.Contains(err.Error(), "starts when it is proven (http://0.0.0.0:") {
		t.Errorf("a pull that is not proven: %v", err)
	}
	w.refused(ref, "it is spoken to without TLS")
	if rec := w.records(ref); !strings.Contains(rec.Weak, "http://0.0.0.0:") {
		t.Errorf("its record: %+v", rec)
	}
	w.restart()
	w.refused(ref, "it is spoken to without TLS")
	// The administrator may say otherwise, and so may the record of an older version.
	w.opts.Policies = policies(t, "registry.example=served")
	w.restart()
	if err := w.create(ref); err != nil {
		t.Errorf("where it may start: %v", err)
	}
	w.opts.Policies = origin.Policies{}
	paths, _ := filepath.Glob(filepath.Join(w.root, "rootfs", "*", rootfs.RecordName))
	if len(paths) != 1 {
		t.Fatal(paths)
	}
	weak := w.records(ref).Weak
	for _, of := range []string{"", weak} {
		w.change(paths[0], func(rec *rootfs.Record) { rec.Weak = of })
		w.restart()
		if err := w.create(ref); (err != nil) != (of != "") {
			t.Errorf("noted is %q: %v", of, err)
		}
	}
	for i, l := range good.Layers {
		l.Blob.Bytes = blobs[i]
	}
	if err := w.create(ref); err != nil || w.proof(ref) != "proven" {
		t.Errorf("once it can be proven: %v, %s", err, w.proof(ref))
	}
	w.mustPull(lie, api.Mounted)
	w.refused(lie, "not as in the layers")
}

// A rootfs that an authenticated server described, and one that nothing authenticates goes on with, is proven first:
// pages of a startup set are what their server says.
func TestWhatAnUnauthenticatedServerFillsIsProvenFirst(t *testing.T) {
	s := bundletest.New(t)
	s.Serve("app:1", layered(t))
	s.SetLimit(0)
	const ref = "registry.example/app:1"
	w := newWorker(t)
	w.unauthenticated(t, s, "registry.example")
	hosts := filepath.Join(w.opts.Hosts.Dirs, "registry.example", "hosts.toml")
	weak, err := os.ReadFile(hosts)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hosts, []byte(strings.ReplaceAll(string(weak), "0.0.0.0", "127.0.0.1")), 0o600); err != nil {
		t.Fatal(err)
	}
	w.restart()
	w.mustPull(ref, api.Mounted)
	if rec := w.records(ref); rec.Weak != "" || rec.Complete {
		t.Fatalf("by an authenticated server: %+v", rec)
	}
	if err := os.WriteFile(hosts, weak, 0o600); err != nil {
		t.Fatal(err)
	}
	s.SetLimit(-1)
	w.restart()
	w.mustPull(ref, api.Complete)
	if rec := w.records(ref); !strings.Contains(rec.Weak, "http://0.0.0.0:") {
		t.Errorf("by one that nothing authenticates: %+v", rec)
	}
}

// A start that waits for its proof tells how far that is.
func TestAStartTellsHowFarItsProofIs(t *testing.T) {
	s := bundletest.New(t)
	m := layered(t)
	_, open := gate(m.Layers[0])
	t.Cleanup(open)
	ref := s.Serve("app:1", m)
	w := newWorker(t)
	w.opts.Policies = policies(t, "*=proven")
	w.restart()
	var kinds []api.EventKind
	var layers []int
	err := w.n.Pull(t.Context(), api.PullRequest{Ref: ref, Container: "c"}, func(ev api.Event) error {
		if n := len(kinds); n == 0 || kinds[n-1] != ev.Event {
			kinds = append(kinds, ev.Event)
		}
		if ev.Event != api.Proving {
			return nil
		}
		if ev.Proof == nil || ev.Proof.Total == 0 || ev.Proof.Hashed > ev.Proof.Total {
			t.Errorf("how far it is: %+v", ev.Proof)
		} else if ev.Proof.Layer > 0 {
			layers = append(layers, ev.Proof.Layer)
			open()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []api.EventKind{api.Reserved, api.Resolved, api.Proving, api.Proven, api.Mounted, api.Complete}; !slices.Equal(kinds, want) {
		t.Errorf("events %q, want %q", kinds, want)
	}
	if len(layers) == 0 || layers[0] != 1 || !slices.IsSorted(layers) {
		t.Errorf("layers %v", layers)
	}
	if err := w.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	list, err := w.n.Images(t.Context())
	if err != nil || len(list) != 1 || list[0].Policy != "proven" || !strings.Contains(list[0].PolicyWhy, "--policy") {
		t.Errorf("%+v, %v", list, err)
	}
}

// keyOf is that of an image's rootfs.
func (w *worker) keyOf(ref string) origin.Key {
	w.t.Helper()
	h, err := w.n.Hold(w.t.Context(), ref)
	if err != nil {
		w.t.Fatal(err)
	}
	w.n.Release(h.Rootfs)
	return h.Rootfs
}

// Who waits for the proof of an image that is still arriving waits for the rest of it first, and is told how it ends.
func TestAProofOfWhatArrivesIsWaitedFor(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	for name, c := range map[string]struct {
		image *bundletest.Image
		code  string
	}{"good:1": {good, ""}, "lie:1": {lying(t, good), api.CodeCorrupt}} {
		s.SetLimit(1)
		ref := s.Serve(name, c.image)
		w := newWorker(t)
		w.mustPull(ref, api.Mounted)
		key := w.keyOf(ref)
		// Who gives up is told of that, and not that the image is not complete.
		tired := errors.New("tired")
		gave, giveUp := context.WithCancelCause(t.Context())
		giveUp(tired)
		if err := w.n.AwaitProof(gave, key); !errors.Is(err, tired) {
			t.Errorf("%s: who gives up is told %v", name, err)
		}
		told := make(chan error, 1)
		go func() { told <- w.n.AwaitProof(t.Context(), key) }()
		if rec := w.records(ref); rec.Complete {
			t.Fatalf("%s is complete, and its server has sent a part of it", name)
		}
		s.SetLimit(-1)
		switch err := <-told; {
		case c.code == "" && (err != nil || w.proof(ref) != "proven"):
			t.Errorf("%s is %q: %v", name, w.proof(ref), err)
		case c.code != "" && (err == nil || api.AsError(err).Code != c.code):
			t.Errorf("%s is %q: %v", name, w.proof(ref), err)
		}
		if err := w.n.RemoveImage(t.Context(), ref); err != nil {
			t.Error(err)
		}
		if err := w.n.AwaitProof(t.Context(), key); err == nil || api.AsError(err).Code != api.CodeNotFound {
			t.Errorf("%s is gone, and who asks for its proof is told %v", name, err)
		}
	}
}
