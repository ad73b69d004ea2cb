package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestParseMount(t *testing.T) {
	dir := t.TempDir()
	odd := filepath.Join(dir, "a,b")
	if err := os.Mkdir(odd, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	bind := func(source, target string, more ...string) specs.Mount {
		return specs.Mount{Type: "bind", Source: source, Destination: target, Options: append([]string{"rbind", "rprivate"}, more...)}
	}
	for s, want := range map[string]specs.Mount{
		"type=bind,source=" + dir + ",target=/src":                    bind(dir, "/src"),
		"src=" + dir + ",dst=/src/../out/,ro":                         bind(dir, "/out", "ro", "rro"),
		"source=.,target=/src,readonly=false":                         bind(dir, "/src"),
		`"source=` + odd + `",destination=/odd`:                       bind(odd, "/odd"),
		"type=tmpfs,target=/tmp":                                      {Type: "tmpfs", Source: "tmpfs", Destination: "/tmp", Options: []string{"nosuid", "nodev"}},
		"type=tmpfs,target=/t,tmpfs-size=64m,tmpfs-mode=1777,ro=true": {Type: "tmpfs", Source: "tmpfs", Destination: "/t", Options: []string{"nosuid", "nodev", "size=64m", "mode=1777", "ro"}},
	} {
		got, err := ParseMount(s)
		if err != nil {
			t.Errorf("%s: %v", s, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s:\n%s", s, d)
		}
	}
	for s, want := range map[string]string{
		"":                                       "write type=bind",
		`"`:                                      "write type=bind",
		"type=bind,target=/a":                    "has a source",
		"type=volume,source=x,target=/a":         `unknown type "volume"`,
		"source=/none/such,target=/a":            "no such file",
		"source=.,target=a":                      "absolute",
		"source=.,target=/.":                     "not its root",
		"source=.":                               "absolute",
		"source=.,target=/a,mode=7":              `unknown field "mode"`,
		"source=.,target=/a,ro=maybe":            "ro=maybe",
		"source=.,target=/a,tmpfs-size=1m":       "nothing of a tmpfs",
		"type=tmpfs,source=.,target=/a":          "no source",
		"type=tmpfs,target=/a,tmpfs-size=1,x":    "unknown field",
		"type=tmpfs,target=/a,tmpfs-size=1mm":    "number of bytes",
		"type=tmpfs,target=/a,tmpfs-size=0":      "number of bytes",
		"type=tmpfs,target=/a,tmpfs-size=-1":     "number of bytes",
		"type=tmpfs,target=/a,tmpfs-mode=rwxrwx": "tmpfs-mode",
		"type=tmpfs,target=/a,tmpfs-mode=77777":  "tmpfs-mode",
	} {
		if m, err := ParseMount(s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want %q", s, m, err, want)
		}
	}
}
