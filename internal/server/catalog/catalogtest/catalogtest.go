// Package catalogtest is the conformance suite of catalog.Catalog.
package catalogtest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Opener opens one catalog, again and again: what was in it before is still
// there.
type Opener func() (catalog.Catalog, error)

// Run tests catalogs. fresh returns the opener of a new, empty one.
func Run(t *testing.T, fresh func(t *testing.T) Opener) {
	tests := []struct {
		name string
		test func(t *testing.T, c catalog.Catalog)
	}{
		{"Blobs", testBlobs},
		{"Manifests", testManifests},
		{"Referrers", testReferrers},
		{"Tags", testTags},
		{"Pages", testPages},
		{"Packs", testPacks},
		{"PackTwice", testPackTwice},
		{"PackRefused", testPackRefused},
		{"Forget", testForget},
		{"ManySegments", testManySegments},
		{"Layers", testLayers},
		{"StartupImages", testStartupImages},
		{"Traces", testTraces},
		{"Quotas", testQuotas},
		{"QuotasAtOnce", testQuotasAtOnce},
		{"Immutable", testImmutable},
		{"Untag", testUntag},
		{"Cancelled", testCancelled},
		{"Concurrent", testConcurrent},
		{"ConcurrentPacks", testConcurrentPacks},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := fresh(t)()
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			}()
			test.test(t, c)
		})
	}
	t.Run("Reopen", func(t *testing.T) { testReopen(t, fresh(t)) })
}

func digestOf(s string) digest.Digest { return digest.FromString(s) }

func manifest(s string) catalog.Manifest {
	return catalog.Manifest{
		Digest:    digestOf(s),
		MediaType: "application/vnd.oci.image.manifest.v1+json",
		Bytes:     []byte(s),
		Pushed:    time.Unix(1700000000, 123456789),
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantNotFound(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("%s: %v, want ErrNotFound", what, err)
	}
}

func wantEqual(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func testBlobs(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	b := catalog.Blob{Digest: digestOf("b"), Size: 1 << 40}
	_, err := c.Blob(ctx, "r", b.Digest)
	wantNotFound(t, "blob of an unknown repository", err)
	_, err = c.AnyBlob(ctx, b.Digest)
	wantNotFound(t, "unknown blob", err)
	wantNotFound(t, "unlink of an unknown blob", c.UnlinkBlob(ctx, "r", b.Digest))

	for range 2 {
		check(t, c.LinkBlob(ctx, "r", b))
	}
	got, err := c.Blob(ctx, "r", b.Digest)
	check(t, err)
	wantEqual(t, "blob", b, got)
	_, err = c.Blob(ctx, "s", b.Digest)
	wantNotFound(t, "blob of another repository", err)
	got, err = c.AnyBlob(ctx, b.Digest)
	check(t, err)
	wantEqual(t, "blob of any repository", b, got)

	many, err := c.Blobs(ctx, "r", nil)
	check(t, err)
	wantEqual(t, "no blobs", 0, len(many))
	other := catalog.Blob{Digest: digestOf("other"), Size: 7, MediaType: "application/y"}
	check(t, c.LinkBlob(ctx, "r", other))
	check(t, c.LinkBlob(ctx, "s", catalog.Blob{Digest: digestOf("of another")}))
	many, err = c.Blobs(ctx, "r", []digest.Digest{other.Digest, b.Digest, other.Digest})
	check(t, err)
	wantEqual(t, "blobs", []catalog.Blob{other, b, other}, many)
	for _, d := range []digest.Digest{digestOf("none"), digestOf("of another"), "", "sha256:x\x00\"]"} {
		_, err = c.Blobs(ctx, "r", []digest.Digest{b.Digest, d})
		wantNotFound(t, fmt.Sprintf("blobs with %q", d), err)
	}

	// A media type is kept when the next one to link knows none.
	b.MediaType = "application/x"
	check(t, c.LinkBlob(ctx, "r", b))
	check(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: b.Digest, Size: b.Size}))
	got, err = c.Blob(ctx, "r", b.Digest)
	check(t, err)
	wantEqual(t, "blob with a media type", b, got)

	holders, err := c.Holders(ctx, digestOf("none"))
	check(t, err)
	wantEqual(t, "holders of an unknown blob", []string{}, holders)
	check(t, c.LinkBlob(ctx, "s", b))
	check(t, c.LinkBlob(ctx, "a/b", b))
	holders, err = c.Holders(ctx, b.Digest)
	check(t, err)
	wantEqual(t, "holders", []string{"a/b", "r", "s"}, holders)
	check(t, c.UnlinkBlob(ctx, "a/b", b.Digest))
	check(t, c.UnlinkBlob(ctx, "r", b.Digest))
	_, err = c.Blob(ctx, "r", b.Digest)
	wantNotFound(t, "unlinked blob", err)
	wantNotFound(t, "unlinking again", c.UnlinkBlob(ctx, "r", b.Digest))
	_, err = c.AnyBlob(ctx, b.Digest)
	check(t, err)
	check(t, c.UnlinkBlob(ctx, "s", b.Digest))
	_, err = c.AnyBlob(ctx, b.Digest)
	wantNotFound(t, "blob of no repository any more", err)
}

func testManifests(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	m := manifest("m")
	m.ArtifactType = "application/vnd.example"
	m.Subject = digestOf("subject")
	m.Annotations = map[string]string{"a": "1", "ü": "\x01\"<>"}
	_, err := c.Manifest(ctx, "r", m.Digest)
	wantNotFound(t, "unknown manifest", err)
	wantNotFound(t, "delete of an unknown manifest", c.DeleteManifest(ctx, "r", m.Digest))

	check(t, c.PutManifest(ctx, "r", m, "one", "two"))
	got, err := c.Manifest(ctx, "r", m.Digest)
	check(t, err)
	wantEqual(t, "manifest", m, got)
	_, err = c.Manifest(ctx, "s", m.Digest)
	wantNotFound(t, "manifest of another repository", err)

	again := m
	again.MediaType = "application/other"
	again.Pushed = again.Pushed.Add(time.Hour)
	check(t, c.PutManifest(ctx, "r", again, "three"))
	again.Pushed = m.Pushed
	got, err = c.Manifest(ctx, "r", m.Digest)
	check(t, err)
	wantEqual(t, "manifest put again", again, got)
	for _, tag := range []string{"one", "two", "three"} {
		d, err := c.Tag(ctx, "r", tag)
		check(t, err)
		wantEqual(t, "tag "+tag, m.Digest, d)
	}

	empty := catalog.Manifest{Digest: digestOf(""), Pushed: m.Pushed}
	check(t, c.PutManifest(ctx, "r", empty))
	got, err = c.Manifest(ctx, "r", empty.Digest)
	check(t, err)
	wantEqual(t, "manifest with nothing in it", empty, got)

	check(t, c.PutManifest(ctx, "s", m, "one"))
	check(t, c.DeleteManifest(ctx, "r", m.Digest))
	_, err = c.Manifest(ctx, "r", m.Digest)
	wantNotFound(t, "deleted manifest", err)
	for _, tag := range []string{"one", "two", "three"} {
		_, err := c.Tag(ctx, "r", tag)
		wantNotFound(t, "tag of a deleted manifest", err)
	}
	_, err = c.Manifest(ctx, "s", m.Digest)
	check(t, err)
	_, err = c.Tag(ctx, "s", "one")
	check(t, err)
}

func testReferrers(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	subject := digestOf("subject") // never pushed
	after := digest.Digest("")
	referrers := func(repo string, d digest.Digest, artifactType string) []string {
		t.Helper()
		var all []string
		for r, err := range c.Referrers(ctx, repo, d, artifactType, after) {
			check(t, err)
			m, err := c.Manifest(ctx, repo, r.Digest)
			check(t, err)
			want := catalog.Referrer{Digest: m.Digest, MediaType: m.MediaType, ArtifactType: m.ArtifactType, Annotations: m.Annotations, Size: int64(len(m.Bytes))}
			wantEqual(t, "a referrer", want, r)
			all = append(all, string(m.Bytes))
		}
		return all
	}
	wantEqual(t, "referrers in an unknown repository", []string(nil), referrers("r", subject, ""))

	add := func(repo, name, artifactType string, subject digest.Digest, pushed int64) {
		t.Helper()
		m := manifest(name)
		m.ArtifactType, m.Subject, m.Pushed = artifactType, subject, time.Unix(pushed, 0)
		check(t, c.PutManifest(ctx, repo, m))
	}
	add("r", "none", "a", "", 1)
	add("r", "third", "a", subject, 30)
	add("r", "first", "a", subject, 10)
	add("r", "second", "b", subject, 20)
	add("r", "other", "a", digestOf("x"), 5)
	add("s", "elsewhere", "a", subject, 5)
	wantEqual(t, "all", []string{"first", "second", "third"}, referrers("r", subject, ""))
	wantEqual(t, "of one type", []string{"first", "third"}, referrers("r", subject, "a"))
	wantEqual(t, "of a type that is not there", []string(nil), referrers("r", subject, "c"))
	wantEqual(t, "of no digest", []string(nil), referrers("r", "", ""))
	wantEqual(t, "in another repository", []string{"elsewhere"}, referrers("s", subject, ""))
	after = digestOf("first")
	wantEqual(t, "after the first", []string{"second", "third"}, referrers("r", subject, ""))
	wantEqual(t, "of one type after the first", []string{"third"}, referrers("r", subject, "a"))
	after = digestOf("third")
	wantEqual(t, "after the last", []string(nil), referrers("r", subject, ""))
	after = digestOf("elsewhere")
	wantEqual(t, "after one of another repository", []string{"first", "second", "third"}, referrers("r", subject, ""))
	after = digestOf("other")
	wantEqual(t, "after one of another subject", []string{"first", "second", "third"}, referrers("r", subject, ""))
	after = ""
	for r, err := range c.Referrers(ctx, "r", subject, "", "") {
		check(t, err)
		wantEqual(t, "the first of all", digestOf("first"), r.Digest)
		break
	}
	check(t, c.DeleteManifest(ctx, "r", digestOf("first")))
	wantEqual(t, "after a delete", []string{"second", "third"}, referrers("r", subject, ""))
}

func testTags(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	_, err := c.Tag(ctx, "r", "latest")
	wantNotFound(t, "unknown tag", err)
	wantNotFound(t, "delete of an unknown tag", c.DeleteTag(ctx, "r", "latest"))
	m, n := manifest("m"), manifest("n")
	check(t, c.PutManifest(ctx, "r", m, "latest", "m"))
	check(t, c.PutManifest(ctx, "r", n, "latest"))
	d, err := c.Tag(ctx, "r", "latest")
	check(t, err)
	wantEqual(t, "a tag that moved", n.Digest, d)
	check(t, c.DeleteManifest(ctx, "r", m.Digest))
	_, err = c.Tag(ctx, "r", "m")
	wantNotFound(t, "tag of the deleted manifest", err)
	d, err = c.Tag(ctx, "r", "latest")
	check(t, err)
	wantEqual(t, "a tag that moved before the delete", n.Digest, d)
	check(t, c.DeleteTag(ctx, "r", "latest"))
	_, err = c.Tag(ctx, "r", "latest")
	wantNotFound(t, "deleted tag", err)
	_, err = c.Manifest(ctx, "r", n.Digest)
	check(t, err)
}

func testPages(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	_, err := c.Tags(ctx, "r", "", -1)
	wantNotFound(t, "tags of an unknown repository", err)
	check(t, c.LinkBlob(ctx, "r", catalog.Blob{Digest: digestOf("b")}))
	tags, err := c.Tags(ctx, "r", "", -1)
	check(t, err)
	wantEqual(t, "tags of a repository with none", []string(nil), tags)

	all := []string{"0", "A", "Z", "_", "a", "a-b", "a.b", "ab", "b"}
	slices.Sort(all)
	check(t, c.PutManifest(ctx, "r", manifest("m"), all...))
	check(t, c.PutManifest(ctx, "s", manifest("m"), "not in r"))
	for limit := -1; limit <= len(all)+1; limit++ {
		for after := -1; after < len(all); after++ {
			last := ""
			if after >= 0 {
				last = all[after]
			}
			want := all[after+1:]
			if limit >= 0 {
				want = want[:min(limit, len(want))]
			}
			got, err := c.Tags(ctx, "r", last, limit)
			check(t, err)
			wantEqual(t, fmt.Sprintf("%d tags after %q", limit, last), want, got)
		}
	}
	got, err := c.Tags(ctx, "r", "a1", 2) // after a tag that is not there
	check(t, err)
	wantEqual(t, "tags after a1", []string{"ab", "b"}, got)

	check(t, c.PutManifest(ctx, "a/b", manifest("m")))
	for _, page := range []struct {
		after string
		limit int
		want  []string
	}{
		{"", -1, []string{"a/b", "r", "s"}},
		{"", 2, []string{"a/b", "r"}},
		{"r", 2, []string{"s"}},
		{"s", 2, nil},
	} {
		got, err := c.ListRepositories(ctx, page.after, page.limit)
		check(t, err)
		wantEqual(t, fmt.Sprintf("repositories %+v", page), page.want, got)
	}
}

func testLayers(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	l := catalog.Layer{Blob: digestOf("blob"), DiffID: digestOf("diff"), Entries: "entries/x", Size: 1 << 50, Files: 84_000}
	_, err := c.Layer(ctx, l.Blob)
	wantNotFound(t, "unknown layer", err)
	refused := catalog.Layer{Blob: l.Blob, Refused: "entry 3 (\"../x\") leaves the tree"}
	for _, want := range []catalog.Layer{refused, l, l} {
		check(t, c.PutLayer(ctx, want))
		got, err := c.Layer(ctx, l.Blob)
		check(t, err)
		wantEqual(t, "layer", want, got)
	}

	other := catalog.Layer{Blob: digestOf("other"), DiffID: digestOf("diff"), Entries: "entries/y"}
	check(t, c.PutLayer(ctx, other))
	many, err := c.Layers(ctx, []digest.Digest{other.Blob, l.Blob, other.Blob})
	check(t, err)
	wantEqual(t, "layers", []catalog.Layer{other, l, other}, many)
	_, err = c.Layers(ctx, []digest.Digest{l.Blob, digestOf("none")})
	wantNotFound(t, "layers with an unknown one", err)

	recipe := catalog.Recipe{Key: "recipes/x", Digest: digestOf("recipe"), Size: 5}
	wantNotFound(t, "recipe of an unknown layer", c.PutRecipe(ctx, digestOf("none"), recipe))
	check(t, c.PutLayer(ctx, catalog.Layer{Blob: digestOf("refused"), Refused: "because"}))
	missing := []catalog.Layer{l, other}
	slices.SortFunc(missing, func(a, b catalog.Layer) int { return strings.Compare(string(a.Blob), string(b.Blob)) })
	for after, want := range map[digest.Digest][]catalog.Layer{"": missing, missing[0].Blob: missing[1:], missing[1].Blob: nil} {
		got, err := c.WithoutRecipe(ctx, after, 10)
		check(t, err)
		wantEqual(t, "layers without recipes", want, got)
	}
	got, err := c.WithoutRecipe(ctx, "", 1)
	check(t, err)
	wantEqual(t, "the first layer without a recipe", missing[:1], got)
	check(t, c.PutRecipe(ctx, missing[0].Blob, recipe))
	missing[0].Recipe = recipe
	made, err := c.Layer(ctx, missing[0].Blob)
	check(t, err)
	wantEqual(t, "layer with a recipe", missing[0], made)
	check(t, c.PutLayer(ctx, made))
	got, err = c.WithoutRecipe(ctx, "", 10)
	check(t, err)
	wantEqual(t, "layers without recipes", missing[1:], got)

	got, err = c.NotLooked(ctx, "", 10)
	check(t, err)
	wantEqual(t, "layers that nobody looked at", []catalog.Layer{made}, got)
	got, err = c.NotLooked(ctx, made.Blob, 10)
	check(t, err)
	wantEqual(t, "those after it", []catalog.Layer(nil), got)
	recipe.Key += ".intact"
	check(t, c.PutRecipe(ctx, made.Blob, recipe))
	got, err = c.NotLooked(ctx, "", 10)
	check(t, err)
	wantEqual(t, "layers that nobody looked at, when all were", []catalog.Layer(nil), got)

	r := catalog.Rootfs{ChainID: digestOf("chain"), TOC: digestOf("toc"), Key: "tocs/x"}
	_, err = c.Rootfs(ctx, r.ChainID)
	wantNotFound(t, "unknown rootfs", err)
	for range 2 {
		check(t, c.PutRootfs(ctx, r))
		got, err := c.Rootfs(ctx, r.ChainID)
		check(t, err)
		wantEqual(t, "rootfs", r, got)
		r.Index = "indexes/x"
	}
}

func testReopen(t *testing.T, open Opener) {
	ctx := t.Context()
	c, err := open()
	check(t, err)
	b, m, p := catalog.Blob{Digest: digestOf("b"), Size: 3}, manifest("m"), Pack("packs/p", 1, 10, 3)
	check(t, c.LinkBlob(ctx, "r", b))
	check(t, c.PutManifest(ctx, "r", m, "latest"))
	check(t, c.AddPack(ctx, p))
	note := startupImage("r", "rootfs", 5)
	check(t, c.NoteImage(ctx, note))
	kept := startupTrace(note, "service", "client", 1)
	check(t, c.PutTrace(ctx, kept, catalog.TraceLimits{Traces: 2, Services: 2}))
	check(t, c.Close())

	for range 2 {
		c, err := open()
		check(t, err)
		gotBlob, err := c.Blob(ctx, "r", b.Digest)
		check(t, err)
		wantEqual(t, "blob", b, gotBlob)
		d, err := c.Tag(ctx, "r", "latest")
		check(t, err)
		gotManifest, err := c.Manifest(ctx, "r", d)
		check(t, err)
		wantEqual(t, "manifest", m, gotManifest)
		wantFound(t, c, []segment.ID{ID(10), ID(11)}, p.Key)
		traces, err := c.Traces(ctx, "r", note.ChainID)
		check(t, err)
		wantEqual(t, "traces", []catalog.Trace{kept}, traces)
		stale, err := c.StaleImages(ctx, 10)
		check(t, err)
		wantEqual(t, "stale images", 1, len(stale))
		check(t, c.AddPack(ctx, p))
		check(t, c.Close())
	}
}
