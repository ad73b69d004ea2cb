package install

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/deploy"
	"hydrofoil.dev/foil/internal/worker/containerd"
)

func TestImports(t *testing.T) {
	const path = "/etc/containerd/conf.d/foil.toml"
	for _, tt := range []struct{ name, config, want, err string }{
		{name: "nothing", config: "", want: "imports = [\"" + path + "\"] # by foil install\n"},
		{
			name:   "no list",
			config: "# ours\nversion = 2\n\n[plugins]\n  imports = [\"no list of this kind\"]\n",
			want:   "imports = [\"" + path + "\"] # by foil install\n# ours\nversion = 2\n\n[plugins]\n  imports = [\"no list of this kind\"]\n",
		},
		{
			name:   "an empty list",
			config: "version = 3\nimports = []\n[debug]\n",
			want:   "version = 3\nimports = [\"" + path + "\", ]\n[debug]\n",
		},
		{
			name:   "others",
			config: "version = 3\nimports = [ # many\n  '/etc/containerd/a.toml',\n]\n",
			want:   "version = 3\nimports = [\"" + path + "\",  # many\n  '/etc/containerd/a.toml',\n]\n",
		},
		{name: "named", config: "imports = ['" + path + "']\n", want: "imports = ['" + path + "']\n"},
		{name: "by a pattern", config: "imports = [\"/etc/containerd/conf.d/*.toml\"]\n", want: "imports = [\"/etc/containerd/conf.d/*.toml\"]\n"},
		{name: "by a relative one", config: "imports = [\"conf.d/*\"]\n", want: "imports = [\"conf.d/*\"]\n"},
		{name: "quoted", config: "\"imports\" = [\"a.toml\"]\n", err: errImports.Error()},
		{name: "in a text", config: "root = '''\nimports = [ ]\n'''\nimports = ['a']\n", err: errImports.Error()},
		{name: "no TOML", config: "imports = [\n", err: "toml"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := addImport([]byte(tt.config), "/etc/containerd", path)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("%q, %v, want an error with %q", got, err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if again, err := addImport(got, "/etc/containerd", path); err != nil || string(again) != string(got) {
				t.Errorf("a second time: %q, %v", again, err)
			}
			if back := dropImport(got, path); string(back) != tt.config {
				t.Errorf("taken out again: %q, want %q", back, tt.config)
			}
		})
	}
}

// What somebody else has written stays, and is said.
func TestFile(t *testing.T) {
	f := file{path: filepath.Join(t.TempDir(), "sub", "file"), text: []byte("a = 1\n"), mode: 0o644}
	for i, want := range []bool{true, false} {
		if changed, err := f.put(); err != nil || changed != want {
			t.Fatalf("time %d: changed %v, %v", i, changed, err)
		}
	}
	if st, err := os.Stat(f.path); err != nil || st.Mode() != f.mode {
		t.Errorf("%v, %v, want mode %o", st, err, f.mode)
	}
	f.text = []byte("a = 2\n")
	if changed, err := f.put(); err != nil || !changed {
		t.Errorf("another version: changed %v, %v", changed, err)
	}
	if removed, err := f.remove(); err != nil || !removed {
		t.Errorf("removed %v, %v", removed, err)
	}
	if removed, err := f.remove(); err != nil || removed {
		t.Errorf("removed %v, %v, and it was not there", removed, err)
	}
	if err := os.WriteFile(f.path, []byte("a = 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := f.put(); !errors.Is(err, errForeign) {
		t.Errorf("over somebody else's file: %v", err)
	}
	if removed, err := f.remove(); err != nil || removed {
		t.Errorf("somebody else's file: removed %v, %v", removed, err)
	}
	if b, err := os.ReadFile(f.path); err != nil || string(b) != "a = 3\n" {
		t.Errorf("somebody else's file holds %q, %v", b, err)
	}
}

// The shipped configuration is for the paths that Install uses, and without all but its snapshotter
// containerd makes nothing new by it.
func TestConfiguration(t *testing.T) {
	o := containerd.Options{Socket: Socket, Root: Root, Major: 2}
	list, err := containerd.Check([]byte(deploy.Containerd2), o)
	if err != nil || len(list) == 0 {
		t.Fatal(list, err)
	}
	for _, f := range list {
		if f.State == containerd.Wrong {
			t.Errorf("%+v", f)
		}
	}
	if !strings.Contains(deploy.Unit, "ExecStart="+program(nil).path+" node\n") {
		t.Errorf("the unit does not start %s", program(nil).path)
	}
	only, err := proxyOnly(deploy.Containerd2)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Version int
		Plugins map[string]any
		Proxy   map[string]struct{ Type, Address string } `toml:"proxy_plugins"`
	}
	if err := toml.Unmarshal(only, &got); err != nil {
		t.Fatal(err)
	}
	if p := got.Proxy["hydrofoil"]; got.Version != 3 || got.Plugins != nil || p.Type != "snapshot" || p.Address != Socket {
		t.Errorf("%+v", got)
	}
}
