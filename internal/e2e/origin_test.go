package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestContainerdSecondClaim has images of other registries name the layers of a lazy one. containerd has their snapshots,
// and would run them on what came from the first registry, without asking anybody but the mirror.
func TestContainerdSecondClaim(t *testing.T) {
	needBusybox(t)
	s := startServer(t, t.TempDir())
	f := newFront(t, s, true)
	w := startMirrored(t, f)
	img := runnable(t, 20, 5_000)
	s.push("app", "1", img)
	plain := plainRegistry(t, s)
	b, err := os.ReadFile(filepath.Join(w.hosts, "registry.example", "hosts.toml"))
	if err != nil {
		t.Fatal(err)
	}
	for registry, text := range map[string]string{
		"other.example": string(b),
		"plain.example": strings.NewReplacer(f.URL, "http://"+plain, `ca = "../ca.pem"`, "").Replace(string(b)),
	} {
		dir := filepath.Join(w.hosts, registry)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := startContainerd(t, containerd2, w)
	lazily := []string{"--snapshotter", "hydrofoil"}
	const first = "registry.example/app:1"
	c.pullFrom(t, w, first, lazily...)
	for _, second := range []string{"other.example/app:1", "plain.example/app:1"} {
		before := strings.Count(w.log.String(), "an image is refused to containerd")
		_, err := c.tryCtr("images", "pull", "--hosts-dir", w.hosts, "--snapshotter", "hydrofoil", second)
		if err == nil || !strings.Contains(err.Error(), "300 Multiple Choices") {
			t.Errorf("pull %s: %v", second, err)
		}
		if strings.Count(w.log.String(), "an image is refused to containerd") == before {
			t.Error("the daemon's log does not say why")
		}
	}
	c.pullFrom(t, w, first, lazily...)
	c.ctr(t, "images", "rm", "--sync", first)
	c.pullFrom(t, w, "other.example/app:1", lazily...)
}
