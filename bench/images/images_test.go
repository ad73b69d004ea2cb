package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
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
	versions := map[string][]Image{}
	for _, image := range c.Images {
		versions[image.Name] = append(versions[image.Name], image)
		if image.Task == "" || image.Category == "" || image.Version == "" {
			t.Errorf("%s lacks a task, a category or a version", image.Ref())
		}
	}
	for name, images := range versions {
		if len(images) != 2 || images[0].Tag != "1" || images[1].Tag != "2" {
			t.Errorf("%s: want the versions 1 and 2, got %d", name, len(images))
			continue
		}
		if images[0].Snapshot == images[1].Snapshot {
			t.Errorf("both versions of %s have one snapshot, so they share a layer", name)
		}
		if diff := cmp.Diff(images[0].Entrypoint, images[1].Entrypoint); diff != "" {
			t.Errorf("the versions of %s start differently:\n%s", name, diff)
		}
	}
	want := []string{"debian", "redis", "memcached", "postgres", "registry", "nginx", "django", "nextjs",
		"python", "node", "golang", "gcc", "openjdk", "scipy", "pytorch",
		"mariadb", "mediawiki", "jupyter"}
	for _, name := range want {
		if versions[name] == nil {
			t.Errorf("%s is not declared", name)
		}
	}
	if len(c.Hub) != 21 {
		t.Errorf("%d images of a public registry, want the 21 of Starlight's table 2", len(c.Hub))
	}
	if _, err := c.Find("redis:3"); err == nil || !strings.Contains(err.Error(), "redis:2") {
		t.Errorf("an image that is not declared: %v", err)
	}
}

const (
	testSnapshot = "[[snapshot]]\nname=\"s\"\nsuite=\"bookworm\"\npockets=[\"release\"]\ncreated=2025-01-01T00:00:00Z\n"
	testBase     = "[[base]]\nname=\"b\"\n"
	testImage    = "[[image]]\nname=\"i\"\nbase=\"b\"\nprobe=\"exit\"\n"
	testVersion  = "[[image.version]]\ntag=\"1\"\nsnapshot=\"s\"\n"
	testAll      = testSnapshot + testBase + testImage + testVersion
)

func TestParseRefuses(t *testing.T) {
	if _, err := Parse([]byte(testAll)); err != nil {
		t.Fatal(err)
	}
	without := func(part string) string { return strings.Replace(testAll, part, "", 1) }
	with := func(old, new string) string {
		if !strings.Contains(testAll, old) {
			t.Fatalf("no %q to replace", old)
		}
		return strings.Replace(testAll, old, new, 1)
	}
	for name, c := range map[string]struct{ text, want string }{
		"unknown key":       {testAll + "colour=\"red\"\n", "colour"},
		"unknown pocket":    {with("release", "sid"), "sid"},
		"unknown base":      {without(testBase), "no base"},
		"unknown snapshot":  {without(testSnapshot), "no snapshot"},
		"version twice":     {testAll + testVersion, "twice"},
		"no version":        {without(testVersion), "no version"},
		"no tag":            {without("tag=\"1\"\n"), "tag"},
		"no pockets":        {with("[\"release\"]", "[]"), "pockets"},
		"no probe":          {without("probe=\"exit\"\n"), "probe"},
		"odd name":          {with("name=\"i\"", "name=\"I/J\""), "name and tag"},
		"path upwards":      {with(testVersion, "[[image.layer]]\nfiles={\"/../etc/passwd\"=\"\"}\n"+testVersion), "absolute"},
		"relative path":     {with(testVersion, "[[image.layer]]\nfiles={\"etc/passwd\"=\"\"}\n"+testVersion), "absolute"},
		"empty layer":       {with(testVersion, "[[image.layer]]\n"+testVersion), "empty"},
		"npm, no version":   {with(testVersion, "[[image.layer]]\nnpm=[\"@a/b\"]\n"+testVersion), "NAME@VERSION"},
		"no value":          {with(testVersion, "[[image.layer]]\nrun=\"%{x}\"\n"+testVersion), "%{x}"},
		"base of itself":    {with(testBase, testBase+"from=\"b\"\n"), "itself"},
		"base with layers":  {with(testBase, testBase+"[[base.layer]]\nrun=\"true\"\n"), "no from"},
		"hub with a host":   {testAll + "[[hub]]\nname=\"registry.example/a:1\"\nprobe=\"exit\"\n", "without a host"},
		"hub without a tag": {testAll + "[[hub]]\nname=\"a\"\nprobe=\"exit\"\n", "TAG"},
		"hub, no local one": {testAll + "[[hub]]\nname=\"a:1\"\nlocal=\"a\"\nprobe=\"exit\"\n", "called"},
		"not TOML":          {"[[image", "images: read declarations"},
	} {
		if _, err := Parse([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want something with %q", name, err, c.want)
		}
	}
}

func TestValues(t *testing.T) {
	c, err := Parse([]byte(testSnapshot + testBase + testImage + `
version_of = "%{v}"
args = ["echo", "%{tag}"]
[[image.layer]]
npm = ["a@%{v}"]
packages = ["p-%{suite}"]
files = { "/%{v}" = "%{v} and %{v}, not {v} or %v" }
run = "run %{v}"
pip = ["q==%{v}"]
[[image.version]]
tag = "1"
snapshot = "s"
values = { v = "7.1" }
[[image.version]]
tag = "2"
snapshot = "s"
values = { v = "7.2" }
`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Layer{{
		Npm: []string{"a@7.2"}, Packages: []string{"p-bookworm"},
		Files: map[string]string{"/7.2": "7.2 and 7.2, not {v} or %v"}, Run: "run 7.2", Pip: []string{"q==7.2"},
	}}, c.Images[1].Layers); diff != "" {
		t.Errorf("layers (-want +got):\n%s", diff)
	}
	if got := c.Images[0].Args[1] + c.Images[0].Version + c.Images[1].Args[1] + c.Images[1].Version; got != "17.127.2" {
		t.Errorf("args and versions: %s", got)
	}
	selected, err := c.Select([]string{"i:2"})
	if err != nil || len(selected) != 1 || selected[0].Tag != "2" {
		t.Errorf("select i:2: %v, %v", selected, err)
	}
	if selected, err = c.Select([]string{"i"}); err != nil || len(selected) != 2 {
		t.Errorf("select i: %v, %v", selected, err)
	}
	if _, err = c.Select([]string{"i", "j"}); err == nil {
		t.Error("select j: no error")
	}
}

func TestSourceLines(t *testing.T) {
	const targets = `http://mirror.example/debian bookworm main
http://mirror.example/debian bookworm contrib
http://mirror.example/debian bookworm main
http://mirror.example/debian bookworm-updates main
http://mirror.example/debian-security bookworm-security main
http://other.example/repo other main
`
	lines, err := sourceLines(targets, "bookworm", "trixie", []string{"release", "security", "backports"})
	want := []string{
		"deb http://mirror.example/debian trixie main",
		"deb http://mirror.example/debian-security trixie-security main",
		"deb http://mirror.example/debian trixie-backports main",
	}
	if diff := cmp.Diff(want, lines); err != nil || diff != "" {
		t.Errorf("%v, (-want +got):\n%s", err, diff)
	}
	if _, err := sourceLines(targets, "noble", "noble", []string{"release"}); err == nil || !strings.Contains(err.Error(), "sources.list.d") {
		t.Errorf("a suite that the host does not have: %v", err)
	}
}

func TestPackageVersion(t *testing.T) {
	const status = "Package: a\nVersion: 1\n\nPackage: b\nDescription: c\n Version: 3\nVersion: 5:2-1\n\nPackage: c\nVersion: 4\n"
	if got, err := packageVersion(status, "b"); got != "5:2-1" || err != nil {
		t.Errorf("b: %q, %v", got, err)
	}
	if _, err := packageVersion(status, "d"); err == nil {
		t.Error("d: no error")
	}
}

func TestClientEnv(t *testing.T) {
	env := clientEnv([]string{"PIP_INDEX_URL=http://index.example", "https_proxy=http://proxy.example", "PIP_FIND_LINKS=/opt", "SECRET=1"})
	for _, want := range []string{"PIP_INDEX_URL=http://index.example", "https_proxy=http://proxy.example", "PIP_CACHE_DIR=/run/build/cache/pip"} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %q", want, env)
		}
	}
	if all := strings.Join(env, " "); strings.Contains(all, "SECRET") || strings.Contains(all, "/opt") {
		t.Errorf("too much in %q", env)
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
