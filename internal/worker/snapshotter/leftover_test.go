package snapshotter

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
)

// A daemon died while it made a snapshot, and while it unpacked a layer.
func TestWhatACrashLeftIsRemoved(t *testing.T) {
	dir := t.TempDir()
	f := newFake()
	img := f.add(t, "a", "b")
	s := open(t, dir, f)
	pullBy(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	ids, err := os.ReadDir(filepath.Join(dir, "snapshots"))
	if err != nil || len(ids) != 2 {
		t.Fatalf("%v, %v", ids, err)
	}
	for _, path := range []string{"new-123/fs", "99/fs", ids[0].Name() + "/unpack/fs"} {
		if err := os.MkdirAll(filepath.Join(dir, "snapshots", path, "left"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	open(t, dir, f)
	now, err := filepath.Glob(filepath.Join(dir, "snapshots/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, id := range ids {
		want = append(want, filepath.Join(dir, "snapshots", id.Name(), "fs"), filepath.Join(dir, "snapshots", id.Name(), "lazy"))
	}
	if diff := cmp.Diff(want, now); diff != "" {
		t.Errorf("what is there (-want +got):\n%s", diff)
	}
}

// A crash between the pull and the snapshots.
func TestLeftoverImageIsRemoved(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	dir := t.TempDir()
	s := open(t, dir, f)
	if p, why, err := s.pull(t.Context(), img.name); p == nil {
		t.Fatal(why, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !f.here[img.name] {
		t.Fatal("the image is gone before the test begins")
	}
	open(t, dir, f)
	if f.here[img.name] {
		t.Error("the image stays that was pulled for a snapshot which never came")
	}
}

func TestUnreadableRecordHarmsOnlyItself(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(dir, "snapshots", "*", "lazy"))
	if err != nil || len(records) != 1 {
		t.Fatal(records, err)
	}
	const gone = "its directory was removed"
	for _, bad := range []string{"", "{}", `{"version":99}`, "null", "[]", gone} {
		if bad == gone {
			err = os.RemoveAll(filepath.Dir(records[0]))
		} else {
			err = os.WriteFile(records[0], []byte(bad), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		s := open(t, dir, f)
		if _, err := s.Prepare(t.Context(), "on-it", names[0]); !errdefs.IsUnavailable(err) {
			t.Errorf("record %q: prepare a container: %v, want unavailable", bad, err)
		}
		if _, err := s.Prepare(t.Context(), "other", ""); err != nil {
			t.Errorf("record %q: another snapshot: %v", bad, err)
		}
		remove(t, s, "other")
		if bad == gone { // what is to be done then
			remove(t, s, names[0])
			pullBy(t, s, img, 0, "")
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRootfsThatComesBack(t *testing.T) {
	f := newFake()
	img := f.add(t, "a")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	delete(f.offered, img.name)
	s = open(t, dir, f)
	if _, err := s.Prepare(t.Context(), "c", names[0]); !errdefs.IsUnavailable(err) {
		t.Errorf("a container on a rootfs that cannot be had: %v, want unavailable", err)
	}
	f.offered[img.name] = img.held
	if _, err := s.Prepare(t.Context(), "c", names[0]); err != nil {
		t.Errorf("a container on a rootfs that can be had again: %v", err)
	}
}
