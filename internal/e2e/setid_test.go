package e2e

import (
	"archive/tar"
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// Set-user-ID programs and device nodes of a lazy image work in containers, whose policy says so,
// while its mount has neither.
func TestContainerdSetIDs(t *testing.T) {
	needContainers(t)
	s := startServer(t, t.TempDir())
	path, err := exec.LookPath("id")
	if err != nil {
		t.Skip(err)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	null := layertest.File("node", 0o666, "")
	null.Header.Typeflag, null.Header.Devmajor, null.Header.Devminor = tar.TypeChar, 1, 3
	img := newImage(t, ocispec.ImageConfig{User: "65534"}, hostProgram(t, "id"),
		layertest.Layer{layertest.File("root-id", 0o4755, string(program)), null}.Gzip(t))
	ref := s.push("app", "1", img)
	w := startWorker(t, workerRoot(t))

	const script = "/bin/busybox cat /proc/self/status | /bin/busybox grep ^Uid: | /bin/busybox awk '{print $2}'; /root-id -u; echo x >/node && echo written"
	const want = "65534\n0\nwritten\n"
	out, stderr, code := command(t, "run", "--root", w.root, "--rm", ref, "--", "/bin/busybox", "sh", "-c", script)
	if diff := cmp.Diff(want, out); diff != "" || code != 0 {
		t.Errorf("foil run: exit code %d, %s\n%s", code, stderr, diff)
	}
	w.mustPull(ref, api.Complete)

	c := startContainerd(t, containerd2, w)
	c.pull(t, ref)
	got := c.ctr(t, "run", "--rm", "--snapshotter", "hydrofoil", "--user", "65534", "--allow-new-privs", ref, unique(t), "/bin/busybox", "sh", "-c", script)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("under containerd (-want +got):\n%s", diff)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(w.mountOf(ref), &st); err != nil || st.Flags&unix.ST_NOSUID == 0 || st.Flags&unix.ST_NODEV == 0 {
		t.Errorf("the mount has the flags %#x, %v", st.Flags, err)
	}
}
