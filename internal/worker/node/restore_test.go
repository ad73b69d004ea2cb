package node

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/store"
)

func TestCompleteImagesNeedNoServerAfterAReboot(t *testing.T) {
	s := newFakeServer(t)
	one, two := newFakeImage(t, some(1, 8, 5000)), newFakeImage(t, some(5, 8, 5000))
	ref1, ref2 := s.Serve("app:1", one), s.Serve("app:2", two)
	h := newHost(t)
	h.mustPull(ref1, api.Complete)
	h.mustPull(ref2, api.Complete)
	h.stop()
	s.Stop()
	h.reboot()
	h.start()
	h.same(one)
	h.same(two)
	for _, ref := range []string{ref1, ref2} {
		if img := h.image(ref); img.State != "complete" {
			t.Errorf("%+v", img)
		}
		h.verified(ref)
	}
	if pulls := h.n.pulls.List(); len(pulls) > 0 {
		t.Errorf("pulls of complete images: %v", pulls)
	}
}

// A power cut takes what was not durable, whatever the presence map says.
func TestOnlyWhatIsDurableIsBelievedAfterAReboot(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(5)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 25000)
	a := h.n.store.Get(h.key(m)).Arena()
	if err := a.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	durable := filepath.Join(h.dir(m), "durable")
	cut, err := os.ReadFile(durable)
	if err != nil {
		t.Fatal(err)
	}
	kept := h.image(ref).ContentHere
	s.SetLimit(12)
	h.here(ref, 12*5000)
	h.stop()
	// The cut: the map of before, and rubbish where blocks were not written yet.
	if err := os.WriteFile(durable, cut, 0o600); err != nil {
		t.Fatal(err)
	}
	h.reboot()
	h.rubbish(m, func(i int) bool { return i >= 5 })
	s.SetHeader(false)
	h.start()
	if got := h.image(ref).ContentHere; got != kept {
		t.Errorf("%d bytes are believed after a reboot, %d were durable", got, kept)
	}
	s.SetLimit(-1)
	s.SetHeader(true)
	h.mustPull(ref, api.Complete)
	h.same(m)
	h.verified(ref)
}

// rubbish overwrites segments of an image's arena on the disk.
func (h *host) rubbish(m *fakeImage, which func(i int) bool) {
	h.t.Helper()
	f, err := os.OpenFile(filepath.Join(h.dir(m), "arena"), os.O_RDWR, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	defer f.Close()
	off := int64(0)
	for i, c := range m.Tree.Contents {
		if which(i) {
			if _, err := f.WriteAt([]byte(strings.Repeat("\xaa", int(c.Size))), off); err != nil {
				h.t.Fatal(err)
			}
		}
		off += (c.Size + 4095) / 4096 * 4096
	}
}

// partly is an image of those files of m that are here.
func (h *host) partly(m *fakeImage) *fakeImage {
	h.t.Helper()
	a := h.n.store.Get(h.key(m)).Arena()
	f := make(files)
	for name, data := range m.Files {
		for i := range m.Tree.Contents {
			off, _ := a.Layout().Offset(i)
			c := m.Tree.Contents[i]
			if m.Data[m.Tree.Segments[c.First].ID] != nil && string(m.Data[m.Tree.Segments[c.First].ID]) == data && a.Present(off, c.Size) {
				f[name] = data
			}
		}
	}
	return newFakeImage(h.t, f)
}

// An image that is complete uses contents in the arena of one that is not. They
// must be durable, and found again, whatever becomes of the other.
func TestWhatAnIncompleteImageLendsIsDurable(t *testing.T) {
	s := newFakeServer(t)
	lender := newFakeImage(t, some(1, 20, 5000))
	ref1 := s.Serve("lender:1", lender)
	s.SetLimit(6)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted)
	h.here(ref1, 30000)
	user := h.partly(lender)
	if len(user.Files) < 6 {
		t.Fatalf("only %d files are here", len(user.Files))
	}
	ref2 := s.Serve("user:1", user)
	h.mustPull(ref2, api.Complete)
	if r := h.rootfs(user); r.Own() >= 0 || !r.Complete() {
		t.Fatalf("the image did not use the other's arena: %v", r.Arenas())
	}
	durable, err := os.ReadFile(filepath.Join(h.dir(lender), "durable"))
	if err != nil {
		t.Fatalf("what is lent is not durable: %v", err)
	}
	h.stop()
	s.Stop()
	// What the end of the daemon made durable, a power cut would not have.
	if err := os.WriteFile(filepath.Join(h.dir(lender), "durable"), durable, 0o600); err != nil {
		t.Fatal(err)
	}
	h.reboot()
	h.start()
	if img := h.image(ref2); img.State != "complete" {
		t.Errorf("after a reboot: %+v", img)
	}
	h.same(user)
	h.verified(ref2)

	// The lender goes, and is pulled again.
	h.remove(ref1)
	h.same(user)
	h.restart()
	h.same(user)
	h.verified(ref2)
	s.Listen(s.Addr)
	s.SetLimit(-1)
	h.mustPull(ref1, api.Complete)
	h.same(lender)
	h.same(user)
	h.remove(ref2)
	h.same(lender)
	h.remove(ref1)
	h.empty()
}

func (h *host) rootfs(m *fakeImage) *store.Rootfs {
	h.t.Helper()
	r := h.n.store.Get(h.key(m))
	if r == nil {
		h.t.Fatalf("no rootfs %s", m.ChainID)
	}
	return r
}

// The user of an incomplete arena was not complete when the power went, and
// neither was what it used: it is laid out anew.
func TestWhatWasLentIsGoneAfterAReboot(t *testing.T) {
	s := newFakeServer(t)
	lender := newFakeImage(t, some(1, 20, 5000))
	ref1 := s.Serve("lender:1", lender)
	s.SetLimit(6)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted)
	h.here(ref1, 30000)
	part := h.partly(lender)
	f := maps.Clone(part.Files)
	maps.Copy(f, some(100, 5, 5000))
	user := newFakeImage(t, f)
	ref2 := s.Serve("user:1", user)
	s.SetLimit(2)
	h.mustPull(ref2, api.Mounted)
	if r := h.rootfs(user); len(r.Arenas()) != 2 {
		t.Fatalf("the image does not use the other's arena: %v", r.Arenas())
	}
	h.stop()
	if err := os.Remove(filepath.Join(h.dir(lender), "durable")); err != nil {
		t.Fatal(err)
	}
	h.reboot()
	h.rubbish(lender, func(int) bool { return true })
	s.SetLimit(-1)
	h.start()
	for _, ref := range []string{ref1, ref2} {
		h.mustPull(ref, api.Complete)
		h.verified(ref)
	}
	h.same(lender)
	h.same(user)
}

// C uses contents in B's arena, B in A's. A and B are removed, and B comes back.
func TestAChainOfArenas(t *testing.T) {
	s := newFakeServer(t)
	a, b, c := newFakeImage(t, some(1, 6, 5000)), newFakeImage(t, some(4, 6, 5000)), newFakeImage(t, some(7, 6, 5000))
	refA, refB, refC := s.Serve("a:1", a), s.Serve("b:1", b), s.Serve("c:1", c)
	h := newHost(t)
	for _, ref := range []string{refA, refB, refC} {
		h.mustPull(ref, api.Complete)
	}
	h.remove(refA)
	h.remove(refB)
	h.same(c)
	if got := h.mounts(); len(got) != 1 {
		t.Errorf("mounted: %v", got)
	}
	h.restart()
	h.same(c)
	if got := h.mounts(); len(got) != 1 {
		t.Errorf("mounted after a restart: %v", got)
	}
	h.reboot()
	h.start()
	h.same(c)
	h.verified(refC)
	h.mustPull(refB, api.Complete)
	h.same(b)
	h.same(c)
	h.remove(refC)
	h.same(b)
	h.remove(refB)
	h.empty()
}

// Each file of one image is damaged in turn. Another image that uses contents in
// its arena, and one that does not, are as before.
func TestDamageHarmsOneImageOnly(t *testing.T) {
	damage := map[string]func(t *testing.T, path string){
		"flipped": func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := range b {
				b[i] ^= 0x11
			}
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"cut": func(t *testing.T, path string) {
			if err := os.Truncate(path, 9); err != nil {
				t.Fatal(err)
			}
		},
		"gone": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	}
	for _, file := range []string{"rootfs.json", "toc", "placement", "contents", "meta.erofs", "presence"} {
		for _, how := range slices.Sorted(maps.Keys(damage)) {
			for _, complete := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s %s, complete %v", file, how, complete), func(t *testing.T) {
					s := newFakeServer(t)
					other, victim := newFakeImage(t, some(200, 3, 5000)), newFakeImage(t, some(1, 12, 5000))
					refOther, refVictim := s.Serve("other:1", other), s.Serve("victim:1", victim)
					h := newHost(t)
					h.mustPull(refOther, api.Complete)
					user := newFakeImage(t, some(1, 3, 5000))
					if complete {
						h.mustPull(refVictim, api.Complete)
					} else {
						s.SetLimit(4)
						h.mustPull(refVictim, api.Mounted)
						h.here(refVictim, 20000)
						user = h.partly(victim)
					}
					refUser := s.Serve("user:1", user)
					h.mustPull(refUser, api.Complete)
					if r := h.rootfs(user); r.Own() >= 0 {
						t.Fatalf("the image did not use the other's arena: %v", r.Arenas())
					}
					h.reboot()
					damage[how](t, filepath.Join(h.dir(victim), file))
					s.SetHeader(false)
					h.start()
					h.same(other)
					h.same(user)
					h.verified(refOther)
					s.SetHeader(true)
					s.SetLimit(-1)
					if _, err := h.pull(refVictim, api.Complete); err == nil {
						h.same(victim)
					} else if !strings.Contains(err.Error(), "foil rm") {
						t.Errorf("an error that does not say what to do: %v", err)
					}
					h.same(user)
					h.restart()
					h.same(user)
					// What the error says helps.
					h.remove(refUser)
					h.remove(refVictim)
					h.mustPull(refVictim, api.Complete)
					h.same(victim)
				})
			}
		}
	}
}

// A file of an incomplete image is damaged while its mount is in use and behind
// the gate. Nothing of it is let through, and the keeper goes on.
func TestADamagedImageStaysBehindTheGate(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	h.stop()
	if err := os.Truncate(filepath.Join(h.dir(m), "toc"), 9); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		h.start()
		end, out := cat(t, filepath.Join(c.Rootfs, "f001-009"))
		if err := ends(t, "the read", end); err == nil {
			t.Errorf("read %d bytes that are not here", out.Len())
		}
		if img := h.image(ref); img.State != "broken" || img.Why == "" {
			t.Errorf("the image is %+v", img)
		}
		h.stop()
		if len(h.keepers()) != 1 {
			t.Error("the keeper has gone, and the gate with it")
		}
	}
	s.SetLimit(-1)
	h.start()
	// This is the daemon's own pull, if it has not ended yet. What is done for the
	// next one must not come in its middle.
	if _, err := h.pull(ref, api.Complete); err == nil || !strings.Contains(err.Error(), "foil rm --force c`") {
		t.Errorf("a pull while a container is on what is damaged: %v", err)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.mustPull(ref, api.Complete)
	h.same(m)
}

func TestAnImageRecordThatIsDamagedIsSetAside(t *testing.T) {
	s := newFakeServer(t)
	one, two := newFakeImage(t, some(1, 3, 5000)), newFakeImage(t, some(50, 3, 5000))
	ref1, ref2 := s.Serve("app:1", one), s.Serve("app:2", two)
	h := newHost(t)
	for name, b := range map[string]string{"empty": "", "no JSON": "{", "of no version": `{"version":0}`, "of another image": ""} {
		h.mustPull(ref1, api.Complete)
		h.mustPull(ref2, api.Complete)
		path := h.imagePath(ref1)
		if name == "of another image" {
			other, err := os.ReadFile(h.imagePath(ref2))
			if err != nil {
				t.Fatal(err)
			}
			b = string(other)
		}
		h.stop()
		if err := os.WriteFile(path, []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
		h.start()
		if img := h.image(ref1); img.Ref != "" {
			t.Errorf("%s: the image is %+v", name, img)
		}
		if _, err := os.Stat(path + ".bad"); err != nil {
			t.Errorf("%s: not set aside: %v", name, err)
		}
		st, err := h.n.Status(t.Context())
		if err != nil || len(st.Warnings) != 1 || !strings.Contains(st.Warnings[0], path) {
			t.Errorf("%s: %v, warnings %q", name, err, st.Warnings)
		}
		h.same(two)
		h.verified(ref2)
	}
}

// A daemon that finds what a newer one wrote touches nothing and says what to do.
func TestStateOfANewerVersionIsLeftAlone(t *testing.T) {
	s := newFakeServer(t)
	m, user := newFakeImage(t, some(1, 6, 5000)), newFakeImage(t, some(4, 6, 5000))
	gone, ref := s.Serve("gone:1", m), s.Serve("app:1", user)
	h := newHost(t)
	h.mustPull(gone, api.Complete)
	h.mustPull(ref, api.Complete)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
		t.Fatal(err)
	}
	h.remove(gone)
	h.takes("a lender is left", user)
	image := h.imagePath(ref)
	h.stop()
	for _, path := range []string{
		image,
		filepath.Join(h.dir(user), "rootfs.json"),
		filepath.Join(h.dir(m), "lender.json"),
		filepath.Join(h.root, "containers/c/container.json"),
	} {
		old, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		newer := regexp.MustCompile(`"version":\s*[12]\b`).ReplaceAll(old, []byte(`"version": 99`))
		if err := os.WriteFile(path, newer, 0o600); err != nil {
			t.Fatal(err)
		}
		n, err := New(h.options())
		if err == nil {
			n.Close()
			t.Fatalf("%s of version 99 is read", path)
		}
		if codeOfErr(err) != api.CodeUnsupported || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "newer foil") {
			t.Errorf("%s of version 99: %v", path, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != string(newer) {
			t.Errorf("%s was changed: %v", path, err)
		}
		if err := os.WriteFile(path, old, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h.start()
	h.same(user)
	h.verified(ref)
}

func TestContainersOfBeforeAreFoundAgain(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	for _, id := range []string{"whole", "half"} {
		c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: id, Ref: ref})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(c.Rootfs, "mine"), []byte(id), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h.stop()
	if err := os.Remove(filepath.Join(h.root, "containers/half/container.json")); err != nil {
		t.Fatal(err)
	}
	h.start()
	list, err := h.n.Containers(t.Context())
	if err != nil || len(list) != 1 || list[0].ID != "whole" {
		t.Errorf("containers %+v, %v", list, err)
	}
	if _, err := os.Stat(filepath.Join(h.root, "containers/half")); err == nil {
		t.Error("what was left of a container is there still")
	}
	if b, err := os.ReadFile(filepath.Join(h.root, "containers/whole/rootfs/mine")); err != nil || string(b) != "whole" {
		t.Errorf("what the container wrote: %q, %v", b, err)
	}
	// One that is made anew sees nothing of its predecessor.
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "half", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(c.Rootfs, "mine")); err == nil {
		t.Error("a new container has files of an old one")
	}
	for _, id := range []string{"whole", "half"} {
		if err := h.n.RemoveContainer(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	h.remove(ref)
	h.empty()
}
