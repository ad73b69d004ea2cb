package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/picture"
	"hydrofoil.dev/foil/internal/worker/api"
)

// hostProgram returns a layer with a program of this host and the libraries that
// it loads, at their places, and busybox.
func hostProgram(t *testing.T, program string) layertest.Blob {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skip(err)
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		t.Skipf("ldd %s: %v", path, err)
	}
	files := []string{path}
	for _, m := range regexp.MustCompile(`(/[^ ]+) \(0x`).FindAllStringSubmatch(string(out), -1) {
		files = append(files, m[1])
	}
	var entries []layertest.Entry
	made := map[string]bool{}
	add := func(name string, data []byte) {
		for i, c := range name {
			if c == '/' && !made[name[:i]] {
				made[name[:i]] = true
				entries = append(entries, layertest.Dir(name[:i], 0o755))
			}
		}
		entries = append(entries, layertest.File(name, 0o755, string(data)))
	}
	for _, f := range append(files, busybox) {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if f == busybox {
			f = "/bin/busybox"
		}
		add(strings.TrimPrefix(f, "/"), b)
	}
	for i := range 40 {
		add(fmt.Sprintf("data/%02d", i), []byte(noise(100_000+i)))
	}
	entries = append(entries, layertest.Dir("dev", 0o755), layertest.Char("dev/null", 0o666, 1, 3))
	return layertest.Layer(entries).Tar(t)
}

// residentBytes returns how much of a file is in the page cache.
func residentBytes(path string) (n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return 0, err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer func() { _ = unix.Munmap(m) }()
	in := make([]byte, trace.Pages(st.Size()))
	err = mincore(m, in)
	for _, b := range in {
		n += int64(b&1) * trace.BlockSize
	}
	return n, err
}

func mincore(m, in []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&in[0])))
	if errno != 0 {
		return errno
	}
	return nil
}

func pagesOf(v *picture.Trace) map[string]bool {
	pages := map[string]bool{}
	for _, touch := range v.Touched {
		for p := touch.First; p < touch.First+touch.Pages; p++ {
			pages[fmt.Sprintf("%s %d", touch.Path, p)] = true
		}
	}
	return pages
}

func imageNames(t *testing.T, w *worker, ref string) *picture.Image {
	t.Helper()
	b, err := w.client.TOC(t.Context(), api.AboutImage{Ref: ref})
	if err != nil {
		t.Fatal(err)
	}
	img, err := picture.NewImage(ref, b)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestTraceIsExact: what a trace says was read are the pages that are in the
// page cache of the mount that was traced, whether read, mapped or executed, and
// nothing that others read.
func TestTraceIsExact(t *testing.T) {
	if busybox == "" {
		t.Skip("no static busybox here: install busybox-static")
	}
	s := startServer(t, t.TempDir())
	layer := hostProgram(t, "git")
	img := newImage(t, ocispec.ImageConfig{Cmd: []string{"/bin/busybox", "true"}}, layer)
	ref := s.push("traced", "1", img)
	w := startWorker(t, workerRoot(t))
	w.mustPull(ref, api.Complete)
	names := imageNames(t, w, ref)

	drops := dropped(t)
	c, err := w.client.CreateContainer(t.Context(), api.ContainerRequest{ID: "traced", Ref: ref, Trace: true})
	if err != nil {
		t.Fatal(err)
	}
	// Another image whose contents lie in the arena that is traced, mounted after
	// that began, and this one as others see it.
	next := s.push("traced", "2", newImage(t, ocispec.ImageConfig{}, layer, layertest.Layer{layertest.File("new", 0o644, noise(5000))}.Tar(t)))
	w.mustPull(next, api.Complete)
	for _, other := range []string{next, ref} {
		if _, err := os.ReadFile(filepath.Join(w.mountOf(other), "data/30")); err != nil {
			t.Fatal(err)
		}
	}

	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip(err)
	}
	if git, err = filepath.EvalSymlinks(git); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	script := "/bin/busybox dd if=/data/05 of=/dev/null bs=4096 skip=3 count=2; /bin/busybox cat /data/06 >/dev/null; exec " + git + " --version"
	cmd := inRoot(c.Rootfs, "/bin/busybox", "sh", "-c", script)
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("git version")) {
		t.Fatalf("%v: %s", err, out)
	}
	st, err := w.client.TraceStatus(t.Context(), c.ID)
	if err != nil {
		t.Fatal(err)
	}
	req := api.TraceRequest{Args: []string{"sh"}, Started: began, Ready: time.Now()}
	res, err := w.client.Trace(t.Context(), c.ID, req)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Decode(res.Trace)
	if err != nil {
		t.Fatal(err)
	}
	v, err := names.Trace(tr)
	if err != nil {
		t.Fatal(err)
	}
	want := withDropped(t, drops, cached(t, names, filepath.Join(c.Dir, "image")), pagesOf(v))
	if diff := cmp.Diff(want, pagesOf(v)); diff != "" {
		t.Errorf("pages in the page cache, and those of the trace:\n%s", diff)
	}
	if st.Pages != v.Pages || int(v.Pages) != len(want) || v.Service != trace.Service([]string{"sh"}) {
		t.Errorf("%d pages, the trace has %d; service %s", st.Pages, v.Pages, v.Service)
	}
	readInOrder(t, v, "/bin/busybox", "/data/05", "/data/06", git)
	if n := len(want); n < 100 {
		t.Errorf("only %d pages: too few to be a test", n)
	}
	for p := range want {
		if strings.HasPrefix(p, "/data/05 ") && p != "/data/05 3" && p != "/data/05 4" || strings.HasPrefix(p, "/data/30 ") {
			t.Errorf("page %s was read", p)
		}
	}
	if err := w.client.RemoveContainer(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	if mounts, err := kernel.Mounts(c.Dir); err != nil || len(mounts) > 0 {
		t.Errorf("left: %+v, %v", mounts, err)
	}
	if _, err := os.Stat(c.Dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", c.Dir, err)
	}

	both := traceAgain(t, w, names, ref, res.Trace, want)
	_, err = w.client.CreateContainer(t.Context(), api.ContainerRequest{ID: "traced", Ref: next, Trace: true, Before: both})
	if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != api.CodeInvalid {
		t.Errorf("with a trace of another image: %v", err)
	}
}

// inRoot is a command whose root directory is another one.
func inRoot(root string, args ...string) *exec.Cmd {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	cmd.Dir = "/"
	return cmd
}

// readInOrder checks that a trace has these files, and that they were first read in this
// order.
func readInOrder(t *testing.T, v *picture.Trace, paths ...string) {
	t.Helper()
	at := make([]int, len(paths))
	for i, path := range paths {
		at[i] = slices.IndexFunc(v.Touched, func(touch picture.Touched) bool { return touch.Path == path })
	}
	if slices.Contains(at, -1) || !slices.IsSorted(at) {
		t.Errorf("%q were read first at %d of %d", paths, at, len(v.Touched))
	}
}

// traceAgain traces another start of an image. It finds the pages of the trace before, which
// are want, and no others; its trace, which is returned, has them, and what it reads besides.
func traceAgain(t *testing.T, w *worker, names *picture.Image, ref string, before []byte, want map[string]bool) []byte {
	t.Helper()
	first, err := trace.Decode(before)
	if err != nil {
		t.Fatal(err)
	}
	drops := dropped(t)
	c, err := w.client.CreateContainer(t.Context(), api.ContainerRequest{ID: "traced", Ref: ref, Trace: true, Before: before})
	if err != nil {
		t.Fatal(err)
	}
	status, err := w.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status.Gate == kernel.GateFanotify {
		if diff := cmp.Diff(want, withDropped(t, drops, cached(t, names, filepath.Join(c.Dir, "image")), want)); diff != "" {
			t.Errorf("pages of the trace, and those in the page cache:\n%s", diff)
		}
	}
	began := time.Now()
	cmd := inRoot(c.Rootfs, "/bin/busybox", "cat", "/data/05")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	res, err := w.client.Trace(t.Context(), c.ID, api.TraceRequest{Args: []string{"sh"}, Started: began, Ready: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	both, err := trace.Decode(res.Trace)
	if err != nil {
		t.Fatal(err)
	}
	if both.Ready != first.Ready {
		t.Errorf("ready after %v, the first start was after %v", both.Ready, first.Ready)
	}
	v, err := names.Trace(both)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(want, cached(t, names, filepath.Join(c.Dir, "image")))
	want = withDropped(t, drops, want, pagesOf(v))
	if diff := cmp.Diff(want, pagesOf(v)); diff != "" || !want["/data/05 0"] || int(v.Pages) != len(want) {
		t.Errorf("pages of both starts, and those of the trace:\n%s", diff)
	}
	if err := w.client.RemoveContainer(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	return res.Trace
}

// TestTraceDaemonKilled: a daemon that is killed while it records leaves nobody hanging,
// and the next one removes what is left.
func TestTraceDaemonKilled(t *testing.T) {
	if busybox == "" {
		t.Skip("no static busybox here: install busybox-static")
	}
	s := startServer(t, t.TempDir())
	ref := s.push("traced", "1", newImage(t, ocispec.ImageConfig{}, hostProgram(t, "git")))
	root := workerRoot(t)
	w := startWorker(t, root)
	w.mustPull(ref, api.Complete)
	c, err := w.client.CreateContainer(t.Context(), api.ContainerRequest{ID: "traced", Ref: ref, Trace: true})
	if err != nil {
		t.Fatal(err)
	}
	mnt := w.mountOf(ref)
	f, err := os.Open(filepath.Join(c.Rootfs, "data/01"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 4096)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	w.kill()
	// It is right or fails, at once.
	switch _, err := f.ReadAt(b, 16*4096); {
	case err != nil:
		t.Logf("without a daemon: %v", err)
	default:
		good, err := os.ReadFile(filepath.Join(mnt, "data/01"))
		if err == nil && !bytes.Equal(b, good[16*4096:17*4096]) {
			t.Error("without a daemon: wrong bytes")
		}
	}
	f.Close()
	w = startWorker(t, root)
	if list, err := w.client.Containers(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("containers %+v, %v", list, err)
	}
	if mounts, err := kernel.Mounts(c.Dir); err != nil || len(mounts) > 0 {
		t.Errorf("left: %+v, %v", mounts, err)
	}
	if _, err := w.client.Trace(t.Context(), c.ID, api.TraceRequest{Started: time.Now(), Ready: time.Now()}); err == nil {
		t.Error("the next daemon has a trace")
	}
}

// TestFoilTrace: the command runs a service several times, cold each time, and
// leaves nothing.
func TestFoilTrace(t *testing.T) {
	needContainers(t)
	s := startServer(t, t.TempDir())
	ref := s.push("traced", "1", newImage(t, ocispec.ImageConfig{Entrypoint: []string{"/bin/busybox", "sh", "-c"}}, hostProgram(t, "git")))
	w := startWorker(t, workerRoot(t))
	file := filepath.Join(t.TempDir(), "traces")
	args := []string{"trace", "--root", w.root, "--no-send", "--runs", "2", "--output", file, "--probe", "stdout:^up$", ref, "--"}
	out, errOut, code := command(t, append(args, "trap exit TERM; busybox cat /data/07 >/dev/null; echo up; busybox cat /data/08 >/dev/null; busybox sleep 100 & wait")...)
	if code != 0 || strings.Count(out, "\n") != 3 || !strings.Contains(out, "run 2: ready after ") {
		t.Fatalf("code %d, output %q, %q", code, out, errOut)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var runs []picture.Trace
	for line := range bytes.Lines(b) {
		var v picture.Trace
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatal(err)
		}
		runs = append(runs, v)
	}
	if len(runs) != 2 || len(runs[0].Args) != 4 || runs[0].Service != runs[1].Service {
		t.Fatalf("runs %+v", runs)
	}
	for i, v := range runs {
		pages := pagesOf(&v)
		if v.Ref != ref || v.Ready <= 0 || int(v.Pages) != len(pages) || v.Bytes > v.Pages*4096 || v.ImageBytes <= v.Bytes {
			t.Errorf("run %d: %+v", i, v)
		}
		for p := range 25 {
			if !pages[fmt.Sprintf("/data/07 %d", p)] {
				t.Errorf("run %d: page %d of what was read before ready is missing", i, p)
			}
		}
		if !pages["/bin/busybox 0"] || pages["/data/09 0"] {
			t.Errorf("run %d: %v", i, pages)
		}
	}
	// One that ends by itself: what it reads until then others wait for as well.
	out, errOut, code = command(t, "trace", "--root", w.root, "--no-send", "--json", "--probe", "stdout:^up$", ref, "--", "echo up; busybox cat /data/08 >/dev/null")
	var ended picture.Trace
	if err := json.Unmarshal([]byte(out), &ended); code != 0 || err != nil || !pagesOf(&ended)["/data/08 24"] {
		t.Errorf("a service that ends: code %d, %v, %q, %q", code, err, out, errOut)
	}
	w.leavesNothing(t)
	if mounts, err := kernel.Mounts(filepath.Join(w.root, "containers")); err != nil || len(mounts) > 0 {
		t.Errorf("left: %+v, %v", mounts, err)
	}
	_, errOut, code = command(t, "trace", "--root", w.root, "--no-send", "--probe", "tcp:1", ref, "--", "echo oh no; exit 7")
	if code != 1 || !strings.Contains(errOut, "oh no") || !strings.Contains(errOut, "exit code 7") {
		t.Errorf("a service that fails: code %d, %q", code, errOut)
	}
	for _, how := range [][]string{{"--probe", "stdout:^never$"}, {"--quiet", "1h"}} {
		_, errOut, code = command(t, append(append([]string{"trace", "--root", w.root, "--no-send", "--timeout", "1s"}, how...),
			ref, "--", "trap 'exit 0' TERM; busybox sleep 1000 & wait")...)
		if code != 1 || !strings.Contains(errOut, "was not ready after 1s") {
			t.Errorf("a service that is never ready, %v: code %d, %q", how, code, errOut)
		}
	}
	w.leavesNothing(t)
}

// startupOf asks for the startup sets of an image, through the command.
func startupOf(t *testing.T, w *worker, ref string) []bundle.Service {
	t.Helper()
	out, errOut, code := command(t, "startup", "ls", "--root", w.root, "--json", ref)
	if code != 0 {
		t.Fatalf("startup ls: code %d, %s", code, errOut)
	}
	var list []bundle.Service
	for line := range strings.Lines(out) {
		var s bundle.Service
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		list = append(list, s)
	}
	return list
}

// TestStartupCommands: a service is traced twice, and its set listed, shown and
// removed, also from where the image is not.
func TestStartupCommands(t *testing.T) {
	needContainers(t)
	s := startServer(t, t.TempDir())
	ref := s.push("traced", "1", newImage(t, ocispec.ImageConfig{Entrypoint: []string{"/bin/busybox", "sh", "-c"}}, hostProgram(t, "git")))
	w := startWorker(t, workerRoot(t))
	script := "busybox cat /data/07 >/dev/null"
	out, errOut, code := command(t, "startup", "create", "--root", w.root, "--runs", "2", "--probe", "exit", ref, "--", script)
	if code != 0 || !strings.Contains(out, "run 2: ") || strings.Count(out, "; sent\n") != 2 || !strings.Contains(out, "traced") {
		t.Fatalf("code %d, output %q, %q", code, out, errOut)
	}
	list := startupOf(t, w, ref)
	if len(list) != 1 || list[0].Origin != bundle.OriginTraced || list[0].Traces != 2 || list[0].Reports != 0 || list[0].Pages < 25 {
		t.Fatalf("services %+v", list)
	}
	if err := w.client.RemoveImage(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	html := filepath.Join(t.TempDir(), "set.html")
	out, errOut, code = command(t, "startup", "show", "--root", w.root, ref, "--", script)
	if code != 0 || !strings.Contains(out, "/data/07") || !strings.Contains(out, fmt.Sprintf("%d pages", list[0].Pages)) {
		t.Errorf("show: code %d, output %q, %q", code, out, errOut)
	}
	_, errOut, code = command(t, "startup", "show", "--root", w.root, "--html", html, "--service", list[0].ID, ref)
	if b, err := os.ReadFile(html); code != 0 || err != nil || !bytes.Contains(b, []byte(`"path":"/data/07"`)) {
		t.Errorf("show --html: code %d, %v, %q", code, err, errOut)
	}
	if _, errOut, code = command(t, "startup", "show", "--root", w.root, ref, "--", "other"); code != 1 || !strings.Contains(errOut, "startup ls") {
		t.Errorf("show of another service: code %d, %q", code, errOut)
	}
	if _, errOut, code = command(t, "startup", "rm", "--root", w.root, "--service", list[0].ID, ref); code != 0 {
		t.Errorf("rm: code %d, %q", code, errOut)
	}
	if list := startupOf(t, w, ref); len(list) != 0 {
		t.Errorf("after rm: %+v", list)
	}
}

// TestLearning: what a container reads before it is ready, while the image is on
// its way, is reported to the server without anybody asking for it; with
// --report off it is not.
func TestLearning(t *testing.T) {
	needContainers(t)
	s := startServer(t, t.TempDir())
	k := newLink(t, s.addr, 0)
	ref := k.via(s.push("learned", "1", newImage(t, ocispec.ImageConfig{Entrypoint: []string{"/bin/busybox", "sh", "-c"}}, hostProgram(t, "git"))))
	script := []string{"busybox cat /data/07 >/dev/null; echo up; busybox cat /data/09 >/dev/null; busybox sleep 100"}
	run := func(flags ...string) *worker {
		w := startWorker(t, workerRoot(t), flags...)
		k.setRate(4 << 20)
		r := w.run(t, append([]string{"--rm", "--probe", "stdout:^up$", "--until", "ready", ref, "--"}, script...)...)
		if code := r.ends(); code != 0 {
			t.Fatalf("code %d: %s", code, r.errOut.String())
		}
		k.setRate(0)
		w.mustPull(ref, api.Complete)
		return w
	}
	w := run("--report", "off")
	if list := startupOf(t, w, ref); len(list) != 0 {
		t.Fatalf("with --report off: %+v", list)
	}
	w.signal(syscall.SIGTERM)
	<-w.done
	w = run("--log-level", "debug")
	want := append([]string{"/bin/busybox", "sh", "-c"}, script...)
	eventually(t, "the server has the report", func() error {
		list := startupOf(t, w, ref)
		if len(list) != 1 || list[0].Reports != 1 {
			return fmt.Errorf("%+v", list)
		}
		if l := list[0]; l.Origin != bundle.OriginLearned || l.Traces != 0 || !slices.Equal(l.Args, want) {
			t.Fatalf("%+v", l)
		}
		return nil
	})
	out, errOut, code := command(t, "startup", "show", "--root", w.root, "--all", ref)
	if code != 0 || !strings.Contains(out, "/data/07") || strings.Contains(out, "/data/11") {
		t.Errorf("show: code %d, %s%s", code, out, errOut)
	}
	// The gate is not needed any more.
	w.signal(syscall.SIGTERM)
	<-w.done
	if pids := pidsOf(t, w.root, "keeper"); len(pids) > 0 {
		t.Errorf("keepers are left: %v", pids)
	}
}
