package catalogtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// policy is one that never changes.
type policy struct {
	quotas    []catalog.Quota
	immutable string // tags that begin with it
}

func (p *policy) Quotas(string) []catalog.Quota { return p.quotas }

func (p *policy) Immutable(_, tag string) string {
	if p.immutable != "" && strings.HasPrefix(tag, p.immutable) {
		return "rule"
	}
	return ""
}

// bounded returns a catalog with a policy.
func bounded(t *testing.T, c catalog.Catalog, p *policy) catalog.Bounded {
	t.Helper()
	b, ok := c.(catalog.Bounded)
	if !ok {
		t.Fatalf("%T is no catalog.Bounded", c)
	}
	b.SetPolicy(func() catalog.Policy { return p })
	return b
}

// Naming returns a manifest that names blobs and manifests.
func Naming(names ...digest.Digest) catalog.Manifest {
	type descriptor struct {
		Digest digest.Digest `json:"digest"`
	}
	layers := make([]descriptor, len(names))
	for i, d := range names {
		layers[i] = descriptor{d}
	}
	b, err := json.Marshal(map[string]any{"layers": layers})
	if err != nil {
		panic(err)
	}
	return catalog.Manifest{Digest: digest.FromBytes(b), MediaType: "m", Bytes: b, Pushed: time.Unix(1_800_000_000, 0)}
}

func blob(name string, size int64) catalog.Blob {
	return catalog.Blob{Digest: digestOf(name), Size: size}
}

func wantRefusal(t *testing.T, what string, err error, quota bool) {
	t.Helper()
	if r, ok := errors.AsType[*catalog.Refusal](err); !ok || r.Quota != quota {
		t.Errorf("%s: %v, want a Refusal (quota: %v)", what, err, quota)
	}
}

func wantUsage(t *testing.T, b catalog.Bounded, repo string, bytes, loose, manifests int64) {
	t.Helper()
	all, err := b.Usages(t.Context(), "", 1000)
	check(t, err)
	i := slices.IndexFunc(all, func(u catalog.RepositoryUsage) bool { return u.Repository == repo })
	if i < 0 {
		t.Fatalf("%s is not among %v", repo, all)
	}
	wantEqual(t, "usage of "+repo, catalog.RepositoryUsage{Repository: repo, Usage: catalog.Usage{Bytes: bytes, Loose: loose, Manifests: manifests}}, all[i])
}

func testQuotas(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	p := new(policy)
	b := bounded(t, c, p)
	one, two := blob("one", 1000), blob("two", 500)
	m, n := Naming(one.Digest), Naming(one.Digest, two.Digest)
	mSize, nSize := int64(len(m.Bytes)), int64(len(n.Bytes))
	check(t, errors.Join(c.LinkBlob(ctx, "r", one), c.LinkBlob(ctx, "r", two)))
	wantUsage(t, b, "r", 0, 1500, 0)
	check(t, errors.Join(c.PutManifest(ctx, "r", m, "1"), c.PutManifest(ctx, "r", n, "2"), c.PutManifest(ctx, "r", n, "3")))
	wantUsage(t, b, "r", 1500+mSize+nSize, 0, 2)
	check(t, c.DeleteManifest(ctx, "r", n.Digest))
	wantUsage(t, b, "r", 1000+mSize, 500, 1)
	// What another repository has counts there alone.
	check(t, errors.Join(c.LinkBlob(ctx, "s", one), c.UnlinkBlob(ctx, "r", two.Digest)))
	wantUsage(t, b, "s", 0, 1000, 0)
	wantUsage(t, b, "r", 1000+mSize, 0, 1)

	p.quotas = []catalog.Quota{{Name: "q", Bytes: 1400 + mSize}}
	wantRefusal(t, "a blob without room", c.LinkBlob(ctx, "r", two), true)
	wantRefusal(t, "room for it", b.Room(ctx, "r", 500), true)
	check(t, errors.Join(b.Room(ctx, "r", 400), c.LinkBlob(ctx, "r", blob("three", 400)), c.LinkBlob(ctx, "alone", two)))
	wantUsage(t, b, "r", 1000+mSize, 400, 1)
	wantRefusal(t, "too many blobs that no manifest names", c.LinkBlob(ctx, "s", two), true)
	wantRefusal(t, "a manifest without room", c.PutManifest(ctx, "r", Naming(digestOf("three")), "4"), true)
	if _, err := c.Tag(ctx, "r", "4"); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("a refused manifest has left a tag: %v", err)
	}
	// Beyond the quota what takes nothing more goes on.
	p.quotas[0].Bytes, p.quotas[0].Manifests = 10, 1
	check(t, errors.Join(c.LinkBlob(ctx, "r", one), c.PutManifest(ctx, "r", m, "5"), c.DeleteTag(ctx, "r", "1")))
	wantRefusal(t, "a first blob", c.LinkBlob(ctx, "u", one), true)
	if _, err := c.Tags(ctx, "u", "", -1); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("a refused blob has made a repository: %v", err)
	}
	// What is counted together.
	p.quotas = []catalog.Quota{{Name: "q", Manifests: 2, Counts: func(repo string) bool { return repo == "team/a" || repo == "team/b" }, Prefix: "team"}}
	check(t, errors.Join(c.PutManifest(ctx, "team/a", manifest("a")), c.PutManifest(ctx, "team/c", manifest("c")), c.PutManifest(ctx, "team/b", manifest("b"))))
	wantRefusal(t, "a third manifest", c.PutManifest(ctx, "team/a", manifest("x")), true)
	check(t, errors.Join(c.DeleteManifest(ctx, "team/b", digestOf("b")), c.PutManifest(ctx, "team/a", manifest("x"))))
}

// However many push at once, exactly as many are let in as there is room for.
func testQuotasAtOnce(t *testing.T, c catalog.Catalog) {
	const room, pushers = 7, 40
	b := bounded(t, c, &policy{quotas: []catalog.Quota{{Name: "q", Manifests: room, Bytes: 1 << 20, Counts: func(string) bool { return true }}}})
	var in, out atomic.Int64
	var all sync.WaitGroup
	for i := range pushers {
		all.Go(func() {
			repo := fmt.Sprint("r", i%4)
			err := c.PutManifest(t.Context(), repo, manifest(fmt.Sprint(i)), fmt.Sprint(i))
			if err == nil {
				in.Add(1)
			} else if _, ok := errors.AsType[*catalog.Refusal](err); ok {
				out.Add(1)
			} else {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if in.Load() != room || out.Load() != pushers-room {
		t.Errorf("%d were let in and %d refused, want %d and %d", in.Load(), out.Load(), room, pushers-room)
	}
	total := int64(0)
	us, err := b.Usages(t.Context(), "", 1000)
	check(t, err)
	for _, u := range us {
		total += u.Manifests
	}
	wantEqual(t, "manifests", int64(room), total)
}

func testImmutable(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	b := bounded(t, c, &policy{immutable: "v"})
	layer := blob("layer", 5)
	m := Naming(layer.Digest)
	index := Naming(m.Digest)
	check(t, errors.Join(c.LinkBlob(ctx, "r", layer), c.PutManifest(ctx, "r", m, "latest"), c.PutManifest(ctx, "r", index, "v1"), c.PutManifest(ctx, "r", index, "v1")))
	other := manifest("other")
	wantRefusal(t, "another manifest", c.PutManifest(ctx, "r", other, "w", "v1"), false)
	if _, err := c.Manifest(ctx, "r", other.Digest); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("it has left the manifest: %v", err)
	}
	wantRefusal(t, "delete the tag", c.DeleteTag(ctx, "r", "v1"), false)
	wantNotFound(t, "delete one that is not there", c.DeleteTag(ctx, "r", "v2"))
	wantRefusal(t, "delete its index", c.DeleteManifest(ctx, "r", index.Digest), false)
	wantRefusal(t, "delete a manifest of the index", c.DeleteManifest(ctx, "r", m.Digest), false)
	wantRefusal(t, "remove a layer", b.MayRemove(ctx, "r", layer.Digest), false)
	check(t, errors.Join(b.MayRemove(ctx, "s", layer.Digest), c.PutManifest(ctx, "r", other, "latest"), c.DeleteTag(ctx, "r", "latest"), c.DeleteManifest(ctx, "r", other.Digest)))
	// Of those who push one tag at once one wins.
	var won atomic.Int64
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			err := c.PutManifest(ctx, "r", manifest(fmt.Sprint(i)), "v3")
			if err == nil {
				won.Add(1)
				return
			}
			wantRefusal(t, "who came later", err, false)
		})
	}
	all.Wait()
	wantEqual(t, "pushes of one immutable tag", int64(1), won.Load())
}

func testUntag(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	b := bounded(t, c, &policy{immutable: "v"})
	at := func(m catalog.Manifest, second int64) catalog.Manifest {
		m.Pushed = time.Unix(second, 0)
		return m
	}
	check(t, errors.Join(c.PutManifest(ctx, "r", at(manifest("a"), 10), "a", "v"), c.PutManifest(ctx, "r", at(manifest("a"), 20), "b"), c.PutManifest(ctx, "r", at(manifest("c"), 30), "c")))
	was, err := b.Tagged(ctx, "r")
	check(t, err)
	want := []catalog.Tagged{{Tag: "a", Target: digestOf("a"), Pushed: time.Unix(10, 0)}, {Tag: "b", Target: digestOf("a"), Pushed: time.Unix(20, 0)},
		{Tag: "c", Target: digestOf("c"), Pushed: time.Unix(30, 0)}, {Tag: "v", Target: digestOf("a"), Pushed: time.Unix(10, 0)}}
	wantEqual(t, "tags", want, was)
	// One was pushed again meanwhile, one moved, one is immutable.
	check(t, errors.Join(c.PutManifest(ctx, "r", at(manifest("a"), 40), "a"), c.PutManifest(ctx, "r", at(manifest("a"), 30), "c")))
	gone, err := b.Untag(ctx, "r", was)
	check(t, err)
	wantEqual(t, "untagged", want[1:2], gone)
	left, err := c.Tags(ctx, "r", "", -1)
	check(t, err)
	wantEqual(t, "left", []string{"a", "c", "v"}, left)
	_, err = b.Tagged(ctx, "s")
	wantNotFound(t, "tags of no repository", err)
}
