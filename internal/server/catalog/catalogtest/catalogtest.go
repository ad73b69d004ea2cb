// Package catalogtest is the conformance suite of catalog.Catalog.
package catalogtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
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

// ID is the ID of a made-up segment.
func ID(n int) segment.ID {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	return segment.Sum(b[:])
}

// Pack makes a pack of frames of perFrame made-up segments, first to last.
func Pack(key string, first, last, perFrame int) catalog.Pack {
	p := catalog.Pack{Key: key}
	for ; first <= last; first += perFrame {
		f := catalog.Frame{Pack: key, Offset: p.Size, Length: uint32(100 + first%7)}
		for n := first; n < min(first+perFrame, last+1); n++ {
			f.Segments = append(f.Segments, catalog.FrameSegment{ID: ID(n), Length: uint32(n%1000 + 1)})
			f.RawLength += uint32(n%1000 + 1)
		}
		p.Frames = append(p.Frames, f)
		p.Size += int64(f.Length)
	}
	return p
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
	referrers := func(repo string, d digest.Digest, artifactType string) []string {
		t.Helper()
		manifests, err := c.Referrers(ctx, repo, d, artifactType)
		check(t, err)
		var all []string
		for _, m := range manifests {
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

// wantLocated checks that the segments of ids are where packs say.
func wantLocated(t *testing.T, c catalog.Catalog, ids []segment.ID, packs ...catalog.Pack) {
	t.Helper()
	where := make(map[segment.ID]catalog.Location)
	for _, p := range packs {
		for i := range p.Frames {
			for j, s := range p.Frames[i].Segments {
				if _, ok := where[s.ID]; !ok {
					where[s.ID] = catalog.Location{Frame: &p.Frames[i], Index: j}
				}
			}
		}
	}
	got, err := c.Locate(t.Context(), ids)
	check(t, err)
	if len(got) != len(ids) {
		t.Fatalf("%d locations of %d segments", len(got), len(ids))
	}
	type key struct {
		pack   string
		offset int64
	}
	shared := make(map[key]*catalog.Frame)
	for i, id := range ids {
		if diff := cmp.Diff(where[id], got[i]); diff != "" {
			t.Fatalf("location of segment %d (-want +got):\n%s", i, diff)
		}
		if f := got[i].Frame; f != nil {
			k := key{f.Pack, f.Offset}
			if other, ok := shared[k]; ok && other != f {
				t.Fatalf("the frame %+v is there twice", k)
			}
			shared[k] = f
		}
	}
}

func testPacks(t *testing.T, c catalog.Catalog) {
	wantLocated(t, c, nil)
	wantLocated(t, c, []segment.ID{ID(1), {}, ID(1)})
	p, q := Pack("packs/p", 1, 10, 3), Pack("packs/q", 8, 20, 100)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	check(t, c.AddPack(t.Context(), catalog.Pack{Key: "packs/empty"}))
	ids := []segment.ID{ID(9), ID(21), ID(1), ID(20), {}, ID(1), ID(10), ID(11), ID(21), ID(3)}
	wantLocated(t, c, ids, p, q)
}

func testPackTwice(t *testing.T, c catalog.Catalog) {
	p := Pack("packs/p", 1, 10, 3)
	for range 2 {
		check(t, c.AddPack(t.Context(), p))
	}
	// The same segments in another pack, and twice in one pack.
	q := Pack("packs/q", 5, 12, 2)
	q.Frames = append(q.Frames, q.Frames...)
	check(t, c.AddPack(t.Context(), q))
	wantLocated(t, c, []segment.ID{ID(1), ID(5), ID(10), ID(11), ID(12), ID(13)}, p, q)
	p.Size++
	if err := c.AddPack(t.Context(), p); err == nil {
		t.Error("a pack of another size under a key that is taken is accepted")
	}
}

func testPackRefused(t *testing.T, c catalog.Catalog) {
	p := Pack("packs/p", 1, 10, 3)
	p.Frames[3].Segments[0].ID = segment.ID{}
	if err := c.AddPack(t.Context(), p); err == nil {
		t.Fatal("a pack with a hole is accepted")
	}
	wantLocated(t, c, []segment.ID{ID(1), ID(10)}) // nothing of it is left
	p = Pack("packs/p", 1, 10, 3)
	check(t, c.AddPack(t.Context(), p))
	wantLocated(t, c, []segment.ID{ID(1), ID(10)}, p)
}

func testForget(t *testing.T, c catalog.Catalog) {
	p, q := Pack("packs/p", 1, 10, 3), Pack("packs/q", 5, 12, 2)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.Forget(t.Context(), nil))
	check(t, c.Forget(t.Context(), []segment.ID{ID(5), ID(6), ID(99), ID(5)}))
	wantLocated(t, c, []segment.ID{ID(5), ID(6)})
	wantLocated(t, c, []segment.ID{ID(4), ID(7), ID(10)}, p)
	// Another pack brings them back, and takes nothing else over.
	check(t, c.AddPack(t.Context(), q))
	wantLocated(t, c, []segment.ID{ID(5), ID(6)}, q)
	wantLocated(t, c, []segment.ID{ID(4), ID(7), ID(10)}, p)
}

func testManySegments(t *testing.T, c catalog.Catalog) {
	const n = 5000
	p, q := Pack("packs/p", 0, n-1, 7), Pack("packs/q", n/2, 2*n, 11)
	check(t, c.AddPack(t.Context(), p))
	check(t, c.AddPack(t.Context(), q))
	var ids []segment.ID
	for i := range 3 * n { // the last third is not stored
		ids = append(ids, ID(i))
	}
	r := rand.New(rand.NewPCG(1, 2))
	r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	wantLocated(t, c, ids, p, q)
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

func testCancelled(t *testing.T, c catalog.Catalog) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.LinkBlob(ctx, "r", catalog.Blob{Digest: digestOf("b")}); !errors.Is(err, context.Canceled) {
		t.Errorf("LinkBlob: %v, want Canceled", err)
	}
	if err := c.AddPack(ctx, Pack("packs/p", 1, 10, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("AddPack: %v, want Canceled", err)
	}
	if _, err := c.Locate(ctx, []segment.ID{ID(1)}); !errors.Is(err, context.Canceled) {
		t.Errorf("Locate: %v, want Canceled", err)
	}
	names, err := c.ListRepositories(t.Context(), "", -1)
	check(t, err)
	wantEqual(t, "repositories", []string(nil), names)
}

func testConcurrent(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	const pushers, images = 8, 12
	var wg sync.WaitGroup
	for p := range pushers {
		wg.Go(func() {
			repo := fmt.Sprintf("r%d", p%3)
			for i := range images {
				b := catalog.Blob{Digest: digestOf(fmt.Sprint("blob", i)), Size: int64(i)}
				m := manifest(fmt.Sprint("manifest", i))
				if err := errors.Join(c.LinkBlob(ctx, repo, b), c.PutManifest(ctx, repo, m, fmt.Sprint(i))); err != nil {
					t.Error(err)
					return
				}
				// What was acknowledged is there at once, for everybody.
				if got, err := c.Blob(ctx, repo, b.Digest); err != nil || got != b {
					t.Errorf("blob %d: %+v, %v", i, got, err)
				}
				if got, err := c.Tag(ctx, repo, fmt.Sprint(i)); err != nil || got != m.Digest {
					t.Errorf("tag %d: %s, %v", i, got, err)
				}
			}
		})
	}
	wg.Wait()
	for r := range 3 {
		tags, err := c.Tags(ctx, fmt.Sprintf("r%d", r), "", -1)
		check(t, err)
		if len(tags) != images {
			t.Errorf("repository %d has %d tags, want %d", r, len(tags), images)
		}
	}
}

// A pack is seen as a whole or not at all.
func testConcurrentPacks(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	const packs, per = 10, 600
	var ids []segment.ID
	for i := range packs * per {
		ids = append(ids, ID(i))
	}
	done := make(chan struct{})
	var adders, readers sync.WaitGroup
	for p := range packs {
		for range 2 { // two add the same
			adders.Go(func() {
				if err := c.AddPack(ctx, Pack(fmt.Sprint("packs/", p), p*per, (p+1)*per-1, 5)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	for range 2 {
		readers.Go(func() {
			for {
				locations, err := c.Locate(ctx, ids)
				if err != nil {
					t.Error(err)
					return
				}
				for p := range packs {
					n := 0
					for _, l := range locations[p*per : (p+1)*per] {
						if l.Frame != nil {
							n++
						}
					}
					if n != 0 && n != per {
						t.Errorf("%d of %d segments of pack %d are there", n, per, p)
						return
					}
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	adders.Wait()
	close(done)
	readers.Wait()
	locations, err := c.Locate(ctx, ids)
	check(t, err)
	for i, l := range locations {
		if want := fmt.Sprint("packs/", i/per); l.Frame == nil || l.Frame.Pack != want {
			t.Fatalf("segment %d is in %+v, want %s", i, l.Frame, want)
		}
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
		wantLocated(t, c, []segment.ID{ID(10), ID(11)}, p)
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
