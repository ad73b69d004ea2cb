// Package metricstest compares docs/metrics.md with what programs register.
package metricstest

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

var update = flag.Bool("update-metrics", false, "write the tables of docs/metrics.md")

var desc = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: "((?:[^"\\]|\\.)*)"(?:, unit: "[^"]*")?, constLabels: \{\}, variableLabels: \{([^}]*)\}\}$`)

// Table compares the table of a section ("<!-- node -->" to "<!-- /node -->") of
// the file with what c describes. Everything that it describes must be in what
// it collects, with the types that a scrape shows; the table is in order of names.
func Table(t testing.TB, file, section string, c prometheus.Collector) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	types := make(map[string]string)
	for _, f := range families {
		types[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	descs := make(chan *prometheus.Desc)
	go func() {
		c.Describe(descs)
		close(descs)
	}()
	var rows []string
	for d := range descs {
		m := desc.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("description %s: not as expected", d)
		}
		name, help := m[1], m[2]
		if !strings.HasPrefix(name, "foil_") || strings.Contains(help, "|") {
			t.Errorf("%s: %q cannot be in the table", name, help)
		}
		if types[name] == "" {
			t.Errorf("%s: described, but not collected", name)
		}
		if counter := types[name] == "counter"; counter != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s: the names of counters, and no others, end with _total", name, types[name])
		}
		labels := "-"
		if m[3] != "" {
			labels = "`" + strings.Join(strings.Split(m[3], ","), "`, `") + "`"
		}
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s | %s |", name, types[name], labels, help))
	}
	slices.Sort(rows)
	want := "| name | type | labels | meaning |\n| --- | --- | --- | --- |\n" + strings.Join(rows, "\n") + "\n"
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+section+" -->\n", "<!-- /"+section+" -->\n"
	before, rest, ok := strings.Cut(string(b), begin)
	got, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no section %s", file, section)
	}
	if *update {
		if err := os.WriteFile(file, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s, section %s, is not what is registered (write it with -update-metrics):\n%s", file, section, d)
	}
}
