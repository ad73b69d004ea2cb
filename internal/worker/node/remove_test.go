package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
)

func TestPullsAndRemovalsLeaveNothing(t *testing.T) {
	s := newFakeServer(t)
	one, two := newFakeImage(t, some(1, 8, 5000)), newFakeImage(t, some(5, 8, 5000))
	ref1, ref2 := s.Serve("app:1", one), s.Serve("app:2", two)
	h := newHost(t)
	h.mustPull(ref1, api.Complete)
	h.remove(ref1)
	h.empty()
	before := descriptors(t)
	for range 5 {
		h.mustPull(ref1, api.Complete)
		h.mustPull(ref2, api.Complete)
		h.same(one)
		h.same(two)
		h.verified(ref2)
		h.remove(ref1)
		h.verified(ref2)
		h.remove(ref2)
	}
	h.empty()
	eventually(t, "no descriptor was leaked", func() error {
		if now := descriptors(t); now > before {
			return fmt.Errorf("%d descriptors, %d before", now, before)
		}
		return nil
	})
	h.stop()
	eventually(t, "a keeper that has nothing to keep ends", func() error {
		if k := h.keepers(); len(k) > 0 {
			return fmt.Errorf("%v", k)
		}
		return nil
	})
	h.start()
}

// When the reference goes that fills the rootfs, the other one goes on with it.
func TestRemovingOneNameOfAnImageLeavesTheOther(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.Serve("app:1", m), s.Serve("other:1", m)
	s.SetLimit(4)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted) // fills
	h.mustPull(ref2, api.Mounted) // waits
	end, _ := cat(t, filepath.Join(h.dir(m), "mnt", "f001-019"))
	h.remove(ref1)
	s.SetLimit(-1)
	h.mustPull(ref2, api.Complete)
	if err := ends(t, "the read", end); err != nil {
		t.Errorf("the read of the other image: %v", err)
	}
	h.same(m)
}

// The same when the other's pull had ended.
func TestRemovingOneNameGoesOnWithTheOther(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref1, ref2 := s.Serve("app:1", m), s.Serve("other:1", m)
	s.SetLimit(4)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted)
	h.mustPull(ref2, api.Mounted)
	p := h.n.pulls.Get(ref2)
	p.Stop(pull.ErrRemoved) // it came to nothing
	if err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.remove(ref1)
	s.SetLimit(-1)
	eventually(t, "the other image is complete", func() error {
		if img := h.image(ref2); img.State != "complete" {
			return fmt.Errorf("%+v", img)
		}
		return nil
	})
	h.same(m)
}

func TestRemoveStopsAPull(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 20, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(4)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	end, followed := make(chan error, 1), make(chan struct{})
	go func() {
		tell := sync.OnceFunc(func() { close(followed) })
		err := h.n.Pull(t.Context(), api.PullRequest{Ref: ref, Until: api.Complete}, func(ev api.Event) (err error) {
			tell()
			if ev.Err != "" {
				err = errors.New(ev.Err)
			}
			return err
		})
		end <- err
	}()
	select {
	case <-followed:
	case err := <-end:
		t.Fatal(err)
	}
	h.remove(ref)
	if err := ends(t, "the pull", end); err == nil {
		t.Error("the pull of a removed image came to a good end")
	}
	h.empty()
	s.SetLimit(-1)
	h.mustPull(ref, api.Complete)
	h.same(m)

	// Before anything is known of the image, too.
	s.SetHeader(false)
	ref2 := s.Serve("app:2", newFakeImage(t, some(90, 2, 5000)))
	go func() {
		_, err := h.pull(ref2, api.Complete)
		end <- err
	}()
	// A removal that finds nothing would keep it from beginning meanwhile.
	eventually(t, "the pull runs", func() error {
		if !h.n.pulls.Running(ref2) {
			return errors.New("it does not")
		}
		return nil
	})
	h.remove(ref2)
	if err := ends(t, "the pull", end); err == nil {
		t.Error("the pull of a removed image came to a good end")
	}
}

// Many at once, in every order that comes up.
func TestPullAndRemoveAtOnce(t *testing.T) {
	s := newFakeServer(t)
	var refs []string
	for i := range 3 {
		m := newFakeImage(t, some(uint64(1+4*i), 8, 3000)) // neighbours share contents
		refs = append(refs, s.Serve(fmt.Sprintf("app:%d", i), m), s.Serve(fmt.Sprintf("again:%d", i), m))
	}
	h := newHost(t)
	var wg sync.WaitGroup
	for i, ref := range refs {
		wg.Go(func() {
			for k := range 6 {
				until := api.Complete
				if k%2 == i%2 {
					until = api.Mounted
				}
				if _, err := h.pull(ref, until); err != nil && codeOfErr(err) != api.CodeConflict {
					t.Errorf("pull %s: %v", ref, err)
				}
				if c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: fmt.Sprintf("c%d", i), Ref: ref}); err == nil {
					if _, err := os.Stat(c.Rootfs); err != nil {
						t.Error(err)
					}
					if err := h.n.RemoveContainer(t.Context(), c.ID); err != nil {
						t.Error(err)
					}
				} else {
					t.Errorf("container of %s: %v", ref, err)
				}
				if err := h.n.RemoveImage(t.Context(), ref); err != nil {
					t.Errorf("remove %s: %v", ref, err)
				}
			}
		})
	}
	wg.Wait()
	h.empty()
}

func TestAnImageThatAContainerUsesStays(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	for range 2 {
		if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
			if codeOfErr(err) != api.CodeConflict {
				t.Errorf("a second container of the same name: %v", err)
			}
		}
	}
	if err := h.n.RemoveImage(t.Context(), ref); codeOfErr(err) != api.CodeConflict {
		t.Errorf("remove an image in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.n.CreateContainer(ctx, api.ContainerRequest{ID: "gone", Ref: ref}); err == nil {
		t.Error("a container was made for somebody who had gone")
	}
	if list, _ := h.n.Containers(t.Context()); len(list) != 1 {
		t.Errorf("containers: %+v", list)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.remove(ref)
	h.empty()
}

// Who lists processes holds their roots for a moment: a container that ends just then is
// removed all the same, and one whose files stay open is not, and says why.
func TestAContainerIsRemovedThatIsLookedAt(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.mustPull(ref, api.Complete)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	looked, err := os.Open(c.Rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer looked.Close()
	if err := h.n.RemoveContainer(t.Context(), "c"); !errors.Is(err, unix.EBUSY) {
		t.Errorf("remove a container whose root is open: %v", err)
	}
	gone := make(chan error, 1)
	go func() {
		time.Sleep(100 * time.Millisecond)
		gone <- looked.Close()
	}()
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Errorf("remove a container whose root is open for a moment: %v", err)
	}
	if err := <-gone; err != nil {
		t.Error(err)
	}
	h.remove(ref)
	h.empty()
}
