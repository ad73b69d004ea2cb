package picture

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

var update = flag.Bool("update", false, "write golden files")

// testImage has /bin/tool (10,000 bytes), /lib/a/deep/x.so (40,960) and
// /lib/a/y</script> (100).
func testImage(t *testing.T) *Image {
	t.Helper()
	img := &Image{Ref: "registry.example/app:1", Digest: digest.FromString("toc"), TOC: new(toc.TOC)}
	for path, size := range map[string]int64{"/bin/tool": 10_000, "/lib/a/deep/x.so": 40_960, "/lib/a/y</script>": 100} {
		img.paths = append(img.paths, path)
		img.TOC.Contents = append(img.TOC.Contents, toc.Content{ID: segment.Sum([]byte(path)), Size: size})
	}
	// A map has no order, and a picture must not depend on one.
	img.bytes = 10_000 + 40_960 + 100
	return img
}

func (img *Image) index(path string) uint32 {
	for i, p := range img.paths {
		if p == path {
			return uint32(i)
		}
	}
	panic(path)
}

func testTrace(img *Image) *trace.Trace {
	ms := time.Millisecond
	tool, lib := img.index("/bin/tool"), img.index("/lib/a/deep/x.so")
	return &trace.Trace{ChainID: digest.FromString("chain"), TOC: img.Digest, Args: []string{"tool", "-x"}, Ready: 30 * ms, Touched: []trace.Touch{
		{Run: trace.Run{Content: tool, First: 0, Blocks: 1}, At: 1 * ms},
		{Run: trace.Run{Content: lib, First: 4, Blocks: 2}, At: 5 * ms, Waited: true},
		{Run: trace.Run{Content: tool, First: 2, Blocks: 1}, At: 20 * ms},
	}}
}

func TestTrace(t *testing.T) {
	img := testImage(t)
	got, err := img.Trace(testTrace(img))
	if err != nil {
		t.Fatal(err)
	}
	want := &Trace{
		Ref: img.Ref, ChainID: digest.FromString("chain"), TOC: img.Digest, Service: trace.Service([]string{"tool", "-x"}), Args: []string{"tool", "-x"},
		Ready: 0.03, Files: 2, Pages: 4, Bytes: 4096 + 2*4096 + 10_000 - 2*4096, ImageBytes: 51_060,
		Touched: []Touched{{"/bin/tool", 0, 1, 0.001, false}, {"/lib/a/deep/x.so", 4, 2, 0.005, true}, {"/bin/tool", 2, 1, 0.02, false}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	bad := testTrace(img)
	bad.Touched[0].Blocks = 4
	if _, err := img.Trace(bad); err == nil {
		t.Error("pages beyond the end are taken")
	}
	bad = testTrace(img)
	bad.TOC = digest.FromString("another")
	if _, err := img.Trace(bad); err == nil {
		t.Error("another image's trace is taken")
	}
}

func TestText(t *testing.T) {
	img := testImage(t)
	set, err := img.OfTrace(testTrace(img))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for _, o := range []TextOptions{{}, {Width: 60, Terminal: true, Color: true, Files: 1}, {Width: 10}} {
		fmt.Fprintf(&b, "-- %+v\n", o)
		if err := set.Text(&b, o); err != nil {
			t.Fatal(err)
		}
	}
	golden := filepath.Join("testdata", "text.golden")
	if *update {
		if err := os.WriteFile(golden, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("text (-want +got), -update writes it anew:\n%s", diff)
	}
}

func TestOfService(t *testing.T) {
	img := testImage(t)
	runs := []trace.Run{{Content: img.index("/lib/a/deep/x.so"), First: 1, Blocks: 3}, {Content: img.index("/bin/tool"), First: 0, Blocks: 3}}
	r := &bundle.ServiceReport{TOC: img.Digest, Runs: trace.AppendRuns(nil, runs)}
	set, err := img.OfService(r)
	if err != nil {
		t.Fatal(err)
	}
	if pages, n := set.Pages(); pages != 6 || n != 3*4096+10_000 || set.Timed {
		t.Errorf("%d pages, %d bytes", pages, n)
	}
	for what, bad := range map[string]*bundle.ServiceReport{
		"another TOC":      {TOC: digest.FromString("x"), Runs: r.Runs},
		"no runs":          {TOC: img.Digest, Runs: []byte{7}},
		"bytes after them": {TOC: img.Digest, Runs: append(trace.AppendRuns(nil, runs), 0)},
		"outside":          {TOC: img.Digest, Runs: trace.AppendRuns(nil, []trace.Run{{Content: 9, Blocks: 1}})},
	} {
		if _, err := img.OfService(bad); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
}

// The page needs nothing else, and a file's name cannot end its script.
func TestHTML(t *testing.T) {
	img := testImage(t)
	tr := testTrace(img)
	tr.Args = []string{"<b>", `"`}
	tr.Touched[0].Content, tr.Touched[0].Blocks = img.index("/lib/a/y</script>"), 1
	set, err := img.OfTrace(tr)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := set.HTML(&b, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, bad := range []string{"http://", "https://", "src=", "<link", "@import", "url(", "<b>"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %s", bad)
		}
	}
	if n := strings.Count(page, "</script>"); n != 1 {
		t.Errorf("%d scripts end", n)
	}
	_, rest, _ := strings.Cut(page, "const data = ")
	line, _, _ := strings.Cut(rest, ";\n")
	var data struct {
		Files []File
		Tree  node
		Runs  [][]float64
	}
	if err := json.Unmarshal([]byte(line), &data); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	if len(data.Files) != 3 || data.Tree.Size != img.bytes || data.Tree.Touched != 100+2*4096+10_000-2*4096 || len(data.Runs) != 3 {
		t.Errorf("%+v", data)
	}
}
