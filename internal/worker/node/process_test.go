package node

import (
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/kernel"
)

// What is left to a container before it begins is bounded by its own limit, and by those above it.
func TestMemoryLeft(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"cgroup.controllers": "memory\n",
		"pod/memory.max":     "5000\n",
		"pod/memory.high":    "max\n",
		"pod/memory.current": "1000\n",
		"pod/memory.stat":    "inactive_file 0\n",
	} {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		p    Process
		want int64
	}{
		{Process{}, kernel.Unlimited},
		{Process{Memory: 3000}, 3000},
		{Process{Cgroup: "/pod/container"}, 4000},
		{Process{Cgroup: "/pod/container", Memory: 3000}, 3000},
		{Process{Cgroup: "/pod/container", Memory: 9000}, 4000},
		{Process{Cgroup: "/another", Memory: 9000}, 9000},
		{Process{Cgroup: "/another"}, kernel.Unlimited},
	} {
		if got := c.p.memoryLeft(kernel.Cgroups(dir)); got != c.want {
			t.Errorf("%+v: %d, want %d", c.p, got, c.want)
		}
	}
	if got := (Process{Cgroup: "/pod", Memory: 7}).memoryLeft(kernel.Cgroups(t.TempDir())); got != 7 {
		t.Errorf("without cgroups: %d", got)
	}
}
