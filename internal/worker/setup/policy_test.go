package setup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/containerd"
)

func TestPolicies(t *testing.T) {
	dirs := t.TempDir()
	for registry, text := range map[string]string{
		"tls.example":         `server = "https://tls.example"`,
		"plain.example_5000_": `server = "http://plain.example:5000"`,
		"skip.example":        "server = \"https://skip.example\"\nskip_verify = true",
		"mixed.example":       "server = \"https://mixed.example\"\n[host.\"http://near.example\"]",
		"_default":            "[host.\"https://mirror.example\"]",
		"broken.example":      "server = 1 1",
	} {
		if err := os.MkdirAll(filepath.Join(dirs, registry), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dirs, registry, "hosts.toml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := checkPolicies(t.Context(), Options{HostsDirs: dirs, Registries: []string{"tls.example", "here.example"}, Unproven: map[string]string{"here.example": "http://here.example: it is spoken to without TLS"},
		Policies: []string{"skip.example=served", "strict.example=proven"}})
	want := []string{
		"ok broken.example: served", // as if there were none
		"ok here.example: proven: a container waits for the proof of its image (images here came from http://here.example",
		"ok mixed.example: served by hosts that are authenticated, proven by others (http://near.example: ",
		"ok plain.example:5000: proven: a container waits for the proof of its image (http://plain.example:5000: it is spoken to without TLS)",
		"note skip.example: served: --policy says so, though nothing shows who answers (https://skip.example: its certificate is not verified)",
		"ok strict.example: proven: --policy says so",
		"ok tls.example: served: its hosts are authenticated by TLS, or on this machine",
	}
	if len(got) != len(want) {
		t.Fatalf("%d findings, want %d: %+v", len(got), len(want), got)
	}
	for i, f := range got {
		if !strings.HasPrefix(string(f.State)+" "+f.Detail, want[i]) {
			t.Errorf("%s %s\nwant %s", f.State, f.Detail, want[i])
		}
	}
	bad := checkPolicies(t.Context(), Options{Policies: []string{"a=b"}})
	if len(bad) != 1 || bad[0].State != containerd.Wrong || bad[0].Fix == "" {
		t.Errorf("a wrong policy: %+v", bad)
	}
}
