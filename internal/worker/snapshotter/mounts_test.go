package snapshotter

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-cmp/cmp"
)

// The mounts of a lazy image are those that containerd's overlayfs snapshotter
// would give, with one lower directory: what containerd adds to them (context=,
// for SELinux) or asks for (mappings of IDs) means the same.
func TestOptionsOfMounts(t *testing.T) {
	f := newFake()
	img := f.add(t, "a", "b")
	dir := t.TempDir()
	s := open(t, dir, f)
	names := pullBy(t, s, img, 0, "")
	const uids, gids = "0:100000:65536", "0:200000:65536"
	mapped := snapshots.WithLabels(map[string]string{snapshots.LabelSnapshotUIDMapping: uids, snapshots.LabelSnapshotGIDMapping: gids})

	mounts, err := s.Prepare(t.Context(), "plain", names[1])
	if err != nil {
		t.Fatal(err)
	}
	want := func(id string, first ...string) []mount.Mount {
		options := append(first, "workdir="+filepath.Join(dir, "snapshots", id, "work"), "upperdir="+filepath.Join(dir, "snapshots", id, "fs"), "lowerdir="+img.held.Mount)
		return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
	}
	// What containerd's snapshotter finds the kernel to need.
	needed := func(mounts []mount.Mount) []mount.Mount {
		mounts[0].Options = slices.DeleteFunc(mounts[0].Options, func(o string) bool { return o == "index=off" || o == "userxattr" })
		return mounts
	}
	if diff := cmp.Diff(want("3"), needed(mounts)); diff != "" {
		t.Errorf("mounts of a container: %s", diff)
	}
	if mounts, err = s.Prepare(t.Context(), "mapped", names[1], mapped); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want("4", "uidmap="+uids, "gidmap="+gids), needed(mounts)); diff != "" {
		t.Errorf("mounts of a container in a user namespace: %s", diff)
	}
	if uid, gid, err := ownerOf(filepath.Join(dir, "snapshots", "4", "fs")); err != nil || uid != 100000 || gid != 200000 {
		t.Errorf("its directory belongs to %d:%d, %v", uid, gid, err)
	}
	view, err := s.View(t.Context(), "view", names[1], mapped)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]mount.Mount{{Type: "bind", Source: img.held.Mount, Options: []string{"uidmap=" + uids, "gidmap=" + gids, "ro", "rbind"}}}, view); diff != "" {
		t.Errorf("mounts of a view in a user namespace: %s", diff)
	}

	// What a containerd does that maps no IDs; the names are those that it gives.
	if _, err := s.Prepare(t.Context(), "default/7/sha256:aa-remap", names[1]); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(t.Context(), "default/8/sha256:aa", "default/7/sha256:aa-remap"); err != nil {
		t.Fatal(err)
	}
	for _, get := range []func() ([]mount.Mount, error){
		func() ([]mount.Mount, error) {
			return s.Prepare(t.Context(), "changed", "default/8/sha256:aa", mapped)
		},
		func() ([]mount.Mount, error) { return s.Mounts(t.Context(), "changed") },
	} {
		mounts, err := get()
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range mounts[0].Options {
			if mapsIDs(o) {
				t.Errorf("on a copy whose owners were changed: option %s", o)
			}
		}
	}
}

// containerd's client adds the SELinux label of a container to the mounts that it is
// given. What becomes of it is the kernel's to say: the same as on an overlay of
// directories, whether it knows labels or refuses them. (The AppArmor profile is in
// the runtime's specification, which no snapshotter sees.)
func TestMountLabels(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	const label = `context="system_u:object_r:container_file_t:s0:c1,c2"`
	f := newFake()
	img := f.add(t, "a", "b")
	s := open(t, t.TempDir(), f)
	names := pullBy(t, s, img, 0, "")
	lazy, err := s.Prepare(t.Context(), "container", names[1])
	if err != nil {
		t.Fatal(err)
	}
	overlay := []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"workdir=" + t.TempDir(), "upperdir=" + t.TempDir(), "lowerdir=" + img.held.Mount}}}
	// mounted is what the kernel says, and what it then lists.
	mounted := func(mounts []mount.Mount, more ...string) (syscall.Errno, string) {
		t.Helper()
		for i := range mounts {
			mounts[i].Options = append(slices.Clone(mounts[i].Options), more...)
		}
		at := t.TempDir()
		err := mount.All(mounts, at)
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			return errno, ""
		}
		if err != nil {
			t.Fatal(err)
		}
		info, err := mount.Lookup(at)
		if err := errors.Join(err, mount.UnmountAll(at, 0)); err != nil {
			t.Fatal(err)
		}
		_, shown, _ := strings.Cut(info.VFSOptions, "context=")
		shown, _, _ = strings.Cut(shown, ",lowerdir=")
		return 0, shown
	}
	if errno, _ := mounted(slices.Clone(lazy)); errno != 0 {
		t.Fatalf("without a label: %v", errno)
	}
	want, shown := mounted(overlay, label)
	if got, here := mounted(slices.Clone(lazy), label); got != want || here != shown {
		t.Errorf("with a label: %v, %q; overlayfs: %v, %q", got, here, want, shown)
	}
	t.Logf("this kernel says to labels: %v, %q", want, shown)
}
