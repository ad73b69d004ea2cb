package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// service is what runs in these tests: it reads forty files of 60,000 bytes, and
// some pages of another, until it says so.
var service = []string{"/bin/sh", "-c", "trap exit TERM; cat /data/000[1-4]? | sha256sum; /bin/busybox dd if=/data/00100 bs=4096 skip=5 count=2 2>/dev/null | sha256sum; echo up; sleep 1000 & wait"}

// serviceBytes are those of the files, at least.
const serviceBytes = 40 * 60_000

// withStartupSet is a server with an image that has been traced.
func withStartupSet(t *testing.T) (s *server, ref string, img image) {
	t.Helper()
	needContainers(t)
	s = startServer(t, t.TempDir())
	img = manyFiles(t, 200, 60_000, 4, 0)
	ref = s.push("service", "1", img)
	w := startWorker(t, workerRoot(t))
	args := append([]string{"trace", "--root", w.root, "--after", "100ms", "--probe", "stdout:^up$", ref, "--"}, service...)
	if out, errOut, code := command(t, args...); code != 0 {
		t.Fatalf("foil trace: code %d, %q, %q", code, out, errOut)
	}
	return s, ref, img
}

// begin begins a pull of the service's image, and returns when it is mounted.
func (w *worker) begin(ref string) {
	w.t.Helper()
	req := api.PullRequest{Ref: ref, Until: api.Mounted, Args: service, Probed: true}
	for _, err := range w.client.Pull(w.t.Context(), req) {
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// brought waits until n bytes of the startup set have been written, or, with 0,
// all of it.
func (w *worker) brought(ref string, n int64) {
	w.t.Helper()
	eventually(w.t, "pages have come", func() error {
		st, err := w.client.Status(w.t.Context())
		if err != nil {
			return err
		}
		for _, p := range st.Pulls {
			switch {
			case p.Ref != ref:
			case n == 0 && p.StartupTotal > 0 && p.StartupRaw == p.StartupTotal, n > 0 && p.StartupRaw >= n:
				return nil
			}
		}
		return fmt.Errorf("%+v", st.Pulls)
	})
}

// TestStartupSet traces a service on one worker. On another one everything that it needs comes
// first: it becomes ready over a link that passes nothing more, and what it
// reads is right.
func TestStartupSet(t *testing.T) {
	s, ref, img := withStartupSet(t)
	k := newLink(t, s.addr, 0)
	k.stallAfter(5 << 20) // the set, and less than half of all
	ref = k.via(ref)
	w := startWorker(t, workerRoot(t))
	w.begin(ref)
	w.brought(ref, 0)
	k.setStall(true)
	before := w.imageOf(ref)
	if before.ContentHere > before.ContentTotal/2 {
		t.Fatalf("%d of %d bytes are here: too many to show anything", before.ContentHere, before.ContentTotal)
	}
	// With the fanotify gate the set is in the mount's page cache before anybody asks.
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ahead := st.Gate == kernel.GateFanotify
	if ahead {
		inCache(t, w, ref)
	}
	events := filepath.Join(t.TempDir(), "events")
	args := append([]string{"run", "--root", w.root, "--rm", "--probe", "stdout:^up$", "--until", "ready", "--events", events, ref, "--"}, service...)
	out, errOut, code := command(t, args...)
	if code != 0 {
		t.Fatalf("foil run: code %d, %q, %q", code, out, errOut)
	}
	var ready api.Event
	b, err := os.ReadFile(events)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		var ev api.Event
		if err := json.Unmarshal(line, &ev); err != nil {
			t.Fatal(err)
		}
		if ev.Event == api.Ready {
			ready = ev
		}
	}
	t.Logf("at ready: %s", b)
	if ready.StartupOrigin != bundle.OriginTraced || ready.StartupRaw < serviceBytes || ready.StartupMoved == 0 ||
		ready.ArenaBytes < ready.StartupRaw || ready.Waits != 0 || (ready.Touched < serviceBytes) != ahead {
		t.Errorf("at ready: %+v", ready)
	}
	// No read-ahead: what was touched is what the set has.
	if os.Getenv(gateEnv) == "" && ready.Touched > ready.StartupRaw+ready.StartupRaw/20+1<<16 {
		t.Errorf("%d bytes were touched, the startup set has %d", ready.Touched, ready.StartupRaw)
	}
	eventually(t, "the mount has read-ahead again", func() error {
		_, err := os.Stat(filepath.Join(filepath.Dir(w.mountOf(ref)), "readahead"))
		if !errors.Is(err, os.ErrNotExist) {
			return errors.Join(err, errors.New("its file is there"))
		}
		return nil
	})
	// The same service over again, here, prints the same.
	k.open()
	intact(t, w, ref, img)
	again, errOut, code := command(t, args...)
	if code != 0 || again != out || strings.Count(out, "\n") != 3 {
		t.Errorf("code %d, printed %q, before that %q, %q", code, again, out, errOut)
	}
}

// TestStartupSetUpdate starts a version of an image where another one is complete: what both have of
// the startup set does not come, and is in the page cache of the mount as well before anybody asks.
func TestStartupSetUpdate(t *testing.T) {
	s, ref, img := withStartupSet(t)
	other := s.push("service", "0", manyFiles(t, 200, 60_000, 9, 0.5))
	w := startWorker(t, workerRoot(t))
	if _, err := w.pull(other, api.Complete); err != nil {
		t.Fatal(err)
	}
	st, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if st.Gate != kernel.GateFanotify {
		t.Skipf("nothing is read ahead through mounts over gate %s", st.Gate)
	}
	// Without Probed, which would have the rest held back for ten seconds.
	for _, err := range w.client.Pull(t.Context(), api.PullRequest{Ref: ref, Until: api.Mounted, Args: service}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	inCache(t, w, ref)
	intact(t, w, ref, img)
}

// inCache waits until the pages that the service needs are in the page cache of the mount.
func inCache(t *testing.T, w *worker, ref string) {
	t.Helper()
	eventually(t, "the startup set is in the page cache of the mount", func() error {
		var n int64
		for i := 10; i < 50; i++ {
			here, err := residentBytes(filepath.Join(w.mountOf(ref), fmt.Sprintf("data/%05d", i)))
			if err != nil {
				return err
			}
			n += here
		}
		if n < serviceBytes {
			return fmt.Errorf("%d bytes of %d are", n, serviceBytes)
		}
		return nil
	})
}

// TestStartupSetCut cuts the link in the middle of the startup set: what has
// come does not come again, and a read that waits gets its bytes.
func TestStartupSetCut(t *testing.T) {
	s, ref, img := withStartupSet(t)
	k := newLink(t, s.addr, 0)
	k.stallAfter(serviceBytes / 2)
	ref = k.via(ref)
	w := startWorker(t, workerRoot(t))
	w.begin(ref)
	w.brought(ref, serviceBytes/4)
	k.setCut(true)
	want, err := os.ReadFile(filepath.Join(unpack(t, img), "data/00049"))
	if err != nil {
		t.Fatal(err)
	}
	r := startReader(t, filepath.Join(w.mountOf(ref), "data/00049"))
	r.waits(t)
	k.open()
	moved := k.bytesMoved()
	k.setCut(false)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes after the cut (%v), not those of the file", len(got), r.err)
	}
	intact(t, w, ref, img)
	total := w.imageOf(ref).ContentTotal
	if again := k.bytesMoved() - moved; again > total-1<<18 {
		t.Errorf("after the cut %d bytes came of %d: the startup set came again", again, total)
	}
}

// TestStartupSetDaemonKilled kills the daemon in the middle of the startup set.
// The next one goes on with the pages that are here.
func TestStartupSetDaemonKilled(t *testing.T) {
	s, ref, img := withStartupSet(t)
	k := newLink(t, s.addr, 0)
	k.stallAfter(serviceBytes / 2)
	ref = k.via(ref)
	root := workerRoot(t)
	w := startWorker(t, root)
	w.begin(ref)
	w.brought(ref, serviceBytes/4)
	want, err := os.ReadFile(filepath.Join(unpack(t, img), "data/00049"))
	if err != nil {
		t.Fatal(err)
	}
	r := startReader(t, filepath.Join(w.mountOf(ref), "data/00049"))
	r.waits(t)
	w.kill()
	moved := k.bytesMoved()
	k.open()
	w = startWorker(t, root)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes (%v), not those of the file", len(got), r.err)
	}
	intact(t, w, ref, img)
	total := w.imageOf(ref).ContentTotal
	if again := k.bytesMoved() - moved; again > total-1<<18 {
		t.Errorf("the next daemon moved %d bytes of %d: the startup set came again", again, total)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(w.mountOf(ref)), "readahead")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mount has no read-ahead: %v", err)
	}
}

// second is another service of the image: it reads what the first one reads, and
// twenty files more.
var second = []string{"/bin/sh", "-c", "trap exit TERM; cat /data/000[1-6]? | sha256sum; echo up; sleep 1000 & wait"}

// secondBytes are those of the files that only it reads.
const secondBytes = 20 * 60_000

// TestSecondService starts another service of an image whose pull is under way,
// over a slow link: what is new of its startup set comes next, and no more than that
// and what was on its way. Then it becomes ready over a link that passes nothing.
func TestSecondService(t *testing.T) {
	s, ref, img := withStartupSet(t)
	w := startWorker(t, workerRoot(t))
	args := append([]string{"trace", "--root", w.root, "--after", "100ms", "--probe", "stdout:^up$", ref, "--"}, second...)
	if out, errOut, code := command(t, args...); code != 0 {
		t.Fatalf("foil trace: code %d, %q, %q", code, out, errOut)
	}
	k := newLink(t, s.addr, 2<<20)
	ref = k.via(ref)
	w = startWorker(t, workerRoot(t))
	w.begin(ref)
	w.brought(ref, 0)
	status := func() api.Event {
		st, err := w.client.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range st.Pulls {
			if p.Ref == ref {
				return p.Event
			}
		}
		t.Fatalf("no pull of %s in %+v", ref, st)
		return api.Event{}
	}
	before := status()
	req := api.PullRequest{Ref: ref, Until: api.Mounted, Args: second, Probed: true}
	for _, err := range w.client.Pull(t.Context(), req) {
		if err != nil {
			t.Fatal(err)
		}
	}
	// Files that the first stream had brought by then do not come as pages.
	w.brought(ref, before.StartupRaw+secondBytes/2)
	w.brought(ref, 0)
	after := status()
	k.setStall(true)
	pages, others := after.StartupMoved-before.StartupMoved, (after.BytesMoved-after.StartupMoved)-(before.BytesMoved-before.StartupMoved)
	t.Logf("the second service moved %d bytes of pages, and %d of other bytes came", pages, others)
	if raw := after.StartupRaw - before.StartupRaw; raw > secondBytes+secondBytes/4 {
		t.Errorf("%d bytes of pages came, of which %d are new", raw, secondBytes)
	}
	// Two runs that were read, what the sockets hold, and what came until the
	// request was there.
	if others > 2<<20 {
		t.Errorf("%d bytes came that are not of the second service's startup set", others)
	}
	if here := w.imageOf(ref); here.ContentHere > here.ContentTotal*3/4 {
		t.Fatalf("%d of %d bytes are here: too many to show anything", here.ContentHere, here.ContentTotal)
	}
	events := filepath.Join(t.TempDir(), "events")
	args = append([]string{"run", "--root", w.root, "--rm", "--probe", "stdout:^up$", "--until", "ready", "--events", events, ref, "--"}, second...)
	if out, errOut, code := command(t, args...); code != 0 {
		t.Fatalf("foil run: code %d, %q, %q", code, out, errOut)
	}
	if ready := status(); ready.Waits != 0 {
		t.Errorf("at ready: %+v", ready)
	}
	k.setStall(false)
	k.setRate(0)
	intact(t, w, ref, img)
}
