package serve_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/trace"
)

// The server is killed the moment it has acknowledged a report. The one that
// comes back has it, and makes the set from it without being asked.
func TestKilledAfterTrace(t *testing.T) {
	root := t.TempDir()
	base, cmd := child(t, root)
	makeImage(t, layertest.Layer{layertest.File("app", 0o755, noise(1, 600_000))}).push(t, strings.TrimPrefix(base, "http://"))
	query := "?" + url.Values{"repository": {"r"}, "reference": {"1"}}.Encode()
	report := func() (r bundle.StartupReport) {
		t.Helper()
		res, err := http.Get(base + bundle.StartupPath + query)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatalf("%s %s, %v", res.Status, b, err)
		}
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	before := report()
	v := trace.Trace{Kind: trace.Reported, ChainID: before.ChainID, TOC: before.TOC, Args: []string{"app"}, Touched: []trace.Touch{{Run: trace.Run{Blocks: 7}}}}
	send(t, "POST", base+bundle.TracePath+query, bundle.MediaTypeTrace, v.Encode(), http.StatusNoContent)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	base, _ = child(t, root)
	// A trace of another service, which is waited for, is built with it.
	v.Kind, v.Args = trace.Recorded, []string{"other"}
	send(t, "POST", base+bundle.TracePath+query, bundle.MediaTypeTrace, v.Encode(), http.StatusNoContent)
	after := report()
	if len(after.Services) != 2 {
		t.Fatalf("%+v", after)
	}
	for _, s := range after.Services {
		if s.Pages != 7 || s.Traces+s.Reports != 1 {
			t.Errorf("%+v", s)
		}
	}
}
