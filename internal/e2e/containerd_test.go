package e2e

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// An image's whole life: pulled, run, updated, removed, with a restart of the
// daemon in between.
func TestContainerdRunsAnImageThatIsOnItsWay(t *testing.T) {
	onHosts(t, []host{{containerd2, ""}, {containerd1, kernel.GateFanotify}, {containerd1, kernel.GateFUSE}}, testContainerdRunsAnImageThatIsOnItsWay)
}

func testContainerdRunsAnImageThatIsOnItsWay(t *testing.T, v containerdVersion) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 80, 75_000)
	slow := newLink(t, s.addr, 0)
	slow.stallAfter(3 << 20) // what a shell starts with, and no more than half
	ref := slow.via(s.push("app", "1", img))
	w := startWorker(t, workerRoot(t))
	c, long := startContainerd(t, v, w), unique(t)

	c.pull(t, ref)
	if images, err := w.client.Images(t.Context()); err != nil || len(images) != 1 || images[0].State != "pulling" {
		t.Fatalf("when the pull has ended, the worker has %+v, %v; want one image that is being pulled", images, err)
	}
	for _, l := range img.layers {
		if out := c.ctr(t, "content", "ls", "-q"); strings.Contains(out, l.Descriptor().Digest.String()) {
			t.Errorf("containerd fetched layer %s", l.Descriptor().Digest)
		}
	}
	checkFigures(t, c, w, ref, img, false)
	slow.open()
	if got, want := c.run(t, ref, "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container on the image that was on its way read\n%s\nwant\n%s", got, want)
	}
	for _, n := range c.names(t) {
		if got := c.info(t, n).Labels[snapshotter.LabelPath]; got != snapshotter.PathLazy {
			t.Errorf("snapshot %s took the path %q", n, got)
		}
	}

	// A restart of the daemon while a container runs.
	c.ctr(t, "run", "--detach", "--snapshotter", "hydrofoil", ref, long, "/bin/sh", "-c", "sleep 1000")
	w.kill()
	w2 := startWorker(t, w.root)
	if got := c.ctr(t, "task", "exec", "--exec-id", "x", long, "/bin/sh", "-c", dataSums); got != wantData(t, img) {
		t.Errorf("after the daemon was killed a container read\n%s", got)
	}
	eventually(t, "containerd reaches the new daemon", func() error {
		_, err := c.tryCtr("snapshots", "--snapshotter", "hydrofoil", "ls")
		return err
	})
	if got := c.run(t, ref, "two", dataSums); got != wantData(t, img) {
		t.Errorf("a container of the new daemon read\n%s", got)
	}

	// An update moves what changed.
	updated := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, img.layers[0],
		layertest.Layer{layertest.File("version", 0o644, "2"), layertest.File("data/new", 0o644, noise(100_000))}.Gzip(t))
	ref2 := slow.via(s.push("app", "2", updated))
	before := slow.bytesMoved()
	c.pull(t, ref2)
	if got, want := c.run(t, ref2, "three", dataSums), wantData(t, updated); got != want {
		t.Errorf("a container of the updated image read\n%s\nwant\n%s", got, want)
	}
	if moved := slow.bytesMoved() - before; moved > 500_000 {
		t.Errorf("an update with a new file of 100 kB moved %d bytes", moved)
	}

	// The disk: what is used is counted, and freed with the images.
	if err := c.tryRemove(ref2); err != nil {
		t.Error(err)
	}
	eventually(t, "the updated image is gone from the worker", func() error {
		if refs := w2.imageRefs(); len(refs) != 1 {
			return fmt.Errorf("it has %q", refs)
		}
		return nil
	})
	w2.mustPull(w2.imageRefs()[0], api.Complete)
	checkFigures(t, c, w2, ref, img, true)
	for _, name := range w2.imageRefs() {
		if _, _, code := command(t, "rm", "--root", w2.root, name); code == 0 {
			t.Errorf("foil rm removed the image %s, which containerd uses", name)
		}
	}
	c.ctr(t, "task", "kill", "--signal", "SIGKILL", long)
	eventually(t, "the container is gone", func() error {
		if _, err := c.tryCtr("task", "rm", long); err != nil && !strings.Contains(err.Error(), "not found") {
			return err
		}
		_, err := c.tryCtr("containers", "rm", long)
		return err
	})
	if err := c.tryRemove(ref); err != nil {
		t.Error(err)
	}
	// CRI does not wait for containerd's collector of garbage.
	eventually(t, "the images are gone from the worker", func() error {
		if refs := w2.imageRefs(); len(refs) > 0 {
			return fmt.Errorf("it has %q", refs)
		}
		return nil
	})
	left, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left after the images were removed: %q, %v", left, err)
	}
}

func TestContainerdUnpacksWhatIsNoBundle(t *testing.T) {
	onHosts(t, []host{{containerd2, ""}}, testContainerdUnpacksWhatIsNoBundle)
}

func testContainerdUnpacksWhatIsNoBundle(t *testing.T, v containerdVersion) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	img := runnable(t, 20, 5_000)
	ref := s.push("app", "1", img)
	w := startWorker(t, workerRoot(t))
	c := startContainerd(t, v, w)
	ref = plainRegistry(t, s) + ref[strings.IndexByte(ref, '/'):]
	c.pull(t, ref)
	if got, want := c.run(t, ref, "one", dataSums), wantData(t, img); got != want {
		t.Errorf("a container read\n%s\nwant\n%s", got, want)
	}
	for _, n := range c.names(t) {
		l := c.info(t, n).Labels
		if l[snapshotter.LabelPath] != snapshotter.PathPlain || l[snapshotter.LabelReason] == "" {
			t.Errorf("labels of snapshot %s: %q", n, l)
		}
	}
	if refs := w.imageRefs(); len(refs) > 0 {
		t.Errorf("the worker has %q", refs)
	}
}

// An image whose layers are the lower ones of another that came lazily: its
// layers are never asked for, so the container's snapshot has to bring them.
func TestContainerdRunsAPrefixOfALazyImage(t *testing.T) {
	onHosts(t, []host{{containerd2, ""}}, testContainerdRunsAPrefixOfALazyImage)
}

func testContainerdRunsAPrefixOfALazyImage(t *testing.T, v containerdVersion) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	whole := runnable(t, 20, 5_000)
	more := layertest.Layer{layertest.Whiteout("version"), layertest.Dir("data", 0o755), layertest.File("data/more", 0o644, noise(3000))}.Gzip(t)
	upper := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, append(slices.Clone(whole.layers), more)...)
	other := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh"}}, append(slices.Clone(whole.layers),
		layertest.Layer{layertest.File("version", 0o644, "other")}.Gzip(t))...)
	refUpper, refWhole := s.push("app", "upper", upper), s.push("app", "whole", whole)
	refOther := s.push("app", "other", other)
	refOther = plainRegistry(t, s) + refOther[strings.IndexByte(refOther, '/'):]
	w := startWorker(t, workerRoot(t))
	c := startContainerd(t, v, w)
	c.pull(t, refUpper)
	c.pull(t, refWhole)
	if got, want := c.run(t, refWhole, "whole", dataSums), wantData(t, whole); got != want {
		t.Errorf("a container of the prefix read\n%s\nwant\n%s", got, want)
	}
	if got := c.run(t, refUpper, "upper", "ls /version; ls /data | wc -l"); got != "21\n" {
		t.Errorf("a container of the lazy image said %q", got)
	}
	// The same layers below one that comes the plain way.
	c.pull(t, refOther)
	if got, want := c.run(t, refOther, "other", dataSums), wantData(t, other); got != want {
		t.Errorf("a container of a plain image on layers that came lazily read\n%s\nwant\n%s", got, want)
	}
	if diff := differs(t, upper, w.mountOf(w.imageRefs()[0])); diff != "" {
		t.Errorf("the lazy image:\n%s", diff)
	}
}
