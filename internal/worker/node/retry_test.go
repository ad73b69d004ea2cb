package node

import (
	"os"
	"path/filepath"
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
// the daemon waits; the pull is tried again after retry.
func gaveUp(t *testing.T, retry time.Duration) (s *fakeServer, h *host, m *fakeImage, ref string) {
	t.Helper()
	s, m = newFakeServer(t), newFakeImage(t, some(1, 10, 5000))
	ref = s.serve("app:1", m)
	s.setLimit(2)
	h = newHost(t)
	h.stop()
	h.giveUp, h.retry = 100*time.Millisecond, retry
	h.start()
	h.mustPull(ref, api.Mounted)
	s.stop()
	h.logged("the pull of an image is tried again later")
	return s, h, m, ref
}

// A server is away for longer than the daemon waits: reads fail, and when it is
// back the image goes on without a command, or a restart of the daemon.
func TestAPullThatGaveUpIsBegunAgain(t *testing.T) {
	s, h, m, ref := gaveUp(t, 10*time.Millisecond)
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
	s, h, _, ref := gaveUp(t, time.Second)
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
