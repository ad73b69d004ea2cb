package node

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/store"
)

// blocks returns how many bytes the arenas below a root take on the disk.
func (h *host) blocks() (size int64) {
	h.t.Helper()
	arenas, err := filepath.Glob(filepath.Join(h.root, "rootfs/*/arena"))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, path := range arenas {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			h.t.Fatal(err)
		}
		size += st.Blocks * 512
	}
	return size
}

// wantBlocks is what the different contents of images take, in whole blocks.
func wantBlocks(images ...*fakeImage) (size int64) {
	seen := make(map[string]bool)
	for _, m := range images {
		for _, data := range m.Files {
			if !seen[data] {
				seen[data] = true
				size += int64(len(data)+4095) / 4096 * 4096
			}
		}
	}
	return size
}

func (h *host) takes(what string, images ...*fakeImage) {
	h.t.Helper()
	// A process of the host may have a copy of the mounts for a moment.
	eventually(h.t, what, func() error {
		if got, want := h.blocks(), wantBlocks(images...); got != want {
			return fmt.Errorf("the arenas take %d bytes, the images' contents %d", got, want)
		}
		return nil
	})
}

// What is left after a removal takes exactly what the images that are left need,
// whoever pulled it; the removed ones can be pulled again.
func TestRemovingFreesWhatNothingElseNeeds(t *testing.T) {
	s := newFakeServer(t)
	a, b, c := newFakeImage(t, some(1, 8, 9000)), newFakeImage(t, some(5, 8, 9000)), newFakeImage(t, some(7, 8, 9000))
	refA, refB, refC := s.Serve("a:1", a), s.Serve("b:1", b), s.Serve("c:1", c)
	h := newHost(t)
	for _, ref := range []string{refA, refB, refC} {
		h.mustPull(ref, api.Complete)
	}
	h.takes("all three", a, b, c)
	h.remove(refA)
	h.takes("without the first", b, c)
	h.same(b)
	h.restart()
	h.takes("after a restart", b, c)
	h.remove(refB)
	h.takes("the last alone", c)
	h.same(c)
	h.verified(refC)
	h.reboot()
	h.start()
	h.same(c)
	h.takes("after a reboot", c)
	// They come back beside what is left of them.
	h.mustPull(refA, api.Complete)
	h.mustPull(refB, api.Complete)
	h.takes("all three again", a, b, c)
	for _, ref := range []string{refA, refB, refC} {
		h.verified(ref)
	}
	h.remove(refC)
	h.takes("without the last", a, b)
	h.same(a)
	h.same(b)
	h.restart()
	h.same(a)
	h.verified(refB)
	h.remove(refB)
	h.takes("the first alone", a)
	h.same(a)
	h.remove(refA)
	h.empty()
}

// Usage of all images together is what is on the disk, shared or not.
func TestUsageCountsWhatIsSharedOnce(t *testing.T) {
	s := newFakeServer(t)
	a, b, c := newFakeImage(t, some(1, 8, 9000)), newFakeImage(t, some(5, 8, 9000)), newFakeImage(t, some(7, 8, 9000))
	refA, refB, refC := s.Serve("a:1", a), s.Serve("b:1", b), s.Serve("c:1", c)
	h := newHost(t)
	sum := func(images ...*fakeImage) {
		t.Helper()
		// What a file takes changes while the kernel writes it back.
		eventually(t, "the sum is what the disk has", func() error {
			var got, want int64
			for _, m := range images {
				size, inodes, err := h.n.RootfsUsage(h.key(m))
				if err != nil || inodes == 0 {
					t.Fatalf("usage: %d inodes, %v", inodes, err)
				}
				got += size
			}
			dirs, err := filepath.Glob(filepath.Join(h.root, "rootfs/*"))
			if err != nil {
				t.Fatal(err)
			}
			for _, dir := range dirs {
				size := store.DirSize(dir)
				want += size
			}
			if got != want {
				return fmt.Errorf("the images are said to take %d bytes, the disk has %d", got, want)
			}
			return nil
		})
	}
	for _, ref := range []string{refA, refB, refC} {
		h.mustPull(ref, api.Complete)
	}
	sum(a, b, c)
	h.remove(refA)
	sum(b, c)
	h.remove(refB)
	sum(c)
}

// A container's overlay keeps the kernel's mount of an image alive that was
// taken away from its place, in whatever namespace. Nothing that it may read is
// punched or given away before it has gone.
func TestNothingIsPunchedUnderAMountThatLivesOn(t *testing.T) {
	s := newFakeServer(t)
	a, b := newFakeImage(t, some(1, 6, 9000)), newFakeImage(t, some(4, 6, 9000))
	refA, refB := s.Serve("a:1", a), s.Serve("b:1", b)
	h := newHost(t)
	h.mustPull(refA, api.Complete)
	h.mustPull(refB, api.Complete)
	hidden := filepath.Join(h.root, "hidden")
	for _, d := range []string{"upper", "work", "mnt"} {
		if err := os.MkdirAll(filepath.Join(hidden, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	overlay := kernel.Overlay{
		Lower: []string{filepath.Join(h.dir(a), "mnt")}, Upper: filepath.Join(hidden, "upper"),
		Work: filepath.Join(hidden, "work"), Target: filepath.Join(hidden, "mnt"),
	}
	if err := kernel.MountOverlay(overlay); err != nil {
		t.Fatal(err)
	}
	h.remove(refA)
	h.restart()
	for name, want := range a.Files {
		got, err := os.ReadFile(filepath.Join(hidden, "mnt", name))
		if err != nil || string(got) != want {
			t.Fatalf("%s: wrong bytes below an overlay that nobody told of, %v", name, err)
		}
	}
	h.takes("while the overlay is there", a, b)
	if err := kernel.Unmount(overlay.Target, false); err != nil {
		t.Fatal(err)
	}
	h.n.store.Collect()
	h.takes("when it has gone", b)
	h.same(b)
	h.verified(refB)
}

// A daemon dies at each point of making room. What is left needs no more and no
// less than what it reads.
func TestADaemonDiesWhileItFrees(t *testing.T) {
	for _, reboot := range []bool{false, true} {
		for _, point := range []string{"lender", "kept", "punched"} {
			name := point
			if reboot {
				name += " and the host reboots"
			}
			t.Run(name, func(t *testing.T) {
				s := newFakeServer(t)
				a, b := newFakeImage(t, some(1, 6, 9000)), newFakeImage(t, some(4, 6, 9000))
				refA, refB := s.Serve("a:1", a), s.Serve("b:1", b)
				h := newHost(t)
				h.mustPull(refA, api.Complete)
				h.mustPull(refB, api.Complete)
				h.stop()
				h.dieAt(point, "-"+refA)
				if reboot {
					h.reboot()
				}
				h.start()
				h.same(b)
				h.verified(refB)
				h.takes("after the restart", b)
				h.mustPull(refA, api.Complete)
				h.same(a)
				h.takes("pulled again", a, b)
				h.remove(refB)
				h.takes("the other removed", a)
				h.same(a)
			})
		}
	}
}

// The image that is removed was on its way, and another uses what had arrived.
func TestRemovingAnIncompleteImageFreesWhatNobodyUses(t *testing.T) {
	s := newFakeServer(t)
	lender := newFakeImage(t, some(1, 20, 9000))
	ref1 := s.Serve("lender:1", lender)
	s.SetLimit(8)
	h := newHost(t)
	h.mustPull(ref1, api.Mounted)
	h.here(ref1, 8*9000)
	f := h.partly(lender).Files
	for _, name := range slices.Sorted(maps.Keys(f))[:2] {
		delete(f, name)
	}
	user := newFakeImage(t, f)
	ref2 := s.Serve("user:1", user)
	h.mustPull(ref2, api.Complete)
	h.remove(ref1)
	h.takes("the user alone", user)
	h.same(user)
	h.reboot()
	h.start()
	h.same(user)
	h.verified(ref2)
	s.SetLimit(-1)
	h.mustPull(ref1, api.Complete)
	h.takes("both", user, lender)
	h.same(lender)
	h.remove(ref2)
	h.remove(ref1)
	h.empty()
}

// Images that share whatever they share are pulled and removed in any order: at
// each point what is here is right, and takes what it must.
func TestPullsAndRemovalsInAnyOrder(t *testing.T) {
	s := newFakeServer(t)
	h := newHost(t)
	var images []*fakeImage
	var refs []string
	for i := range 5 {
		f := some(uint64(1+2*i), 5, 5000)
		maps.Copy(f, some(uint64(100+i/2), 2, 300_000))
		m := newFakeImage(t, f)
		images = append(images, m)
		refs = append(refs, s.Serve("app:"+string(rune('a'+i)), m))
	}
	here := make(map[int]bool)
	random := rand.New(rand.NewPCG(4, 4))
	for step := range 50 {
		i := random.IntN(len(images))
		what := "pull"
		switch {
		case random.IntN(6) == 0:
			what = "restart"
			h.restart()
		case here[i]:
			what = "remove"
			h.remove(refs[i])
			delete(here, i)
		default:
			h.mustPull(refs[i], api.Complete)
			here[i] = true
		}
		var left []*fakeImage
		for i := range here {
			left = append(left, images[i])
			h.same(images[i])
		}
		h.takes(fmt.Sprintf("after step %d, %s of image %d", step, what, i), left...)
	}
}
