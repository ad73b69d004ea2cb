package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	digest "github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

func TestDeclared(t *testing.T) {
	c, err := Declared()
	if err != nil {
		t.Fatal(err)
	}
	first, err := c.Find("redis:1")
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.Find("redis:2")
	if err != nil {
		t.Fatal(err)
	}
	if first.Base == second.Base {
		t.Error("both versions of redis have one base, so they share a layer")
	}
	if first.Probe == "" {
		t.Error("redis:1 has no probe")
	}
	if _, err := c.Find("redis:3"); err == nil || !strings.Contains(err.Error(), "redis:2") {
		t.Errorf("an image that is not declared: %v", err)
	}
}

func TestParseRefuses(t *testing.T) {
	const base = "[[base]]\nname=\"b\"\npockets=[\"release\"]\ncreated=2025-01-01T00:00:00Z\n"
	const image = "[[image]]\nname=\"i\"\ntag=\"1\"\nbase=\"b\"\ncreated=2025-01-01T00:00:00Z\n"
	if _, err := parse([]byte(base + image)); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"unknown key":    base + image + "colour=\"red\"\n",
		"unknown pocket": strings.Replace(base, "release", "sid", 1),
		"unknown base":   image,
		"image twice":    base + image + image,
		"no tag":         base + strings.Replace(image, "tag=\"1\"\n", "", 1),
		"no pockets":     strings.Replace(base, "[\"release\"]", "[]", 1),
		"path upwards":   base + image + "[image.files]\n\"/../etc/passwd\"=\"\"\n",
		"relative path":  base + image + "[image.files]\n\"etc/passwd\"=\"\"\n",
	} {
		if _, err := parse([]byte(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// entry is what a test looks at in a layer.
type entry struct {
	Name, Link, Body string
	Type             byte
	Mode             int64
	Xattr            string
	Time             int64
}

func readLayer(t *testing.T, blob []byte) (entries []entry) {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(z)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return entries
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, entry{h.Name, h.Linkname, string(body), h.Typeflag, h.Mode, h.PAXRecords["SCHILY.xattr.security.capability"], h.ModTime.Unix()})
	}
}

func TestWriteLayer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("whiteouts and trusted xattrs need root")
	}
	root := t.TempDir()
	created := time.Unix(1700000000, 0)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	path := func(name string) string { return filepath.Join(root, name) }
	must(os.MkdirAll(path("a/opaque"), 0o755))
	must(unix.Setxattr(path("a/opaque"), "trusted.overlay.opaque", []byte("y"), 0))
	must(unix.Setxattr(path("a"), "trusted.overlay.impure", []byte("y"), 0))
	must(os.WriteFile(path("a/one"), []byte("once"), 0o755))
	must(os.Chmod(path("a/one"), 0o755|os.ModeSetuid))
	// cap_net_raw+ep, see capabilities(7) and linux/capability.h.
	capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	must(unix.Setxattr(path("a/one"), "security.capability", []byte(capability), 0))
	must(os.Link(path("a/one"), path("b-link")))
	must(os.Symlink("a/one", path("c-symlink")))
	must(unix.Mknod(path("deleted"), unix.S_IFCHR, 0))
	must(os.MkdirAll(path("dev"), 0o755))
	must(os.WriteFile(path("dev/left"), nil, 0o644))
	must(os.WriteFile(path("old"), nil, 0o644))
	must(os.Chtimes(path("old"), time.Unix(1000, 7), time.Unix(1000, 7)))

	var blob, again bytes.Buffer
	descriptor, diffID, err := writeLayer(&blob, root, true, created)
	must(err)
	const young = 1700000000
	want := []entry{
		{"a/", "", "", tar.TypeDir, 0o755, "", young},
		{"a/one", "", "once", tar.TypeReg, 0o4755, capability, young},
		{"a/opaque/", "", "", tar.TypeDir, 0o755, "", young},
		{"a/opaque/.wh..wh..opq", "", "", tar.TypeReg, 0, "", young},
		{"b-link", "a/one", "", tar.TypeLink, 0o4755, capability, young},
		{"c-symlink", "a/one", "", tar.TypeSymlink, 0o777, "", young},
		{".wh.deleted", "", "", tar.TypeReg, 0, "", young},
		{"dev/", "", "", tar.TypeDir, 0o755, "", young},
		{"old", "", "", tar.TypeReg, 0o644, "", 1000},
	}
	if diff := cmp.Diff(want, readLayer(t, blob.Bytes())); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if descriptor.Digest != digest.FromBytes(blob.Bytes()) || descriptor.Size != int64(blob.Len()) {
		t.Errorf("%+v does not describe the %d bytes that were written", descriptor, blob.Len())
	}
	z, err := gzip.NewReader(&blob)
	must(err)
	plain, err := io.ReadAll(z)
	must(err)
	if diffID != digest.FromBytes(plain) {
		t.Error("the diff ID is not that of the uncompressed layer")
	}
	second, _, err := writeLayer(&again, root, true, created)
	must(err)
	if second.Digest != descriptor.Digest {
		t.Error("the same tree gave two digests")
	}
}

func TestOnce(t *testing.T) {
	b := Builder{Cache: t.TempDir()}
	dir := filepath.Join(b.Cache, "x")
	failed := errors.New("failed")
	if err := b.once(dir, func(partial string) error { return errors.Join(os.Mkdir(partial, 0o755), failed) }); !errors.Is(err, failed) {
		t.Fatalf("got %v", err)
	}
	entries, err := os.ReadDir(b.Cache)
	if err != nil || len(entries) != 0 {
		t.Fatalf("a failed build left %v, %v", entries, err)
	}
	calls := 0
	for range 2 {
		if err := b.once(dir, func(partial string) error { calls++; return os.Mkdir(partial, 0o755) }); err != nil {
			t.Fatal(err)
		}
	}
	if calls != 1 {
		t.Errorf("built %d times", calls)
	}
}

func TestSkopeoSource(t *testing.T) {
	for ref, want := range map[string]string{
		"registry.example/redis:7":       "docker://registry.example/redis:7",
		"registry.example:5000/redis":    "docker://registry.example:5000/redis",
		"localhost:5000/redis:7":         "docker://localhost:5000/redis:7 --src-tls-verify=false",
		"127.0.0.1:5000/redis:7":         "docker://127.0.0.1:5000/redis:7 --src-tls-verify=false",
		"[::1]:5000/redis":               "docker://[::1]:5000/redis --src-tls-verify=false",
		"docker://registry.example/a":    "docker://registry.example/a",
		"docker-archive:/tmp/redis.tar":  "docker-archive:/tmp/redis.tar",
		"oci:/tmp/layout:tag":            "oci:/tmp/layout:tag",
		"registry.example/a@sha256:0000": "docker://registry.example/a@sha256:0000",
	} {
		source, options := skopeoSource(ref)
		if got := strings.Join(append([]string{source}, options...), " "); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}
