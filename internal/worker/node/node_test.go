package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
)

func TestRestartsLeakNoDescriptors(t *testing.T) {
	s := newFakeServer(t)
	m, done := newFakeImage(t, some(1, 12, 5000)), newFakeImage(t, some(50, 5, 5000))
	refDone, ref := s.Serve("done:1", done), s.Serve("app:1", m)
	h := newHost(t)
	h.mustPull(refDone, api.Complete)
	s.SetLimit(3)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 15000)
	h.restart()
	h.stop()
	before := descriptors(t)
	for range 5 {
		h.start()
		h.stop()
	}
	eventually(t, "no descriptor was leaked", func() error {
		if now := descriptors(t); now > before {
			return fmt.Errorf("%d descriptors, %d before", now, before)
		}
		return nil
	})
	s.SetLimit(-1)
	h.start()
	h.mustPull(ref, api.Complete)
	h.same(m)
}

func TestAnImageUnderTwoNamesIsPulledOnce(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.Serve("app:1", m), s.Serve("other:1", m)
	s.SetLimit(4)
	h := newHost(t)
	var wg sync.WaitGroup
	for _, ref := range []string{ref1, ref2} {
		wg.Go(func() {
			if _, err := h.pull(ref, api.Mounted); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(h.dir(m), "mnt", "f001-000")); err != nil {
				t.Errorf("%s was said to be mounted: %v", ref, err)
			}
		})
	}
	wg.Wait()
	s.SetLimit(-1)
	for _, ref := range []string{ref1, ref2} {
		h.mustPull(ref, api.Complete)
		h.verified(ref)
	}
	h.same(m)
	if dirs, err := filepath.Glob(filepath.Join(h.root, "rootfs/*")); err != nil || len(dirs) != 1 {
		t.Errorf("rootfs: %v, %v", dirs, err)
	}
	h.remove(ref1)
	h.verified(ref2)
	h.remove(ref2)
	h.empty()
}

func TestATagMovesWhileAContainerUsesTheOldRootfs(t *testing.T) {
	s := newFakeServer(t)
	old, new := newFakeImage(t, some(1, 8, 5000)), newFakeImage(t, some(5, 8, 5000))
	ref := s.Serve("app:1", old)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	s.Serve("app:1", new)
	h.mustPull(ref, api.Complete)
	h.same(new)
	for name, want := range old.Files {
		if got, err := os.ReadFile(filepath.Join(c.Rootfs, name)); err != nil || string(got) != want {
			t.Errorf("%s in the container: %v", name, err)
		}
	}
	h.restart()
	h.same(old)
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(h.mounts(), filepath.Join(h.dir(old), "mnt")) {
		t.Error("the old rootfs is mounted, and nothing names it")
	}
	h.same(new)
	h.remove(ref)
	h.empty()
}

// A process of the host has a file of the mount open. The arena must not be let
// go of under it: holes would be read as zeros.
func TestAMountInUseStaysBehindTheGate(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	f, err := os.Open(filepath.Join(h.dir(m), "mnt", "f001-009"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h.remove(ref)
	got := make([]byte, 5009)
	if n, err := f.ReadAt(got, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("read %d bytes of a file that is not here: %v", n, err)
	}
	s.SetLimit(-1)
	h.mustPull(ref, api.Complete)
	if _, err := f.ReadAt(got, 0); err != nil || string(got) != m.Files["f001-009"] {
		t.Errorf("after it was pulled again: %v", err)
	}
	h.same(m)
	f.Close()
	h.remove(ref)
	h.empty()
}

func TestCloseWhilePullsAndRequestsRun(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	var refs []string
	var images []*fakeImage
	for i := range 4 {
		m := newFakeImage(t, some(uint64(1+10*i), 15, 4000))
		images = append(images, m)
		refs = append(refs, s.Serve(fmt.Sprintf("app:%d", i), m))
	}
	h.mustPull(refs[0], api.Complete)
	s.SetLimit(5)
	var wg sync.WaitGroup
	n := h.n
	for _, ref := range refs {
		wg.Go(func() { _, _ = pullOf(n, ref) })
		wg.Go(func() {
			for n.Verify(context.Background(), ref, func(api.VerifyEvent) error { return nil }) == nil {
			}
		})
	}
	wg.Go(func() {
		for i := 0; ; i++ {
			_, err := n.CreateContainer(context.Background(), api.ContainerRequest{ID: fmt.Sprint("c", i), Ref: refs[0]})
			if err == nil {
				err = n.RemoveContainer(context.Background(), fmt.Sprint("c", i))
			}
			if err != nil {
				return
			}
		}
	})
	eventually(t, "every pull runs", func() error {
		if len(s.Requests()) < 5 {
			return errors.New("no")
		}
		return nil
	})
	h.stop()
	wg.Wait()
	s.SetLimit(-1)
	h.start()
	for i, ref := range refs {
		h.mustPull(ref, api.Complete)
		h.same(images[i])
	}
}

func pullOf(n *Node, ref string) (last api.Event, err error) {
	err = n.Pull(context.Background(), api.PullRequest{Ref: ref}, func(ev api.Event) error { last = ev; return nil })
	return last, err
}

// Who reads an arena while its pull ends goes on reading.
func TestAnArenaIsClosedAfterItsReaders(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	_, r, release, err := h.n.lookup(ref)
	if err != nil {
		t.Fatal(err)
	}
	a := r.Arena()
	s.SetLimit(-1)
	h.mustPull(ref, api.Complete)
	b := make([]byte, 5000)
	if _, err := a.File().ReadAt(b, 0); err != nil || !a.Present(0, 5000) {
		t.Errorf("an arena that was completed meanwhile: %v, present %v", err, a.Present(0, 5000))
	}
	release()
	if _, err := a.File().ReadAt(b, 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the arena is open, and nobody uses it: %v", err)
	}
}

func TestRootBehindASymbolicLink(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.stop()
	real := h.root
	link := real + "-link"
	if err := os.Symlink(real, link); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(link)
	for range 2 {
		h.root = link
		h.start()
		h.mustPull(ref, api.Complete)
		h.stop()
	}
	h.root = real
	if got := h.mounts(); len(got) != 1 {
		t.Errorf("mounts after a restart: %v", got)
	}
	h.start()
}

// After a restart with the server gone, reads fail when the daemon gives up.
func TestReadsFailWhenTheServerDoesNotComeBack(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.stop()
	s.Stop()
	h.giveUp = time.Second
	h.start()
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
	if err := ends(t, "the read", end); err == nil {
		t.Errorf("a read of what nobody has returned %d bytes", out.Len())
	}
	// Reads fail a moment before the pull has ended, which another would join.
	p := h.n.pulls.Get(ref)
	if err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.SetLimit(-1)
	s.Listen(s.Addr)
	_, _ = h.pull(ref, api.Complete) // perhaps the one that has just failed, and is about to end
	h.mustPull(ref, api.Complete)
	h.same(m)
}

func TestTheServerDescribesAnImageAnew(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	s.SetLimit(2)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 10000)
	h.stop()
	// The same rootfs, other TOC bytes: one file more, whose name comes first.
	anew := newFakeImage(t, func() files { f := maps.Clone(m.Files); f["a"] = "new"; return f }())
	anew.ChainID, anew.Tree.ChainID = m.ChainID, m.ChainID
	anew.Config, anew.Manifest = m.Config, m.Manifest
	var err error
	if anew.TOC, err = toc.Encode(anew.Tree); err != nil {
		t.Fatal(err)
	}
	anew.TOCDigest = toc.Digest(anew.TOC)
	s.Serve("app:1", anew)
	s.SetLimit(-1)
	h.start()
	h.mustPull(ref, api.Complete)
	h.same(anew)
	if !strings.Contains(h.log.String(), "conflict: the server describes a rootfs by another TOC") {
		t.Error("nobody is told of the other TOC")
	}
	// What is complete is not used for it either.
	s.Serve("app:1", m)
	h.mustPull(ref, api.Complete)
	h.same(m)
}
