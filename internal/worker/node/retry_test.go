package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// A host boots, and its network comes up later: reads wait, as they would for a
// server that stalls, and nobody has to ask for the image again.
func TestAnIncompleteImageGoesOnWhenTheNetworkIsBack(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.serve("app:1", m)
	s.setLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.reboot()
	s.stop()
	h.start()
	const last = "f001-009"
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
	h.logged("the pull of an image cannot go on yet")
	select {
	case err := <-end:
		t.Fatalf("a read of what is absent ended (%v) while the daemon was trying", err)
	default:
	}
	s.setLimit(-1)
	s.listen(s.addr)
	if err := ends(t, "the read", end); err != nil || out.String() != m.files[last] {
		t.Errorf("read %d bytes, %v", out.Len(), err)
	}
	h.complete(ref)
	h.same(m)
}

// gaveUp is a host whose image was mounted when its server went away for longer than
// the daemon waits; the pull is tried again after retry, or when somebody wants it and
// wanted has passed.
func gaveUp(t *testing.T, retry, wanted time.Duration) (s *fakeServer, h *host, m *fakeImage, ref string) {
	t.Helper()
	s, m = newFakeServer(t), newFakeImage(t, some(1, 10, 5000))
	ref = s.serve("app:1", m)
	s.setLimit(2)
	h = newHost(t)
	h.stop()
	h.giveUp, h.retry = 100*time.Millisecond, retry
	h.wanted = wanted
	h.start()
	h.mustPull(ref, api.Mounted)
	s.stop()
	h.logged("the pull of an image is tried again later")
	return s, h, m, ref
}

// A server is away for longer than the daemon waits: reads fail, and when it is
// back the image goes on without a command, or a restart of the daemon.
func TestAPullThatGaveUpIsBegunAgain(t *testing.T) {
	s, h, m, ref := gaveUp(t, 10*time.Millisecond, 0)
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
	if err := ends(t, "the read", end); err == nil {
		t.Errorf("a read of what nobody has returned %d bytes", out.Len())
	}
	s.setLimit(-1)
	s.listen(s.addr)
	h.complete(ref)
	h.same(m)
	eventually(t, "nothing is left of the failures", func() error {
		h.n.mu.Lock()
		defer h.n.mu.Unlock()
		if len(h.n.retries) > 0 {
			return os.ErrExist
		}
		return nil
	})
}

// An image that is removed while its pull waits for the next attempt stays so.
func TestARemovedImageIsNotBegunAgain(t *testing.T) {
	s, h, _, ref := gaveUp(t, time.Second, 0)
	h.remove(ref)
	s.setLimit(-1)
	s.listen(s.addr)
	eventually(t, "the pause is over", func() error {
		h.n.mu.Lock()
		defer h.n.mu.Unlock()
		if len(h.n.retries) > 0 {
			return os.ErrExist
		}
		return nil
	})
	h.empty()
}

// A read of what is absent does not fail before the server has been asked once more.
func TestAReadBeginsTheNextTry(t *testing.T) {
	s, h, m, ref := gaveUp(t, time.Hour, time.Nanosecond)
	s.setLimit(-1)
	s.listen(s.addr)
	const last = "f001-009"
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
	if err := ends(t, "the read", end); err != nil || out.String() != m.files[last] {
		t.Errorf("read %d bytes, %v", out.Len(), err)
	}
	h.complete(ref)
	h.same(m)
}

// As long as the server is away such reads fail when it has been asked in vain, and
// the next one asks again.
func TestAReadOfAnAbsentServerFails(t *testing.T) {
	_, h, m, _ := gaveUp(t, time.Hour, time.Nanosecond)
	for n := 2; n < 4; n++ {
		end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
		if err := ends(t, "the read", end); err == nil {
			t.Errorf("a read of what nobody has returned %d bytes", out.Len())
		}
		eventually(t, "the next try is put off again", func() error {
			if got := strings.Count(h.log.String(), "the pull of an image is tried again later"); got != n {
				return fmt.Errorf("%d times, want %d", got, n)
			}
			return nil
		})
	}
}

// Reads do not ask a server that is away more often than every few seconds, but fail.
func TestReadsAreNoStorm(t *testing.T) {
	_, h, m, ref := gaveUp(t, time.Hour, time.Hour)
	for range 3 {
		end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
		if err := ends(t, "the read", end); err == nil {
			t.Errorf("a read of what nobody has returned %d bytes", out.Len())
		}
	}
	if got := strings.Count(h.log.String(), "going on with the pull"); got != 0 {
		t.Errorf("the pull was begun again %d times", got)
	}
	// Nor one that asks not to be asked.
	h.n.mu.Lock()
	defer h.n.mu.Unlock()
	h.n.retries[ref].asked = time.Hour
	if h.n.tryNow(ref, 0) {
		t.Error("a server is asked before it wants to be")
	}
}

// containerd resolves an image, whose server answers: the pull that waits goes on with
// that answer. containerd itself asks for no more, since it has the snapshots.
func TestAHeaderBeginsTheNextTry(t *testing.T) {
	s, m := newFakeServer(t), newFakeImage(t, some(1, 10, 5000))
	tag := s.serve("app:1", m)
	ref := strings.TrimSuffix(tag, ":1") + "@" + m.Manifest.Digest.String()
	s.setLimit(2)
	h := newHost(t)
	h.stop()
	h.giveUp = 100 * time.Millisecond
	h.start()
	h.mustPull(ref, api.Mounted)
	s.stop()
	h.logged("the pull of an image is tried again later")
	s.setLimit(-1)
	s.listen(s.addr)
	before := s.requestCount()
	h.header(tag)
	h.complete(ref)
	h.same(m)
	if n := s.requestCount() - before; n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
}

// A container that is made of an image whose pull waits begins it.
func TestAContainerBeginsTheNextTry(t *testing.T) {
	s, h, m, ref := gaveUp(t, time.Hour, time.Nanosecond)
	s.setLimit(-1)
	s.listen(s.addr)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
		t.Fatal(err)
	}
	h.complete(ref)
	h.same(m)
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Error(err)
	}
}
