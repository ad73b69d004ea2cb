package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/fstest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// changeMuch is what a container does to an image of manyFiles, by all that overlayfs has a way to note.
const changeMuch = `b=/bin/busybox
echo new >/data/new; echo more >>/data/00001; $b rm /data/00002; $b chmod 4755 /data/00003; $b chown 5:6 /data/00004
$b ln /data/new /hard; $b ln -s ../data /link; $b mv /data/00005 /moved; $b mkfifo /fifo
$b mkdir -p /tree/a; $b cp /data/00006 /tree/a/copy; $b truncate -s 3000000 /sparse; echo end >>/sparse
$b rm -r /opaque; $b mkdir /opaque; echo x >/opaque/own
$b touch -d '2001-02-03 04:05:06' /data/00007; echo done`

// runNamed runs a container that stays.
func (w *worker) runNamed(t *testing.T, id, ref, script string) string {
	t.Helper()
	out, stderr, code := command(t, "run", "--root", w.root, "--name", id, ref, "--", "/bin/sh", "-c", script)
	if code != 0 {
		t.Fatalf("exit code %d: %s%s", code, out, stderr)
	}
	return out
}

func (w *worker) commit(t *testing.T, args ...string) api.CommitReport {
	t.Helper()
	return w.commitIn(t, nil, args...)
}

// commitIn commits with more in the environment.
func (w *worker) commitIn(t *testing.T, env []string, args ...string) (v api.CommitReport) {
	t.Helper()
	cmd := exec.Command(foil, append([]string{"commit", "--root", w.root, "--json"}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &v)
	}
	if err != nil {
		t.Fatalf("foil commit %v: %v: %s%s", args, err, out, &stderr)
	}
	return v
}

// saw is what a container sees, without what its runtime made to mount on.
func (w *worker) saw(t *testing.T, id string) fstest.Tree {
	t.Helper()
	tree := snapshot(t, filepath.Join(w.root, "containers", id, "rootfs"))
	for _, name := range []string{"dev", "proc", "sys", "etc", "etc/hosts", "etc/hostname", "etc/resolv.conf"} {
		delete(tree, name)
	}
	return tree
}

// withoutRoot ignores what no layer says: the root directory's own metadata, and names that overlayfs goes on counting.
func withoutRoot(path string, a, b *fstest.Node) {
	if path == "." {
		*a = *b
	}
	a.Nlink, b.Nlink = 0, 0
}

// committable is an image with a directory that changeMuch replaces.
func committable(t *testing.T, seed uint64) image {
	img := manyFiles(t, 60, 20_000, seed, 0)
	more := layertest.Layer{layertest.Dir("opaque", 0o755), layertest.File("opaque/hidden", 0o644, "hidden")}.Gzip(t)
	return newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/sh", "-c", "echo hello"}, Env: []string{"A=1"}}, append(img.layers, more)...)
}

// What a container has changed becomes an image that can be run at once, without a server; it is what the container saw, and what
// containerd unpacks of the layer; it is proven, survives the daemon and its base, and nothing evicts it.
func TestCommit(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	img := committable(t, 21)
	ref := s.push("app", "1", img)
	made, again := s.addr+"/app:made", s.addr+"/app:again"
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete)
	for _, err := range w.client.Prove(t.Context(), ref) {
		if err != nil {
			t.Fatal(err)
		}
	}
	id := unique(t)
	w.runNamed(t, id, ref, changeMuch)
	saw := w.saw(t, id)
	s.kill() // nobody is asked from here on

	v := w.commit(t, "--change", `CMD ["/bin/sh", "-c", "cat /data/new /hard; echo $A $B"]`, "--change", "ENV B=2", "--message", "why", "--author", "who", id, made)
	if v.Ref != made || v.Entries < 15 || v.FileBytes < 3_000_000 {
		t.Errorf("%+v", v)
	}
	if got := w.imageOf(made); got.State != "complete" || got.Digest != v.Digest || !got.Made {
		t.Errorf("%+v", got)
	}
	if out, stderr, code := command(t, "run", "--root", w.root, "--rm", made); code != 0 || out != "new\nnew\n1 2\n" {
		t.Errorf("exit code %d: %q, %s", code, out, stderr)
	}
	checkCommitted := func() {
		t.Helper()
		if d := fstest.Diff(saw, snapshot(t, w.mountOf(made)), withoutRoot); d != "" {
			t.Errorf("what the container saw, and the image:\n%s", d)
		}
		layer, err := os.ReadFile(filepath.Join(w.root, "rootfs", w.imageOf(made).Rootfs, "layer-"+strings.TrimPrefix(v.DiffID, "sha256:")))
		if err != nil || int64(len(layer)) != v.LayerBytes {
			t.Errorf("%d bytes of its layer are kept, want %d: %v", len(layer), v.LayerBytes, err)
		}
		if d := differs(t, image{layers: append(img.layers[:len(img.layers):len(img.layers)], layertest.TarBlob(layer))}, w.mountOf(made)); d != "" {
			t.Errorf("what containerd unpacks, and the image:\n%s", d)
		}
		if last, bad := w.verify(made); len(bad) > 0 || last.Checked != last.Total {
			t.Errorf("verify: %+v, bad %v", last, bad)
		}
	}
	checkCommitted()
	for ev, err := range w.client.Prove(t.Context(), made) {
		if err != nil {
			t.Errorf("its proof: %v", err)
		} else if ev.Done && ev.Proof != "proven" {
			t.Errorf("its proof: %+v", ev)
		}
	}
	// What is not new lies where it lay.
	if own, base := w.arenaUsage(t, made), w.arenaUsage(t, ref); own > 1<<20 || base < 2<<20 {
		t.Errorf("its contents take %d bytes, those of its base %d", own, base)
	}

	// On what was made here more is made, by the same rules.
	second := unique(t)
	w.runNamed(t, second, made, "echo second >/second; /bin/busybox rm /moved")
	epoch := []string{"SOURCE_DATE_EPOCH=1700000000"}
	one := w.commitIn(t, epoch, second, again)
	if two := w.commitIn(t, epoch, second, again); one.Digest != two.Digest || one.DiffID != two.DiffID {
		t.Errorf("the same again is another image: %+v, %+v", one, two)
	}
	if out, stderr, code := command(t, "run", "--root", w.root, "--rm", again, "--", "/bin/sh", "-c", "cat /second /data/new; [ ! -e /moved ]"); code != 0 || out != "second\nnew\n" {
		t.Errorf("exit code %d: %q, %s", code, out, stderr)
	}
	out, stderr, code := command(t, "diff", "--root", w.root, made, again)
	if want := "D /moved\nA /second 7\n"; code != 0 || out != want {
		t.Errorf("foil diff: exit code %d: %q, want %q: %s", code, out, want, stderr)
	}

	// Nothing is evicted that is nowhere else; base and containers may go; the next daemon finds it.
	for _, c := range []string{id, second} {
		if out, stderr, code := command(t, "rm", "--root", w.root, c); code != 0 {
			t.Errorf("foil rm %s: %s%s", c, out, stderr)
		}
	}
	if _, err := w.client.GC(t.Context(), api.GCRequest{Limit: "1B"}); err != nil {
		t.Error(err)
	}
	if _, stderr, code := command(t, "rm", "--root", w.root, again); code != 0 {
		t.Error(stderr)
	}
	w.signal(syscall.SIGTERM)
	<-w.done
	w = startWorker(t, w.root)
	images, err := w.client.Images(t.Context())
	if err != nil || len(images) != 1 || images[0].Ref != made {
		t.Errorf("images %+v, %v", images, err)
	}
	checkCommitted()
}

// arenaUsage is what the arena of an image takes.
func (w *worker) arenaUsage(t *testing.T, ref string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(w.root, "rootfs", w.imageOf(ref).Rootfs, "arena"), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// A container that runs stands still meanwhile, and goes on: of two files that are written in turns, neither is ahead by
// more than one write.
func TestCommitARunningContainer(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	ref := s.push("app", "1", manyFiles(t, 10, 1000, 22, 0))
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete)
	id := unique(t)
	r := w.run(t, "--rm", "--name", id, ref, "--", "/bin/sh", "-c",
		`i=0; echo 0 >/count; echo 0 >/copy; echo up; while [ ! -e /stop ]; do i=$((i+1)); echo $i >>/count; echo $i >>/copy; done; echo stopped; exit 3`)
	r.prints("up")
	v := w.commit(t, id, s.addr+"/app:2")
	if v.Paused <= 0 {
		t.Errorf("%+v", v)
	}
	if err := os.WriteFile(filepath.Join(w.root, "containers", id, "rootfs/stop"), nil, 0o644); err != nil {
		t.Error(err)
	}
	r.prints("stopped")
	if code := r.ends(); code != 3 {
		t.Errorf("exit code %d: %s", code, r.errOut.String())
	}
	out, stderr, code := command(t, "run", "--root", w.root, "--rm", s.addr+"/app:2", "--", "/bin/sh", "-c", `while read x; do a=$x; done </count; while read x; do b=$x; done </copy
d=$((a-b)); if [ $d = 0 ] || [ $d = 1 ]; then echo fine; else echo $a and $b; fi`)
	if code != 0 || out != "fine\n" {
		t.Errorf("exit code %d: %q, %s", code, out, stderr)
	}
	w.leavesNothing(t, id)
}

// What cannot be committed is refused with what to do, and leaves nothing.
func TestCommitRefuses(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	k := newLink(t, s.addr, 1<<20)
	slow := k.via(s.push("slow", "1", manyFiles(t, 150, 40_000, 23, 0)))
	here := s.push("here", "1", manyFiles(t, 3, 1000, 24, 0))
	w := startWorker(t, workerRoot(t))
	w.mustPull(here, api.Complete)
	id, arriving := unique(t), unique(t)+"b"
	w.runNamed(t, id, here, "echo x >/x")
	w.runNamed(t, arriving, slow, "echo x >/x")
	before, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"none", s.addr + "/a:b"}, "no container none"},
		{[]string{id, "elsewhere.example/a:b"}, "is of the registry " + s.addr},
		{[]string{id, s.addr + "/a@sha256:" + strings.Repeat("0", 64)}, "leave it out"},
		{[]string{"--change", "RUN true", id, s.addr + "/a:b"}, `change "RUN true": unknown instruction`},
		{[]string{"--change", `ENV A="b`, id, s.addr + "/a:b"}, "is not closed"},
		{[]string{arriving, strings.TrimSuffix(slow, "1") + "2"}, "has not arrived yet"},
	} {
		out, stderr, code := command(t, append([]string{"commit", "--root", w.root}, c.args...)...)
		if code != 1 || !strings.Contains(stderr, c.want) {
			t.Errorf("%v: exit code %d: %s%s, want %q", c.args, code, out, stderr, c.want)
		}
	}
	if err := os.WriteFile(filepath.Join(w.root, "containers", id, "rootfs/.wh.x"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := command(t, "commit", "--root", w.root, id, s.addr+"/a:b"); code != 1 || !strings.Contains(stderr, "/.wh.x cannot be in a layer") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	if after, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*")); err != nil || len(after) != len(before) {
		t.Errorf("left %q, before %q: %v", after, before, err)
	}
	out, stderr, code := command(t, "diff", "--root", w.root, id)
	if want := "A /.wh.x 0\nA /x 2\n"; code != 0 || out != want {
		t.Errorf("foil diff: exit code %d: %q, want %q: %s", code, out, want, stderr)
	}
	k.setRate(0)
}

// The daemon is killed while it commits: there is the image, whole, or nothing of it; and the same command makes it.
func TestKillsDuringCommit(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	img := committable(t, 25)
	ref, made := s.push("app", "1", img), s.addr+"/app:made"
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete)
	id := unique(t)
	w.runNamed(t, id, ref, changeMuch)
	saw := w.saw(t, id)
	half := 0
	for i := range 12 {
		cmd := exec.Command(foil, "commit", "--root", w.root, id, made)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i*i) * 2 * time.Millisecond)
		w.kill()
		committed := cmd.Wait() == nil
		w = startWorker(t, w.root)
		images, err := w.client.Images(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(images) == 2 {
			if d := fstest.Diff(saw, snapshot(t, w.mountOf(made)), withoutRoot); d != "" {
				t.Fatalf("kill %d: the image is not what the container saw:\n%s", i, d)
			}
			if err := w.client.RemoveImage(t.Context(), made); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if half++; committed {
			t.Errorf("kill %d: an image that was made has gone: %s", i, out.String())
		}
		eventually(t, "nothing of it is left", func() error {
			left, err := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
			if err == nil && len(left) != 1 {
				err = &os.PathError{Op: "left", Path: strings.Join(left, " "), Err: os.ErrExist}
			}
			return err
		})
	}
	t.Logf("%d of 12 kills came before the image", half)
	w.commit(t, id, made)
	if d := fstest.Diff(saw, snapshot(t, w.mountOf(made)), withoutRoot); d != "" {
		t.Error(d)
	}
	intact(t, w, ref, img)
}
