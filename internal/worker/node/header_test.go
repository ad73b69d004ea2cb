package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// held returns how many pulls wait to be claimed.
func (h *host) waiting() int { return h.n.pulls.Offered() }

// awaitMount waits until something is mounted.
func (h *host) awaitMount() {
	h.t.Helper()
	eventually(h.t, "a rootfs is mounted", func() error {
		if len(h.mounts()) == 0 {
			return errors.New("nothing is mounted")
		}
		return nil
	})
}

func (h *host) header(ref string) *pull.Header {
	h.t.Helper()
	got, err := h.n.Header(h.t.Context(), api.PullRequest{Ref: ref})
	if err != nil {
		h.t.Fatal(err)
	}
	return got
}

// digestName is the name by which the snapshotter pulls.
func digestName(ref string, m *fakeImage) string {
	return ref[:strings.LastIndex(ref, ":")] + "@" + m.Manifest.Digest.String()
}

func TestHeaderThenPull(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	got := h.header(ref)
	if got.Digest() != m.Manifest.Digest || string(got.Config.Bytes) != string(m.Config.Bytes) || string(got.Manifest.Bytes) != string(m.Manifest.Bytes) {
		t.Errorf("header %+v", got)
	}
	name := digestName(ref, m)
	if h.n.Has(name) || h.n.Has(ref) {
		t.Error("an image of which the header is known counts as being here")
	}
	if images, _ := h.n.Images(t.Context()); len(images) > 0 {
		t.Errorf("images %+v", images)
	}
	// Its mount is being made all the same.
	h.awaitMount()
	h.mustPull(name, api.Complete)
	h.same(m)
	if n := len(s.Requests()); n != 1 || h.waiting() > 0 {
		t.Errorf("%d requests, %d pulls wait", n, h.waiting())
	}
	// Of what is here, the server is asked all the same.
	h.header(ref)
	h.header(name)
	if n := len(s.Requests()); n != 3 || h.waiting() > 0 {
		t.Errorf("%d requests, %d pulls wait", n, h.waiting())
	}
	// The tag moves.
	moved := newFakeImage(t, some(50, 3, 5000))
	s.Serve("app:1", moved)
	if got := h.header(ref); got.Digest() != moved.Manifest.Digest {
		t.Errorf("the tag still names %s", got.Digest())
	}
	h.mustPull(digestName(ref, moved), api.Complete)
	h.same(moved)
	if n := len(s.Requests()); n != 4 {
		t.Errorf("%d requests", n)
	}
}

// The header is told of before the TOC has come; the pull that was claimed by then
// outlives a stream that breaks there.
func TestHeaderBeforeTOC(t *testing.T) {
	for _, cut := range []bool{false, true} {
		s := newFakeServer(t)
		m := newFakeImage(t, some(1, 10, 5000))
		ref := s.Serve("app:1", m)
		h := newHost(t)
		s.SetTOC("wait")
		if got := h.header(ref); got.Digest() != m.Manifest.Digest {
			t.Errorf("header %+v", got)
		}
		if h.waiting() != 1 || len(h.mounts()) > 0 {
			t.Errorf("%d pulls wait, mounts %v", h.waiting(), h.mounts())
		}
		end := make(chan error, 1)
		go func() {
			end <- h.n.Pull(t.Context(), api.PullRequest{Ref: digestName(ref, m)}, func(api.Event) error { return nil })
		}()
		eventually(t, "the pull is claimed", func() error {
			if h.waiting() > 0 {
				return errors.New("it waits")
			}
			return nil
		})
		want := 1
		if s.SetTOC(""); cut {
			s.SetTOC("cut")
			want = 2
		}
		if err := ends(t, "the pull", end); err != nil {
			t.Fatal(err)
		}
		h.mustPull(digestName(ref, m), api.Complete)
		h.same(m)
		if n := len(s.Requests()); n < want {
			t.Errorf("cut %t: %d requests", cut, n)
		}
		h.stop()
	}
}

func TestHeaderThatNobodyClaims(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.stop()
	h.early = time.Millisecond
	h.start()
	h.header(ref)
	eventually(t, "the pull has ended", func() error {
		if n := h.waiting(); n > 0 {
			return fmt.Errorf("%d pulls wait", n)
		}
		return nil
	})
	eventually(t, "nothing is left", func() error {
		left, err := os.ReadDir(filepath.Join(h.root, "rootfs"))
		if err != nil || len(left) > 0 || len(h.mounts()) > 0 {
			return fmt.Errorf("%v, mounts %v, %w", left, h.mounts(), err)
		}
		return nil
	})
	h.stop() // and waits for it
	if strings.Contains(h.log.String(), "failed") {
		t.Error("that nobody pulls an image counts as a failure")
	}
	h.early = 0
	h.start()
	if got := h.mounts(); len(got) > 0 {
		t.Errorf("mounts %v", got)
	}
	// Those that wait are bounded, and one that is asked for again replaces itself.
	for i := range 2 * 8 {
		m := newFakeImage(t, some(uint64(100+i), 2, 1000))
		ref := s.Serve(string(rune('a'+i))+":1", m)
		h.header(ref)
		h.header(ref)
	}
	if n := h.waiting(); n > 8 || n == 0 {
		t.Errorf("%d pulls wait", n)
	}
}

// Who pulls an image by another name than the one by which it could be claimed
// does not wait for the end of the other pull, and has what that one made.
func TestHeaderThenPullByTag(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.stop()
	h.early = time.Hour
	h.start()
	h.header(ref)
	h.awaitMount()
	h.mustPull(ref, api.Complete)
	h.same(m)
	if h.n.Has(digestName(ref, m)) || h.waiting() > 0 {
		t.Errorf("an image that nobody claimed is here, and %d pulls wait", h.waiting())
	}
}

// Of an image that nobody has claimed, the room that it would take is free.
func TestHeaderReservesNothing(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	h.header(ref)
	h.awaitMount()
	d, err := h.n.store.Space()
	if err != nil || d.Pending != 0 {
		t.Errorf("%d bytes are pending, %v", d.Pending, err)
	}
}

func TestHeaderFails(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	if _, err := h.n.Header(t.Context(), api.PullRequest{Ref: s.Addr + "/absent:1"}); codeOfErr(err) != api.CodeNotFound {
		t.Errorf("no such image: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s.SetHeader(false)
	end := make(chan error, 1)
	go func() {
		_, err := h.n.Header(ctx, api.PullRequest{Ref: s.Addr + "/absent:1"})
		end <- err
	}()
	eventually(t, "the server was asked", func() error {
		if n := len(s.Requests()); n != 2 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	cancel()
	if err := ends(t, "a request that was given up", end); !errors.Is(err, context.Canceled) {
		t.Errorf("a request that was given up: %v", err)
	}
	s.Stop()
	began := time.Now()
	_, err := h.n.Header(t.Context(), api.PullRequest{Ref: s.Addr + "/absent:1"})
	if codeOfErr(err) != api.CodeUnavailable || !errors.Is(err, fetch.ErrUnreachable) {
		t.Errorf("no server, after %v: %v", time.Since(began), err)
	}
}
