package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"bytes"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/fstest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// unpack is what containerd's own unpacker makes of an image's layers.
func unpack(t testing.TB, img image) string {
	t.Helper()
	dir := t.TempDir()
	for _, l := range img.layers {
		r, err := compression.DecompressStream(bytes.NewReader(l.Bytes))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Apply(t.Context(), dir, r); err != nil {
			t.Fatal(err)
		}
		r.Close()
	}
	return dir
}

func snapshot(t testing.TB, dir string) fstest.Tree {
	t.Helper()
	tree, err := fstest.Snapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// differs says how a mounted rootfs differs from what containerd unpacks. No
// layer here has an entry for the root, so its time is when it was made.
func differs(t testing.TB, img image, mnt string) string {
	t.Helper()
	return fstest.Diff(snapshot(t, unpack(t, img)), snapshot(t, mnt), func(path string, a, b *fstest.Node) {
		if path == "." {
			a.Mtime, a.MtimeNsec = b.Mtime, b.MtimeNsec
		}
	})
}

// oddImage has everything that makes a filesystem hard to carry over.
func oddImage(t *testing.T) image {
	long := strings.Repeat("n", 255)
	when := time.Unix(1_234_567_890, 123_456_789).UTC()
	big := strings.Repeat(noise(1<<20), 3) // content-defined pieces, some equal
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/true"}},
		layertest.Layer{
			layertest.Dir("etc", 0o755).Mtime(when),
			layertest.File("etc/motd", 0o644, "hello\n").Owner(0, 5).Mtime(when),
			layertest.File("etc/gone", 0o600, "bye\n"),
			layertest.Dir("opaque", 0o700),
			layertest.File("opaque/old", 0o644, "old"),
			layertest.Dir("dir-to-file", 0o755),
			layertest.File("dir-to-file/x", 0o644, "x"),
			layertest.File("file-to-dir", 0o644, "f"),
			layertest.Dir("usr", 0o755),
			layertest.Dir("usr/bin", 0o755),
			layertest.File("usr/bin/su", 0o4755, noise(5000)),
			layertest.File("usr/bin/ping", 0o755, noise(4096)).Xattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
			layertest.Link("usr/bin/su2", "usr/bin/su"),
			layertest.Link("etc/su3", "usr/bin/su"),
			layertest.Symlink("usr/bin/sh", "../../etc/motd"),
			layertest.Symlink("dangling", "/nowhere/"+strings.Repeat("d/", 900)),
			layertest.Char("null", 0o666, 1, 3),
			layertest.Block("disk", 0o660, 259, 300_000),
			layertest.Fifo("pipe", 0o620),
			layertest.File(long, 0o644, "long"),
			layertest.File("not-utf8-\xff\xfe", 0o644, "bytes"),
			layertest.File("large-owner", 0o640, "o").Owner(4_000_000_000, 4_294_967_294),
			layertest.File("empty", 0o644, ""),
			layertest.File("zeros", 0o644, strings.Repeat("\x00", 3<<20)),
			layertest.File("zeros-inside", 0o644, noise(700_000)+strings.Repeat("\x00", 5<<20)+noise(700_001)),
			layertest.File("big", 0o644, big),
			layertest.File("old-times", 0o644, "1969").Mtime(time.Unix(-1, 5).UTC()),
			layertest.File("user-xattr", 0o644, "x").Xattr("user.a", "1").Xattr("user.b", strings.Repeat("v", 300)),
		}.Gzip(t),
		// A layer that changes a directory lists it, as image builders do: else
		// its time is that of the unpacking.
		layertest.Layer{
			layertest.Dir("etc", 0o755).Mtime(when),
			layertest.Whiteout("etc/gone"),
			layertest.Dir("opaque", 0o700),
			layertest.Opaque("opaque"),
			layertest.File("opaque/new", 0o644, "new"),
			layertest.Whiteout("dir-to-file"),
			layertest.File("dir-to-file", 0o644, "now a file"),
			layertest.Whiteout("file-to-dir"),
			layertest.Dir("file-to-dir", 0o711),
			layertest.File("file-to-dir/inside", 0o644, "i"),
			layertest.File("twice", 0o644, "first"),
			layertest.File("twice", 0o600, "second"),
		}.Zstd(t),
		layertest.Layer{
			layertest.Dir("etc", 0o750).Mtime(when),
			layertest.File("etc/motd", 0o644, "hello again\n"),
			layertest.Dir("many", 0o755),
		}.Tar(t),
	)
}

func TestWhatIsMountedIsWhatContainerdUnpacks(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := oddImage(t)
	ref := s.push("odd", "1", img)
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete)
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Errorf("containerd's unpacker and the mounted rootfs differ:\n%s", diff)
	}
	if last, bad := w.verify(ref); len(bad) > 0 || last.Absent > 0 || last.Checked != last.Total {
		t.Errorf("verify: %+v, bad %v", last, bad)
	}
}

// manyFiles is an image of n files with bytes that do not compress; seed and
// changed decide which files differ from those of another.
func manyFiles(t testing.TB, n, size int, seed uint64, changed float64) image {
	t.Helper()
	var base, app layertest.Layer
	base = append(base, layertest.Dir("bin", 0o755), layertest.Dir("data", 0o755))
	if busybox != "" {
		b, err := os.ReadFile(busybox)
		if err != nil {
			t.Fatal(err)
		}
		base = append(base, layertest.File("bin/busybox", 0o755, string(b)))
		for _, name := range []string{"sh", "cat", "sleep", "echo", "id", "sha256sum", "true", "false"} {
			base = append(base, layertest.Link("bin/"+name, "bin/busybox").Mode(0o755))
		}
	}
	choose := rand.New(rand.NewPCG(seed, 1))
	for i := range n {
		v := uint64(0)
		if choose.Float64() < changed {
			v = seed
		}
		content := rand.NewChaCha8([32]byte{byte(i), byte(i >> 8), byte(v), 7})
		b := make([]byte, size+i%97)
		_, _ = content.Read(b)
		base = append(base, layertest.File(fmt.Sprintf("data/%05d", i), 0o644, string(b)))
	}
	app = append(app, layertest.File("version", 0o644, fmt.Sprint(seed)))
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh", "-c", "echo hello"}}, base.Gzip(t), app.Gzip(t))
}

func TestUpdateMovesOnlyWhatChanged(t *testing.T) {
	s := startServer(t, t.TempDir())
	one, two := manyFiles(t, 400, 20_000, 1, 0), manyFiles(t, 400, 20_000, 2, 0.1)
	ref1, ref2 := s.push("app", "1", one), s.push("app", "2", two)
	w := startWorker(t, workerRoot(t))
	first := w.mustPull(ref1, api.Complete)
	second := w.mustPull(ref2, api.Complete)
	fresh, update := first[len(first)-1].BytesMoved, second[len(second)-1].BytesMoved
	t.Logf("bytes moved: fresh %d, update %d", fresh, update)
	// A tenth of the files differs and no layer is shared; metadata comes on top.
	if update > fresh/6 {
		t.Errorf("an update that changes a tenth moved %d bytes, a fresh pull %d", update, fresh)
	}
	for ref, img := range map[string]image{ref1: one, ref2: two} {
		if diff := differs(t, img, w.mountOf(ref)); diff != "" {
			t.Errorf("%s:\n%s", ref, diff)
		}
	}
	// What the second uses in place must outlive the first.
	if err := w.client.RemoveImage(t.Context(), ref1); err != nil {
		t.Fatal(err)
	}
	if last, bad := w.verify(ref2); len(bad) > 0 || last.Checked != last.Total {
		t.Errorf("after the first image was removed: %+v, bad %v", last, bad)
	}
	if err := w.client.RemoveImage(t.Context(), ref2); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left after all images were removed: %v, %v", left, err)
	}
}

func TestLargeFileThatChangedABitMovesABit(t *testing.T) {
	s := startServer(t, t.TempDir())
	data := noise(24 << 20)
	one := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("db", 0o644, data)}.Gzip(t))
	two := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("db", 0o644, data[:9<<20]+"inserted"+data[9<<20:])}.Gzip(t))
	ref1, ref2 := s.push("db", "1", one), s.push("db", "2", two)
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref1, api.Complete)
	events := w.mustPull(ref2, api.Complete)
	if moved := events[len(events)-1].BytesMoved; moved > 4<<20 {
		t.Errorf("8 bytes inserted in 24 MiB moved %d bytes", moved)
	}
	if diff := differs(t, two, w.mountOf(ref2)); diff != "" {
		t.Error(diff)
	}
}

func TestMountedBeforeTheBytesAreHere(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 300, 40_000, 3, 0)
	ref := s.push("slow", "1", img)
	k := newLink(t, s.addr, 0)
	k.stallAfter(1 << 20)
	ref = k.via(ref)
	w := startWorker(t, workerRoot(t))
	events := w.mustPull(ref, api.Mounted)
	ev := events[len(events)-1]
	if ev.ContentHere >= ev.ContentTotal {
		t.Fatalf("mounted only when everything was here: %+v", ev)
	}
	path, want := absent(t, w, ref, img)
	r := startReader(t, path)
	r.waits(t)
	k.open()
	// Read all of it at once, through the gate, in an order of our own.
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Error(diff)
	}
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("the read that waited: %v, %d bytes, not those of the file", r.err, len(got))
	}
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Pulls[0].Waits == 0 {
		t.Errorf("no read had to wait: %+v", st.Pulls[0])
	}
}

func TestAReadOfWhatIsQueuedFarBehindIsPromoted(t *testing.T) {
	s := startServer(t, t.TempDir())
	var layer layertest.Layer
	for i := range 60 {
		layer = append(layer, layertest.File(fmt.Sprintf("data/%02d", i), 0o644, noise(500_000+i)))
	}
	img := newImage(t, ocispec.ImageConfig{}, layer.Gzip(t))
	ref := s.push("far", "1", img)
	k := newLink(t, s.addr, 1<<20) // half a minute for all of it
	ref = k.via(ref)
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Mounted)
	// The largest is the last of the plan.
	if _, err := os.ReadFile(filepath.Join(w.mountOf(ref), "data/59")); err != nil {
		t.Fatal(err)
	}
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if here, total := st.Pulls[0].ContentHere, st.Pulls[0].ContentTotal; here > total/2 {
		t.Errorf("the last file was read when %d of %d bytes were here: it was not promoted", here, total)
	}
	k.setRate(0)
	w.mustPull(ref, api.Complete)
}
