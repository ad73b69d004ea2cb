package erofs

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
)

// nobody is a user of the host without rights.
const nobody = 65534

// userOf is who runs the program at path, when nobody starts it.
func userOf(t *testing.T, path string) string {
	t.Helper()
	cmd := exec.Command(path, "-u")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", path, err, out)
	}
	return strings.TrimSpace(string(out))
}

// In the mount of an image neither set-user-ID programs nor device nodes work; in what
// containers are given of it they do.
func TestMountIsPowerless(t *testing.T) {
	needMount(t)
	id, err := exec.LookPath("id")
	if err != nil {
		t.Skipf("skip: this host has no id to make a set-user-ID program of: %v", err)
	}
	program, err := os.ReadFile(id)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	root := newDir(0o755)
	root.children["id"] = newFile(0o4755, program)
	root.children["null"] = &node{inode: toc.Inode{Mode: 0o020666, Major: 1, Minor: 3}}
	image, arenas := layOut(t, dir, build(root), 1)

	check := func(what, at string, works bool) {
		t.Helper()
		want := map[bool]string{true: "0", false: "65534"}[works]
		if got := userOf(t, filepath.Join(at, "id")); got != want {
			t.Errorf("%s: a set-user-ID program runs as %s, want %s", what, got, want)
		}
		f, err := os.OpenFile(filepath.Join(at, "null"), os.O_WRONLY, 0)
		if err == nil {
			f.Close()
		}
		if works && err != nil || !works && !errors.Is(err, fs.ErrPermission) {
			t.Errorf("%s: open a device: %v", what, err)
		}
	}
	path := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	mounted(t, image, arenas, func(target string) {
		check("the mount", target, false)

		over := path("overlay")
		if err := kernel.MountOverlay(kernel.Overlay{Lower: []string{target}, Upper: path("upper"), Work: path("work"), Target: over}); err != nil {
			t.Fatal(err)
		}
		check("a container's overlay", over, true)
		if err := kernel.Unmount(over, false); err != nil {
			t.Error(err)
		}

		// What a snapshot that is only read is given, mounted as containerd does.
		view := path("view")
		if err := mount.All([]mount.Mount{{Type: "bind", Source: target, Options: []string{"ro", "rbind"}}}, view); err != nil {
			t.Fatal(err)
		}
		check("a view by containerd", view, true)
		if err := kernel.Unmount(view, false); err != nil {
			t.Error(err)
		}
		check("the mount, after all that", target, false)

		// One of an earlier version.
		attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
		if err := unix.MountSetattr(unix.AT_FDCWD, target, 0, &attr); err != nil {
			t.Fatal(err)
		}
		check("a mount of an earlier version", target, true)
		if err := kernel.Restrict(target); err != nil {
			t.Fatal(err)
		}
		check("the same, restricted", target, false)
	})
}
