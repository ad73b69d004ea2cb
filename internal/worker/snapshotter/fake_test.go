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
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// fakeNode has the images that a test gives it. Its rootfs are directories.
type fakeNode struct {
	told    []string              // of containers, in order
	offered map[string]*node.Held // what can be pulled
	blobs   map[digest.Digest][]byte

	here   map[string]bool
	proven map[origin.Key]bool
	holds  map[digest.Digest]int

	provable map[origin.Key]bool // AwaitProof proves it
	refused  map[origin.Key]error
	asked    []string // names of Hold
	fetched  int      // blobs
	held     func()   // is called by Hold; nil: nothing is
}

func (f *fakeNode) ContainerMade(_ origin.Key, id string) { f.told = append(f.told, "made "+id) }

func (f *fakeNode) ContainerStarts(_ origin.Key, id string, process func() node.Process) {
	runs := process()
	f.told = append(f.told, strings.TrimSpace(fmt.Sprintf("starts %s %q %s", id, runs.Args, memoryOf(runs))))
}

// memoryOf is what is known of a container's memory, in words.
func memoryOf(runs node.Process) string {
	if runs.Cgroup == "" {
		return ""
	}
	return fmt.Sprintf("in %s with %d bytes", runs.Cgroup, runs.Memory)
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
	if f.held != nil {
		f.held()
	}
	return h, nil
}

func (f *fakeNode) Proven(key origin.Key) bool { return f.proven[key] }

func (f *fakeNode) Proof(key origin.Key) string {
	if f.proven[key] {
		return "proven"
	}
	return "served"
}

func (f *fakeNode) AwaitProof(_ context.Context, key origin.Key) error {
	if !f.provable[key] {
		return errors.New("no recipe")
	}
	f.proven[key] = true
	return nil
}

func (f *fakeNode) MayStart(_ context.Context, key origin.Key) error { return f.refused[key] }

func (f *fakeNode) Release(key origin.Key) {
	chain := digest.Digest(key)
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

func (f *fakeNode) RootfsUsage(origin.Key) (size, inodes int64, err error) { return 12345, 6, nil }

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
		provable: make(map[origin.Key]bool), refused: make(map[origin.Key]error),
		offered: make(map[string]*node.Held),
		blobs:   make(map[digest.Digest][]byte),
		here:    make(map[string]bool),
		proven:  make(map[origin.Key]bool),
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
	img.held = &node.Held{Ref: img.name, Digest: img.manifest, Manifest: manifest, Config: config, ChainID: img.chains[len(img.chains)-1], Rootfs: origin.Key(img.chains[len(img.chains)-1]), Mount: mnt}
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

// pullBy does what containerd does with layers from on, on a parent, while they
// are skipped. It returns the names of the snapshots that it finds.
func pullBy(t *testing.T, s *Snapshotter, img testImage, from int, parent string) (names []string) {
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
