package kernel

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func features(tb testing.TB, root string) map[string]Feature {
	tb.Helper()
	list, err := Features(context.Background(), root)
	if err != nil {
		tb.Fatal(err)
	}
	byName := map[string]Feature{}
	for _, f := range list {
		tb.Logf("%-28s have %-5t need %-5t min %-12q %s", f.Name, f.Have, f.Need, f.Min, f.Detail)
		byName[f.Name] = f
		if f.Have != (f.Fix == "") {
			tb.Errorf("%s: have %t, and a fix %q", f.Name, f.Have, f.Fix)
		}
	}
	if len(byName) != len(list) || len(list) != len(table)+1 {
		tb.Errorf("%d features, %d names, %d in the table", len(list), len(byName), len(table))
	}
	return byName
}

// What a probe says and what other calls do must agree.
func TestFeatures(t *testing.T) {
	root := t.TempDir()
	f := features(t, filepath.Join(root, "not", "made", "yet"))
	if entries, err := os.ReadDir(root); err != nil || len(entries) != 0 {
		t.Errorf("probing left %v behind, %v", entries, err)
	}
	if mounts, err := Mounts(root); err != nil || len(mounts) != 0 {
		t.Errorf("probing left mounts %v behind, %v", mounts, err)
	}
	if f["root"].Have && os.Geteuid() != 0 {
		t.Errorf("root, but user ID %d", os.Geteuid())
	}
	if !strings.HasPrefix(f["kernel"].Detail, "Linux ") {
		t.Errorf("kernel: %q", f["kernel"].Detail)
	}
	var major, minor int
	if n, err := fmt.Sscanf(f["kernel"].Detail, "Linux %d.%d", &major, &minor); n != 2 {
		t.Fatalf("kernel %q: %v", f["kernel"].Detail, err)
	}
	if f[FeaturePreContent].Have && (major < 6 || major == 6 && minor < 14) {
		t.Errorf("pre-content events before Linux 6.14: %+v", f[FeaturePreContent])
	}
	gate, why, err := ChooseGate(context.Background(), root, Systemd())
	if (err == nil) != f[FeatureGate].Have || err == nil && !strings.HasPrefix(f[FeatureGate].Detail, gate) {
		t.Errorf("gate %q (%s), %v, but the feature %+v", gate, why, err, f[FeatureGate])
	}
	best := f[FeatureGated].Have && f[FeatureErofs].Have
	if gate, why, _ = ChooseGate(context.Background(), root, true); best != (gate == GateFanotify) || best != (why == "") {
		t.Errorf("gate %q (%s) where it is kept", gate, why)
	}
	// One that nobody keeps fails closed where that is possible.
	if gate, why, _ = ChooseGate(context.Background(), root, false); best && (f[FeatureFUSE].Have != (gate == GateFUSE) || !strings.Contains(why, "return zeros")) {
		t.Errorf("gate %q (%s) where nobody keeps it", gate, why)
	}
	if f[FeatureGated].Have && !f[FeaturePreContent].Have {
		t.Error("a gate without pre-content events")
	}
}

// A root directory on tmpfs cannot be gated; the fix must say so.
func TestFeaturesOnTmpfs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := t.TempDir()
	if err := mountNew("tmpfs", dir, nil, 0, fsconfigCreate); err != nil {
		t.Skipf("no tmpfs here: %v", err)
	}
	t.Cleanup(func() {
		if err := Unmount(dir, false); err != nil {
			t.Error(err)
		}
	})
	here, f := features(t, t.TempDir()), features(t, dir)
	// The events are the kernel's, whatever the filesystem.
	events := f[FeaturePreContent].Have
	if events != here[FeaturePreContent].Have {
		t.Errorf("pre-content events: %+v on tmpfs, %+v elsewhere", f[FeaturePreContent], here[FeaturePreContent])
	}
	if g := f[FeatureGated]; g.Have || events && !strings.Contains(g.Fix, "ext4") || !events && !strings.Contains(g.Fix, "Linux 6.14") {
		t.Errorf("gate on tmpfs: %+v", g)
	}
	if g := f[FeatureErofs]; g.Have || !strings.Contains(g.Fix, "cannot be on tmpfs") {
		t.Errorf("EROFS on tmpfs: %+v", g)
	}
	if g := f[FeatureGate]; g.Have {
		t.Errorf("a gate on tmpfs: %+v", g)
	}
	if g := f["root directory"]; !strings.Contains(g.Detail, "tmpfs") {
		t.Errorf("filesystem: %+v", g)
	}
}

func TestFeaturesOfAFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Features(context.Background(), name); err == nil {
		t.Error("a file was taken for a root directory")
	}
}
