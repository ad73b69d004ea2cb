package snapshotter

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/pull"
)

func (img testImage) header() *pull.Header {
	return &pull.Header{
		Name:     img.name,
		Manifest: bundle.Blob{Digest: img.manifest, Bytes: img.held.Manifest},
		Config:   bundle.Blob{Bytes: img.held.Config},
	}
}

// expect has the snapshots of an image made, and returns what is expected then.
func expect(s *Snapshotter, img testImage) *expectation {
	s.Expect(img.header())
	s.mu.Lock()
	e := s.expected[img.name]
	s.mu.Unlock()
	if e != nil {
		<-e.done
	}
	return e
}

type fataler interface {
	Helper()
	Fatal(...any)
}

// walk returns the names of all snapshots, sorted.
func walk(t fataler, s *Snapshotter) (names []string) {
	t.Helper()
	err := s.Walk(context.Background(), func(_ context.Context, info snapshots.Info) error {
		names = append(names, info.Name)
		return nil
	})
	if err != nil && !errdefs.IsNotFound(err) {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// left are the files of a snapshotter: nothing when it has no snapshots and no
// images.
func left(dir string) []string {
	files, _ := filepath.Glob(filepath.Join(dir, "*", "*"))
	return files
}

func TestExpectedImage(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b", "c")
	dir := t.TempDir()
	s := open(t, dir, f)
	if e := expect(s, img); e == nil || len(e.made) != 3 {
		t.Fatalf("expected: %+v", e)
	}
	made := walk(t, s)
	if len(f.asked) != 0 {
		t.Errorf("the image was held before containerd asked for it: %q", f.asked)
	}
	names := pullBy(t, s, img, 0, "")
	if diff := cmp.Diff(made, slices.Sorted(slices.Values(names))); diff != "" {
		t.Errorf("made before containerd asked (-), and found (+):\n%s", diff)
	}
	if got := f.holds[img.held.ChainID]; got != 1 {
		t.Errorf("%d holds, want 1", got)
	}
	counted(t, s, PathLazy, PathLazy)
	mounts, err := s.Prepare(t.Context(), "container", names[2])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{img.held.Mount}, lowerOf(t, mounts)); diff != "" {
		t.Errorf("lower directories of a container: %s", diff)
	}
	// The image is here: nothing is made for who resolves it again.
	if e := expect(s, img); e != nil {
		t.Errorf("an image that is here is expected: %+v", e)
	}

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, f)
	if diff := cmp.Diff(names, pullBy(t, s, img, 0, "")); diff != "" {
		t.Errorf("after a restart (-before +after):\n%s", diff)
	}
	remove(t, s, "container", names[2], names[1], names[0])
	if files := left(dir); len(files) > 0 || len(f.here) != 0 || len(f.holds) != 0 {
		t.Errorf("left: %q, images %v, holds %v", files, f.here, f.holds)
	}
}

// The root directory of an image may be another user's. That is not known when the
// snapshots are made.
func TestExpectedRootsOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files to others")
	}
	f := newFake()
	img := f.add(t, "a")
	if err := os.Chown(img.held.Mount, 12, 34); err != nil {
		t.Fatal(err)
	}
	s := open(t, t.TempDir(), f)
	e := expect(s, img)
	pullBy(t, s, img, 0, "")
	if uid, gid, err := ownerOf(s.fsDir(e.made[0].ID)); uid != 12 || gid != 34 || err != nil {
		t.Errorf("owner %d:%d, %v", uid, gid, err)
	}
}

// Nobody asks for the image: not while the daemon runs, and not before it is
// killed.
func TestUnaskedImageGoes(t *testing.T) {
	for _, ends := range []string{"in time", "by a kill", "by a reboot", "by a kill while it is noted"} {
		t.Run(ends, func(t *testing.T) {
			f := newFake()
			img := f.add(t, "a", "b")
			dir := t.TempDir()
			s := open(t, dir, f)
			e := expect(s, img)
			if e == nil || len(e.made) != 2 {
				t.Fatalf("expected: %+v", e)
			}
			note := s.expectedFile(img.name)
			reopen := func() {
				t.Helper()
				// What a kill leaves: nothing is cleaned up by Close.
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if ends == "by a reboot" {
					b, err := os.ReadFile(note)
					if err == nil {
						err = os.WriteFile(note, []byte(strings.Replace(string(b), s.boot, "another", 1)), 0o600)
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				s = open(t, dir, f)
			}
			switch ends {
			case "in time":
				s.expire(img.name, e)
			case "by a kill while it is noted":
				s.expire(img.name, e)
				if err := os.WriteFile(note, []byte(`{"boot":"`), 0o600); err != nil {
					t.Fatal(err)
				}
				reopen()
			case "by a kill":
				reopen()
			case "by a reboot":
				reopen()
				// containerd was started as well, and removes what it does not know.
				if got := walk(t, s); len(got) != 2 {
					t.Fatalf("snapshots that containerd may know are gone: %q", got)
				}
				remove(t, s, e.made[1].Name, e.made[0].Name)
			}
			if files := left(dir); len(files) > 0 || len(f.asked) > 0 {
				t.Errorf("left: %q; asked for %q", files, f.asked)
			}
			// It can be had all the same.
			remove(t, s, reversed(pullBy(t, s, img, 0, ""))...)
		})
	}
}

func reversed(names []string) []string {
	slices.Reverse(names)
	return names
}

// Somebody else pulls the image meanwhile: it stays when containerd does not ask.
func TestUnaskedImageOfTheUserStays(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	s := open(t, t.TempDir(), f)
	e := expect(s, img)
	f.here[img.name] = true
	s.expire(img.name, e)
	if !f.here[img.name] {
		t.Error("it was removed")
	}
	remove(t, s, pullBy(t, s, img, 0, "")...)
	if !f.here[img.name] {
		t.Error("it was removed with containerd's snapshots")
	}
}

// An image that has been resolved, and cannot be had as a bundle after all, goes
// the plain way.
func TestExpectedImageThatFails(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	delete(f.offered, img.name)
	dir := t.TempDir()
	s := open(t, dir, f)
	expect(s, img)
	if _, err := s.Prepare(t.Context(), "extract", "", snapshots.WithLabels(img.labels(0))); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"extract"}, walk(t, s)); diff != "" {
		t.Errorf("snapshots (-want +got):\n%s", diff)
	}
	remove(t, s, "extract")
	if files := left(dir); len(files) > 0 {
		t.Errorf("left: %q", files)
	}
}

// A resolved image that was complete here by another name.
func TestExpectedImageThatIsFull(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	img.held.Complete = true
	s := open(t, t.TempDir(), f)
	expect(s, img)
	names := pullBy(t, s, img, 0, "")
	counted(t, s, PathFull, PathFull)
	if got := walk(t, s); len(got) != 2 {
		t.Errorf("snapshots: %q", got)
	}
	remove(t, s, reversed(names)...)
}

// containerd collects garbage between resolving and asking.
func TestExpectedImageIsCollected(t *testing.T) {
	for n := 1; n <= 3; n++ {
		f := newFake()
		img := f.add(t, "a", "b", "c")
		dir := t.TempDir()
		s := open(t, dir, f)
		e := expect(s, img)
		for _, r := range slices.Backward(e.made[3-n:]) {
			remove(t, s, r.Name)
		}
		names := pullBy(t, s, img, 0, "")
		if got := walk(t, s); len(got) != 3 || f.holds[img.held.ChainID] != 1 {
			t.Errorf("%d collected: snapshots %q, holds %v", n, got, f.holds)
		}
		remove(t, s, reversed(names)...)
		if files := left(dir); len(files) > 0 || len(f.here) != 0 {
			t.Errorf("%d collected: left %q, images %v", n, files, f.here)
		}
	}
}

// Whatever is resolved, asked for, given up, killed and removed, of images that
// share layers: containerd finds each layer that it asks for, what it knows stays,
// and in the end nothing is left.
func TestExpectations(t *testing.T) {
	f := newFake()
	images := []testImage{f.add(t, "a", "b", "c"), f.add(t, "a", "b", "d"), f.add(t, "a", "e"), f.add(t, "a", "b")}
	// In memory, where there is such a place: it is many small waits for a disk.
	base, err := os.MkdirTemp("/dev/shm", "foil")
	if err != nil {
		base = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	rapid.Check(t, func(rt *rapid.T) {
		clear(f.here)
		clear(f.holds)
		dir, err := os.MkdirTemp(base, "")
		if err != nil {
			rt.Fatal(err)
		}
		s, err := Open(t.Context(), Options{Dir: dir, Node: f})
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { s.Close() }()
		known := make(map[string]string) // what containerd knows: chain to name
		which := rapid.SampledFrom(images)
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"resolve", "resolve", "ask", "expire", "restart", "collect"}).Draw(rt, "step") {
			case "resolve":
				expect(s, which.Draw(rt, "image"))
			case "ask":
				img, parent := which.Draw(rt, "image"), ""
				// containerd may die, or be asked to stop, after any layer.
				for i := range rapid.IntRange(1, len(img.chains)).Draw(rt, "layers") {
					chain := img.chains[i].String()
					if known[chain] == "" {
						_, err := s.Prepare(t.Context(), fmt.Sprintf("extract-%d", i), parent, snapshots.WithLabels(img.labels(i)))
						if !errdefs.IsAlreadyExists(err) {
							rt.Fatalf("layer %d of %s: %v", i, img.name, err)
						}
						s.mu.Lock()
						r := s.find(img.chains[i], parent)
						s.mu.Unlock()
						if r == nil || r.expected {
							rt.Fatalf("layer %d of %s: %+v", i, img.name, r)
						}
						known[chain] = r.Name
					}
					parent = known[chain]
				}
			case "expire":
				for name, e := range maps.Clone(s.expected) {
					s.expire(name, e)
				}
			case "restart":
				if err := s.Close(); err != nil {
					rt.Fatal(err)
				}
				if s, err = Open(t.Context(), Options{Dir: dir, Node: f}); err != nil {
					rt.Fatal(err)
				}
				if len(s.expected) > 0 {
					rt.Fatal("something is expected after a restart")
				}
			case "collect":
				collect(rt, s, slices.Collect(maps.Values(known)))
			}
			names := walk(rt, s)
			for chain, name := range known {
				if !slices.Contains(names, name) {
					rt.Fatalf("layer %s, which containerd knows as %s, is gone: %q", chain, name, names)
				}
			}
		}
		for name, e := range maps.Clone(s.expected) {
			s.expire(name, e)
		}
		collect(rt, s, nil)
		for _, p := range maps.Clone(s.pulls) {
			p.timer.Reset(0) // containerd never asked for the last layer
		}
		if err := s.Close(); err != nil {
			rt.Fatal(err)
		}
		if s, err = Open(t.Context(), Options{Dir: dir, Node: f}); err != nil {
			rt.Fatal(err)
		}
		if files := left(dir); len(files) > 0 || len(f.here) > 0 || len(f.holds) > 0 {
			rt.Fatalf("left: %q, images %v, holds %v", files, f.here, f.holds)
		}
	})
}

// collect removes snapshots that containerd does not know, as its garbage
// collection does.
func collect(t fataler, s *Snapshotter, known []string) {
	for again := true; again; {
		again = false
		for _, name := range walk(t, s) {
			if slices.Contains(known, name) {
				continue
			}
			switch err := s.Remove(context.Background(), name); {
			case err == nil:
				again = true
			case !errdefs.IsFailedPrecondition(err): // something is made on it
				t.Fatal(err)
			}
		}
	}
}
