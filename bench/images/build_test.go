package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	digest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// needs skips a test that builds where something for it is missing.
func needs(t *testing.T, programs ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("building images needs root")
	}
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not installed", program)
		}
	}
}

// busybox is a base: a shell with its tools, and nothing else.
func busybox(ctx context.Context, _ Snapshot, _ bool, dir string) error {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	for _, sub := range []string{"bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr/local"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := exec.CommandContext(ctx, "cp", path, dir+"/bin/busybox").Run(); err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/etc/removed", nil, 0o644); err != nil {
		return err
	}
	return exec.CommandContext(ctx, "chroot", dir, "/bin/busybox", "--install", "-s", "/bin").Run()
}

const tiny = testSnapshot + `
[[base]]
name = "bottom"
[[base]]
name = "b"
from = "bottom"
[[base.layer]]
run = "echo shared >/etc/shared; rm /etc/removed"

[[image]]
name = "i"
base = "b"
version_of = "%{v}"
env = ["WHO=world"]
entrypoint = ["/hello"]
cmd = ["nobody"]
args = ["everybody"]
probe = "stdout:^hello world and everybody, %{v}$"
[[image.layer]]
[image.layer.files]
"/hello" = '''
#!/bin/sh
echo "hello $WHO and $1, $(cat /etc/version)"
'''
[[image.layer]]
run = "echo %{v} >/etc/version; ! [ -e /etc/removed ]; mkdir /opt; ln -s ../etc/version /opt/version; echo late >/tmp/left"
[[image.version]]
tag = "1"
snapshot = "s"
values = { v = "one" }
[[image.version]]
tag = "2"
snapshot = "s"
values = { v = "two" }
`

// TestBuild builds two versions of a small image by the real steps, in real
// namespaces, and runs one of them.
func TestBuild(t *testing.T) {
	needs(t, "busybox", "unshare", "chroot", "apt-config", "runc")
	c, err := Parse([]byte(tiny))
	if err != nil {
		t.Fatal(err)
	}
	var logged []string
	b := Builder{Cache: t.TempDir(), Log: func(line string) { logged = append(logged, line) }, bootstrap: busybox}
	if built, err := b.Cached(c, "i:1"); built != nil || err != nil {
		t.Fatalf("before it was built: %v, %v", built, err)
	}
	first, err := b.Build(t.Context(), c, "i:1")
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Build(t.Context(), c, "i:2")
	if err != nil {
		t.Fatal(err)
	}
	if first.Version() != "one" || first.Args[0] != "everybody" || len(first.Manifest.Layers) != 4 {
		t.Errorf("version %q, args %q, %d layers", first.Version(), first.Args, len(first.Manifest.Layers))
	}
	for i, same := range []bool{true, true, true, false} {
		if (first.Manifest.Layers[i].Digest == second.Manifest.Layers[i].Digest) != same {
			t.Errorf("layer %d: the same in both versions: want %v", i, same)
		}
	}
	logged = nil
	again, err := b.Build(t.Context(), c, "i:1")
	if err != nil || again.Digest != first.Digest || len(logged) > 0 {
		t.Errorf("built again: %v, %v, %q", again, err, logged)
	}

	dir := t.TempDir()
	if err := second.Unpack(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"etc/shared": "shared\n", "opt/version": "two\n", "etc/removed": "", "tmp/left": "", "etc/hosts": ""} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); string(text) != want || (want == "") != errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, %v; want %q", name, text, err, want)
		}
	}

	v, err := b.Verify(t.Context(), second, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if v.Files != 4 || v.Ready <= 0 { // busybox, shared, hello, version
		t.Errorf("verified: %+v", v)
	}
	first.Args = []string{"nobody else"}
	if _, err := b.Verify(t.Context(), first, time.Minute); err == nil || !strings.Contains(err.Error(), "hello world and nobody else, one") {
		t.Errorf("a container that ends before it is ready: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(b.Cache, "verify-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

// A build that failed goes on where it failed.
func TestBuildGoesOn(t *testing.T) {
	needs(t, "busybox", "unshare", "chroot", "apt-config")
	dir := t.TempDir()
	steps := func(layers string) string {
		return testSnapshot + testBase + testImage + layers + testVersion
	}
	// The file is what the first try lacks.
	gate := filepath.Join(dir, "downloads", "gate")
	const firstLayer = "[[image.layer]]\nrun=\"echo a >/a\"\n"
	c, err := Parse([]byte(steps(firstLayer + "[[image.layer]]\nrun=\"cat /a; echo no gate here; cat /run/build/cache/gate\"\n")))
	if err != nil {
		t.Fatal(err)
	}
	var logged []string
	b := Builder{Cache: dir, Log: func(line string) { logged = append(logged, line) }, bootstrap: busybox}
	if _, err := b.Build(t.Context(), c, "i:1"); err == nil || !strings.Contains(err.Error(), "no gate here") || !strings.Contains(err.Error(), "layer 2") {
		t.Fatalf("a step that fails: %v", err)
	}
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	logged = nil
	if _, err := b.Build(t.Context(), c, "i:1"); err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(logged, "\n"); strings.Contains(all, "layer 1") || !strings.Contains(all, "layer 2") {
		t.Errorf("the second try did:\n%s", all)
	}
	// The first layer is still good when only the second is declared anew.
	for i, second := range []string{"false", "true"} {
		c, err := Parse([]byte(steps(firstLayer + "[[image.layer]]\nrun=\"" + second + "\"\n")))
		if err != nil {
			t.Fatal(err)
		}
		logged = nil
		if _, err := b.Build(t.Context(), c, "i:1"); (err == nil) != (second == "true") {
			t.Fatalf("layer 2 is %s: %v", second, err)
		}
		if all := strings.Join(logged, "\n"); strings.Contains(all, "layer 1") != (i == 0) {
			t.Errorf("layer 2 is %s: did\n%s", second, all)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.work")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

func TestPrune(t *testing.T) {
	c, err := Parse([]byte(testAll))
	if err != nil {
		t.Fatal(err)
	}
	b := Builder{Cache: t.TempDir()}
	image := filepath.Base(b.layout(c, c.Images[0]))
	base := filepath.Base(b.baseDir(c.Snapshots[0], c.Bases))
	kept := []string{base, "downloads", "fetched-0", "i-1.work", image, "lock", "verify-0"}
	for _, name := range append(slices.Clone(kept), "base-b-s-0", "i-1-0", "j-1.work", image+".partial") {
		if name == "lock" { // a file, which Prune makes
			continue
		}
		if err := os.MkdirAll(filepath.Join(b.Cache, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	removed, err := b.Prune(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"base-b-s-0", image + ".partial", "i-1-0", "j-1.work"}, removed, cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(kept, names(t, b.Cache), cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
}

// A cancelled build leaves no process and no mount.
func TestBuildIsCancelled(t *testing.T) {
	needs(t, "busybox", "unshare", "chroot", "apt-config")
	c, err := Parse([]byte(testSnapshot + testBase + testImage + "[[image.layer]]\nrun=\"echo $$ >/run/build/cache/started; sleep 1000\"\n" + testVersion))
	if err != nil {
		t.Fatal(err)
	}
	b := Builder{Cache: t.TempDir(), bootstrap: busybox}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := b.Build(ctx, c, "i:1")
		failed <- err
	}()
	for !exists(filepath.Join(b.Cache, "downloads", "started")) {
		select {
		case err := <-failed:
			t.Fatalf("ended early: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	cancel()
	if err := <-failed; err == nil {
		t.Fatal("no error")
	}
	processes, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range processes {
		if text, err := os.ReadFile(path); err == nil && strings.Contains(string(text), "FETCHED="+b.Cache) {
			t.Errorf("%s is of a process that was left", path)
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), b.Cache) {
		t.Errorf("mounts were left (%v):\n%s", err, mounts)
	}
}

// foreign makes an image of layers that nobody built here.
func foreign(t *testing.T, layers ...[]tar.Header) *Built {
	t.Helper()
	l, err := newLayout(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	manifest := v1.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}}
	config := v1.Image{RootFS: v1.RootFS{Type: "layers"}}
	for _, headers := range layers {
		var plain, blob bytes.Buffer
		w := tar.NewWriter(&plain)
		for _, header := range headers {
			if header.Typeflag == 0 {
				header.Typeflag = tar.TypeReg
			}
			if header.Mode == 0 {
				header.Mode = 0o755
			}
			if err := w.WriteHeader(&header); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		z := gzip.NewWriter(&blob)
		_, err := z.Write(plain.Bytes())
		if err := errors.Join(err, z.Close()); err != nil {
			t.Fatal(err)
		}
		d := digest.FromBytes(blob.Bytes())
		if err := os.WriteFile(l.blob(d), blob.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		manifest.Layers = append(manifest.Layers, v1.Descriptor{MediaType: v1.MediaTypeImageLayerGzip, Digest: d, Size: int64(blob.Len())})
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(plain.Bytes()))
	}
	if manifest.Config, err = l.addJSON(v1.MediaTypeImageConfig, config); err != nil {
		t.Fatal(err)
	}
	descriptor, err := l.addJSON(v1.MediaTypeImageManifest, manifest)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.finish(descriptor, "t"); err != nil {
		t.Fatal(err)
	}
	built, err := Open(l.dir, "t")
	if err != nil {
		t.Fatal(err)
	}
	return built
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		all = append(all, name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestUnpack(t *testing.T) {
	needs(t)
	at := time.Unix(1700000000, 0)
	image := foreign(t,
		[]tar.Header{
			{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 3, ModTime: at},
			{Name: "d/gone"}, {Name: "d/kept"}, {Name: "o/low"}, {Name: "o/sub/low"},
			{Name: "file"}, {Name: "dir/inside"}, {Name: "./su", Mode: 0o4755, Uid: 5, Gid: 6, ModTime: at},
		},
		[]tar.Header{
			{Name: "d/.wh.gone"}, {Name: "o/high"}, {Name: "o/.wh..wh..opq"},
			{Name: "file/", Typeflag: tar.TypeDir}, {Name: "dir"}, // each becomes the other
			{Name: "hard", Typeflag: tar.TypeLink, Linkname: "su"},
			{Name: "soft", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
			{Name: "pipe", Typeflag: tar.TypeFifo}, {Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
			{Name: "absent/.wh.x"}, {Name: "absent/.wh..wh..opq"},
		})
	dir := t.TempDir()
	if err := image.Unpack(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	want := []string{"d", "d/kept", "dir", "file", "hard", "null", "o", "o/high", "pipe", "soft", "su"}
	if diff := cmp.Diff(want, names(t, dir)); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	var stat, link unix.Stat_t
	if err := errors.Join(unix.Stat(dir+"/su", &stat), unix.Stat(dir+"/hard", &link)); err != nil {
		t.Fatal(err)
	}
	if stat.Ino != link.Ino || stat.Mode&0o7777 != 0o4755 || stat.Uid != 5 || stat.Gid != 6 || stat.Mtim.Sec != at.Unix() {
		t.Errorf("su: %+v", stat)
	}
	info, err := os.Stat(dir + "/d")
	if err != nil {
		t.Fatal(err)
	}
	if !info.ModTime().Equal(at) || info.Mode()&fs.ModeSticky == 0 || info.Sys().(*syscall.Stat_t).Uid != 3 {
		t.Errorf("d: %v %v", info.Mode(), info.ModTime())
	}
}

func TestUnpackStaysInside(t *testing.T) {
	needs(t)
	for name, layer := range map[string][]tar.Header{
		"dots":               {{Name: "../out"}},
		"link as directory":  {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@"}, {Name: "l/out"}},
		"link as file":       {{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "@/out"}, {Name: "out"}},
		"hard link":          {{Name: "l", Typeflag: tar.TypeLink, Linkname: "../out"}},
		"hard link by link":  {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@"}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "l/secret"}},
		"whiteout by link":   {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@"}, {Name: "l/.wh.secret"}},
		"opaque by link":     {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@"}, {Name: "l/.wh..wh..opq"}},
		"mode by link":       {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@/secret"}, {Name: "l", Typeflag: tar.TypeDir, Mode: 0o777}},
		"device beside link": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "@"}, {Name: "l/out", Typeflag: tar.TypeChar}},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			dir, outside := filepath.Join(parent, "in"), filepath.Join(parent, "outside")
			if err := errors.Join(os.Mkdir(dir, 0o755), os.Mkdir(outside, 0o755), os.WriteFile(outside+"/secret", nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			for i := range layer {
				layer[i].Linkname = strings.Replace(layer[i].Linkname, "@", outside, 1)
			}
			image := foreign(t, layer)
			if err := image.Unpack(t.Context(), dir); err != nil {
				t.Logf("refused: %v", err)
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"outside", "outside/secret"}, names(t, parent)); diff != "" {
				t.Errorf("outside of the directory (-want +got):\n%s", diff)
			}
			info, err := os.Stat(outside + "/secret")
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode() != 0o600 || info.Sys().(*syscall.Stat_t).Nlink != 1 {
				t.Errorf("a file outside: %v", info.Mode())
			}
		})
	}
}

func TestUnpackChecksLayers(t *testing.T) {
	image := foreign(t, []tar.Header{{Name: "a"}})
	image.Config.RootFS.DiffIDs[0] = digest.FromString("else")
	if err := image.Unpack(t.Context(), t.TempDir()); err == nil {
		t.Error("a layer with other contents than the config says: no error")
	}
}

// TestDeclaredImage runs an image that has been built for real, when one has.
func TestDeclaredImage(t *testing.T) {
	needs(t, "runc")
	c, err := Declared()
	if err != nil {
		t.Fatal(err)
	}
	cache, err := filepath.Abs("../../.cache/images")
	if err != nil {
		t.Fatal(err)
	}
	b := Builder{Cache: cache}
	built, err := b.Cached(c, "redis:1")
	if err != nil {
		t.Fatal(err)
	}
	if built == nil {
		t.Skip("redis:1 is not built; `bench images build redis:1` does it")
	}
	v, err := b.Verify(t.Context(), built, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var labels map[string]string
	text, err := json.Marshal(built.Config.Config.Labels)
	if err := errors.Join(err, json.Unmarshal(text, &labels)); err != nil {
		t.Fatal(err)
	}
	if v.Files < 1000 || !strings.Contains(built.Version(), "7.") || labels[v1.AnnotationTitle] != "redis" {
		t.Errorf("%+v, version %s, labels %v", v, built.Version(), labels)
	}
}
