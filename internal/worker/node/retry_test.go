package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// A host boots, and its network comes up later: reads wait, as they would for a
// server that stalls, and nobody has to ask for the image again.
func TestAnIncompleteImageGoesOnWhenTheNetworkIsBack(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.reboot()
	s.Stop()
	h.start()
	const last = "f001-009"
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
	h.logged("the pull of an image cannot go on yet")
	select {
	case err := <-end:
		t.Fatalf("a read of what is absent ended (%v) while the daemon was trying", err)
	default:
	}
	s.SetLimit(-1)
	s.Listen(s.Addr)
	if err := ends(t, "the read", end); err != nil || out.String() != m.Files[last] {
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
	ref = s.Serve("app:1", m)
	s.SetLimit(2)
	h = newHost(t)
	h.stop()
	h.giveUp, h.retry = 100*time.Millisecond, retry
	h.wanted = wanted
	h.start()
	h.mustPull(ref, api.Mounted)
	s.Stop()
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
	s.SetLimit(-1)
	s.Listen(s.Addr)
	h.complete(ref)
	h.same(m)
	eventually(t, "nothing is left of the failures", func() error {
		if h.n.pulls.Retrying() > 0 {
			return os.ErrExist
		}
		return nil
	})
}

// An image that is removed while its pull waits for the next attempt stays so.
func TestARemovedImageIsNotBegunAgain(t *testing.T) {
	s, h, _, ref := gaveUp(t, time.Second, 0)
	h.remove(ref)
	s.SetLimit(-1)
	s.Listen(s.Addr)
	eventually(t, "the pause is over", func() error {
		if h.n.pulls.Retrying() > 0 {
			return os.ErrExist
		}
		return nil
	})
	h.empty()
}

// A read of what is absent does not fail before the server has been asked once more.
func TestAReadBeginsTheNextTry(t *testing.T) {
	s, h, m, ref := gaveUp(t, time.Hour, time.Nanosecond)
	s.SetLimit(-1)
	s.Listen(s.Addr)
	const last = "f001-009"
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
	if err := ends(t, "the read", end); err != nil || out.String() != m.Files[last] {
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
	_, h, m, _ := gaveUp(t, time.Hour, time.Hour)
	for range 3 {
		end, out := cat(t, filepath.Join(h.dir(m), "mnt", "f001-009"))
		if err := ends(t, "the read", end); err == nil {
			t.Errorf("a read of what nobody has returned %d bytes", out.Len())
		}
	}
	if got := strings.Count(h.log.String(), "going on with the pull"); got != 0 {
		t.Errorf("the pull was begun again %d times", got)
	}
}

// containerd resolves an image, whose server answers: the pull that waits goes on with
// that answer. containerd itself asks for no more, since it has the snapshots.
func TestAHeaderBeginsTheNextTry(t *testing.T) {
	s, m := newFakeServer(t), newFakeImage(t, some(1, 10, 5000))
	tag := s.Serve("app:1", m)
	ref := strings.TrimSuffix(tag, ":1") + "@" + m.Manifest.Digest.String()
	s.SetLimit(2)
	h := newHost(t)
	h.stop()
	h.giveUp = 100 * time.Millisecond
	h.start()
	h.mustPull(ref, api.Mounted)
	s.Stop()
	h.logged("the pull of an image is tried again later")
	s.SetLimit(-1)
	s.Listen(s.Addr)
	before := len(s.Requests())
	h.header(tag)
	h.complete(ref)
	h.same(m)
	if n := len(s.Requests()) - before; n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
}

// A container that is made of an image whose pull waits begins it.
func TestAContainerBeginsTheNextTry(t *testing.T) {
	s, h, m, ref := gaveUp(t, time.Hour, time.Nanosecond)
	s.SetLimit(-1)
	s.Listen(s.Addr)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
		t.Fatal(err)
	}
	h.complete(ref)
	h.same(m)
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Error(err)
	}
}

// Who asks for an image whose pull has failed, and is about to say so, has one of their
// own, and not the failure of another time.
func TestAPullThatHasFailedIsNotJoined(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	h.stop()
	failing, goOn := make(chan struct{}), make(chan struct{})
	h.at = func(point string) {
		if point == "failing" {
			close(failing)
			<-goOn
		}
	}
	h.start()
	m := newFakeImage(t, some(1, 3, 5000))
	ref := s.Addr + "/app:1"
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := h.pull(ref, api.Complete)
		first <- err
	}()
	<-failing
	s.Serve("app:1", m)
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := h.n.pulls.Start(ended, api.PullRequest{Ref: ref}, pull.How{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a pull that joins: %v, want one that waits", err)
	}
	go func() {
		_, err := h.pull(ref, api.Complete)
		second <- err
	}()
	close(goOn)
	if err := ends(t, "the first pull", first); codeOfErr(err) != string(api.CodeNotFound) {
		t.Errorf("the first pull: %v, want that there is no such image", err)
	}
	if err := ends(t, "the second pull", second); err != nil {
		t.Errorf("the second pull: %v", err)
	}
	h.same(m)
}

// A read that begins to wait before the pull of its rootfs has come as far as to
// open it is handed to that pull: what it needs comes ahead of its turn.
func TestAReadBeforeItsPullIsPromoted(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 10, 100_000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.here(ref, 200_000)
	s.SetHeader(false)
	h.restart()
	const last = "f001-009"
	end, out := cat(t, filepath.Join(h.dir(m), "mnt", last))
	eventually(t, "the read waits", func() error {
		if h.rootfs(m).Waiting() == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	before := len(s.Promoted())
	s.SetHeader(true)
	eventually(t, "the last frame is promoted", func() error {
		if got := s.Promoted()[before:]; !slices.Contains(got, 7) { // two of ten are here
			return fmt.Errorf("promoted %v", got)
		}
		return nil
	})
	s.SetLimit(-1)
	if err := ends(t, "the read", end); err != nil || out.String() != m.Files[last] {
		t.Errorf("read %d bytes, %v", out.Len(), err)
	}
	h.complete(ref)
	h.same(m)
}
