package snapshotter

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics/metricstest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/node"
)

// fakeNode has the images that a test gives it. Its rootfs are directories.
type fakeNode struct {
	offered map[string]*node.Held // what can be pulled
	blobs   map[digest.Digest][]byte

	here    map[string]bool
	holds   map[digest.Digest]int
	asked   []string // names of Hold
	fetched int      // blobs
}

func (f *fakeNode) Has(name string) bool { return f.here[name] }

func (f *fakeNode) Hold(_ context.Context, name string) (*node.Held, error) {
	f.asked = append(f.asked, name)
	h := f.offered[name]
	if h == nil {
		return nil, &api.Error{Code: api.CodeUnavailable, Message: "the server is away"}
	}
	f.here[name] = true
	f.holds[h.ChainID]++
	return h, nil
}

func (f *fakeNode) Release(chain digest.Digest) {
	if f.holds[chain]--; f.holds[chain] == 0 {
		delete(f.holds, chain)
	}
}

func (f *fakeNode) RemoveImage(_ context.Context, name string) error {
	if !f.here[name] {
		return &api.Error{Code: api.CodeNotFound, Message: "no image " + name}
	}
	if f.holds[f.offered[name].ChainID] > 0 {
		return &api.Error{Code: api.CodeConflict, Message: "in use"}
	}
	delete(f.here, name)
	return nil
}

func (f *fakeNode) RootfsUsage(digest.Digest) (size, inodes int64, err error) { return 12345, 6, nil }

func (f *fakeNode) OpenBlob(_ context.Context, _ string, blob ocispec.Descriptor) (io.ReadCloser, error) {
	f.fetched++
	b, ok := f.blobs[blob.Digest]
	if !ok {
		return nil, errors.New("no such blob")
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// testImage is an image of layers with one file each, and its rootfs.
type testImage struct {
	ref, name string
	manifest  digest.Digest
	layers    []ocispec.Descriptor
	chains    []digest.Digest
	held      *node.Held
}

func newFake() *fakeNode {
	return &fakeNode{
		offered: make(map[string]*node.Held),
		blobs:   make(map[digest.Digest][]byte),
		here:    make(map[string]bool),
		holds:   make(map[digest.Digest]int),
	}
}

// add makes an image of layers that hold a file each, of the given names.
func (f *fakeNode) add(t *testing.T, files ...string) testImage {
	t.Helper()
	var m ocispec.Manifest
	var c ocispec.Image
	img := testImage{ref: "registry.example/app:1"}
	mnt := t.TempDir()
	for _, name := range files {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := errors.Join(
			w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(name)), Typeflag: tar.TypeReg}),
			func() error { _, err := w.Write([]byte(name)); return err }(),
			w.Close(),
			os.WriteFile(filepath.Join(mnt, name), []byte(name), 0o644)); err != nil {
			t.Fatal(err)
		}
		d := digest.FromBytes(b.Bytes())
		f.blobs[d] = b.Bytes()
		m.Layers = append(m.Layers, ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: d, Size: int64(b.Len())})
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, d)
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	img.layers, img.manifest = m.Layers, digest.FromBytes(manifest)
	img.chains = identity.ChainIDs(append([]digest.Digest(nil), c.RootFS.DiffIDs...))
	img.name = "registry.example/app@" + img.manifest.String()
	img.held = &node.Held{Ref: img.name, Digest: img.manifest, Manifest: manifest, Config: config, ChainID: img.chains[len(img.chains)-1], Mount: mnt}
	f.offered[img.name] = img.held
	return img
}

func open(t *testing.T, dir string, n Node) *Snapshotter {
	t.Helper()
	s, err := Open(t.Context(), Options{Dir: dir, Node: n})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// labels are what containerd passes with layer i.
func (img testImage) labels(i int) map[string]string {
	return map[string]string{
		snapshots.LabelSnapshotRef:             img.chains[i].String(),
		snapshotters.TargetRefLabel:            img.ref,
		snapshotters.TargetManifestDigestLabel: img.manifest.String(),
		snapshotters.TargetLayerDigestLabel:    img.layers[i].Digest.String(),
	}
}

// A daemon died while it made a snapshot, and while it unpacked a layer.
func TestWhatACrashLeftIsRemoved(t *testing.T) {
	dir := t.TempDir()
	f := newFake()
	img := f.add(t, "a", "b")
	s := open(t, dir, f)
	pull(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ids, err := os.ReadDir(filepath.Join(dir, "snapshots"))
	if err != nil || len(ids) != 2 {
		t.Fatalf("%v, %v", ids, err)
	}
	for _, path := range []string{"new-123/fs", "99/fs", ids[0].Name() + "/unpack/fs"} {
		if err := os.MkdirAll(filepath.Join(dir, "snapshots", path, "left"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	open(t, dir, f)
	now, err := filepath.Glob(filepath.Join(dir, "snapshots/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, id := range ids {
		want = append(want, filepath.Join(dir, "snapshots", id.Name(), "fs"), filepath.Join(dir, "snapshots", id.Name(), "lazy"))
	}
	if diff := cmp.Diff(want, now); diff != "" {
		t.Errorf("what is there (-want +got):\n%s", diff)
	}
}

// pull does what containerd does with layers from on, on a parent, while they
// are skipped. It returns the names of the snapshots that it finds.
func pull(t *testing.T, s *Snapshotter, img testImage, from int, parent string) (names []string) {
	t.Helper()
	for i := from; i < len(img.chains); i++ {
		_, err := s.Prepare(t.Context(), fmt.Sprintf("extract-%s-%d", parent, i), parent, snapshots.WithLabels(img.labels(i)))
		if !errdefs.IsAlreadyExists(err) {
			t.Fatalf("prepare layer %d: %v, want already exists", i, err)
		}
		found := ""
		err = s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
			if info.Kind == snapshots.KindCommitted && info.Parent == parent {
				found = info.Name
			}
			return nil
		}, fmt.Sprintf("labels.%q==%s,parent==%q", snapshots.LabelSnapshotRef, img.chains[i], parent))
		if err != nil || found == "" {
			t.Fatalf("layer %d: no committed snapshot, %v", i, err)
		}
		names = append(names, found)
		parent = found
	}
	return names
}

func remove(t *testing.T, s *Snapshotter, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := s.Remove(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
}

func lowerOf(t *testing.T, mounts []mount.Mount) []string {
	t.Helper()
	for _, o := range mounts[0].Options {
		if l, ok := strings.CutPrefix(o, "lowerdir="); ok {
			return strings.Split(l, ":")
		}
	}
	return nil
}

func TestLazyImage(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b", "c")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pull(t, s, img, 0, "")
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
	if info.Labels[LabelPath] != PathLazy || info.Labels[LabelReason] == "" || info.Labels[LabelImage] != img.name || info.Labels[LabelRole] != roleRootfs {
		t.Errorf("labels: %q", info.Labels)
	}
	// Another namespace of containerd asks for the same.
	if diff := cmp.Diff(names, pull(t, s, img, 0, "")); diff != "" {
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

// The mounts of a lazy image are those that containerd's overlayfs snapshotter
// would give, with one lower directory: what containerd adds to them (context=,
// for SELinux) or asks for (mappings of IDs) means the same.
func TestOptionsOfMounts(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pull(t, s, img, 0, "")
	const uids, gids = "0:100000:65536", "0:200000:65536"
	mapped := snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotUIDMapping: uids, snapshots.LabelSnapshotGIDMapping: gids})

	mounts, err := s.Prepare(t.Context(), "plain", names[1])
	if err != nil {
		t.Fatal(err)
	}
	want := func(id string, first ...string) []mount.Mount {
		options := append(first, "workdir="+filepath.Join(dir, "snapshots", id, "work"), "upperdir="+filepath.Join(dir, "snapshots", id, "fs"), "lowerdir="+img.held.Mount)
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
	}
	// What containerd's snapshotter finds the kernel to need.
	needed := func(mounts []mount.Mount) []mount.Mount {
		mounts[0].Options = slices.DeleteFunc(mounts[0].Options, func(o string) bool { return o == "index=off" || o == "userxattr" })
		return mounts
	}
	if diff := cmp.Diff(want("3"), needed(mounts)); diff != "" {
		t.Errorf("mounts of a container: %s", diff)
	}
	if mounts, err = s.Prepare(t.Context(), "mapped", names[1], mapped); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want("4", "uidmap="+uids, "gidmap="+gids), needed(mounts)); diff != "" {
		t.Errorf("mounts of a container in a user namespace: %s", diff)
	}
	if uid, gid, err := ownerOf(filepath.Join(dir, "snapshots", "4", "fs")); err != nil || uid != 100000 || gid != 200000 {
		t.Errorf("its directory belongs to %d:%d, %v", uid, gid, err)
	}
	view, err := s.View(t.Context(), "view", names[1], mapped)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]mount.Mount{{Type: "bind", Source: img.held.Mount, Options: []string{"uidmap=" + uids, "gidmap=" + gids, "ro", "rbind"}}}, view); diff != "" {
		t.Errorf("mounts of a view in a user namespace: %s", diff)
	}

	// What a containerd does that maps no IDs; the names are those that it gives.
	if _, err := s.Prepare(t.Context(), "default/7/sha256:aa-remap", names[1]); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(t.Context(), "default/8/sha256:aa", "default/7/sha256:aa-remap"); err != nil {
		t.Fatal(err)
	}
	for _, get := range []func() ([]mount.Mount, error){
		func() ([]mount.Mount, error) {
			return s.Prepare(t.Context(), "changed", "default/8/sha256:aa", mapped)
		},
		func() ([]mount.Mount, error) { return s.Mounts(t.Context(), "changed") },
	} {
		mounts, err := get()
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range mounts[0].Options {
			if mapsIDs(o) {
				t.Errorf("on a copy whose owners were changed: option %s", o)
			}
		}
	}
}

// containerd's client adds the SELinux label of a container to the mounts that it is
// given. What becomes of it is the kernel's to say: the same as on an overlay of
// directories, whether it knows labels or refuses them. (The AppArmor profile is in
// the runtime's specification, which no snapshotter sees.)
func TestMountLabels(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	const label = `context="system_u:object_r:container_file_t:s0:c1,c2"`
	f := newFake()
	img := f.add(t, "a", "b")
	s := open(t, t.TempDir(), f)
	names := pull(t, s, img, 0, "")
	lazy, err := s.Prepare(t.Context(), "container", names[1])
	if err != nil {
		t.Fatal(err)
	}
	overlay := []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"workdir=" + t.TempDir(), "upperdir=" + t.TempDir(), "lowerdir=" + img.held.Mount}}}
	// mounted is what the kernel says, and what it then lists.
	mounted := func(mounts []mount.Mount, more ...string) (syscall.Errno, string) {
		t.Helper()
		for i := range mounts {
			mounts[i].Options = append(slices.Clone(mounts[i].Options), more...)
		}
		at := t.TempDir()
		err := mount.All(mounts, at)
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			return errno, ""
		}
		if err != nil {
			t.Fatal(err)
		}
		info, err := mount.Lookup(at)
		if err := errors.Join(err, mount.UnmountAll(at, 0)); err != nil {
			t.Fatal(err)
		}
		_, shown, _ := strings.Cut(info.VFSOptions, "context=")
		shown, _, _ = strings.Cut(shown, ",lowerdir=")
		return 0, shown
	}
	if errno, _ := mounted(slices.Clone(lazy)); errno != 0 {
		t.Fatalf("without a label: %v", errno)
	}
	want, shown := mounted(overlay, label)
	if got, here := mounted(slices.Clone(lazy), label); got != want || here != shown {
		t.Errorf("with a label: %v, %q; overlayfs: %v, %q", got, here, want, shown)
	}
	t.Logf("this kernel says to labels: %v, %q", want, shown)
}

func TestImageOfTheUserStays(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	f.here[img.name] = true
	s := open(t, t.TempDir(), f)
	remove(t, s, pull(t, s, img, 0, "")...)
	if !f.here[img.name] {
		t.Error("an image that somebody pulled before containerd did was removed with containerd's")
	}
}

// A crash between the pull and the snapshots.
func TestLeftoverImageIsRemoved(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	dir := t.TempDir()
	s := open(t, dir, f)
	if p, why, err := s.pull(t.Context(), img.name); p == nil {
		t.Fatal(why, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !f.here[img.name] {
		t.Fatal("the image is gone before the test begins")
	}
	open(t, dir, f)
	if f.here[img.name] {
		t.Error("the image stays that was pulled for a snapshot which never came")
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
	again := pull(t, s, img, 1, names[0])
	if f.holds[img.held.ChainID] != 1 {
		t.Errorf("%d holds, want that of the snapshot", f.holds[img.held.ChainID])
	}
	if diff := cmp.Diff(again, pull(t, s, img, 1, names[0])); diff != "" {
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
	names := pull(t, s, img, 0, "")
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

func TestMetricsAreDocumented(t *testing.T) {
	metricstest.Table(t, "../../../docs/metrics.md", "containerd", open(t, t.TempDir(), newFake()).Metrics())
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
	names := pull(t, s, img, 0, "")

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
	names := pull(t, s, short, 0, "")
	more := pull(t, s, long, 2, names[1])
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

func TestUnreadableRecordHarmsOnlyItself(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pull(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(dir, "snapshots", "*", "lazy"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	const gone = "its directory was removed"
	for _, bad := range []string{"", "{}", `{"version":99}`, "null", "[]", gone} {
		if bad == gone {
			err = os.RemoveAll(filepath.Dir(records[0]))
		} else {
			err = os.WriteFile(records[0], []byte(bad), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s := open(t, dir, f)
		if _, err := s.Prepare(t.Context(), "on-it", names[0]); !errdefs.IsUnavailable(err) {
			t.Errorf("record %q: prepare a container: %v, want unavailable", bad, err)
		}
		if _, err := s.Prepare(t.Context(), "other", ""); err != nil {
			t.Errorf("record %q: another snapshot: %v", bad, err)
		}
		remove(t, s, "other")
		if bad == gone { // what is to be done then
			remove(t, s, names[0])
			pull(t, s, img, 0, "")
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
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

func TestRootfsThatComesBack(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pull(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	delete(f.offered, img.name)
	s = open(t, dir, f)
	if _, err := s.Prepare(t.Context(), "c", names[0]); !errdefs.IsUnavailable(err) {
		t.Errorf("a container on a rootfs that cannot be had: %v, want unavailable", err)
	}
	f.offered[img.name] = img.held
	if _, err := s.Prepare(t.Context(), "c", names[0]); err != nil {
		t.Errorf("a container on a rootfs that can be had again: %v", err)
	}
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
