package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// halfPulled is a worker with an image that is mounted and not complete, over a
// link that passes nothing.
func halfPulled(t *testing.T, nodeFlags ...string) (s *server, k *link, w *worker, ref string, img image) {
	t.Helper()
	s = startServer(t, t.TempDir())
	img = manyFiles(t, 200, 60_000, 4, 0)
	ref = s.push("half", "1", img)
	k = newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref = k.via(ref)
	w = startWorker(t, workerRoot(t), nodeFlags...)
	w.mustPull(ref, api.Mounted)
	eventually(t, "some bytes are here", func() error {
		if ev := w.imageOf(ref); ev.ContentHere < 1<<20 {
			return fmt.Errorf("%d bytes", ev.ContentHere)
		}
		return nil
	})
	return s, k, w, ref, img
}

// intact holds the mounted rootfs against the image, whole.
func intact(t *testing.T, w *worker, ref string, img image) {
	t.Helper()
	w.mustPull(ref, api.Complete)
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Errorf("wrong bytes:\n%s", diff)
	}
	if last, bad := w.verify(ref); len(bad) > 0 || last.Checked != last.Total {
		t.Errorf("verify: %+v, bad %v", last, bad)
	}
}

// reader reads a file of a mount in a process of its own, which can be killed.
type reader struct {
	path string
	cmd  *exec.Cmd
	out  bytes.Buffer
	err  error
	done chan struct{}
}

func startReader(t *testing.T, path string) *reader {
	t.Helper()
	r := &reader{path: path, cmd: exec.Command("cat", path), done: make(chan struct{})}
	r.cmd.Stdout = &r.out
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.done
	})
	return r
}

// waits checks that the read does not end. It has begun, or is about to, when
// the process has the file open.
func (r *reader) waits(t *testing.T) {
	t.Helper()
	eventually(t, "the file is open", func() error {
		select {
		case <-r.done:
			return nil
		default:
		}
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", r.cmd.Process.Pid))
		if err != nil {
			return err
		}
		for _, fd := range fds {
			if name, err := os.Readlink(fd); err == nil && filepath.Base(name) == filepath.Base(r.path) {
				return nil
			}
		}
		return fmt.Errorf("not among %q", fds)
	})
	select {
	case <-r.done:
		t.Fatalf("the read ended (%v) with %d bytes; it should wait", r.err, r.out.Len())
	case <-time.After(300 * time.Millisecond):
	}
}

func (r *reader) ends(t *testing.T) []byte {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(2 * time.Minute):
		t.Fatal("the read hangs")
	}
	return r.out.Bytes()
}

// absent is a file of the image that has not arrived: the last one in order.
func absent(t *testing.T, w *worker, ref string, img image) (path string, want []byte) {
	t.Helper()
	want, err := os.ReadFile(filepath.Join(unpack(t, img), "data/00199"))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(w.mountOf(ref), "data/00199"), want
}

func TestLinkCutInTheMiddle(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	path, want := absent(t, w, ref, img)
	r := startReader(t, path)
	k.setCut(true)
	r.waits(t)
	k.open()
	moved := k.bytesMoved()
	k.setCut(false)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes after the cut (%v), not those of the file", len(got), r.err)
	}
	intact(t, w, ref, img)
	total := w.imageOf(ref).ContentTotal
	if again := k.bytesMoved() - moved; again > total-1<<19 {
		t.Errorf("after the cut %d bytes came of %d: the stream was restarted, not resumed", again, total)
	}
}

func TestServerGoneAndBack(t *testing.T) {
	s, k, w, ref, img := halfPulled(t)
	path, want := absent(t, w, ref, img)
	r := startReader(t, path)
	s.kill()
	k.setCut(true)
	r.waits(t)
	k.open()
	startServerAt(t, s.root, s.addr)
	k.setCut(false)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes (%v), not those of the file", len(got), r.err)
	}
	intact(t, w, ref, img)
}

func TestServerGoneForGood(t *testing.T) {
	s, k, w, ref, img := halfPulled(t, "--give-up", "2s")
	path, _ := absent(t, w, ref, img)
	r := startReader(t, path)
	s.kill()
	k.setCut(true)
	r.ends(t)
	if r.err == nil {
		t.Errorf("a read of bytes that nobody has returned %d bytes and no error", r.out.Len())
	}
	_, err := w.pull(ref, api.Complete)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodeUnavailable {
		t.Errorf("pull failed with %v, want the code %s", err, api.CodeUnavailable)
	}
	// And what failed is no obstacle later.
	k.open()
	startServerAt(t, s.root, s.addr)
	k.setCut(false)
	intact(t, w, ref, img)
}

func TestDaemonKilled(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	path, want := absent(t, w, ref, img)
	r := startReader(t, path)
	r.waits(t)
	w.kill()
	late := startReader(t, filepath.Join(filepath.Dir(path), "00198"))
	r.waits(t)
	late.waits(t)
	k.open()
	w = startWorker(t, w.root)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("the read that waited through the crash got %d bytes (%v), not those of the file", len(got), r.err)
	}
	if late.ends(t); late.err != nil {
		t.Errorf("the read that began while there was no daemon: %v", late.err)
	}
	intact(t, w, ref, img)
}

func TestKeeperKilled(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	path, want := absent(t, w, ref, img)
	r := startReader(t, path)
	old := pidsOf(t, w.root, "keeper")
	if len(old) != 1 {
		t.Fatalf("keepers: %v", old)
	}
	if err := syscall.Kill(old[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another keeper", func() error {
		st, err := w.client.Status(t.Context())
		if err == nil && (st.Keeper == 0 || st.Keeper == old[0]) {
			err = fmt.Errorf("keeper %d", st.Keeper)
		}
		return err
	})
	r.waits(t)
	// The new keeper must be as good as the old one.
	w.kill()
	r.waits(t)
	k.open()
	w = startWorker(t, w.root)
	if got := r.ends(t); !bytes.Equal(got, want) {
		t.Errorf("read %d bytes (%v), not those of the file", len(got), r.err)
	}
	intact(t, w, ref, img)
}

func TestDaemonAndKeeperKilledTogether(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	keepers := pidsOf(t, w.root, "keeper")
	for _, pid := range keepers {
		_ = syscall.Kill(pid, syscall.SIGSTOP) // cannot be noticed or restarted in between
	}
	w.signal(syscall.SIGKILL)
	for _, pid := range keepers {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	<-w.done
	k.open()
	w = startWorker(t, w.root)
	intact(t, w, ref, img)
}

func TestReaderKilledWhileItWaits(t *testing.T) {
	_, k, w, ref, img := halfPulled(t)
	path, _ := absent(t, w, ref, img)
	r := startReader(t, path)
	r.waits(t)
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	r.ends(t)
	k.open()
	intact(t, w, ref, img)
}

func TestDaemonKilledAgainAndAgain(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 200, 60_000, 5, 0)
	k := newLink(t, s.addr, 3<<20)
	ref := k.via(s.push("crash", "1", img))
	root := workerRoot(t)
	w := startWorker(t, root)
	w.mustPull(ref, api.Mounted)
	mnt := w.mountOf(ref)
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	want := unpack(t, img)
	for i := range 4 {
		wg.Go(func() {
			for f := i; f < 200; f += 4 {
				name := fmt.Sprintf("data/%05d", f)
				got, err := exec.Command("cat", filepath.Join(mnt, name)).Output()
				exp, _ := os.ReadFile(filepath.Join(want, name))
				// EIO is allowed, for the instant between an event's arrival and its note.
				if err == nil && !bytes.Equal(got, exp) {
					errs <- fmt.Errorf("%s: wrong bytes", name)
					return
				}
			}
		})
	}
	for range 8 {
		time.Sleep(200 * time.Millisecond)
		w.kill()
		w = startWorker(t, root)
	}
	k.setRate(0)
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	intact(t, w, ref, img)
}

func TestCorruptOnTheWay(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 200, 60_000, 6, 0)
	k := newLink(t, s.addr, 0)
	ref := k.via(s.push("corrupt", "1", img))
	w := startWorker(t, workerRoot(t))
	n := 0
	k.setCorrupt(func(b []byte) {
		// One byte in a chunk of frames, far behind the header, three times.
		if n++; n == 100 || n == 200 || n == 300 {
			b[len(b)/2] ^= 0x20
		}
	})
	intact(t, w, ref, img)
}

// The server finds out that its TOCs are damaged, and makes them again from the
// layers that were pushed.
func TestDamagedTOCsOnTheServer(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 50, 1000, 7, 0)
	ref := s.push("wrong", "1", img)
	w := startWorker(t, workerRoot(t), "--give-up", "2s")
	w.mustPull(ref, api.Complete)
	if err := w.client.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	s.signal(syscall.SIGTERM)
	<-s.done
	damaged := 0
	err := filepath.WalkDir(s.root, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(path, "toc") {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			b[len(b)/2] ^= 1
			damaged++
			return os.WriteFile(path, b, 0o600)
		}
		return err
	})
	if err != nil || damaged == 0 {
		t.Fatalf("damaged %d TOCs: %v", damaged, err)
	}
	startServerAt(t, s.root, s.addr)
	intact(t, w, ref, img)
}

// Bytes of packs that have changed below a running server are noticed by the
// worker, which says so when it resumes: the server makes them anew.
func TestDamagedPacksOnTheServer(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 50, 60_000, 7, 0)
	ref := s.push("wrong", "1", img)
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete) // and so it is prepared
	if err := w.client.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	damaged := 0
	err := filepath.WalkDir(filepath.Join(s.root, "objects", "packs"), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil || info.Size() < 1<<20 {
			return err
		}
		damaged++
		_, err = f.WriteAt([]byte("8 bytes!"), info.Size()/3)
		return err
	})
	if err != nil || damaged == 0 {
		t.Fatalf("damaged %d packs: %v", damaged, err)
	}
	intact(t, w, ref, img)
	if !strings.Contains(s.log.String(), "a stored frame is damaged") {
		t.Error("the server noticed nothing")
	}
}

func TestHeaderCorruptOnTheWay(t *testing.T) {
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 50, 1000, 7, 0)
	k := newLink(t, s.addr, 0)
	ref := k.via(s.push("wrong", "1", img))
	w := startWorker(t, workerRoot(t), "--give-up", "2s")
	k.setCorrupt(func(b []byte) {
		// Whatever is large enough to be more than a greeting.
		for i := 200; i < len(b); i += 100 {
			b[i] ^= 1
		}
	})
	if _, err := w.pull(ref, api.Mounted); err == nil {
		t.Error("an image with a damaged header was mounted")
	} else {
		t.Log(err)
	}
	images, err := w.client.Images(t.Context())
	left, _ := filepath.Glob(filepath.Join(w.root, "rootfs", "*"))
	if err != nil || len(images) > 0 || len(left) > 0 {
		t.Errorf("left behind: %v, %v, %v", images, left, err)
	}
	k.setCorrupt(nil)
	intact(t, w, ref, img)
}

func TestUnknownImage(t *testing.T) {
	s := startServer(t, t.TempDir())
	w := startWorker(t, workerRoot(t))
	_, err := w.pull(s.addr+"/no/such:image", api.Complete)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodeNotFound || !strings.Contains(e.Message, "no/such") {
		t.Errorf("error %v, want one with the code %s that names the image", err, api.CodeNotFound)
	}
	_, stderr, code := command(t, "pull", "--root", w.root, s.addr+"/no/such:image")
	if code != 1 || !strings.Contains(stderr, "no/such") {
		t.Errorf("foil pull: exit code %d, %q", code, stderr)
	}
}

func TestNobodyThere(t *testing.T) {
	w := startWorker(t, workerRoot(t), "--give-up", "1s")
	_, err := w.pull(freeAddr(t)+"/a:b", api.Complete)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodeUnavailable {
		t.Errorf("error %v, want one with the code %s", err, api.CodeUnavailable)
	}
}

func TestWithoutRoot(t *testing.T) {
	cmd := exec.Command(foil, "node", "--root", t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if err := os.Chmod(filepath.Dir(foil), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "root") {
		t.Errorf("foil node without root: %v, %q", err, out)
	}
}

// smallDisk is a filesystem of its own, so that it can be filled.
func smallDisk(t *testing.T, mb int) string {
	t.Helper()
	dir := t.TempDir()
	img, mnt := filepath.Join(dir, "disk"), filepath.Join(dir, "mnt")
	for _, args := range [][]string{
		{"truncate", "-s", fmt.Sprintf("%dM", mb), img},
		{"mkfs.ext4", "-q", "-m", "0", img},
		{"mkdir", mnt},
		{"mount", "-o", "loop", img, mnt},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("no small filesystem here: %v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "-l", mnt).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return mnt
}

func TestWorkerDiskFull(t *testing.T) {
	s := startServer(t, t.TempDir())
	small := manyFiles(t, 20, 50_000, 8, 0)
	large := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("big", 0o644, noise(60<<20))}.Gzip(t))
	refSmall, refLarge := s.push("small", "1", small), s.push("large", "1", large)
	disk := smallDisk(t, 40)
	root := filepath.Join(disk, "foil")
	w := startWorker(t, root, "--give-up", "5s")
	t.Cleanup(func() { endKeeper(t, root) })
	w.mustPull(refSmall, api.Complete)
	_, err := w.pull(refLarge, api.Complete)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.CodeNoSpace {
		t.Errorf("error %v, want one with the code %s", err, api.CodeNoSpace)
	}
	if last, bad := w.verify(refSmall); len(bad) > 0 || last.Checked != last.Total {
		t.Errorf("the other image was harmed: %+v, bad %v", last, bad)
	}
	if !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("the error does not say that the disk is full: %v", err)
	}
	// What cannot fit has not taken the room of others.
	if err := os.WriteFile(filepath.Join(disk, "else"), []byte(noise(4<<20)), 0o600); err != nil {
		t.Error(err)
	}
	out, _, code := command(t, "gc", "--root", root, "--dry-run", "--limit", "0")
	if code != 0 || !strings.Contains(out, refSmall) || !strings.Contains(out, "would go") {
		t.Errorf("foil gc --dry-run: exit code %d, %q", code, out)
	}
	if out, _, code = command(t, "gc", "--root", root, "--limit", "0"); code != 0 || !strings.Contains(out, "removed") {
		t.Errorf("foil gc: exit code %d, %q", code, out)
	}
	if images, err := w.client.Images(t.Context()); err != nil || len(images) > 0 {
		t.Errorf("after foil gc --limit 0: %+v, %v", images, err)
	}
}

func TestServerDiskFull(t *testing.T) {
	disk := smallDisk(t, 40)
	s := startServer(t, filepath.Join(disk, "registry"))
	small := manyFiles(t, 20, 50_000, 9, 0)
	large := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("big", 0o644, noise(60<<20))}.Gzip(t))
	refSmall := s.push("small", "1", small)
	err := s.tryPush("large", "1", large)
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "space") {
		t.Errorf("a push to a full disk: %v, want an error that says so", err)
	}
	w := startWorker(t, workerRoot(t))
	intact(t, w, refSmall, small)
}
