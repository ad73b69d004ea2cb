package commit

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
)

const baseConfig = `{"architecture":"arm64","variant":"v8","os":"linux","author":"before","container":"abc","container_config":{"Cmd":["x"]},
"config":{"Env":["PATH=/bin","A=1"],"Cmd":["old"],"WorkingDir":"/srv","Labels":{"keep":"1"},"Healthcheck":{"Test":["CMD","x"]},"Unknown":{"a":[1,2]}},
"history":[{"created_by":"base","unknown":1}],"rootfs":{"type":"layers","diff_ids":["sha256:aa"]},"unknown":"kept"}`

func TestNewConfig(t *testing.T) {
	now := time.Unix(1_700_000_000, 0).UTC()
	req := api.CommitRequest{Message: "why", Author: "who", Changes: []string{
		`CMD ["run", "it"]`, `entrypoint exec server --port 80`, `ENV A=2 B="x y" C=\"`, `ENV D d d`, `LABEL new=2`, `EXPOSE 80 53/udp`,
		`VOLUME /data`, `USER 1:2`, `WORKDIR sub`, `STOPSIGNAL SIGINT`,
	}}
	b, err := newConfig([]byte(baseConfig), "sha256:bb", req, now)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"architecture": "arm64", "variant": "v8", "os": "linux", "author": "who", "unknown": "kept", "created": "2023-11-14T22:13:20Z",
		"config": map[string]any{
			"Env": []any{"PATH=/bin", "A=2", "B=x y", `C="`, "D=d d"}, "Cmd": []any{"run", "it"}, "Entrypoint": []any{"/bin/sh", "-c", "exec server --port 80"},
			"WorkingDir": "/srv/sub", "Labels": map[string]any{"keep": "1", "new": "2"}, "Healthcheck": map[string]any{"Test": []any{"CMD", "x"}},
			"Unknown": map[string]any{"a": []any{1.0, 2.0}}, "ExposedPorts": map[string]any{"80/tcp": map[string]any{}, "53/udp": map[string]any{}},
			"Volumes": map[string]any{"/data": map[string]any{}}, "User": "1:2", "StopSignal": "SIGINT",
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{"sha256:aa", "sha256:bb"}},
	}
	history := got["history"].([]any)
	delete(got, "history")
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if len(history) != 2 {
		t.Fatalf("history %v", history)
	}
	if d := cmp.Diff(map[string]any{"created_by": "base", "unknown": 1.0}, history[0]); d != "" {
		t.Error(d)
	}
	last := history[1].(map[string]any)
	if last["comment"] != "why" || last["author"] != "who" || last["created"] != "2023-11-14T22:13:20Z" || last["empty_layer"] != nil {
		t.Errorf("history %v", last)
	}
	again, err := newConfig([]byte(baseConfig), "sha256:bb", req, now)
	if err != nil || string(again) != string(b) {
		t.Errorf("the same makes other bytes: %v\n%s", err, again)
	}
	// One without a config of its own.
	if _, err := newConfig([]byte(`{"config":null,"rootfs":{"type":"layers","diff_ids":[]}}`), "sha256:bb", req, now); err != nil {
		t.Error(err)
	}
}

func TestBadChanges(t *testing.T) {
	for _, c := range []string{"", "CMD [1]", `CMD ["a"`, "ENV", "ENV =1", `ENV A="`, "LABEL", "LABEL a=1 b", "RUN x", "FROM scratch", "USER", "EXPOSE", "VOLUME [", "WORKDIR"} {
		_, err := newConfig([]byte(baseConfig), "sha256:bb", api.CommitRequest{Changes: []string{c}}, time.Time{})
		if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != api.CodeInvalid {
			t.Errorf("%q: %v", c, err)
		}
	}
}

func TestWords(t *testing.T) {
	for s, want := range map[string][]string{
		"a b":           {"a", "b"},
		"  a\t b ":      {"a", "b"},
		`a="b c" 'd e'`: {"a=b c", "d e"},
		`a\ b "" 'x\'`:  {"a b", "", `x\`},
		`"a\"b"`:        {`a"b`},
		`["a", "b c"]`:  {"a", "b c"},
		`a\`:            {`a\`},
	} {
		got, err := words(s)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%q: %v\n%s", s, err, d)
		}
	}
}

func TestNewManifest(t *testing.T) {
	config := []byte("{}")
	b, err := newManifest([]byte(`{"schemaVersion":2,"mediaType":"m","config":{"mediaType":"c","digest":"sha256:00","size":7,"annotations":{"a":"b"}},
"layers":[{"mediaType":"l","digest":"sha256:aa","size":1,"annotations":{"kept":"1"}}],"annotations":{"made":"by"},"subject":{"digest":"sha256:cc"}}`),
		config, &ocispec.Descriptor{MediaType: "new", Digest: "sha256:bb", Size: 2})
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(json.Unmarshal(b, &got))
	must(json.Unmarshal([]byte(`{"schemaVersion":2,"mediaType":"m","config":{"mediaType":"c","digest":"`+digest.FromBytes(config).String()+`","size":2},
"layers":[{"mediaType":"l","digest":"sha256:aa","size":1,"annotations":{"kept":"1"}},{"mediaType":"new","digest":"sha256:bb","size":2}]}`), &want))
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
