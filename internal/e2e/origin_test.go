package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestContainerdSecondClaim has images of other registries name the layers of a lazy one. containerd has their snapshots,
// and would run them on what came from the first registry, without asking anybody but the mirror. That has it proven first.
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
	// The first claim has it proven, at the latest.
	for _, second := range []string{"other.example/app:1", "plain.example/app:1"} {
		c.pullFrom(t, w, second, lazily...)
	}
	if log := w.log.String(); !strings.Contains(log, "image proven") || strings.Contains(log, "an image is refused to containerd") {
		t.Error("the images of others run on what nobody has proven, or one was refused it")
	}
	c.pullFrom(t, w, first, lazily...)
	c.ctr(t, "images", "rm", "--sync", first)
	c.pullFrom(t, w, "other.example/app:1", lazily...)
}
