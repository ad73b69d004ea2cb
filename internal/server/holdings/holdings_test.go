package holdings_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/holdings"
)

func read(config string) (*holdings.Rules, error) {
	var c holdings.Settings
	d := toml.NewDecoder(strings.NewReader(config))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return nil, err
	}
	return holdings.New(c)
}

func TestStrict(t *testing.T) {
	const where = "repositories = [\"a/**\"]\n"
	for config, want := range map[string]string{
		"[[quota]]\nbytes = \"1G\"":                                "wants repositories",
		"[[quota]]\n" + where:                                      "wants bytes or manifests",
		"[[quota]]\n" + where + "bytes = \"1X\"":                   "want bytes like 500M",
		"[[quota]]\n" + where + "bytes = \"NaN\"":                  "want bytes like 500M",
		"[[quota]]\n" + where + "bytes = -1":                       "wants bytes or manifests",
		"[[quota]]\n" + where + "bytes = \"1G\"\nmanifests = -1":   "wants bytes or manifests",
		"[[quota]]\nrepositories = [\"A\"]\nbytes = \"1G\"":        "no repository has 'A'",
		"[[quota]]\n" + where + "size = \"1G\"":                    "strict mode",
		"[[immutable]]\ntags = [\"v*\"]":                           "wants repositories",
		"[[immutable]]\n" + where + "tags = [\"v+\"]":              "no tag has '+'",
		"[[immutable]]\n" + where + "tags = [\"\"]":                "want 1 to 128",
		"[[retention]]\n" + where:                                  "wants keep-last, keep-for or both",
		"[[retention]]\n" + where + "keep-all = true\nkeep-last=1": "or keep-all alone",
		"[[retention]]\n" + where + "keep-last = -1":               "keep-last wants",
		"[[retention]]\n" + where + "keep-for = 30":                "keep-for a duration",
		"[[retention]]\n" + where + "keep-for = \"NaNd\"":          "want a duration",
		"[[retention]]\n" + where + "keep-for = \"-3h\"":           "want a duration",
		"retention-every = \"1s\"":                                 "too often",
		"[[quota]]\n" + where + "bytes = \"1.5G\"\neach = true":    "",
		"[[retention]]\n" + where + "keep-for = \"1.5d\"":          "",
	} {
		_, err := read(config)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", config, err, want)
		}
	}
}

func TestQuotas(t *testing.T) {
	r, err := read(`
[[quota]]
repositories = ["team/**", "tea/x"]
bytes = "2K"
[[quota]]
name = "each"
repositories = ["**"]
manifests = 3
each = true
`)
	if err != nil {
		t.Fatal(err)
	}
	all := r.Quotas("team")
	if len(all) != 2 || all[0].Name != "quota 1" || all[0].Bytes != 2048 || all[1].Counts != nil || all[1].Manifests != 3 {
		t.Fatalf("%+v", all)
	}
	for repo, want := range map[string]bool{"team": true, "team/a/b": true, "tea/x": true, "teams": false, "tea": false} {
		if got := all[0].Counts(repo); got != want || got && !strings.HasPrefix(repo, all[0].Prefix) {
			t.Errorf("%s: counts %v, want %v; prefix %q", repo, got, want, all[0].Prefix)
		}
	}
	if got := r.Quotas("other"); len(got) != 1 || got[0].Name != "each" {
		t.Errorf("other: %+v", got)
	}
}

func TestRetain(t *testing.T) {
	r, err := read(`
[[immutable]]
repositories = ["team/**"]
tags = ["v*"]
[[retention]]
name = "latest"
repositories = ["**"]
tags = ["latest"]
keep-all = true
[[retention]]
name = "nightly"
repositories = ["team/**"]
tags = ["nightly-*", "vnightly"]
keep-last = 2
[[retention]]
name = "rest"
repositories = ["team/**"]
keep-last = 1
keep-for = "2d"
`)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	day := func(tag string, ago float64) catalog.Tagged {
		return catalog.Tagged{Tag: tag, Pushed: now.Add(-time.Duration(ago * 24 * float64(time.Hour)))}
	}
	tags := []catalog.Tagged{
		day("latest", 900), day("nightly-1", 3), day("nightly-2", 2), day("nightly-3", 1), day("vnightly", 0.5), day("nightly-0", 100),
		day("a", 1), day("b", 1.9), day("c", 3), day("v1", 1000), day("future", -5),
	}
	want := []string{"nightly-2 nightly", "nightly-1 nightly", "c rest", "nightly-0 nightly"}
	var got []string
	for _, g := range r.Retain("team/app", tags, now) {
		got = append(got, g.Tag+" "+g.Rule)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what goes (-want +got):\n%s", diff)
	}
	if gone := r.Retain("other", tags, now); gone != nil || r.Retains("teams") == false {
		t.Errorf("other: %v", gone)
	}
	if r.Every() != time.Hour {
		t.Errorf("every %v", r.Every())
	}
	// Only what was pushed last is kept when all is old.
	if gone := r.Retain("team/app", []catalog.Tagged{day("x", 50), day("y", 40), day("z", 60)}, now); len(gone) != 2 || gone[0].Tag != "x" {
		t.Errorf("all old: %v", gone)
	}
}
