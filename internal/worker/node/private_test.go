package node

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// asNobody runs a program of the host as a user without rights.
func asNobody(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Other users of the host neither read nor run what images have, wherever the root is, and
// whichever version has made it.
func TestRootIsPrivate(t *testing.T) {
	s, m := newFakeServer(t), newFakeImage(t, some(1, 3, 5000))
	ref := s.Serve("app:1", m)
	h := newHost(t)
	if err := os.Chmod(h.root, 0o755); err != nil { // as one that was there
		t.Fatal(err)
	}
	h.mustPull(ref, api.Complete)
	c, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		below := 0
		err := filepath.WalkDir(h.root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || d.Type()&fs.ModeSymlink != 0 {
				return err
			}
			below++
			if out, err := asNobody(t, "/bin/cat", path); err == nil || !strings.Contains(out, "Permission denied") {
				t.Errorf("nobody reads %s: %v, %.100q", path, err, out)
			}
			return nil
		})
		if err != nil || below < 2*len(m.Files) { // in the mount, and in the container's filesystem
			t.Errorf("%d files, %v", below, err)
		}
	}
	check()
	for _, at := range []string{filepath.Join(h.dir(m), "mnt"), c.Rootfs} {
		var st unix.Statfs_t
		if err := unix.Statfs(at, &st); err != nil {
			t.Fatal(err)
		}
		const powerless = unix.ST_NOSUID | unix.ST_NODEV
		if got, want := st.Flags&powerless == powerless, at != c.Rootfs; got != want {
			t.Errorf("%s is nosuid and nodev: %v, want %v", at, got, want)
		}
	}

	// One of an earlier version.
	for _, d := range []string{"images", "rootfs", "containers", "run"} {
		if err := os.Chmod(filepath.Join(h.root, d), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	mnt := filepath.Join(h.dir(m), "mnt")
	attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if err := unix.MountSetattr(unix.AT_FDCWD, mnt, 0, &attr); err != nil {
		t.Fatal(err)
	}
	h.restart()
	check()
	var st unix.Statfs_t
	if err := unix.Statfs(mnt, &st); err != nil || st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
		t.Errorf("the mount of an earlier version has the flags %#x, %v", st.Flags, err)
	}
	if err := kernel.Unmount(c.Rootfs, false); err != nil {
		t.Error(err)
	}
}
