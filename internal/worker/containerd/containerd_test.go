package containerd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	root   = "/var/lib/foil"
	socket = root + "/run/snapshotter.sock"
)

func read(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// bad are the names of findings that are not OK, with their states.
func bad(list []Finding) map[string]State {
	m := make(map[string]State)
	for _, f := range list {
		if f.State != OK {
			m[f.Name] = f.State
		}
	}
	return m
}

// Configurations as containerd 2.4.2 and 1.7.28 print them, those of
// deploy/containerd, and each with one thing wrong.
func TestCheck(t *testing.T) {
	type change struct{ from, to string }
	two, one := "testdata/dump-2.4.toml", "testdata/dump-1.7.toml"
	deploy2, deploy1 := "../../../deploy/containerd/containerd-2.toml", "../../../deploy/containerd/containerd-1.7.toml"
	for _, tt := range []struct {
		name, file string
		major      int
		changes    []change
		want       map[string]State
		fix        string // in the advice of the first that is wrong
	}{
		{"2 as it should be", two, 0, nil, nil, ""},
		{"1.7 as it should be", one, 0, nil, nil, ""},
		{"the file for 2", deploy2, 2, nil, nil, ""},
		{"the file for 1.7", deploy1, 1, nil, nil, ""},
		{"2 without Hydrofoil", "testdata/default-2.4.toml", 0, nil, map[string]State{"proxy plugin": Absent}, "enable_remote_snapshot_annotations"},
		{"1.7 without Hydrofoil", "testdata/default-1.7.toml", 0, nil, map[string]State{"proxy plugin": Absent}, "[proxy_plugins.hydrofoil]"},
		{"2, another address", two, 0, []change{{"    address = '" + socket + "'\n    platform", "    address = '/run/foil.sock'\n    platform"}}, map[string]State{"proxy plugin": Wrong}, socket},
		{"1.7, another address", one, 0, []change{{`    address = "` + socket + `"` + "\n    capabilities", `    address = "/run/foil.sock"` + "\n    capabilities"}}, map[string]State{"proxy plugin": Wrong}, socket},
		{"another type", deploy2, 2, []change{{`type = "snapshot"`, `type = "content"`}}, map[string]State{"proxy plugin": Wrong}, `type = "snapshot"`},
		{"an address with a scheme", deploy2, 2, []change{{`address = "/`, `address = "unix:///`}}, nil, ""},
		{"2, annotations of the transfer service off", two, 0, []change{{"enable_remote_snapshot_annotations = 'true'", "enable_remote_snapshot_annotations = 'false'"}}, map[string]State{"transfer: annotations": Wrong}, "exports"},
		{"2, nothing to unpack", two, 0, []change{{"      platform = 'linux'\n      snapshotter = 'hydrofoil'", "      platform = 'linux/amd64'\n      snapshotter = 'overlayfs'"}}, map[string]State{"transfer: unpack": Wrong}, "unpack_config"},
		{"2, unpacks without a platform", two, 0, []change{{"      platform = 'linux'\n      snapshotter = 'hydrofoil'", "      platform = ''\n      snapshotter = 'hydrofoil'"}}, map[string]State{"transfer: unpack": Wrong}, `platform = "linux"`},
		{"2, another snapshotter for CRI", two, 0, []change{{"    snapshotter = 'hydrofoil'\n    disable", "    snapshotter = 'overlayfs'\n    disable"}}, map[string]State{"CRI: snapshotter": Wrong}, `[plugins."io.containerd.cri.v1.images"]`},
		{"1.7, another snapshotter for CRI", one, 0, []change{{`snapshotter = "hydrofoil"`, `snapshotter = "overlayfs"`}}, map[string]State{"CRI: snapshotter": Wrong}, `[plugins."io.containerd.grpc.v1.cri".containerd]`},
		{"2, CRI says nothing", two, 0, []change{{"disable_snapshot_annotations = false", "disable_snapshot_annotations = true"}}, map[string]State{"CRI: annotations": Wrong}, "disable_snapshot_annotations = false"},
		{"1.7, CRI says nothing", one, 0, []change{{"disable_snapshot_annotations = false", "disable_snapshot_annotations = true"}}, map[string]State{"CRI: annotations": Wrong}, "disable_snapshot_annotations = false"},
		{"1.7, a plain file without the line", deploy1, 1, []change{{"disable_snapshot_annotations = false", ""}}, map[string]State{"CRI: annotations": Wrong}, "disable_snapshot_annotations = false"},
		{"2, layers are discarded", two, 0, []change{{"discard_unpacked_layers = false", "discard_unpacked_layers = true"}}, map[string]State{"CRI: discarded layers": Note}, ""},
		{"1.7, layers are discarded", one, 0, []change{{"discard_unpacked_layers = false", "discard_unpacked_layers = true"}}, map[string]State{"CRI: discarded layers": Note}, ""},
		{"2, a runtime with a snapshotter of its own", two, 0, []change{{"          snapshotter = ''", "          snapshotter = 'nydus'"}}, map[string]State{"CRI: runtimes": Note}, ""},
		{"2 without CRI", two, 0, []change{{"disabled_plugins = []", "disabled_plugins = ['io.containerd.cri.v1.images']"}, {"    snapshotter = 'hydrofoil'\n    disable", "    snapshotter = 'overlayfs'\n    disable"}}, map[string]State{"CRI": Note}, ""},
		{"2, no mapping of IDs", two, 0, []change{{"    capabilities = ['remap-ids']", "    capabilities = []"}}, map[string]State{"user namespaces": Note}, ""},
		{"1.7, a mapping of IDs", deploy1, 1, []change{{`  type = "snapshot"`, "  type = \"snapshot\"\n  capabilities = [\"remap-ids\"]"}}, map[string]State{"user namespaces": Wrong}, "take it away"},
		{"2, no root", deploy2, 2, []change{{`    root = "/var/lib/foil"`, ""}}, map[string]State{"CRI: image filesystem": Wrong}, `root = "/var/lib/foil"`},
		{"1.7, no root", deploy1, 1, []change{{`    root = "/var/lib/foil"`, ""}}, map[string]State{"CRI: image filesystem": Wrong}, `root = "/var/lib/foil"`},
		{"2, another root", two, 0, []change{{"      root = '/var/lib/foil'", "      root = '/srv/foil'"}}, map[string]State{"CRI: image filesystem": Wrong}, `root = "/var/lib/foil"`},
		{"version 1", one, 0, []change{{"version = 2", "version = 1"}}, map[string]State{"configuration": Wrong}, "config migrate"},
		{"a plugin of another name at the socket", deploy1, 1, []change{{"proxy_plugins.hydrofoil]", "proxy_plugins.lazy]"}, {"proxy_plugins.hydrofoil.exports", "proxy_plugins.lazy.exports"}, {`snapshotter = "hydrofoil"`, `snapshotter = "lazy"`}}, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := read(t, tt.file)
			for _, c := range tt.changes {
				if !strings.Contains(text, c.from) {
					t.Fatalf("%s has no %q", tt.file, c.from)
				}
				text = strings.Replace(text, c.from, c.to, 1)
			}
			list, err := Check([]byte(text), Options{Socket: socket, Root: root, Major: tt.major})
			if err != nil {
				t.Fatal(err)
			}
			if tt.want == nil {
				tt.want = map[string]State{}
			}
			if diff := cmp.Diff(tt.want, bad(list)); diff != "" {
				t.Errorf("findings (-want +got):\n%s\n%+v", diff, list)
			}
			for _, f := range list {
				if f.State == Wrong || f.State == Absent {
					if f.Fix == "" || !strings.Contains(f.Fix, tt.fix) {
						t.Errorf("%s: the advice is %q, want %q in it", f.Name, f.Fix, tt.fix)
					}
				}
			}
		})
	}
	if _, err := Check([]byte("= broken"), Options{}); err == nil {
		t.Error("what is no TOML is read")
	}
}

// Whatever a file holds, it is read or refused.
func FuzzCheck(f *testing.F) {
	for _, name := range []string{"testdata/dump-2.4.toml", "testdata/dump-1.7.toml"} {
		f.Add([]byte(read(f, name)), 0)
	}
	f.Add([]byte("version = 3\nproxy_plugins = 1\nplugins = []\ndisabled_plugins = {}"), 2)
	f.Fuzz(func(t *testing.T, b []byte, major int) {
		_, _ = Check(b, Options{Socket: socket, Root: root, Major: major})
	})
}

func TestConfigFile(t *testing.T) {
	for want, args := range map[string][]string{
		"/etc/containerd/config.toml": {"/usr/bin/containerd", "--log-level", "debug"},
		"/a":                          {"containerd", "--config", "/a"},
		"/b":                          {"containerd", "-c", "/b"},
		"/c":                          {"containerd", "--config=/c"},
	} {
		if got := configFile(args); got != want {
			t.Errorf("%q: %s, want %s", args, got, want)
		}
	}
}

// A containerd that runs, as far as a directory like /proc says, and prints a
// version and a configuration.
func TestRunningContainerd(t *testing.T) {
	dir := t.TempDir()
	bin, conf, proc := filepath.Join(dir, "containerd"), filepath.Join(dir, "config.toml"), filepath.Join(dir, "proc")
	script := "#!/bin/sh\ncase \"$1\" in --version) echo 'containerd github.com/containerd/containerd/v2 v2.4.2 abc';; *) cat " + conf + ";; esac\n"
	for path, text := range map[string]string{bin: script, conf: read(t, "testdata/dump-2.4.toml")} {
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if h, err := Running(t.Context(), proc, socket); h != nil || err != nil {
		t.Errorf("without any process: %+v, %v", h, err)
	}
	for name, text := range map[string]string{"comm": "containerd\n", "cmdline": bin + "\x00--config\x00" + conf + "\x00"} {
		path := filepath.Join(proc, "123", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(bin, filepath.Join(proc, "123/exe")); err != nil {
		t.Fatal(err)
	}
	if h, err := Running(t.Context(), proc, "/another.sock"); h != nil || err != nil {
		t.Errorf("somebody else's: %+v, %v", h, err)
	}
	h, err := Running(t.Context(), proc, socket)
	if err != nil || h == nil || h.PID != 123 || h.Major != 2 || h.Config != conf || len(h.Data) == 0 {
		t.Fatalf("%+v, %v", h, err)
	}
	h.Stale = true
	list, err := h.Findings(t.Context(), Options{Socket: filepath.Join(dir, "none.sock")})
	if err != nil {
		t.Fatal(err)
	}
	got := bad(list)
	for name, want := range map[string]State{"proxy plugin": Wrong, "restart": Wrong, "daemon": Wrong} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q: %+v", name, got[name], want, list)
		}
	}
}

// A CRI that reads no exports names a directory below containerd's own root.
func TestImageDirectory(t *testing.T) {
	dir := t.TempDir()
	data := fmt.Appendf(nil, "version = 2\nroot = %q\n[proxy_plugins.lazy]\n  type = \"snapshot\"\n  address = %q\n", dir, socket)
	image, own := filepath.Join(dir, "io.containerd.snapshotter.v1.lazy"), filepath.Join(dir, "foil")
	h := Host{Data: data, Major: 1}
	o := Options{Socket: socket, Root: own}
	for _, step := range []struct {
		make  func() error
		blind bool
		want  State
	}{
		{nil, false, ""},
		{nil, true, Wrong},
		{func() error { return errors.Join(os.Mkdir(own, 0o700), os.Mkdir(image, 0o700)) }, true, Wrong},
		{func() error { return errors.Join(os.Remove(image), os.Symlink(own, image)) }, true, OK},
	} {
		if step.make != nil {
			if err := step.make(); err != nil {
				t.Fatal(err)
			}
		}
		h.Blind = step.blind
		list, err := h.Findings(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		var got Finding
		for _, f := range list {
			if f.Name == "CRI: image directory" {
				got = f
			}
		}
		if got.State != step.want || step.want == Wrong && !strings.Contains(got.Fix, image) {
			t.Errorf("it is %+v, want %q", got, step.want)
		}
	}
	for environ, want := range map[string]bool{"A=1\x00ENABLE_CRI_SANDBOXES=1\x00": true, "ENABLE_CRI_SANDBOXES=\x00": false, "A=ENABLE_CRI_SANDBOXES=1\x00": false} {
		if setsSandboxes([]byte(environ)) != want {
			t.Errorf("%q: want %v", environ, want)
		}
	}
}

func TestOrder(t *testing.T) {
	for after, want := range map[string]State{
		"After=network.target foil-node.service local-fs.target\n": OK,
		"After=network.target\n":                                   Wrong,
		"After=not-foil-node.service\n":                            Wrong,
	} {
		if got := orderFinding(after, nil); got.State != want {
			t.Errorf("%q: %+v", after, got)
		}
	}
	if got := orderFinding("", errors.New("no systemctl")); got.State != Note {
		t.Errorf("%+v", got)
	}
}

func TestTheInstalledContainerdIsUnderstood(t *testing.T) {
	for _, v := range []struct{ variable, config string }{
		{"FOIL_TEST_CONTAINERD2", "containerd-2.toml"}, {"FOIL_TEST_CONTAINERD1", "containerd-1.7.toml"},
	} {
		t.Run(v.config, func(t *testing.T) {
			dir := os.Getenv(v.variable)
			if dir == "" {
				t.Skipf("skip: %s names no directory with containerd", v.variable)
			}
			exe := filepath.Join(dir, "containerd")
			out, err := run(t.Context(), exe, "--config", "../../../deploy/containerd/"+v.config, "config", "dump")
			if err != nil {
				t.Fatal(err)
			}
			var h Host
			h.version(t.Context(), exe)
			list, err := Check(out, Options{Socket: socket, Root: root, Major: h.Major})
			if err != nil || len(bad(list)) > 0 {
				t.Errorf("%+v, %v", bad(list), err)
			}
		})
	}
}
