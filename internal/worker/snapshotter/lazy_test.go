package snapshotter

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/metrics/metricstest"
)

func TestLazyImage(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b", "c")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")
	top := names[2]

	check := func(s *Snapshotter, key string) {
		t.Helper()
		mounts, err := s.Prepare(t.Context(), key, top)
		if err != nil {
			t.Fatal(err)
		}
		again, err := s.Mounts(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(mounts, again); diff != "" {
			t.Errorf("Prepare and Mounts differ: %s", diff)
		}
		if diff := cmp.Diff([]string{img.held.Mount}, lowerOf(t, mounts)); diff != "" {
			t.Errorf("lower directories of a container: %s", diff)
		}
		view, err := s.View(t.Context(), key+"-view", top)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]mount.Mount{{Type: "bind", Source: img.held.Mount, Options: []string{"ro", "rbind"}}}, view); diff != "" {
			t.Errorf("view: %s", diff)
		}
	}
	check(s, "container")
	for i, want := range []int64{0, 0, 12345} {
		if u, err := s.Usage(t.Context(), names[i]); err != nil || u.Size != want {
			t.Errorf("usage of layer %d: %+v, %v; want %d bytes", i, u, err, want)
		}
	}
	info, err := s.Stat(t.Context(), top)
	if err != nil {
		t.Fatal(err)
	}
	if info.Labels[LabelPath] != PathLazy || info.Labels[LabelReason] == "" || info.Labels[LabelImage] != img.name || info.Labels[LabelRole] != roleRootfs || info.Labels[LabelProof] != "served" {
		t.Errorf("labels: %q", info.Labels)
	}
	// What containerd keeps for good does not say how the proof stood when it pulled.
	err = s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
		if info.Labels[LabelProof] != "" {
			t.Errorf("labels of %s, of all: %q", info.Name, info.Labels)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	// Another namespace of containerd asks for the same.
	if diff := cmp.Diff(names, pullBy(t, s, img, 0, "")); diff != "" {
		t.Errorf("the same image has other snapshots the second time: %s", diff)
	}
	if got := f.holds[img.held.ChainID]; got != 1 {
		t.Errorf("%d holds, want 1", got)
	}
	if f.fetched != 0 {
		t.Errorf("%d blobs were fetched", f.fetched)
	}
	counted(t, s, PathLazy, PathLazy)

	// The next daemon.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if len(f.holds) != 0 {
		t.Errorf("holds after Close: %v", f.holds)
	}
	s = open(t, dir, f)
	if got := f.holds[img.held.ChainID]; got != 1 {
		t.Errorf("%d holds after a restart, want 1", got)
	}
	check(s, "another")

	remove(t, s, "container", "container-view", "another", "another-view", names[2])
	if len(f.here) != 0 || len(f.holds) != 0 {
		t.Errorf("after its rootfs snapshot was removed: images %v, holds %v", f.here, f.holds)
	}
	remove(t, s, names[1], names[0])
	if left, _ := filepath.Glob(filepath.Join(dir, "*", "*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestImageOfTheUserStays(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	f.here[img.name] = true
	s := open(t, t.TempDir(), f)
	remove(t, s, pullBy(t, s, img, 0, "")...)
	if !f.here[img.name] {
		t.Error("an image that somebody pulled before containerd did was removed with containerd's")
	}
}

// All snapshots of an image are made when containerd asks for the first. What it
// does not know it removes: when it collects garbage before it has asked for the
// others, and when it never does.
func TestLayersAreMadeTogether(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b", "c", "d")
	dir := t.TempDir()
	s := open(t, dir, f)
	first := func() (names []string) {
		_, err := s.Prepare(t.Context(), "extract", "", snapshots.WithLabels(img.labels(0)))
		if !errdefs.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		byChain := make(map[string]snapshots.Info)
		if err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
			byChain[info.Labels[snapshots.LabelSnapshotRef]] = info
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		parent := ""
		for i, chain := range img.chains {
			info, ok := byChain[chain.String()]
			if !ok || info.Parent != parent || info.Kind != snapshots.KindCommitted {
				t.Fatalf("snapshot of layer %d: %+v; its parent should be %q", i, info, parent)
			}
			for k, v := range img.labels(i) {
				if info.Labels[k] != v {
					t.Errorf("layer %d: label %s is %q, not %q", i, k, info.Labels[k], v)
				}
			}
			names, parent = append(names, info.Name), info.Name
		}
		return names
	}
	names := first()
	remove(t, s, names[3], names[2], names[1])
	if !f.here[img.name] {
		t.Error("the image was removed while containerd asked for its layers")
	}
	again := pullBy(t, s, img, 1, names[0])
	if f.holds[img.held.ChainID] != 1 {
		t.Errorf("%d holds, want that of the snapshot", f.holds[img.held.ChainID])
	}
	if diff := cmp.Diff(again, pullBy(t, s, img, 1, names[0])); diff != "" {
		t.Errorf("the same image has other snapshots the second time: %s", diff)
	}
	remove(t, s, again[2], again[1], again[0], names[0])
	if len(f.here) != 0 || len(f.holds) != 0 {
		t.Errorf("images %v, holds %v are left", f.here, f.holds)
	}
	// containerd died after the first layer, and the daemon is started again.
	names = first()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, f)
	remove(t, s, names[3], names[2], names[1], names[0])
	if len(f.here) != 0 || len(f.holds) != 0 {
		t.Errorf("images %v, holds %v are left", f.here, f.holds)
	}
}

func TestMetricsAreDocumented(t *testing.T) {
	metricstest.Table(t, "../../../docs/metrics.md", "containerd", open(t, t.TempDir(), newFake()).Metrics())
}

func TestImageName(t *testing.T) {
	const d = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	for _, c := range []struct{ ref, manifest, want string }{
		{"registry.example/app:1", d, "registry.example/app@" + d},
		{"registry.example/app@" + d, d, "registry.example/app@" + d},
		{"registry.example:5000/a/b", "", "registry.example:5000/a/b:latest"},
		{"registry.example/app:1", "sha256:x", ""},
		{"registry.example/UPPER", d, ""},
		{"", d, ""},
	} {
		got, why := imageName(map[string]string{snapshotters.TargetRefLabel: c.ref, snapshotters.TargetManifestDigestLabel: c.manifest})
		if got != c.want || (got == "") == (why == "") {
			t.Errorf("image %q, manifest %q: %q, %q; want %q", c.ref, c.manifest, got, why, c.want)
		}
	}
}
