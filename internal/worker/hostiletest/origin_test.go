package hostiletest

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/bundletest"
)

const secret = "what only the first registry's images may read"

func private(t *testing.T) *bundletest.Image {
	return bundletest.NewImage(t, toctest.Files{"secret": secret, "program": toctest.Blob(1, 3<<20), "small": toctest.Blob(2, 5000)})
}

func rogue(t *testing.T) *bundletest.Image {
	return bundletest.NewImage(t, toctest.Files{"program": toctest.Blob(666, 3<<20), "evil": "what the rogue wants to run"})
}

// told is what the last request of a server says is on the worker.
func told(s *bundletest.Server) (chains []digest.Digest) {
	requests := s.Requests()
	for _, h := range requests[len(requests)-1].Have {
		chains = append(chains, h.ChainID)
	}
	return chains
}

// A server learns what came from its own registry, and nothing else.
func TestAServerIsToldOfItsOwnOriginOnly(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	m := private(t)
	w := newWorker(t)
	w.mustPull(a.Serve("private:1", m), api.Complete)
	w.mustPull(b.Serve("public:1", rogue(t)), api.Complete)
	if list := told(b); len(list) > 0 {
		t.Errorf("the other registry's server is told of %v", list)
	}
	w.mustPull(a.Serve("other:1", bundletest.NewImage(t, toctest.Some(50, 3, 4000))), api.Complete)
	if list := told(a); !slices.Equal(list, []digest.Digest{m.ChainID}) {
		t.Errorf("its own server is told of %v, want %v", list, m.ChainID)
	}
}

// In a group each server is told of all, and what one has brought the other need not.
func TestAGroupIsNoWall(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	m := private(t)
	w := newWorker(t, a.Addr+" "+b.Addr)
	w.mustPull(a.Serve("private:1", m), api.Complete)
	before := b.Sent()
	ref := b.Serve("same:1", m)
	w.mustPull(ref, api.Complete)
	if list := told(b); !slices.Equal(list, []digest.Digest{m.ChainID}) || b.Sent() != before {
		t.Errorf("the other server of the group is told of %v, and sent %d frames", list, b.Sent()-before)
	}
	w.reads(ref, "secret", secret)
}

// An image of another registry that claims a rootfs has its own, whoever came first.
func TestAClaimedChainIDIsAnotherRootfs(t *testing.T) {
	for _, first := range []string{"good", "rogue"} {
		t.Run(first+" first", func(t *testing.T) {
			a, b := bundletest.New(t), bundletest.New(t)
			good := private(t)
			liar := rogue(t).As(t, good)
			refs := map[string]string{"good": a.Serve("app:1", good), "rogue": b.Serve("app:1", liar)}
			w := newWorker(t)
			w.mustPull(refs[first], api.Complete)
			for _, ref := range refs {
				w.mustPull(ref, api.Complete)
			}
			w.reads(refs["good"], "secret", secret)
			w.reads(refs["good"], "program", good.Files["program"])
			w.right(refs["good"])
			w.reads(refs["rogue"], "program", liar.Files["program"])
			if got, err := w.read(refs["rogue"], "secret"); err == nil {
				t.Errorf("the rogue's image has %q", got)
			}
		})
	}
}

// A rogue that never had a byte claims all of an image, its TOC included.
func TestAnImageCannotBeHadByItsNames(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	good := private(t)
	w := newWorker(t)
	w.mustPull(a.Serve("private:1", good), api.Complete)
	empty := *good
	empty.Data = nil
	ref := b.Serve("thief:1", &empty)
	if err := w.pull(ref, api.Complete); err == nil {
		t.Error("an image of which no byte was sent is complete")
	}
	if got, err := w.read(ref, "secret"); err == nil {
		t.Errorf("it has %q", got)
	}
}

// Another TOC for the chain ID of the same registry is told, and never takes the place of the first.
func TestAnotherTOCIsAConflictAndAnotherRootfs(t *testing.T) {
	s := bundletest.New(t)
	good := private(t)
	liar := rogue(t).As(t, good)
	w := newWorker(t)
	bad := s.Serve("bad:1", liar)
	w.mustPull(bad, api.Complete)
	ref := s.Serve("good:1", good)
	w.mustPull(ref, api.Complete)
	w.reads(ref, "secret", secret)
	w.reads(ref, "program", good.Files["program"])
	w.right(ref)
	w.reads(bad, "program", liar.Files["program"])
	if !strings.Contains(w.log.String(), "conflict: ") {
		t.Error("nobody is told")
	}
}

// So it is for an image that is here, when containerd asks what a tag names.
func TestAnotherTOCOfWhatIsHereIsTold(t *testing.T) {
	s := bundletest.New(t)
	good := private(t)
	w := newWorker(t)
	tag := s.Serve("app:1", good)
	ref := s.Addr + "/app@" + good.Manifest.Digest.String()
	w.mustPull(ref, api.Complete)
	s.Serve("app:1", rogue(t).As(t, good))
	if _, err := w.n.Header(t.Context(), api.PullRequest{Ref: tag}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(w.log.String(), "conflict: ") {
		t.Error("nobody is told")
	}
	w.reads(ref, "secret", secret)
}

// A content that another registry's image has is not had by naming its hash.
func TestContentsAreNotLentToAnotherOrigin(t *testing.T) {
	for name, file := range map[string]string{"one segment": "secret", "several": "program"} {
		t.Run(name, func(t *testing.T) {
			a, b := bundletest.New(t), bundletest.New(t)
			good := private(t)
			w := newWorker(t)
			w.mustPull(a.Serve("private:1", good), api.Complete)
			thief := bundletest.NewImage(t, toctest.Files{"stolen": good.Files[file], "own": "x"})
			maps.DeleteFunc(thief.Data, func(id segment.ID, b []byte) bool { return string(b) != "x" })
			ref := b.Serve("thief:1", thief)
			if err := w.pull(ref, api.Complete); err == nil {
				t.Error("what no server sent is here")
			}
			if got, err := w.read(ref, "stolen"); err == nil {
				t.Errorf("it has %.40q", got)
			}
		})
	}
}

// What two registries' images have in common comes from both, also while both are pulled.
func TestRunningPullsOfTwoOriginsShareNothing(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	m := private(t)
	other := bundletest.NewImage(t, toctest.Files{"program": m.Files["program"], "own": "x"})
	w := newWorker(t)
	a.SetLimit(1)
	w.mustPull(a.Serve("app:1", m), api.Mounted)
	ref := b.Serve("app:1", other)
	w.mustPull(ref, api.Complete)
	if list := told(b); len(list) > 0 || b.Sent() != len(other.Data) {
		t.Errorf("told of %v, %d of %d frames came", list, b.Sent(), len(other.Data))
	}
	w.reads(ref, "program", m.Files["program"])
}

// A pull that stalls on a rootfs that it claimed makes nobody wait: not another registry's image, nor one of its own.
func TestAStalledClaimHoldsUpNobody(t *testing.T) {
	for name, sameOrigin := range map[string]bool{"of another origin": false, "of the same": true} {
		t.Run(name, func(t *testing.T) {
			a, b := bundletest.New(t), bundletest.New(t)
			m := private(t)
			if sameOrigin {
				b = a
			}
			w := newWorker(t)
			ref := a.Serve("stalled:1", m)
			a.SetLimit(0)
			w.mustPull(ref, api.Mounted)
			a.Change("stalled", func(st *bundletest.Stream) { st.Limited = true })
			a.SetLimit(-1)
			good := b.Serve("good:1", m)
			w.mustPull(good, api.Complete)
			w.reads(good, "secret", secret)
		})
	}
}

// falsely makes a content of an image say that it is another one.
func falsely(t *testing.T, m *bundletest.Image, file string, as segment.ID) {
	id := segment.Sum([]byte(m.Files[file]))
	m.Change(t, func(x *toc.TOC) {
		i := slices.IndexFunc(x.Contents, func(c toc.Content) bool { return c.ID == id })
		if i < 0 {
			t.Fatalf("there is no %s", file)
		}
		x.Contents[i].ID = as
	})
}

// A content whose segments are right, and whose ID is another content's, is found out before anybody refers to it. All
// images are of one registry.
func TestAContentWithAnothersIDIsNotLent(t *testing.T) {
	for name, file := range map[string]string{"several segments": toctest.Blob(666, 3<<20), "a hole": strings.Repeat("\x00", 3<<20)} {
		for _, complete := range []bool{true, false} {
			t.Run(name+map[bool]string{true: ", complete", false: ", not all here"}[complete], func(t *testing.T) {
				s := bundletest.New(t)
				good := bundletest.NewImage(t, toctest.Files{"program": toctest.Blob(1, 3<<20)})
				liar := bundletest.NewImage(t, toctest.Files{"a": file, "z": "the last"})
				falsely(t, liar, "a", segment.Sum([]byte(good.Files["program"])))
				bad := s.Serve("bad:1", liar)
				w := newWorker(t)
				if complete {
					err := w.pull(bad, api.Complete)
					if e := api.AsError(err); err == nil || e.Code != api.CodeCorrupt || !strings.Contains(e.Message, "hashed whole") {
						t.Errorf("the pull ends with %v", err)
					}
					list, err := w.n.Images(t.Context())
					if err != nil || len(list) != 1 || list[0].State != "broken" || !strings.Contains(list[0].Why, "hashed whole") {
						t.Errorf("the image is %+v, %v", list, err)
					}
				} else {
					s.SetLimit(len(liar.Data) - 1)
					w.mustPull(bad, api.Mounted)
					for w.here(bad) < int64(len(file)) && !strings.Contains(name, "hole") {
						if t.Context().Err() != nil {
							t.Fatal("it does not come")
						}
					}
					s.Change("bad", func(st *bundletest.Stream) { st.Limited, st.Limit = true, len(liar.Data)-1 })
					s.SetLimit(-1)
				}
				ref := s.Serve("good:1", good)
				w.mustPull(ref, api.Complete)
				w.reads(ref, "program", good.Files["program"])
				w.right(ref)
			})
		}
	}
}

// A content's ID with another length is another content: else less of it would be kept than others need, or more of the
// arena read than it is. All images are of one registry.
func TestAContentIsAsLongAsItIs(t *testing.T) {
	program := toctest.Blob(1, 1200<<10)
	good := bundletest.NewImage(t, toctest.Files{"program": program, "secret": secret})
	for name, size := range map[string]int{"short": 300 << 10, "long": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			s := bundletest.New(t)
			ref := s.Serve("good:1", good)
			w := newWorker(t)
			w.mustPull(ref, api.Complete)
			liar := bundletest.NewImage(t, toctest.Files{"a": strings.Repeat("\x00", size), "z": name})
			falsely(t, liar, "a", segment.Sum([]byte(program)))
			bad := s.Serve("liar:1", liar)
			if err := w.pull(bad, api.Complete); err == nil {
				t.Error("it is complete")
			}
			if got, err := w.read(bad, "a"); err == nil && got != strings.Repeat("\x00", size) {
				t.Error("it is read from another image")
			}
			if err := w.n.RemoveImage(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
			w.mustPull(ref, api.Complete)
			w.reads(ref, "program", program)
			w.right(ref)
		})
	}
}

// here is how many bytes of an image's contents are here.
func (w *worker) here(ref string) int64 {
	w.t.Helper()
	list, err := w.n.Images(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, img := range list {
		if img.Ref == ref {
			return img.ContentHere
		}
	}
	return 0
}

// What was hashed whole is lent: the walls cost nothing within an origin.
func TestHashedContentsAreLentWithinAnOrigin(t *testing.T) {
	s := bundletest.New(t)
	files := toctest.Files{"program": toctest.Blob(1, 3<<20), "hole": strings.Repeat("\x00", 5<<20), "small": "x"}
	w := newWorker(t)
	w.mustPull(s.Serve("one:1", bundletest.NewImage(t, files)), api.Complete)
	before := s.Sent()
	more := maps.Clone(files)
	more["more"] = "y"
	ref := s.Serve("two:1", bundletest.NewImage(t, more))
	w.mustPull(ref, api.Complete)
	if n := s.Sent() - before; n != 1 {
		t.Errorf("%d frames came, 1 is new", n)
	}
	for name, want := range more {
		w.reads(ref, name, want)
	}
	rec := w.records(ref)
	if len(rec.Arenas) != 2 || !rec.Hashed {
		t.Errorf("the second rootfs uses %d arenas, and its contents were hashed: %v", len(rec.Arenas), rec.Hashed)
	}
}

// silence: a server that sends a greeting, and nothing else, is nobody's trouble but its own image's.
func TestASilentServerIsAlone(t *testing.T) {
	a, b := bundletest.New(t), bundletest.New(t)
	m := private(t)
	w := newWorker(t)
	b.SetHeader(false)
	silent := make(chan error, 1)
	go func() { silent <- w.pull(b.Serve("app:1", m), api.Complete) }()
	for len(b.Requests()) == 0 {
		if t.Context().Err() != nil {
			t.Fatal("it is not asked")
		}
	}
	ref := a.Serve("app:1", m)
	w.mustPull(ref, api.Complete)
	w.reads(ref, "secret", secret)
	b.SetHeader(true)
	if err := <-silent; err != nil {
		t.Error(err)
	}
}
