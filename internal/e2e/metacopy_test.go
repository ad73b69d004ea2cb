package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"hydrofoil.dev/foil/internal/fstest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// An entrypoint that changes the owner of everything fetches nothing of it and copies nothing; and a directory can be
// renamed. What the container sees is right when the image has arrived, and so is an image that is made of it.
func TestChownFetchesNothing(t *testing.T) {
	t.Parallel()
	needContainers(t)
	_, k, w, ref, img := halfPulled(t)
	// The shell has to be here, and of the rest not all.
	k.setRate(300 << 10)
	k.stallAfter(4 << 20)
	k.setStall(false)
	if _, err := os.ReadFile(filepath.Join(w.mountOf(ref), "bin/busybox")); err != nil {
		t.Fatal(err)
	}
	k.setStall(true) // who reads what is not here waits for ever
	id := unique(t)
	r := w.run(t, "--name", id, ref, "--", "/bin/sh", "-c", "/bin/busybox chown -R 5:6 /data && /bin/busybox chmod -R g+w /data && echo changed")
	if code := r.ends(); code != 0 || r.out.String() != "changed\n" {
		t.Fatalf("exit code %d: %s %s", code, r.out, r.errOut)
	}
	if img := w.imageOf(ref); img.ContentHere == img.ContentTotal {
		t.Error("all was here before")
	}
	dir := filepath.Join(w.root, "containers", id)
	if copied := treeUsage(t, filepath.Join(dir, "upper")); copied > 2<<20 {
		t.Errorf("%d bytes were copied", copied)
	}
	k.open()
	w.mustPull(ref, api.Complete)
	want, got := snapshot(t, filepath.Join(unpack(t, img), "data")), snapshot(t, filepath.Join(dir, "rootfs/data"))
	if d := fstest.Diff(want, got, func(path string, a, b *fstest.Node) {
		a.UID, a.GID, a.Mode = 5, 6, a.Mode|0o020
		if path == "." {
			a.Mtime, a.MtimeNsec = b.Mtime, b.MtimeNsec
		}
	}); d != "" {
		t.Errorf("what the container sees:\n%s", d)
	}
	second, made := unique(t), strings.TrimSuffix(ref, "1")+"2"
	w.runNamed(t, second, ref, "b=/bin/busybox; $b chown -R 7:8 /data; $b mv /data /moved; echo more >>/moved/00001; $b mkdir /data")
	saw := w.saw(t, second)
	w.commit(t, second, made)
	if d := fstest.Diff(saw, snapshot(t, w.mountOf(made)), withoutRoot); d != "" {
		t.Errorf("what the container saw, and the image:\n%s", d)
	}
}

// treeUsage is what the files below a directory take.
func treeUsage(t *testing.T, dir string) (size int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		var st syscall.Stat_t
		if err == nil {
			err = syscall.Lstat(path, &st)
		}
		size += st.Blocks * 512
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return size
}
