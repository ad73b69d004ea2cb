package hostiletest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/hosttest"
)

// honest is an image that is what it says.
type honest struct {
	m     *bundletest.Image
	files toctest.Files
}

// newHonest is an image of two layers, of which the upper one hides a file, with a content of several segments, one of
// zeros, and one that all versions have.
func newHonest(t testing.TB, app, version uint64) *honest {
	files := toctest.Files{
		"program": toctest.Blob(app*10+version, 1200<<10), "library": toctest.Blob(app, 1100<<10), "zeros": strings.Repeat("\x00", 300<<10),
		"secret": fmt.Sprintf("what only images of app %d may read", app), "common": toctest.Blob(7, 9000), "new": toctest.Blob(app*10+version+5, 7000),
	}
	var lower, upper layertest.Layer
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name == "new" || name == "program" {
			upper = append(upper, layertest.File(name, 0o755, files[name]))
		} else {
			lower = append(lower, layertest.File(name, 0o644, files[name]))
		}
	}
	lower = append(lower, layertest.File("old", 0o644, toctest.Blob(app*10+version+7, 5000)))
	upper = append(upper, layertest.Whiteout("old"))
	return &honest{bundletest.NewLayers(t, lower, upper), files}
}

// tally counts what has happened in all checks.
type tally struct {
	mu    sync.Mutex
	count map[string]int
	told  map[string]int // lies
}

func (n *tally) add(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.count[what]++
}

// world is a worker, the registries that its honest images come from, and those of the liars: one of its own, and the
// first honest one, where liars may push to other repositories.
type world struct {
	*worker
	tally   *tally
	images  []*honest
	servers []*bundletest.Server // the last one is the liars'
	named   map[string]*honest   // what the honest registries' references name
	here    map[string]*honest   // of those: what was pulled
	runs    map[string]*container
	liars   []*liar
	number  int
	ctx     context.Context // of the liars' pulls
}

// container is one on an honest image.
type container struct {
	ref, dir string
	of       *honest
}

// TestRandomLiar has honest images pulled, run, updated and removed on a worker on which others come from servers that lie
// about everything that they could lie about. -rapid.checks says how many workers there are in a row, -rapid.steps how many
// steps each takes, about; each step is a round, after which every file of the honest images is compared.
func TestRandomLiar(t *testing.T) {
	for name, value := range map[string]string{"rapid.checks": "8", "rapid.steps": "20", "rapid.seed": fmt.Sprint(rand.Uint64N(1<<40) + 1)} {
		f := flag.Lookup(name)
		if f.Value.String() != f.DefValue {
			continue // somebody has chosen
		}
		if err := f.Value.Set(value); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Value.Set(f.DefValue) })
	}
	t.Logf("-rapid.seed=%s", flag.Lookup("rapid.seed").Value)
	var images []*honest
	for app := range uint64(2) {
		for version := range uint64(2) {
			images = append(images, newHonest(t, app, version))
		}
	}
	n := &tally{count: make(map[string]int), told: make(map[string]int)}
	rapid.Check(t, func(rt *rapid.T) {
		x := newWorld(t, rt, images, n)
		rt.Repeat(map[string]func(*rapid.T){
			"lie": func(t *rapid.T) {
				x.lie(t)
				x.step(t)
			},
			"step": x.step,
			"":     x.check,
		})
		for len(x.liars) > 0 {
			x.judge(rt)
			x.check(rt)
		}
		n.add("workers")
	})
	t.Logf("%v; lies: %v", n.count, n.told)
}

func newWorld(t testing.TB, rt *rapid.T, images []*honest, n *tally) *world {
	x := &world{tally: n, images: images, named: make(map[string]*honest), here: make(map[string]*honest), runs: make(map[string]*container)}
	for range 3 {
		s := bundletest.New(t)
		rt.Cleanup(s.Stop)
		x.servers = append(x.servers, s)
	}
	for _, s := range x.servers[:2] {
		for app := range 2 {
			x.named[s.Serve(fmt.Sprintf("app%d:1", app), images[2*app].m)] = images[2*app]
		}
	}
	kinds, err := hosttest.Gates()
	if err != nil {
		t.Fatal(err)
	}
	x.worker = newWorkerOn(rt, oneOf(rt, "gate", kinds))
	n.add(x.opts.Gate)
	var cancel context.CancelFunc
	x.ctx, cancel = context.WithCancel(context.Background())
	rt.Cleanup(func() {
		cancel()
		for _, l := range x.liars {
			<-l.pull
		}
	})
	return x
}

// step is one thing that can be done.
func (x *world) step(t *rapid.T) {
	var can []func(*rapid.T)
	can = append(can, x.pullOne, x.run)
	if len(x.here) > 0 {
		can = append(can, x.proveOne, x.proveOne, x.removeOne, x.update, x.again)
	}
	if len(x.runs) > 0 {
		can = append(can, x.endOne)
	}
	if len(x.liars) > 0 {
		can = append(can, x.judge, x.forget)
	}
	if len(x.liars) >= mostLiars {
		can = []func(*rapid.T){x.judge}
	}
	can[evenly(t, "step", len(can))](t)
}

// mostLiars bounds the liars' images that are here at a time.
const mostLiars = 6

// evenly draws one of n numbers, all as likely as each other, which package rapid's own generators do not.
func evenly(t *rapid.T, what string, n int) (i int) {
	for _, bit := range rapid.SliceOfN(rapid.Bool(), 16, 16).Draw(t, what) {
		i *= 2
		if bit {
			i++
		}
	}
	return i % n
}

// draw draws an honest reference.
func (x *world) draw(t *rapid.T, of map[string]*honest) string {
	refs := slices.Sorted(maps.Keys(of))
	return refs[evenly(t, "honest image", len(refs))]
}

// runsOn reports whether a container is on a reference's image.
func (x *world) runsOn(ref string) bool {
	for _, c := range x.runs {
		if c.ref == ref {
			return true
		}
	}
	return false
}

// server is that of a reference, and repository that of its requests.
func (x *world) server(ref string) (s *bundletest.Server, repository string) {
	host, rest, _ := strings.Cut(ref, "/")
	i := slices.IndexFunc(x.servers, func(s *bundletest.Server) bool { return s.Addr == host })
	repository, _, _ = strings.Cut(rest, ":")
	return x.servers[i], repository
}

// asked is how often a bundle of an honest image was asked for.
func (x *world) asked(ref string) (n int) {
	s, repository := x.server(ref)
	for _, r := range s.Requests() {
		if r.Image.Repository == repository {
			n++
		}
	}
	return n
}

// mostAsked bounds the requests of a pull whose server is honest: one, one for what liars' images were to bring and did
// not, and one for another image's place.
const mostAsked = 3

func (x *world) pullRef(t *rapid.T, ref string) {
	before := x.asked(ref)
	x.mustPull(ref, api.Complete)
	if n := x.asked(ref) - before; n > mostAsked {
		t.Errorf("the pull of %s took %d requests", ref, n)
	}
	x.here[ref] = x.named[ref]
	x.tally.add("pulls")
}

func (x *world) pullOne(t *rapid.T) { x.pullRef(t, x.draw(t, x.named)) }

// update has a tag name another version, which is pulled.
func (x *world) update(t *rapid.T) {
	ref := x.draw(t, x.named)
	i := slices.Index(x.images, x.named[ref]) ^ 1
	s, repository := x.server(ref)
	s.Serve(repository+":1", x.images[i].m)
	x.named[ref] = x.images[i]
	x.pullRef(t, ref)
}

func (x *world) removeOne(t *rapid.T) {
	ref := x.draw(t, x.here)
	if x.runsOn(ref) {
		x.pullRef(t, ref)
		return
	}
	if err := x.n.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	delete(x.here, ref)
}

// run pulls an image until it is mounted, and makes a container on it.
func (x *world) run(t *rapid.T) {
	ref := x.draw(t, x.named)
	if x.here[ref] == nil {
		x.mustPull(ref, api.Mounted)
	}
	x.number++
	id := fmt.Sprintf("c%d", x.number)
	c, err := x.n.CreateContainer(t.Context(), api.ContainerRequest{ID: id, Ref: ref})
	if err != nil {
		t.Fatalf("no container starts on %s: %v", ref, err)
	}
	x.runs[id] = &container{ref, c.Rootfs, x.named[ref]}
	x.same(t, c.Rootfs, x.named[ref])
	x.tally.add("containers")
	x.pullRef(t, ref)
}

func (x *world) endOne(t *rapid.T) {
	ids := slices.Sorted(maps.Keys(x.runs))
	if err := x.n.RemoveContainer(t.Context(), ids[0]); err != nil {
		t.Fatal(err)
	}
	delete(x.runs, ids[0])
}

func (x *world) proveOne(t *rapid.T) {
	ref := x.draw(t, x.here)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := x.n.Prove(ctx, ref, func(api.VerifyEvent) error { return nil }); err != nil || x.proof(ref) != "proven" {
		t.Errorf("%s is %q: %v", ref, x.proof(ref), err)
	}
	x.tally.add("proofs")
}

func (x *world) again(t *rapid.T) { x.restart() }

// lie has a liar's image pulled.
func (x *world) lie(t *rapid.T) {
	if len(x.liars) == mostLiars {
		return
	}
	l := &liar{m: x.images[evenly(t, "image", len(x.images))].m.Clone(t)}
	names := slices.Sorted(maps.Keys(lies))
	for range 1 + evenly(t, "lies", 3) {
		name := names[evenly(t, "lie", len(names))]
		if lies[name](t, l, x.images) {
			l.told = append(l.told, name)
		}
	}
	if len(l.told) == 0 {
		return
	}
	x.number++
	s := x.servers[2*evenly(t, "server", 2)]
	l.ref = s.Serve(fmt.Sprintf("liar%d:1", x.number), l.m)
	l.pull = x.follow(l.ref)
	x.liars = append(x.liars, l)
	x.tally.mu.Lock()
	defer x.tally.mu.Unlock()
	for _, name := range l.told {
		x.tally.told[name]++
	}
}

// follow pulls an image beside everything else.
func (x *world) follow(ref string) chan error {
	n, ended := x.n, make(chan error, 1)
	go func() {
		defer close(ended)
		var last api.Event
		err := n.Pull(x.ctx, api.PullRequest{Ref: ref, Until: api.Complete}, func(ev api.Event) error { last = ev; return nil })
		if err == nil && last.Err != "" {
			err = errors.New(last.Err)
		}
		ended <- err
	}()
	return ended
}

// truth is the image whose layers a liar's config names.
func (x *world) truth(l *liar) *honest {
	for _, h := range x.images {
		if h.m.ChainID == l.m.ChainID {
			return h
		}
	}
	return nil
}

// judge looks at what has become of the oldest liar's image, and removes it.
func (x *world) judge(t *rapid.T) {
	l := x.liars[0]
	x.liars = x.liars[1:]
	if l.stays {
		x.drop(t, l)
		x.tally.add("left waiting")
		return
	}
	select {
	case err := <-l.pull:
		if err != nil {
			x.drop(t, l)
			x.tally.add("refused")
			return
		}
	case <-time.After(2 * time.Minute):
		t.Fatalf("the pull of %s (%v) has no end", l.ref, l.told)
	}
	x.verdict(t, l)
	x.drop(t, l)
}

// sameTree reports whether two encoded TOCs have one tree: other bytes may say the same.
func sameTree(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	x, err := toc.Decode(b)
	if err != nil {
		return false
	}
	again, err := toc.Encode(x)
	return err == nil && bytes.Equal(a, again)
}

// verdict compares what is known of a complete image with what it is.
func (x *world) verdict(t *rapid.T, l *liar) {
	h := x.truth(l)
	if h == nil {
		t.Fatalf("%s (%v) is complete, with chain ID %s", l.ref, l.told, l.m.ChainID)
	}
	right := h.m.TOCDigest == l.m.TOCDigest || sameTree(h.m.TOC, l.m.TOC)
	if l.mute {
		if got := x.proof(l.ref); got == "proven" && !right {
			t.Errorf("%s (%v) is %s", l.ref, l.told, got)
		}
		x.tally.add("not answered")
		return
	}
	err := x.proven(l.ref)
	got := x.proof(l.ref)
	// With the blobs that its manifest names the proof comes to an end, whatever else is withheld.
	ends, real := true, true
	for i, made := range l.m.Layers {
		ends = ends && made.Blob.Bytes != nil && digest.FromBytes(made.Blob.Bytes) == made.Blob.Digest
		real = real && i < len(h.m.Layers) && made.Blob.Digest == h.m.Layers[i].Blob.Digest
	}
	switch code := api.AsError(err); {
	case right && err == nil && got == "proven":
		x.tally.add("proven")
	case right && ends && real && len(l.m.Layers) > 0, right && err == nil, !right && err == nil, !right && got == "proven":
		t.Errorf("%s (%v), whose tree is right (%v), is %q: %v", l.ref, l.told, right, got, err)
	case !right && ends && real && len(l.m.Layers) > 0 && (code.Code != api.CodeCorrupt || !strings.HasPrefix(got, "failed: ")):
		t.Errorf("%s (%v), whose tree is wrong, is %q: %v", l.ref, l.told, got, err)
	case code.Code == api.CodeCorrupt:
		x.tally.add("failed")
		x.refused(l.ref, "")
	default:
		x.tally.add("unproven")
	}
}

// drop removes a liar's image.
func (x *world) drop(t *rapid.T, l *liar) {
	err := x.n.RemoveImage(t.Context(), l.ref)
	if e := api.AsError(err); err != nil && e.Code == api.CodeConflict {
		// A container is on its rootfs, by an honest name that has moved on.
		for len(x.runs) > 0 {
			x.endOne(t)
		}
		err = x.n.RemoveImage(t.Context(), l.ref)
	}
	if e := api.AsError(err); err != nil && e.Code != api.CodeNotFound {
		t.Fatalf("remove %s (%v): %v", l.ref, l.told, err)
	}
	for range l.pull { //nolint:revive // until it has ended
	}
}

// forget removes the newest liar's image, whatever it is at.
func (x *world) forget(t *rapid.T) {
	l := x.liars[len(x.liars)-1]
	x.liars = x.liars[:len(x.liars)-1]
	x.drop(t, l)
}

// check compares every file of the honest images that are here, and what is said of them.
func (x *world) check(t *rapid.T) {
	x.tally.add("rounds")
	list, err := x.n.Images(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range list {
		if h := x.here[img.Ref]; h == nil {
			continue
		} else if img.State != "complete" || strings.HasPrefix(img.Proof, "failed") || img.Digest != h.m.Manifest.Digest.String() {
			t.Errorf("the honest image %s is %+v", img.Ref, img)
		}
	}
	for ref, h := range x.here {
		hold, err := x.n.Hold(t.Context(), ref)
		if err != nil {
			t.Fatalf("the honest image %s: %v", ref, err)
		}
		x.same(t, hold.Mount, h)
		x.n.Release(hold.Rootfs)
	}
	for _, c := range x.runs {
		x.same(t, c.dir, c.of)
	}
}

// same fails the test unless below a directory are the files of an image, and no others.
func (x *world) same(t *rapid.T, dir string, h *honest) {
	got := toctest.Files{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		got[name] = string(b)
		return err
	})
	if err != nil {
		log := strings.Split(strings.TrimSpace(x.log.String()), "\n")
		t.Fatalf("%v; the daemon said last:\n%s", err, strings.Join(log[max(0, len(log)-40):], "\n"))
	}
	if maps.Equal(got, h.files) {
		return
	}
	if d := cmp.Diff(slices.Sorted(maps.Keys(h.files)), slices.Sorted(maps.Keys(got))); d != "" {
		t.Fatal(d)
	}
	for name, want := range h.files {
		if at := firstDifference(got[name], want); at >= 0 {
			t.Errorf("%s has %d bytes, want %d; from %d on %.40q, want %.40q", filepath.Join(dir, name), len(got[name]), len(want), at, got[name][at:], want[at:])
		}
	}
}

// firstDifference returns where two strings differ; -1: nowhere.
func firstDifference(a, b string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	return -1
}

// decode decodes JSON.
func decode(t hosttest.T, b []byte, v any) {
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatal(err)
	}
}
