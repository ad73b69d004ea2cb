package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// edit changes a record.
func (h *host) edit(path string, change func(map[string]any)) {
	h.t.Helper()
	var record map[string]any
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &record)
	}
	if err == nil {
		change(record)
		b, err = json.Marshal(record)
	}
	if err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// withoutOrigins makes of a root what a version would have left that knew no origins: rootfs are named by chain IDs, and
// neither they nor images say whose they are. The host has rebooted.
func (h *host) withoutOrigins() {
	h.t.Helper()
	h.reboot()
	edit := h.edit
	old := make(map[string]string) // chain IDs by key
	paths, _ := filepath.Glob(filepath.Join(h.root, "rootfs", "*", rootfs.RecordName))
	for _, path := range paths {
		edit(path, func(r map[string]any) {
			old[string(rootfs.KeyOf(filepath.Dir(path)))] = r["chain_id"].(string)
		})
	}
	for _, path := range paths {
		edit(path, func(r map[string]any) {
			r["version"] = 1
			arenas := r["arenas"].([]any)
			for i := range arenas {
				arenas[i] = old[arenas[i].(string)]
			}
			for _, key := range []string{"origin", "hashed", "proof"} {
				delete(r, key)
			}
		})
		dir := filepath.Dir(path)
		chain := digest.Digest(old[string(rootfs.KeyOf(dir))])
		if err := errors.Join(os.Remove(filepath.Join(dir, rootfs.ContentsName)), os.Rename(dir, filepath.Join(h.root, "rootfs", chain.Encoded()))); err != nil {
			h.t.Fatal(err)
		}
	}
	images, _ := filepath.Glob(filepath.Join(h.root, "images", "*.json"))
	for _, path := range images {
		edit(path, func(r map[string]any) { delete(r, "rootfs") })
	}
}

// record is that of an image's rootfs, on the disk.
func (h *host) record(m *fakeImage) (rec rootfs.Record) {
	h.t.Helper()
	b, err := os.ReadFile(filepath.Join(h.dir(m), rootfs.RecordName))
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return rec
}

// told are the chain IDs that the last request of a server names.
func told(s *fakeServer) (chains []digest.Digest) {
	requests := s.Requests()
	for _, h := range requests[len(requests)-1].Have {
		chains = append(chains, h.ChainID)
	}
	return chains
}

// What an older version left is its images', and nobody else's.
func TestARootfsOfBeforeOriginsIsItsImagesOnly(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 8, 5000))
	half := newFakeImage(t, some(20, 8, 5000))
	h := newHost(t)
	ref := s.Serve("app:1", m)
	h.mustPull(ref, api.Complete)
	s.SetLimit(3)
	refHalf := s.Serve("half:1", half)
	h.mustPull(refHalf, api.Mounted)
	h.here(refHalf, 10000)
	s.Stop()
	h.withoutOrigins()
	h.start()
	h.same(m)
	// An upgrade is most often one of a daemon whose mounts stay.
	h.stop()
	for _, m := range []*fakeImage{m, half} {
		h.edit(filepath.Join(h.dir(m), rootfs.RecordName), func(r map[string]any) {
			r["version"] = 1
			delete(r, "origin")
			delete(r, "unwalled")
		})
	}
	for _, ref := range []string{ref, refHalf} {
		h.edit(h.imagePath(ref), func(r map[string]any) { delete(r, "rootfs") })
	}
	h.start()
	h.same(m)
	if rec := h.record(m); rec.Origin != s.Addr || !rec.Unwalled || rec.Version != rootfs.RecordVersion {
		t.Errorf("it is %+v", rec)
	}
	s.SetLimit(-1)
	s.Listen(s.Addr)
	h.complete(refHalf)
	h.same(half)
	h.verified(ref)

	// It is used for its own image, and another reference of its registry, without a byte.
	before := s.Sent()
	h.mustPull(ref, api.Complete)
	if got := told(s); !slices.Equal(got, []digest.Digest{m.ChainID}) || s.Sent() != before {
		t.Errorf("the server is told of %v, and sends %d frames", got, s.Sent()-before)
	}
	// Nothing of it is lent, nor told of for another image.
	more := newFakeImage(t, func() files { f := some(1, 8, 5000); f["more"] = "x"; return f }())
	refMore := s.Serve("more:1", more)
	h.mustPull(refMore, api.Complete)
	if got := told(s); len(got) > 0 || s.Sent()-before != len(more.Data) {
		t.Errorf("the server is told of %v, and sends %d of %d frames", got, s.Sent()-before, len(more.Data))
	}
	h.same(more)
	if rec := h.record(more); len(rec.Arenas) != 1 {
		t.Errorf("another image uses the arenas %v", rec.Arenas)
	}
	h.remove(ref)
	h.remove(refHalf)
	h.remove(refMore)
	h.empty()
}

// One that images of two registries name serves both, and no other image: nobody knows whose bytes it has.
func TestARootfsOfBeforeOriginsThatTwoNameIsNobodys(t *testing.T) {
	s, other := newFakeServer(t), newFakeServer(t)
	m := newFakeImage(t, some(1, 8, 5000))
	h := newHost(t)
	ref := s.Serve("app:1", m)
	h.mustPull(ref, api.Complete)
	refOther := other.Serve("app:1", m)
	h.reboot()
	// The older version had one rootfs for both.
	h.start()
	img := *h.n.images.Get(ref)
	img.Ref = refOther
	record, err := h.n.images.Stage(&img)
	if err == nil {
		err = h.n.images.Put(&img, record)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.withoutOrigins()
	for range 2 { // what was decided once stays, whoever goes
		h.start()
		if rec := h.record(m); rec.Origin != "" || !rec.Unwalled {
			t.Fatalf("it is %+v", rec)
		}
		h.same(m)
		before := s.Sent() + other.Sent()
		h.mustPull(ref, api.Complete)
		if n := s.Sent() + other.Sent() - before; n > 0 {
			t.Errorf("%d frames came for an image that is here", n)
		}
		if h.n.images.Get(refOther) != nil {
			h.remove(refOther)
		}
		h.reboot()
	}
	h.start()
	before := s.Sent()
	h.mustPull(s.Serve("new:1", m), api.Complete)
	if n := s.Sent() - before; n != len(m.Data) {
		t.Errorf("%d of %d frames came for a new image", n, len(m.Data))
	}
}

// A rootfs with a content that is not what its ID says is not served by the next daemon either.
func TestAWrongContentStaysOutOfTheWay(t *testing.T) {
	s := newFakeServer(t)
	liar := newFakeImage(t, files{"a": strings.Repeat("\x00", 3<<20), "b": "x"})
	for i := range liar.Tree.Contents {
		if c := &liar.Tree.Contents[i]; c.Segments > 1 {
			c.ID = liar.Tree.Contents[1-i].ID
			c.ID[0] ^= 1
		}
	}
	liar.Change(t, func(*toc.TOC) {})
	ref := s.Serve("app:1", liar)
	h := newHost(t)
	if _, err := h.pull(ref, api.Complete); codeOfErr(err) != api.CodeCorrupt {
		t.Fatalf("the pull ends with %v", err)
	}
	s.Stop()
	h.restart()
	if img := h.image(ref); img.State != "broken" || !strings.Contains(img.Why, "hashed whole") {
		t.Errorf("after a restart it is %+v", img)
	}
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); codeOfErr(err) != api.CodeCorrupt {
		t.Errorf("a container of it: %v", err)
	}
}

// as returns what a server accepts of users.
func as(users ...string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		user, _, _ := r.BasicAuth()
		return slices.Contains(users, user)
	}
}

func pullAs(h *host, ref, user string, until api.EventKind) error {
	return h.n.Pull(h.t.Context(), api.PullRequest{Ref: ref, Until: until, Credential: credentials.Credential{Username: user, Secret: "s"}}, func(api.Event) error { return nil })
}

// Who joins a pull is let in by the registry first, with what they have themselves.
func TestAPullIsJoinedWithOnesOwnCredentials(t *testing.T) {
	s := newFakeServer(t)
	s.Accept(as("owner", "friend"))
	ref := s.Serve("app:1", newFakeImage(t, some(1, 8, 5000)))
	h := newHost(t)
	s.SetLimit(2)
	if err := pullAs(h, ref, "owner", api.Mounted); err != nil {
		t.Fatal(err)
	}
	for user, ok := range map[string]bool{"stranger": false, "": false, "friend": true, "owner": true} {
		before := len(s.Requests())
		err := pullAs(h, ref, user, api.Mounted)
		if ok && err != nil || !ok && codeOfErr(err) != api.CodeUnauthorized {
			t.Errorf("%q joins: %v", user, err)
		}
		if asked := len(s.Requests()) - before; asked != map[string]int{"friend": 1}[user] {
			t.Errorf("%q: the server accepted %d requests", user, asked)
		}
	}
	s.SetLimit(-1)
	h.complete(ref)
}

// A pull that has failed is tried again with what it was begun with.
func TestARetryShowsWhatThePullWasBegunWith(t *testing.T) {
	s := newFakeServer(t)
	s.Accept(as("owner"))
	ref := s.Serve("app:1", newFakeImage(t, some(1, 8, 5000)))
	h := newHost(t)
	h.stop()
	h.retry = 10 * time.Millisecond
	h.start()
	s.SetLimit(2)
	if err := pullAs(h, ref, "owner", api.Mounted); err != nil {
		t.Fatal(err)
	}
	s.Change("app", func(st *bundletest.Stream) { st.Fail = true })
	s.SetLimit(-1)
	h.complete(ref)
}

// What was shown is not kept over a restart: the registry refuses who goes on then, and the image says what to do.
func TestAResumedPullSaysWhatItLacks(t *testing.T) {
	s := newFakeServer(t)
	s.Accept(as("owner"))
	ref := s.Serve("app:1", newFakeImage(t, some(1, 8, 5000)))
	h := newHost(t)
	s.SetLimit(2)
	if err := pullAs(h, ref, "owner", api.Mounted); err != nil {
		t.Fatal(err)
	}
	h.restart()
	eventually(t, "the registry refuses the daemon", func() error {
		if why := h.image(ref).Why; !strings.Contains(why, pull.Forgotten) {
			return fmt.Errorf("it is said: %q", why)
		}
		return nil
	})
	s.SetLimit(-1)
	if err := pullAs(h, ref, "owner", api.Complete); err != nil {
		t.Error(err)
	}
	if why := h.image(ref).Why; why != "" {
		t.Errorf("once it is complete it is said: %q", why)
	}
}
