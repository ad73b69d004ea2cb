package serve_test

import (
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/usage"
)

// A store of which everything can be counted by hand: two images share a layer, and a file of it is in
// another layer as well.
func TestUsage(t *testing.T) {
	base := layertest.Layer{layertest.File("x", 0o644, noise(1, 5000)), layertest.File("y", 0o644, noise(2, 3000))}.Gzip(t)
	second := layertest.Layer{layertest.File("dir/z", 0o644, noise(1, 5000))}.Tar(t)
	third := layertest.Layer{layertest.File("w", 0o644, noise(3, 7000)), layertest.File("empty", 0o644, "")}.Gzip(t)
	a, b := imageOf(t, base, second), imageOf(t, base, third)
	root := t.TempDir()
	t.Setenv("TMPDIR", t.TempDir())
	s := start(t, serve.Options{Root: root})
	for _, p := range []struct {
		repo string
		image
	}{{"b/c", b}, {"a", a}} { // one after the other: layers that are ingested at once may store a segment twice
		p.pushTo(t, s.Addr(), p.repo)
		if _, err := askFor(http.DefaultClient, s.Addr(), p.repo, nil); err != nil {
			t.Fatal(err)
		}
	}
	got, err := usage.Look(t.Context(), usage.Options{Root: root, Repository: "a", Largest: 2}) // while it serves
	if err != nil {
		t.Fatal(err)
	}
	size := func(b []byte) int64 { return int64(len(b)) }
	config, manifest := size(a.blobs[2]), size(a.manifest)
	blobs := size(base.Bytes) + size(second.Bytes) + size(third.Bytes) + config + size(b.blobs[2])
	tars := []int64{512 + 5120 + 512 + 3072 + 1024, 512 + 5120 + 1024, 512 + 7168 + 512 + 1024}
	want := &usage.Report{
		Repositories: []usage.Repository{{
			Name: "a", Manifests: 1, Tags: 1,
			Plain: size(base.Bytes) + size(second.Bytes) + config + manifest, Alone: size(second.Bytes) + config + manifest, Shared: size(base.Bytes),
			Adds: size(second.Bytes) + config + manifest, // its contents are all in others too
		}},
		Images: []usage.Image{{
			Name: "a:1", Layers: 2, Plain: size(base.Bytes) + size(second.Bytes) + config + manifest, Uncompressed: tars[0] + tars[1],
			Alone: size(second.Bytes) + config + manifest, Shared: size(base.Bytes),
		}},
		Layers:   usage.Duplicates{Count: 4, Bytes: 2*size(base.Bytes) + size(second.Bytes) + size(third.Bytes), Distinct: 3, DistinctBytes: size(base.Bytes) + size(second.Bytes) + size(third.Bytes)},
		Intact:   usage.Intact{Blobs: 5, Bytes: blobs, Intact: 5, IntactBytes: blobs},
		Files:    usage.Duplicates{Count: 4, Bytes: 20_000, Distinct: 3, DistinctBytes: 15_000},
		Segments: usage.Duplicates{Count: 4, Bytes: 20_000, Distinct: 3, DistinctBytes: 15_000},
		Largest:  []usage.Content{{Bytes: 7000, Copies: 1, Path: "w"}, {Bytes: 5000, Copies: 2}},
		Depths:   []usage.Depth{{Layer: 1, Count: 2, Bytes: 2 * tars[0]}, {Layer: 2, Count: 2, Bytes: tars[1] + tars[2]}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(usage.Report{}, "Rest", "Total", "Packed", "Read", "Took"),
		cmp.FilterPath(func(p cmp.Path) bool { return strings.HasSuffix(p.GoString(), "Largest[1].Path") }, cmp.Ignore()),
		cmpopts.IgnoreFields(usage.Content{}, "ID", "Layer")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	// At rest, against du, and against what the packs have.
	http.DefaultClient.CloseIdleConnections()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err = usage.Look(t.Context(), usage.Options{Root: root}); err != nil {
		t.Fatal(err)
	}
	if len(got.Repositories) != 2 || got.Images != nil {
		t.Errorf("%+v, %+v", got.Repositories, got.Images)
	}
	for flag, n := range map[string]int64{"--apparent-size": got.Total.Bytes, "--one-file-system": got.Total.Disk} {
		out, err := exec.Command("du", "-s", "--block-size=1", flag, root).Output()
		if err != nil {
			t.Fatal(err)
		}
		if du, err := strconv.ParseInt(strings.Fields(string(out))[0], 10, 64); err != nil || du != n {
			t.Errorf("du %s says %d, %v; want %d", flag, du, err, n)
		}
	}
	kinds := map[string]usage.Rest{}
	sum := usage.Rest{Kind: "total"}
	for _, r := range got.Rest {
		kinds[r.Kind] = r
		sum.Files, sum.Bytes, sum.Disk = sum.Files+r.Files, sum.Bytes+r.Bytes, sum.Disk+r.Disk
	}
	if sum != got.Total {
		t.Errorf("kinds sum up to %+v, all is %+v", sum, got.Total)
	}
	if kinds["blobs"].Bytes != blobs || kinds["blobs"].Files != 5 {
		t.Errorf("blobs %+v, want %d bytes", kinds["blobs"], blobs)
	}
	// A pack is its frames, a table and 72 bytes.
	if p := kinds["packs"]; got.Packed <= 0 || got.Packed > p.Bytes-72*p.Files || got.Packed < p.Bytes-(72+100)*p.Files {
		t.Errorf("segments take %d bytes of packs of %+v", got.Packed, p)
	}
	for _, r := range got.Repositories {
		if r.Adds != r.Alone+r.Packed {
			t.Errorf("%+v", r)
		}
	}
	if alone := got.Repositories[0].Packed + got.Repositories[1].Packed; alone <= 0 || alone >= got.Packed {
		t.Errorf("of %d bytes %d are one repository's", got.Packed, alone)
	}
	if _, err := usage.Look(t.Context(), usage.Options{Root: root, Repository: "none"}); err == nil || !strings.Contains(err.Error(), `no repository "none"`) {
		t.Errorf("of no repository: %v", err)
	}
	left, err := os.ReadDir(os.TempDir())
	for _, e := range left {
		if err != nil || strings.HasPrefix(e.Name(), "foil-usage-") || strings.HasPrefix(e.Name(), "foil-catalog-") {
			t.Errorf("%s is left, %v", e.Name(), err)
		}
	}
}
