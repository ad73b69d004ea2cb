package runner

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// rootfs makes a root directory with account files.
func rootfs(tb testing.TB) string {
	tb.Helper()
	root := filepath.Join(tb.TempDir(), "rootfs")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		tb.Fatal(err)
	}
	for name, text := range map[string]string{
		"passwd": "root:x:0:0::/root:/bin/sh\nweb:x:1000:1001::/home/web:/bin/sh\nbroken\n",
		"group":  "root:x:0:\nweb:x:1001:\nextra:x:3000:web,root\n",
	} {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
	return root
}

func TestSpecGolden(t *testing.T) {
	root := rootfs(t)
	dir := filepath.Dir(root)
	s, err := Spec(ocispec.Image{Config: ocispec.ImageConfig{
		User: "web", Env: []string{"PATH=/usr/bin", "A=1"}, Entrypoint: []string{"/entry"}, Cmd: []string{"cmd"}, WorkingDir: "/srv",
	}}, SpecOptions{ID: "golden", Dir: dir, Rootfs: root, Net: NoNetwork, Env: []string{"A=2"}})
	if err != nil {
		t.Fatal(err)
	}
	// Whether there is a cgroup namespace depends on the host.
	s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.CgroupNamespace })
	if err := WriteSpec(dir, s); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	got := strings.ReplaceAll(string(b), dir, "DIR") + "\n"
	name := filepath.Join("testdata", "config.json")
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("config.json differs from %s (-update rewrites it):\n%s", name, d)
	}
}

func TestUsers(t *testing.T) {
	root := rootfs(t)
	for _, tt := range []struct {
		user string
		want specs.User
		err  string
	}{
		{"", specs.User{AdditionalGids: []uint32{0, 3000}}, ""},
		{"root", specs.User{AdditionalGids: []uint32{0, 3000}}, ""},
		{"0", specs.User{AdditionalGids: []uint32{0, 3000}}, ""},
		{"web", specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 3000}}, ""},
		{"1000", specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{1001, 3000}}, ""},
		{"web:extra", specs.User{UID: 1000, GID: 3000, AdditionalGids: []uint32{3000}}, ""},
		{"web:7", specs.User{UID: 1000, GID: 7, AdditionalGids: []uint32{7}}, ""},
		{"55", specs.User{UID: 55, AdditionalGids: []uint32{0}}, ""},
		{"55:66", specs.User{UID: 55, GID: 66, AdditionalGids: []uint32{66}}, ""},
		{"nobody", specs.User{}, `"nobody"`},
		{"web:nogroup", specs.User{}, `"web:nogroup"`},
		{"-1", specs.User{}, `"-1"`},
	} {
		got, err := lookUpUser(root, tt.user)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%q: %+v, %v", tt.user, got, err)
			}
			continue
		}
		if d := cmp.Diff(tt.want, got); d != "" || err != nil {
			t.Errorf("%q: %v\n%s", tt.user, err, d)
		}
	}
}

// An image chooses what its /etc/passwd is; none of it may reach the host.
func TestAccountFilesStayInside(t *testing.T) {
	host := filepath.Join(t.TempDir(), "passwd")
	if err := os.WriteFile(host, []byte("web:x:9999:9999::/:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	inside := "usr/lib/passwd"
	replace := func(make func(root, name string) error) string {
		root := rootfs(t)
		name := filepath.Join(root, "etc/passwd")
		if err := os.MkdirAll(filepath.Join(root, "usr/lib"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(name, filepath.Join(root, inside)); err != nil {
			t.Fatal(err)
		}
		if err := make(root, name); err != nil {
			t.Fatal(err)
		}
		return root
	}
	link := func(target string) func(root, name string) error {
		return func(_, name string) error { return os.Symlink(target, name) }
	}
	for what, tt := range map[string]struct {
		make func(root, name string) error
		uid  uint32 // 0: an error
	}{
		"absolute link":          {link("/" + inside), 1000},
		"relative link":          {link("../" + inside), 1000},
		"link above the root":    {link("../../../../../" + inside), 1000},
		"link to the host":       {link(host), 0},
		"link above to the host": {link("../../../../../../../.." + host), 0},
		"link to itself":         {link("passwd"), 0},
		"FIFO":                   {func(_, name string) error { return unix.Mkfifo(name, 0o644) }, 0},
		"directory":              {func(_, name string) error { return os.Mkdir(name, 0o755) }, 0},
		"huge": {func(_, name string) error {
			return errorsFirst(os.WriteFile(name, nil, 0o644), os.Truncate(name, 1<<40))
		}, 0},
		"none": {func(_, name string) error { return nil }, 0},
	} {
		got, err := lookUpUser(replace(tt.make), "web")
		if (err == nil) != (tt.uid != 0) || got.UID != tt.uid {
			t.Errorf("%s: %+v, %v", what, got, err)
		}
	}
}

func errorsFirst(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestSpecRefuses(t *testing.T) {
	root := rootfs(t)
	cmd := ocispec.ImageConfig{Cmd: []string{"x"}}
	for _, tt := range []struct {
		name  string
		image ocispec.ImageConfig
		opts  SpecOptions
		want  string
	}{
		{"no command", ocispec.ImageConfig{}, SpecOptions{Dir: root, Rootfs: root}, "give a command"},
		{"no command after an entrypoint is dropped", cmd, SpecOptions{Dir: root, Rootfs: root, Entrypoint: []string{}}, "give a command"},
		{"relative rootfs", cmd, SpecOptions{Dir: root, Rootfs: "rootfs"}, "absolute"},
		{"relative bundle", cmd, SpecOptions{Dir: "x", Rootfs: root}, "absolute"},
		{"network", cmd, SpecOptions{Dir: root, Rootfs: root, Net: "bridge"}, "unknown network"},
		{"user", cmd, SpecOptions{Dir: root, Rootfs: root, User: "nobody"}, `"nobody"`},
	} {
		tt.opts.ID = "box"
		if _, err := Spec(ocispec.Image{Config: tt.image}, tt.opts); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "box") {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestSpecHostNetwork(t *testing.T) {
	root := rootfs(t)
	dir := filepath.Dir(root)
	s, err := Spec(ocispec.Image{Config: ocispec.ImageConfig{Cmd: []string{"x"}}}, SpecOptions{ID: "box", Dir: dir, Rootfs: root})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range s.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace {
			t.Error("a network namespace")
		}
	}
	if host, _ := os.Hostname(); s.Hostname != host {
		t.Errorf("host name %q, want %q", s.Hostname, host)
	}
	want, _ := os.ReadFile("/etc/hosts")
	if got, err := os.ReadFile(filepath.Join(dir, "hosts")); err != nil || len(want) > 0 && string(got) != string(want) {
		t.Errorf("hosts %q, %v", got, err)
	}
}

func TestStateDecodes(t *testing.T) {
	var s State
	err := json.Unmarshal([]byte(`{"ociVersion":"1.0.2-dev","id":"a","pid":17,"status":"running","bundle":"/b","rootfs":"/b/rootfs","created":"2026-01-02T03:04:05.678901234Z","owner":""}`), &s)
	if err != nil || s.ID != "a" || s.PID != 17 || s.Status != "running" || s.Bundle != "/b" || s.Created.Nanosecond() != 678901234 {
		t.Errorf("%+v, %v", s, err)
	}
}
