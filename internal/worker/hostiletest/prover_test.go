package hostiletest

import (
	"fmt"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

// An image whose manifest names other layers than its config says nothing about another image of the same rootfs.
func TestBlobsOfOtherLayersAreTheirImagesTrouble(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	other := bundletest.NewLayers(t, layertest.Layer{layertest.File("a", 0o644, "a")}, layertest.Layer{layertest.File("b", 0o644, "b")})
	l := &liar{m: good.Clone(t)}
	l.blobs(t, other)
	for _, made := range l.m.Layers {
		made.Recipe, made.Blob.Bytes = nil, nil
	}
	bad := s.Serve("a-liar:1", l.m)
	w := newWorker(t)
	w.mustPull(bad, api.Complete)
	if err := w.proven(bad); api.AsError(err).Code != api.CodeUnavailable {
		t.Fatalf("without recipes and blobs: %v", err)
	}
	for i, made := range l.m.Layers {
		made.Blob.Bytes = other.Layers[i].Blob.Bytes
	}
	ref := s.Serve("good:1", good)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err != nil || w.proof(ref) != "proven" {
		t.Errorf("the good image is %q: %v", w.proof(ref), err)
	}
	w.reads(ref, "secret", secret)
	// The bad one is told, whatever its rootfs is, and stays so.
	for range 2 {
		if err := w.proven(bad); err == nil || !strings.Contains(err.Error(), "another diff ID") || !strings.HasPrefix(w.proof(bad), "failed: layer 1") {
			t.Errorf("the bad one is %q: %v", w.proof(bad), err)
		}
		w.refused(bad, "another diff ID")
		w.restart()
	}
	if got := w.proof(ref); got != "proven" {
		t.Errorf("after a restart the good one is %q", got)
	}
}

// A container on such an image does not keep a good one of the same rootfs from coming.
func TestWhatRunsOnBlobsOfOtherLayersIsInNobodysWay(t *testing.T) {
	s := bundletest.New(t)
	good := layered(t)
	l := &liar{m: good.Clone(t)}
	l.blobs(t, bundletest.NewLayers(t, layertest.Layer{layertest.File("a", 0o644, "a")}, layertest.Layer{layertest.File("b", 0o644, "b")}))
	for _, made := range l.m.Layers {
		made.Recipe = nil
	}
	reached, open := gate(l.m.Layers[0])
	t.Cleanup(open)
	bad := s.Serve("liar:1", l.m)
	w := newWorker(t)
	w.mustPull(bad, api.Complete)
	<-reached
	if _, err := w.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "rogue", Ref: bad}); err != nil {
		t.Fatal(err)
	}
	open()
	if err := w.proven(bad); err == nil {
		t.Fatal("it is proven")
	}
	ref := s.Serve("good:1", good)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err != nil {
		t.Error(err)
	}
	if _, err := w.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "good", Ref: ref}); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"good", "rogue"} {
		if err := w.n.RemoveContainer(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

// Alone such an image fails.
func TestBlobsOfOtherLayersAreFound(t *testing.T) {
	s := bundletest.New(t)
	other := bundletest.NewLayers(t, layertest.Layer{layertest.File("a", 0o644, "a")}, layertest.Layer{layertest.File("b", 0o644, "b")})
	l := &liar{m: layered(t)}
	l.blobs(t, other)
	for _, made := range l.m.Layers {
		made.Recipe = nil
	}
	ref := s.Serve("liar:1", l.m)
	w := newWorker(t)
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err == nil || !strings.Contains(err.Error(), "layer 1 has another diff ID") {
		t.Errorf("a manifest of other layers: %v", err)
	}
	w.refused(ref, "another diff ID")
}

// mute has a worker prove images whose servers never answer questions about layers, and waits until they were asked.
func mute(t *testing.T, w *worker, s *bundletest.Server, n int) (refs []string) {
	for i := range n {
		m := bundletest.NewLayers(t, layertest.Layer{layertest.File("file", 0o644, fmt.Sprint(i))})
		reached := make(chan struct{}, 100)
		m.Layers[0].Silent, m.Layers[0].Meets = true, func() { reached <- struct{}{} }
		ref := s.Serve(fmt.Sprintf("mute%d:1", i), m)
		w.mustPull(ref, api.Complete)
		<-reached
		refs = append(refs, ref)
	}
	return refs
}

// Servers that say nothing hold up no other image's proof, and no removal.
func TestServersThatSayNothingHoldUpNoProof(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	w := newWorker(t)
	refs := mute(t, w, b, 4)
	ref := a.Serve("good:1", layered(t))
	w.mustPull(ref, api.Complete)
	if err := w.proven(ref); err != nil {
		t.Error(err)
	}
	for _, ref := range refs {
		if got := w.proof(ref); got == "proven" {
			t.Errorf("%s is %s", ref, got)
		}
		if err := w.n.RemoveImage(t.Context(), ref); err != nil {
			t.Error(err)
		}
	}
}

// One of them holds up nobody either who does not wait for the proof.
func TestOneServerThatSaysNothing(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	w := newWorker(t)
	bad := mute(t, w, b, 1)[0]
	ref := a.Serve("good:1", layered(t))
	w.mustPull(ref, api.Complete)
	w.eventually(func() bool { return w.proof(ref) == "proven" })
	if got := w.proof(bad); got != "proving 0%" {
		t.Errorf("the other one is %q", got)
	}
}
