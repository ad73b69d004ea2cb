package setup

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/containerd"
	"hydrofoil.dev/foil/internal/worker/mirror"
)

const goodUnit = "LoadState=loaded\nNeedDaemonReload=no\nFragmentPath=/etc/systemd/system/foil-node.service\nType=notify\nKillMode=process\nFileDescriptorStoreMax=16384\n"

// serveMirror serves the mirror of a root.
func serveMirror(t *testing.T, l net.Listener, root string) {
	t.Helper()
	key, err := mirror.LoadKey(root, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- mirror.New(mirror.Options{}).Serve(ctx, l, key) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestCheck(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	here, nobody := l.Addr().String(), gone.Addr().String()
	root := t.TempDir()
	serveMirror(t, l, root)
	dirs := func(files map[string]string) string {
		root := t.TempDir()
		for name, text := range files {
			dir := filepath.Join(root, name)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return root
	}
	host := func(url string) string {
		return "server = \"https://registry.example\"\n[host.\"" + url + "\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
	}
	base := Options{Root: root, Mirror: "off", Metrics: "off", DiskLimit: "80%", Unit: goodUnit, Running: "1", Version: "1"}
	for name, test := range map[string]struct {
		change func(*Options)
		want   []string // name, state and part of what is found or to be done
	}{
		"nothing is set up": {func(o *Options) { o.DiskLimit, o.Unit = "", "LoadState=not-found\n" }, []string{
			"disk limit note disk-limit = ", "origins ok wall; without the mirror", "systemd unit note is not installed"}},
		"good": {func(o *Options) {
			o.Mirror, o.Metrics = here, here
			o.HostsDirs = dirs(map[string]string{"registry.example": mirror.Hosts(root, here), "other.example_5000_": host("https://else.example")})
		}, []string{"hosts.toml ok 2 read", "mirror ok 1 hosts.toml name it", "metrics ok " + here, "disk limit ok 80%", "origins ok ", "systemd unit ok /etc/"}},
		"nobody listens": {func(o *Options) { o.Mirror, o.Metrics = nobody, nobody }, []string{
			"mirror wrong start the daemon", "metrics wrong start the daemon", "disk limit ok ", "origins ok ", "systemd unit ok "}},
		"nobody asks the mirror": {func(o *Options) {
			o.Mirror = here
			o.HostsDirs = dirs(map[string]string{"_default": host("https://else.example")})
		}, []string{"hosts.toml ok 1 read", "mirror wrong containerd never asks", "disk limit ok ", "origins ok ", "systemd unit ok "}},
		"asked without its key": {func(o *Options) {
			o.Mirror = here
			o.HostsDirs = dirs(map[string]string{"_default": host("http://" + here), "a.example": host("https://" + here), "b.example": mirror.Hosts(root, here)})
		}, []string{"hosts.toml wrong answers 400", "hosts.toml wrong client = \"" + mirror.KeyPath(root), "hosts.toml ok 3", "mirror ok ", "disk limit ok ", "origins ok ", "systemd unit ok "}},
		"bad files": {func(o *Options) {
			o.HostsDirs = dirs(map[string]string{
				"a.example": "server = ",
				"b.example": host("https://b.example") + "ca = \"/nowhere/ca.pem\"\n",
				"c.example": host("https://c.example") + "client = [[\"/nowhere/cert.pem\", \"/nowhere/key.pem\"]]\n",
			})
		}, []string{"hosts.toml wrong a.example", "hosts.toml wrong /nowhere/ca.pem", "hosts.toml wrong /nowhere/cert.pem", "disk limit ok ", "origins ok ", "systemd unit ok "}},
		"addresses": {func(o *Options) { o.Mirror, o.Metrics, o.DiskLimit = "0.0.0.0:598", "598", "much" }, []string{
			"mirror wrong loopback", "metrics wrong HOST:PORT", "disk limit wrong is no limit", "origins ok ", "systemd unit ok "}},
		"an old unit": {func(o *Options) {
			o.Unit = strings.NewReplacer("=process", "=control-group", "Max=16384", "Max=0").Replace(goodUnit)
		}, []string{"disk limit ok ", "origins ok ", "systemd unit wrong KillMode=control-group, not process"}},
		"a changed unit": {func(o *Options) { o.Unit = strings.Replace(goodUnit, "Reload=no", "Reload=yes", 1) }, []string{
			"disk limit ok ", "origins ok ", "systemd unit wrong daemon-reload"}},
		"two registries, one mirror": {func(o *Options) {
			o.Mirror = here
			o.HostsDirs = dirs(map[string]string{"registry.example": mirror.Hosts(root, here)})
			o.Registries = []string{"other.example:5000", "registry.example"}
		}, []string{"hosts.toml ok 1 read", "mirror ok ", "disk limit ok ", "origins note those of other.example:5000", "systemd unit ok "}},
		"two registries, the mirror of all": {func(o *Options) {
			o.Mirror = here
			o.HostsDirs = dirs(map[string]string{"_default": mirror.Hosts(root, here)})
			o.Registries = []string{"other.example:5000", "registry.example"}
		}, []string{"hosts.toml ok 1 read", "mirror ok ", "disk limit ok ", "origins ok wall", "systemd unit ok "}},
		"two registries in a group": {func(o *Options) {
			o.Registries, o.Groups = []string{"other.example:5000", "registry.example"}, []string{"registry.example other.example:5000"}
		}, []string{"disk limit ok ", "origins ok other.example:5000; without the mirror", "systemd unit ok "}},
		"a group of one": {func(o *Options) { o.Groups = []string{"registry.example"} }, []string{
			"disk limit ok ", "origins wrong correct origin-group", "systemd unit ok "}},
		"an old daemon": {func(o *Options) { o.Running = "0" }, []string{"disk limit ok ", "origins ok ", "systemd unit ok ", "version note systemctl restart"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := base
			test.change(&o)
			got := slices.DeleteFunc(Check(t.Context(), o), func(f finding) bool { return f.Name == "policy" }) // see TestPolicies
			for i, f := range got {
				line := f.Name + " " + string(f.State) + " "
				if i >= len(test.want) || !strings.HasPrefix(test.want[i], line) || !strings.Contains(f.Detail+" "+f.Fix, strings.TrimPrefix(test.want[i], line)) {
					t.Errorf("finding %d: %+v", i, f)
				}
				if o.Mirror != "off" && strings.Contains(f.Detail, "without the mirror") {
					t.Errorf("there is a mirror: %+v", f)
				}
				if f.State == containerd.Wrong && f.Fix == "" {
					t.Errorf("%s: nothing to do", f.Name)
				}
			}
			if len(got) != len(test.want) {
				t.Errorf("%d findings, want %d", len(got), len(test.want))
			}
		})
	}
}

// Registry and mirror on an IPv6 address.
func TestCheckIPv6(t *testing.T) {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("this host has no IPv6: %v", err)
	}
	dirs, root := t.TempDir(), t.TempDir()
	serveMirror(t, l, root)
	for _, registry := range []string{"[::1]_5000_", "[fd00::7]:5000", "[fd00::8]_443_"} {
		if err := os.Mkdir(filepath.Join(dirs, registry), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dirs, registry, "hosts.toml"), []byte(mirror.Hosts(root, l.Addr().String())), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range Check(t.Context(), Options{Root: root, HostsDirs: dirs, Mirror: l.Addr().String(), Metrics: l.Addr().String(), DiskLimit: "80%", Unit: goodUnit}) {
		if f.State != containerd.OK || f.Name == "mirror" && !strings.Contains(f.Detail, "3 hosts.toml name it") {
			t.Errorf("%+v", f)
		}
	}
}

func TestRegistryOf(t *testing.T) {
	for dir, want := range map[string]string{
		"_default": "registry.invalid", "registry.example": "registry.example", "registry.example_5000_": "registry.example:5000",
		"registry.example:5000": "registry.example:5000", "[::1]_5000_": "[::1]:5000", "[::1]:5000": "[::1]:5000", "10.0.0.1_80_": "10.0.0.1:80",
	} {
		if got := registryOf(dir); got != want {
			t.Errorf("%s: %s, want %s", dir, got, want)
		}
	}
}

// The unit that is shipped is one that the check finds right.
func TestShippedUnit(t *testing.T) {
	b, err := os.ReadFile("../../../deploy/systemd/foil-node.service")
	if err != nil {
		t.Fatal(err)
	}
	shown := "LoadState=loaded\nNeedDaemonReload=no\n" + string(b)
	if f := checkUnit(shown); f.State != containerd.OK {
		t.Errorf("%+v", f)
	}
}
