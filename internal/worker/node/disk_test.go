package node

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

func TestParseLimit(t *testing.T) {
	const size = 1000
	for s, want := range map[string]int64{
		"": math.MaxInt64, "0": 0, "80%": 800, "12.5%": 125, "100%": size, "0%": 0,
		"1": 1, "5kB": 5000, "20GB": 20e9, "1.5GiB": 3 << 29, "512MiB": 512 << 20, "2 TB": 2e12, "7G": 7e9,
	} {
		l, err := ParseLimit(s)
		if err != nil || l.of(size) != want {
			t.Errorf("%q: %d, %v, want %d", s, l.of(size), err, want)
		}
	}
	for _, s := range []string{"-1", "101%", "-5%", "x", "%", "GB", "1e30GB", "5 potatoes", "NaN", "NaN%", "Inf"} {
		if l, err := ParseLimit(s); err == nil {
			t.Errorf("%q is %+v", s, l)
		}
	}
}

// limited starts the daemon anew with a limit on images.
func (h *host) limited(limit string) {
	h.t.Helper()
	l, err := ParseLimit(limit)
	if err != nil {
		h.t.Fatal(err)
	}
	h.stop()
	o := h.options()
	o.DiskLimit = l
	if h.n, err = New(o); err != nil {
		h.t.Fatal(err)
	}
	h.n.StartEviction()
}

func (h *host) refs() (refs []string) {
	h.t.Helper()
	list, err := h.n.Images(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	for _, img := range list {
		refs = append(refs, img.Ref)
	}
	return refs
}

// Images that nothing uses go, the least recently used first, and no more of
// them than must; restarts do not change the order.
func TestTheLeastRecentlyUsedGo(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	var refs []string
	for i := range 5 {
		refs = append(refs, s.Serve(fmt.Sprintf("app:%d", i), newFakeImage(t, some(uint64(1+20*i), 10, 100_000))))
	}
	for i, ref := range refs[:4] {
		h.mustPull(ref, api.Complete)
		old := time.Now().Add(time.Duration(i-100) * time.Hour)
		if err := os.Chtimes(h.imagePath(ref), old, old); err != nil {
			t.Fatal(err)
		}
	}
	h.restart() // reads the times
	// The oldest becomes the newest; the next is in use.
	for _, c := range []struct{ id, ref string }{{"past", refs[0]}, {"now", refs[1]}} {
		if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: c.id, Ref: c.ref}); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.n.RemoveContainer(t.Context(), "past"); err != nil {
		t.Fatal(err)
	}
	h.limited("4.6MB")
	if got := h.refs(); !slices.Equal(got, refs[:4]) {
		t.Errorf("within the limit: %v", got)
	}
	h.mustPull(refs[4], api.Complete)
	want := []string{refs[0], refs[1], refs[3], refs[4]}
	eventually(t, "one image has gone", func() error {
		if got := h.refs(); !slices.Equal(got, want) {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
	// The same by hand, with a limit that nothing used keeps.
	dry, err := h.n.GC(t.Context(), api.GCRequest{DryRun: true, Limit: "0"})
	if err != nil {
		t.Fatal(err)
	}
	if got := h.refs(); !slices.Equal(got, want) {
		t.Errorf("a dry run left %v", got)
	}
	wet, err := h.n.GC(t.Context(), api.GCRequest{Limit: "0"})
	if err != nil {
		t.Fatal(err)
	}
	if got := h.refs(); !slices.Equal(got, refs[1:2]) {
		t.Errorf("after foil gc --limit 0: %v, want what a container uses, %s", got, refs[1])
	}
	if dry.Freed != wet.Freed || wet.Freed == 0 {
		t.Errorf("the dry run said %d bytes, %d were freed", dry.Freed, wet.Freed)
	}
	if len(dry.Items) != 4 {
		t.Errorf("items: %+v", dry.Items)
	}
	for _, it := range dry.Items {
		if goes := it.Name != refs[1]; it.Goes != goes || it.Why == "" || it.Bytes == 0 {
			t.Errorf("%+v", it)
		}
	}
}

// Which image was used last is known whatever the clock has been: here one was used while
// it was a year ahead, and another one before that year has passed.
func TestTheOrderOfUseSurvivesTheClock(t *testing.T) {
	s, h := newFakeServer(t), newHost(t)
	ahead, now := s.Serve("ahead:1", newFakeImage(t, some(1, 3, 1000))), s.Serve("now:1", newFakeImage(t, some(50, 3, 1000)))
	h.mustPull(now, api.Complete)
	h.mustPull(ahead, api.Complete)
	record, year := h.imagePath(ahead), time.Now().AddDate(1, 0, 0)
	h.stop()
	if err := os.Chtimes(record, year, year); err != nil {
		t.Fatal(err)
	}
	h.start()
	order := func(why string, want ...string) {
		t.Helper()
		list, _ := h.n.evictable()
		var got []string
		for _, c := range list {
			got = append(got, c.refs...)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: the order of use is %v, want %v", why, got, want)
		}
	}
	order("the other was used before", now, ahead)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: now}); err != nil {
		t.Fatal(err)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	order("a container was on it", ahead, now)
	third := s.Serve("third:1", newFakeImage(t, some(90, 3, 1000)))
	h.mustPull(third, api.Complete)
	order("another is pulled", ahead, now, third)
	h.restart()
	order("after a restart", ahead, now, third)
}

// The report knows what remains of an image because others use it, and finds
// what no record names.
func TestGCExplainsSharedContentsAndLeftovers(t *testing.T) {
	s := newFakeServer(t)
	a, b := newFakeImage(t, some(1, 8, 90_000)), newFakeImage(t, some(5, 8, 90_000))
	refA, refB := s.Serve("a:1", a), s.Serve("b:1", b)
	h := newHost(t)
	h.mustPull(refA, api.Complete)
	h.mustPull(refB, api.Complete)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: refB}); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(h.root, "rootfs", strings.Repeat("0", 64))
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dry := range []bool{true, false} {
		r, err := h.n.GC(t.Context(), api.GCRequest{DryRun: dry, Limit: "0"})
		if err != nil {
			t.Fatal(err)
		}
		kinds := make(map[string]api.GCItem)
		for _, it := range r.Items {
			kinds[it.Name] = it
		}
		if it := kinds[refA]; !it.Goes || it.Bytes == 0 {
			t.Errorf("dry %v: %+v", dry, it)
		}
		if it := kinds[refB]; it.Goes || !strings.Contains(it.Why, "container c") {
			t.Errorf("dry %v: %+v", dry, it)
		}
		if it := kinds[left]; !it.Goes || it.Kind != "leftover" {
			t.Errorf("dry %v: %+v", dry, r.Items)
		}
		if it := kinds[a.ChainID.String()]; it.Goes || it.Kind != "contents" || it.Bytes == 0 || !strings.Contains(it.Why, refB) {
			t.Errorf("dry %v: %+v", dry, r.Items)
		}
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("the leftover is there still")
	}
	h.takes("the image that is left", b)
	h.same(b)
}

// smallRoot moves a host to a filesystem of its own.
func (h *host) smallRoot(mb int) {
	h.t.Helper()
	dir := h.t.TempDir()
	img, mnt := filepath.Join(dir, "disk"), filepath.Join(dir, "mnt")
	for _, args := range [][]string{
		{"truncate", "-s", fmt.Sprintf("%dM", mb), img}, {"mkfs.ext4", "-q", "-m", "0", img}, {"mkdir", mnt}, {"mount", "-o", "loop", img, mnt},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			h.t.Skipf("no small filesystem here: %v: %v: %s", args, err, out)
		}
	}
	h.stop()
	old := h.root
	h.root = filepath.Join(mnt, "foil")
	h.t.Cleanup(func() {
		if h.n != nil {
			h.stop()
		}
		h.endKeeper()
		h.unmountAll()
		h.root = old
		eventually(h.t, "the filesystem is not used any more", func() error { return kernel.Unmount(mnt, false) })
	})
	h.start()
}

// A disk that is too small for both images: without a limit the second pull fails
// and says why, and nothing is harmed; with one the first goes, if nothing uses it.
func TestAFullDisk(t *testing.T) {
	s := newFakeServer(t)
	one, two := newFakeImage(t, some(1, 12, 1_000_000)), newFakeImage(t, some(50, 12, 1_000_000))
	ref1, ref2 := s.Serve("one:1", one), s.Serve("two:1", two)
	h := newHost(t)
	h.smallRoot(24)
	h.mustPull(ref1, api.Complete)
	fails := func(why string) {
		t.Helper()
		_, err := h.pull(ref2, api.Complete)
		if codeOfErr(err) != api.CodeNoSpace || !strings.Contains(err.Error(), "no space left") || !strings.Contains(err.Error(), "foil rm") {
			t.Fatalf("%s: pull onto a full disk: %v", why, err)
		}
		h.same(one)
		h.verified(ref1)
	}
	fails("without a limit")
	if _, err := os.Stat(h.dir(two)); err == nil {
		t.Error("what does not fit was begun")
	}
	h.limited("100%")
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref1}); err != nil {
		t.Fatal(err)
	}
	fails("while a container uses the other image")
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.mustPull(ref2, api.Complete)
	h.same(two)
	h.verified(ref2)
	if got := h.refs(); !slices.Equal(got, []string{ref2}) {
		t.Errorf("images: %v, want the second alone", got)
	}
}
