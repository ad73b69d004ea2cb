package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/containerd"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares got with testdata/NAME.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-update writes it anew):\n%s", path, diff)
	}
}

func TestDoctor(t *testing.T) {
	good := []kernel.Feature{
		{Name: "kernel", Have: true, Detail: "Linux 6.18.5 x86_64"},
		{Name: kernel.FeatureErofs, Have: true, Min: "Linux 6.12"},
		{Name: kernel.FeatureGate, Have: true, Need: true, Min: "Linux 6.12", Detail: kernel.GateFanotify},
		{Name: "open files", Detail: "limit 1024, 16384 wanted", Fix: "raise the limit"},
	}
	old := append([]kernel.Feature{}, good...)
	old[0].Detail = "Linux 6.1.0 x86_64"
	old[1] = kernel.Feature{Name: kernel.FeatureErofs, Min: "Linux 6.12", Detail: "mount: block device required", Fix: "use Linux 6.12 or newer"}
	old[2] = kernel.Feature{Name: kernel.FeatureGate, Need: true, Min: "Linux 6.12", Detail: "neither EROFS from files nor loop devices", Fix: "use Linux 6.14 or newer"}
	second := append([]kernel.Feature{}, good...)
	second[0].Detail = "Linux 6.12.1 x86_64"
	second[2].Detail = "fuse: no pre-content events: invalid argument"
	host := "containerd, process 7, configured in /etc/containerd/config.toml"
	found := []containerd.Finding{
		{Name: "proxy plugin", State: containerd.OK, Detail: "hydrofoil is at /run/s.sock"},
		{Name: "CRI: annotations", State: containerd.Wrong, Detail: "disable_snapshot_annotations is not false", Fix: "write:\ndisable_snapshot_annotations = false"},
		{Name: "CRI: discarded layers", State: containerd.Note, Detail: "discard_unpacked_layers is true", Fix: "know it"},
	}
	settings := []containerd.Finding{
		{Name: "mirror", State: containerd.Wrong, Detail: "nothing answers at 127.0.0.1:598: connection refused", Fix: "start the daemon"},
		{Name: "disk limit", State: containerd.OK, Detail: "80%"},
	}
	for _, test := range []struct {
		golden   string
		features []kernel.Feature
		host     string
		found    []containerd.Finding
		worker   []containerd.Finding
		json     bool
		fails    bool
	}{
		{"doctor-good.txt", good, "", nil, nil, false, false},
		{"doctor-fuse.txt", second, "", nil, nil, false, false},
		{"doctor-old.txt", old, "", nil, nil, false, true},
		{"doctor-old.jsonl", old, "", nil, nil, true, true},
		{"doctor-containerd.txt", good, host, found, nil, false, true},
		{"doctor-containerd.jsonl", good, host, found, nil, true, true},
		{"doctor-worker.txt", good, "", nil, settings, false, true},
		{"doctor-worker.jsonl", good, "", nil, settings, true, true},
		{"doctor-containerd-ok.txt", good, host, found[:1], nil, false, false},
	} {
		var b bytes.Buffer
		err := printDoctor(&b, "/var/lib/foil", test.features, []group{{"worker: ", "the settings of foil node", test.worker}, {"containerd: ", test.host, test.found}}, test.json)
		if (err != nil) != test.fails {
			t.Errorf("%s: error %v", test.golden, err)
		}
		golden(t, test.golden, b.Bytes())
	}
}
