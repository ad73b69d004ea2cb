package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/holdings"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// The catalog is read while its server has it.
func TestQuotaAndRetention(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(rootdir.Catalog(root), 0o700); err != nil {
		t.Fatal(err)
	}
	c, err := sqlite.Open(t.Context(), rootdir.CatalogFile(root))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put := func(repo, tag, bytes string, pushed time.Time) {
		t.Helper()
		m := catalog.Manifest{Digest: digest.FromString(bytes), MediaType: "m", Bytes: []byte(bytes), Pushed: pushed}
		if err := c.PutManifest(t.Context(), repo, m, tag); err != nil {
			t.Fatal(err)
		}
	}
	layer := catalog.Blob{Digest: digest.FromString("layer"), Size: 5_000_000}
	if err := errors.Join(c.LinkBlob(t.Context(), "team/a", layer), c.LinkBlob(t.Context(), "team/b", layer)); err != nil {
		t.Fatal(err)
	}
	long := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	put("team/a", "nightly-1", `{"layers": [{"digest": "`+layer.Digest.String()+`"}]}`, long)
	put("team/a", "nightly-2", `{}`, long.Add(time.Hour))
	put("team/b", "v1", `{}`, long)
	access := filepath.Join(root, "access.toml")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(access, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`
[[quota]]
name = "team"
repositories = ["team/**"]
bytes = "10M"
[[quota]]
name = "each"
repositories = ["team/*"]
manifests = 2
each = true
[[immutable]]
repositories = ["**"]
tags = ["v*"]
[[retention]]
name = "nightly"
repositories = ["team/**"]
keep-last = 1
`)
	foil := func(args ...string) (code int, stdout, stderr string) {
		t.Helper()
		var out, failed bytes.Buffer
		code = run(t.Context(), append([]string{"server", args[0], "--root", root}, args[1:]...), strings.NewReader(""), &out, &failed)
		return code, out.String(), failed.String()
	}
	for _, test := range []struct {
		args   []string
		code   int
		output []string
	}{
		{[]string{"quota", "--access", access}, 0, []string{"QUOTA ", "team    team/**        5.0 MB   10.5 MB   5.0 MB   3           -", "each    team/a         5.0 MB   -         0 B      2           2", "each    team/b"}},
		{[]string{"quota", "team/b", "--access", access}, 0, []string{"team    team/**", "each    team/b         2 B"}},
		{[]string{"quota", "team/c", "--access", access}, 1, []string{"there is no repository team/c"}},
		{[]string{"quota"}, 2, []string{"which rules? --access names"}},
		{[]string{"retention", "--access", access}, 2, []string{"--dry-run says what would go"}},
		{[]string{"retention", "--dry-run", "--access", access}, 0, []string{"REPOSITORY   TAG", "team/a       nightly-1", "nightly\n"}},
	} {
		code, out, failed := foil(test.args...)
		if code != test.code {
			t.Errorf("%v: code %d: %s", test.args, code, failed)
		}
		for _, want := range test.output {
			if !strings.Contains(out+failed, want) {
				t.Errorf("%v: no %q in\n%s%s", test.args, want, out, failed)
			}
		}
		if strings.Contains(out, "nightly-2") || strings.Contains(out, "v1") {
			t.Errorf("%v: what stays is named:\n%s", test.args, out)
		}
	}
	_, out, _ := foil("quota", "--access", access, "--json")
	var used []holdings.Used
	if err := json.Unmarshal([]byte(out), &used); err != nil || len(used) != 3 || used[0].MaxBytes != 10<<20 || used[0].Loose != 5_000_000 || used[1].MaxManifests != 2 {
		t.Errorf("%v: %s", err, out)
	}
	_, out, _ = foil("retention", "--dry-run", "--access", access, "--json")
	var gone []untagged
	if err := json.Unmarshal([]byte(out), &gone); err != nil || len(gone) != 1 || gone[0].Tag != "nightly-1" || !gone[0].Pushed.Equal(long) || gone[0].Rule != "nightly" {
		t.Errorf("%v: %s", err, out)
	}
	// Nothing was changed; and without rules there is nothing to say.
	if tags, err := c.Tags(t.Context(), "team/a", "", -1); err != nil || len(tags) != 2 {
		t.Errorf("tags %v, %v", tags, err)
	}
	write("")
	for command, want := range map[string]string{"quota": "there are no quotas", "retention --dry-run": "no tag would go"} {
		if code, out, _ := foil(append(strings.Fields(command), "--access", access)...); code != 0 || !strings.Contains(out, want) {
			t.Errorf("%s without rules: %d %s", command, code, out)
		}
	}
	if _, _, failed := foil("quota", "--access", access, "--root", root+"/none"); !strings.Contains(failed, "no such file") {
		t.Errorf("no root: %s", failed)
	}
}
