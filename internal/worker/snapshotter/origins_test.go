package snapshotter

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/origin"
)

// from offers an image under the name of another registry.
func (f *fakeNode) from(img testImage, registry string) testImage {
	img.ref = registry + "/app:1"
	img.name = registry + "/app@" + img.manifest.String()
	held := *img.held
	held.Ref = img.name
	held.Rootfs = origin.KeyOf(registry, held.ChainID, held.ChainID)
	img.held = &held
	f.offered[img.name] = img.held
	return img
}

func openWith(t *testing.T, n Node, claims bool, groups ...string) *Snapshotter {
	t.Helper()
	g, err := origin.ParseGroups(groups)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), Options{Dir: t.TempDir(), Node: n, Claims: claims, Groups: g})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// prepare asks for layer i as containerd does, and returns the error.
func prepare(t *testing.T, s *Snapshotter, img testImage, i int, parent string) error {
	t.Helper()
	_, err := s.Prepare(t.Context(), "extract-"+img.ref+img.chains[i].String(), parent, snapshots.WithLabels(img.labels(i)))
	return err
}

// A rootfs that is not proven serves the images of its origin.
func TestARootfsIsClaimedByItsOwnOrigin(t *testing.T) {
	for name, c := range map[string]struct {
		groups  []string
		proven  bool
		soon    bool // it is proven when somebody waits for it
		refused bool
	}{
		"another origin":    {refused: true},
		"in a group":        {groups: []string{"registry.example other.example"}},
		"proven":            {proven: true},
		"proven when asked": {soon: true},
		"not in the group":  {groups: []string{"registry.example third.example"}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake()
			img := f.add(t, "a", "b")
			s := openWith(t, f, true, c.groups...)
			names := pullBy(t, s, img, 0, "")
			f.proven[img.held.Rootfs], f.provable[img.held.Rootfs] = c.proven, c.soon
			same := f.from(img, "other.example")
			// containerd would find the snapshots of both layers, and ask for nothing.
			err := s.Claim(same.header())
			if (err != nil) != c.refused {
				t.Errorf("the mirror is told %v", err)
			}
			if c.refused && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "--origin-group") || !strings.Contains(err.Error(), img.name)) {
				t.Errorf("it says %v", err)
			}
			// One that asks, in another namespace.
			err = prepare(t, s, same, 1, names[0])
			if c.refused && !errdefs.IsFailedPrecondition(err) || !c.refused && !errdefs.IsAlreadyExists(err) {
				t.Errorf("prepare of the last layer: %v", err)
			}
			if err := s.Claim(img.header()); err != nil {
				t.Errorf("its own image is refused it: %v", err)
			}
		})
	}
}

// Who asks first for its lowest layer is refused as well, and leaves nothing.
func TestAClaimFromTheFirstLayerIsRefused(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	s := openWith(t, f, true)
	pullBy(t, s, img, 0, "")
	same := f.from(img, "other.example")
	if err := prepare(t, s, same, 0, ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("prepare: %v", err)
	}
	if f.holds[img.held.ChainID] != 1 || f.here[same.name] {
		t.Errorf("%d holds, the image is here: %v", f.holds[img.held.ChainID], f.here[same.name])
	}
}

// An image of another origin that has these layers and more has its own rootfs, lazily; as containerd unpacks it, it
// would lie on the other's.
func TestAnImageOnAForeignRootfs(t *testing.T) {
	f := newFake()
	base := f.add(t, "a", "b")
	s := openWith(t, f, true)
	names := pullBy(t, s, base, 0, "")
	more := f.from(f.add(t, "a", "b", "c"), "other.example")
	if err := s.Claim(more.header()); err != nil {
		t.Errorf("the mirror is told %v", err)
	}
	if err := prepare(t, s, more, 2, names[1]); !errdefs.IsAlreadyExists(err) {
		t.Errorf("lazily: %v", err)
	}
	plain := f.from(f.add(t, "a", "b", "d"), "third.example")
	delete(f.offered, plain.name)
	if err := prepare(t, s, plain, 2, names[1]); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("unpacked on it: %v", err)
	}
	// A layer that was skipped would be unpacked on it, too.
	higher := f.from(f.add(t, "a", "b", "f", "g"), "other.example")
	virtual := pullBy(t, s, higher, 2, names[1])[0]
	if _, err := s.View(t.Context(), "view", virtual); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a view of a layer on it: %v", err)
	}
	own := f.add(t, "a", "b", "e")
	delete(f.offered, own.name)
	if err := prepare(t, s, own, 2, names[1]); err != nil {
		t.Errorf("unpacked on it, of its own origin: %v", err)
	}
}

// Without a mirror nobody sees which image claims what: only one origin's images come lazily.
func TestWithoutTheMirrorOneOriginIsLazy(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	s := openWith(t, f, false, "registry.example friend.example")
	names := pullBy(t, s, img, 0, "")
	other := f.from(f.add(t, "b"), "other.example")
	if err := prepare(t, s, other, 0, ""); err != nil {
		t.Fatalf("it is not unpacked: %v", err)
	}
	why := ""
	err := s.Walk(t.Context(), func(_ context.Context, info snapshots.Info) error {
		if info.Labels[LabelPath] == PathPlain {
			why = info.Labels[LabelReason]
		}
		return nil
	})
	if err != nil || !strings.Contains(why, "--mirror-listen") {
		t.Errorf("the reason is %q, %v", why, err)
	}
	pullBy(t, s, f.from(f.add(t, "c"), "friend.example"), 0, "")
	remove(t, s, names...)
}

// On a rootfs that failed its proof, or was not proven in time, nothing starts, and what runs goes on.
func TestNothingStartsOnWhatIsRefused(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	s := openWith(t, f, true)
	names := pullBy(t, s, img, 0, "")
	top := names[len(names)-1]
	if _, err := s.Prepare(t.Context(), "runs", top); err != nil {
		t.Fatal(err)
	}
	f.refused[img.held.Rootfs] = errors.New("it is a lie")
	_, prepared := s.Prepare(t.Context(), "new", top)
	_, viewed := s.View(t.Context(), "view", top)
	for _, err := range []error{prepared, viewed} {
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "it is a lie") {
			t.Errorf("what is made on it: %v", err)
		}
	}
	if _, err := s.Mounts(t.Context(), "runs"); err != nil {
		t.Errorf("what runs: %v", err)
	}
}

// An image whose rootfs is not what its layers make comes anew, when something is to start on it: now and then, as often as
// that may be. What runs stays where it is.
func TestARefusedImageComesAnew(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	s := openWith(t, f, true)
	names := pullBy(t, s, img, 0, "")
	top := names[len(names)-1]
	f.refused[img.held.Rootfs] = &api.Error{Code: api.CodeCorrupt, Message: "it is a lie"}
	asked := len(f.asked)
	for range 3 {
		if _, err := s.Prepare(t.Context(), "new", top); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "it is a lie") {
			t.Errorf("what is made on it: %v", err)
		}
	}
	if got := f.asked[asked:]; len(got) != 1 || got[0] != img.name {
		t.Errorf("asked for %q, want the image once", got)
	}
	if n := f.holds[img.held.ChainID]; n != 1 {
		t.Errorf("%d holds", n)
	}
	// Later its server is honest.
	for _, r := range s.records {
		r.healAt = time.Time{}
	}
	f.held = func() { delete(f.refused, img.held.Rootfs) }
	if _, err := s.Prepare(t.Context(), "new", top); err != nil {
		t.Errorf("when it has come anew: %v", err)
	}
}
