package pods

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
)

func TestWithArgs(t *testing.T) {
	built := &images.Built{Config: ocispec.Image{Config: ocispec.ImageConfig{Entrypoint: []string{"entry"}, Cmd: []string{"redis-server", "conf"}}}}
	for _, c := range []struct {
		name, args string
		command    []string
		want       []string
	}{
		{"redis:1", imageArgs, nil, nil},
		{"redis:1", imageArgs, []string{"task"}, []string{"task"}},
		{"redis:1", ownArgs, nil, []string{"redis-server", "conf", "--appendonly", "yes"}},
		{"redis:2", ownArgs, []string{"task"}, []string{"task", "--appendonly", "yes"}},
	} {
		im, err := withArgs(engines.Image{Name: c.name, Built: built, Command: c.command}, c.args)
		if err != nil || !slices.Equal(im.Command, c.want) {
			t.Errorf("%s, %s: %q, %v; want %q", c.name, c.args, im.Command, err, c.want)
		}
	}
	if _, err := withArgs(engines.Image{Name: "gcc:1", Built: built}, ownArgs); err == nil || !strings.Contains(err.Error(), "--args image") {
		t.Errorf("of an image without any: %v", err)
	}
}

func TestManifest(t *testing.T) {
	for declared, want := range map[string]map[string]any{
		"tcp:6379":     {"tcpSocket": map[string]any{"host": "127.0.0.1", "port": 6379.}, "periodSeconds": 1.},
		"http:80/":     {"httpGet": map[string]any{"host": "127.0.0.1", "port": 80., "path": "/"}, "periodSeconds": 1.},
		"http:80/a/b?": {"httpGet": map[string]any{"host": "127.0.0.1", "port": 80., "path": "/a/b?"}, "periodSeconds": 1.},
	} {
		asked, err := probe(declared)
		if err != nil {
			t.Fatal(err)
		}
		text, err := manifest("p", "registry/app:1", []string{"a b", "--c=\"d\""}, asked)
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]any
		if err := json.Unmarshal([]byte(text), &got); err != nil {
			t.Fatal(err)
		}
		container := map[string]any{
			"name": "app", "image": "registry/app:1", "imagePullPolicy": "IfNotPresent",
			"args": []any{"a b", `--c="d"`}, "readinessProbe": want,
		}
		if diff := cmp.Diff([]any{container}, got["spec"].(map[string]any)["containers"]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", declared, diff)
		}
	}
	for _, bad := range []string{"", "tcp:", "tcp:x", "tcp:70000", "exec:true", "stdout:ready", "http:/"} {
		if asked, err := probe(bad); err == nil {
			t.Errorf("probe %q is %v", bad, asked)
		}
	}
	// Arguments and a probe that nobody asks for are not there: an empty list would replace the image's.
	if text, err := manifest("p", "i", nil, nil); err != nil || strings.Contains(text, "args") || strings.Contains(text, "readinessProbe") {
		t.Errorf("%v\n%s", err, text)
	}
}

func options() Options {
	return Options{Images: []string{"a:1"}, Engines: Engines, Args: Args, RTTs: []time.Duration{0, 150 * time.Millisecond}, Rate: 1e8, Runs: 2}
}

// records are those of a measurement that went well.
func records(m Measurement) (all []Record) {
	for i, node := range nodes(m.Engine) {
		all = append(all, Record{Measurement: m, Node: node, Running: float64(m.Run), Answers: float64(i + 2), Ready: 3.25})
	}
	return all
}

// What was measured is not measured again; what failed, or was not measured on all nodes, is.
func TestMissing(t *testing.T) {
	all := missing(options(), nil)
	if len(all) != 2*2*2*2 {
		t.Fatalf("%d measurements: %v", len(all), all)
	}
	if all[0].Engine != foilName || all[1].Engine != overlayName || all[4].Run != 2 || all[4].Engine != overlayName {
		t.Errorf("engines do not take turns: %v", all)
	}
	path := filepath.Join(t.TempDir(), "results")
	for i, m := range all[:6] {
		made := records(m)
		switch i {
		case 2:
			made[1].Err = "it failed"
		case 3:
			made[0].Err = "it failed"
		}
		if err := add(path, made); err != nil {
			t.Fatal(err)
		}
	}
	read, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slices.Concat(all[2:4], all[6:]), missing(options(), read)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	o := options()
	o.Rate = 1e9
	if got := missing(o, read); len(got) != len(all) {
		t.Errorf("at another rate %d are left, want all", len(got))
	}
	// A writer was killed: its last line goes.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"image": "a`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := add(path, records(all[6])); err != nil {
		t.Fatal(err)
	}
	again, err := Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append(read, records(all[6])...), again); diff != "" {
		t.Errorf("after a kill (-want +got):\n%s", diff)
	}
	if err := os.WriteFile(path, []byte("{}\nnonsense\n{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(path); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("nonsense: %v", err)
	}
}

func TestTable(t *testing.T) {
	var all []Record
	for _, m := range missing(options(), nil) {
		all = append(all, records(m)...)
	}
	all[0].Err = "it failed"
	all = append(all, Record{Measurement: Measurement{Image: "b:1", Args: imageArgs, Engine: overlayName}, Node: "any", Running: 1, Answers: 2, Ready: 3})
	const head = "| pod | overlayfs | foil, first node | foil, second node |\n| --- | --- | --- | --- |\n"
	const rest = "| 1.50 / 2.00 / 3.25 (2) | 1.50 / 2.00 / 3.25 (2) | 1.50 / 3.00 / 3.25 (2) |\n"
	const text = ". Seconds until the container runs / the service answers / the pod is ready, medians of runs (their number).\n\n"
	want := "\nRound trip 0s, 100 Mbit/s" + text + head +
		"| a:1 | 1.50 / 2.00 / 3.25 (2) | 2.00 / 2.00 / 3.25 (1) | 1.50 / 3.00 / 3.25 (2) |\n| a:1, own arguments " + rest +
		"\nRound trip 0s, no limit of the rate" + text + head + "| b:1 | 1.00 / 2.00 / 3.00 (1) | – | – |\n" +
		"\nRound trip 150ms, 100 Mbit/s" + text + head + "| a:1 " + rest + "| a:1, own arguments " + rest
	if diff := cmp.Diff(want, Table(all)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
