package snapshotter

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/worker/api"
)

// counted wants one image to be counted, with its path and reason.
func counted(t *testing.T, s *Snapshotter, path, reason string) {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(s.Metrics())
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if v := m.GetCounter().GetValue(); v != 0 {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				got[name] = v
			}
		}
	}
	if diff := cmp.Diff(map[string]float64{"foil_node_images_total " + path + " " + reason: 1}, got); diff != "" {
		t.Errorf("counted: %s", diff)
	}
}

// An image that is complete when containerd asks is told from one that comes
// while it runs, also by the next daemon.
func TestFullImage(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	img.held.Complete = true
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")
	counted(t, s, PathFull, PathFull)
	for range 2 {
		for _, name := range names {
			info, err := s.Stat(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			if info.Labels[LabelPath] != PathFull || !strings.Contains(info.Labels[LabelReason], "every byte") {
				t.Errorf("labels: %q", info.Labels)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = open(t, dir, f)
	}
}

// containerd that does not say which image a layer is of: counted once.
func TestImageWithoutName(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	s := open(t, t.TempDir(), f)
	parent := ""
	for i := range img.chains {
		key := fmt.Sprint("extract-", i)
		labels := map[string]string{snapshots.LabelSnapshotRef: img.chains[i].String()}
		if _, err := s.Prepare(t.Context(), key, parent, snapshots.WithLabels(labels)); err != nil {
			t.Fatal(err)
		}
		parent = img.chains[i].String()
		if err := s.Commit(t.Context(), parent, key); err != nil {
			t.Fatal(err)
		}
	}
	counted(t, s, PathPlain, "no_name")
}

func TestPlainImage(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	delete(f.offered, img.name)
	s := open(t, t.TempDir(), f)
	parent := ""
	for i := range img.chains {
		labels := img.labels(i)
		labels[LabelPath] = "forged"
		key := fmt.Sprint("extract-", i)
		mounts, err := s.Prepare(t.Context(), key, parent, snapshots.WithLabels(labels))
		if err != nil || len(mounts) != 1 {
			t.Fatal(mounts, err)
		}
		name := img.chains[i].String()
		if err := s.Commit(t.Context(), name, key, snapshots.WithLabels(labels)); err != nil {
			t.Fatal(err)
		}
		info, err := s.Stat(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Labels[LabelPath] != PathPlain || !strings.Contains(info.Labels[LabelReason], "the server is away") {
			t.Errorf("labels of layer %d: %q", i, info.Labels)
		}
		parent = name
	}
	counted(t, s, PathPlain, api.CodeUnavailable)
	if len(f.asked) != 1 {
		t.Errorf("the node was asked %d times for an image that it cannot have, want once: %q", len(f.asked), f.asked)
	}
	if left, _ := filepath.Glob(filepath.Join(s.opts.Dir, "images", "*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestVirtualSnapshotIsUnpackedWhenNeeded(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b", "c")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")

	// First the registry sends something else, and nothing wrong comes of it.
	right := f.blobs[img.layers[1].Digest]
	f.blobs[img.layers[1].Digest] = bytes.ToUpper(right)
	if _, err := s.Prepare(t.Context(), "container", names[1]); err == nil {
		t.Fatal("a container was made on a layer that does not match its digest")
	}
	if _, err := s.Stat(t.Context(), "container"); !errdefs.IsNotFound(err) {
		t.Errorf("stat of a snapshot that was not made: %v", err)
	}
	f.blobs[img.layers[1].Digest] = right
	mounts, err := s.Prepare(t.Context(), "container", names[1])
	if err != nil {
		t.Fatal(err)
	}
	lower := lowerOf(t, mounts)
	if len(lower) != 2 {
		t.Fatalf("lower directories %q, want those of two layers", lower)
	}
	for i, want := range []string{"b", "a"} {
		entries, err := os.ReadDir(lower[i])
		if err != nil || len(entries) != 1 || entries[0].Name() != want {
			t.Errorf("%s has %v, %v; want %s", lower[i], entries, err, want)
		}
	}
	fetched := f.fetched
	remove(t, s, "container")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, f)
	if _, err := s.View(t.Context(), "view", names[1]); err != nil {
		t.Fatal(err)
	}
	if f.fetched != fetched {
		t.Error("layers that had been unpacked were fetched again")
	}
	if u, err := s.Usage(t.Context(), names[1]); err != nil || u.Size == 0 {
		t.Errorf("usage of an unpacked layer: %+v, %v", u, err)
	}
	// What is above goes on as it was.
	mounts, err = s.Prepare(t.Context(), "top", names[2])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{img.held.Mount}, lowerOf(t, mounts)); diff != "" {
		t.Errorf("lower directories on the rootfs: %s", diff)
	}
}

// Another image that begins with the whole of a lazy one.
func TestImageOnALazyOne(t *testing.T) {
	f := newFake()
	short, long := f.add(t, "a", "b"), f.add(t, "a", "b", "c", "d")
	s := open(t, t.TempDir(), f)
	names := pullBy(t, s, short, 0, "")
	more := pullBy(t, s, long, 2, names[1])
	mounts, err := s.Prepare(t.Context(), "container", more[0])
	if err != nil {
		t.Fatal(err)
	}
	lower := lowerOf(t, mounts)
	if len(lower) != 2 || lower[1] != short.held.Mount {
		t.Errorf("lower directories %q, want a layer and the rootfs %s", lower, short.held.Mount)
	}
	if f.fetched != 1 {
		t.Errorf("%d layers were fetched, want only the one that is on no rootfs", f.fetched)
	}
}

// gRPC sends no label that is not UTF-8, and containerd takes none of any length.
func TestReasonsCanBeLabels(t *testing.T) {
	for _, c := range []struct{ why, want string }{
		{"short", "short"},
		{"file \xff\xfe", "file \uFFFD"},
		{strings.Repeat("x", 2047) + "é", strings.Repeat("x", 2047) + "\uFFFD..."},
	} {
		if got := shorten(c.why); got != c.want {
			t.Errorf("%q: %q, want %q", c.why, got, c.want)
		}
	}
	s := open(t, t.TempDir(), newFake())
	labels := map[string]string{
		snapshots.LabelSnapshotRef:  digest.FromString("layer").String(),
		snapshotters.TargetRefLabel: "registry.example/" + strings.Repeat("\xff", 4000),
	}
	if _, err := s.Prepare(t.Context(), "k", "", snapshots.WithLabels(labels)); err != nil {
		t.Fatal(err)
	}
	info, err := s.Stat(t.Context(), "k")
	if why := info.Labels[LabelReason]; err != nil || !utf8.ValidString(why) || len(why) > 2100 || why == "" {
		t.Errorf("%v, reason of %d bytes: %q", err, len(why), why)
	}
}
