package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

func needContainers(t *testing.T) {
	t.Helper()
	if busybox == "" {
		t.Skip("no static busybox here: install busybox-static")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Skip(err)
	}
}

// foilRun is a `foil run` in the background.
type foilRun struct {
	t           *testing.T
	cmd         *exec.Cmd
	out, errOut outFile
	events      string
	done        chan struct{}
}

// outFile is what a process wrote to a file: unlike a pipe, it does not have to
// wait for whoever has it open after the process has ended.
type outFile string

func (f outFile) String() string {
	b, err := os.ReadFile(string(f))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (f outFile) create(t *testing.T) *os.File {
	t.Helper()
	file, err := os.Create(string(f))
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func (w *worker) run(t *testing.T, args ...string) *foilRun {
	t.Helper()
	dir := t.TempDir()
	r := &foilRun{t: t, events: filepath.Join(dir, "events"), done: make(chan struct{}),
		out: outFile(filepath.Join(dir, "out")), errOut: outFile(filepath.Join(dir, "err"))}
	r.cmd = exec.Command(foil, append([]string{"run", "--root", w.root, "--events", r.events}, args...)...)
	stdout, stderr := r.out.create(t), r.errOut.create(t)
	defer stdout.Close()
	defer stderr.Close()
	r.cmd.Stdout, r.cmd.Stderr = stdout, stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = r.cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.done
		// A test that failed may leave containers, which nobody else ends.
		left, _ := filepath.Glob(filepath.Join(w.root, "run", "runc", "*"))
		for _, dir := range left {
			if out, err := exec.Command("runc", "--root", filepath.Dir(dir), "delete", "--force", filepath.Base(dir)).CombinedOutput(); err != nil {
				t.Logf("runc delete %s: %v: %s", filepath.Base(dir), err, out)
			}
		}
	})
	return r
}

// has waits for an event.
func (r *foilRun) has(kind api.EventKind) {
	r.t.Helper()
	eventually(r.t, "foil run says "+string(kind), func() error {
		b, err := os.ReadFile(r.events)
		if err != nil {
			return err
		}
		for line := range bytes.Lines(b) {
			var ev api.Event
			if json.Unmarshal(line, &ev) == nil && ev.Event == kind {
				return nil
			}
		}
		return fmt.Errorf("events %s, standard error %s", b, r.errOut.String())
	})
}

// prints waits for a line of the container's output.
func (r *foilRun) prints(line string) {
	r.t.Helper()
	eventually(r.t, "the container prints "+line, func() error {
		if out := r.out.String(); !strings.Contains(out, line+"\n") {
			return fmt.Errorf("output %q, standard error %q", out, r.errOut.String())
		}
		return nil
	})
}

// ends waits for the end and returns the exit code.
func (r *foilRun) ends() int {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(time.Minute):
		r.t.Fatalf("foil run hangs; output %q, standard error %q", r.out.String(), r.errOut.String())
	}
	return r.cmd.ProcessState.ExitCode()
}

// leavesNothing checks that no container, mount of one, state of runc or cgroup
// is left on a worker.
func (w *worker) leavesNothing(t *testing.T, ids ...string) {
	t.Helper()
	eventually(t, "nothing is left of the containers", func() error {
		var left []string
		mounts, err := kernel.Mounts(w.root)
		if err != nil {
			return err
		}
		for _, m := range mounts {
			if m.Type == "overlay" {
				left = append(left, m.Target)
			}
		}
		for _, pattern := range []string{"containers/*", "run/runc/*"} {
			more, err := filepath.Glob(filepath.Join(w.root, pattern))
			if err != nil {
				return err
			}
			left = append(left, more...)
		}
		err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
			for _, id := range ids {
				if err == nil && d.IsDir() && strings.Contains(d.Name(), id) {
					left = append(left, path)
				}
			}
			return nil // others' cgroups come and go
		})
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v", left)
		}
		return err
	})
}

// unique is a name for a container that no other test's has.
func unique(t *testing.T) string {
	return fmt.Sprintf("e2e-%d-%x", os.Getpid(), sha256.Sum256([]byte(t.Name())))[:20] + fmt.Sprint(time.Now().UnixNano()%1_000_000)
}

// printSums prints the digest of every data file, one a line.
const printSums = "for f in /data/*; do sha256sum $f; done; echo done"

func wantSums(t *testing.T, img image) string {
	t.Helper()
	dir := unpack(t, img)
	names, err := filepath.Glob(filepath.Join(dir, "data", "*"))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%x  /data/%s\n", sha256.Sum256(data), filepath.Base(name))
	}
	return b.String() + "done\n"
}

func TestARunningContainerOutlivesTheDaemon(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 150, 40_000, 11, 0)
	k := newLink(t, s.addr, 1<<20)
	ref := k.via(s.push("live", "1", img))
	w := startWorker(t, workerRoot(t))
	id := unique(t)
	r := w.run(t, "--rm", "--name", id, ref, "--", "/bin/sh", "-c", printSums)
	r.has(api.Started)
	eventually(t, "the container reads", func() error {
		if r.out.String() == "" {
			return errors.New(r.errOut.String())
		}
		return nil
	})
	w.kill()
	w = startWorker(t, w.root)
	k.setRate(0)
	if code := r.ends(); code != 0 {
		t.Errorf("exit code %d: %s", code, r.errOut.String())
	}
	if got, want := r.out.String(), wantSums(t, img); got != want {
		t.Errorf("the container read something else:\n%s", firstDifference(got, want))
	}
	w.leavesNothing(t, id)
	intact(t, w, ref, img)
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d: %q, want %q", i, g[i], w[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(g), len(w))
}

// A container ends at once while a read of it waits at the gate, and leaves
// nothing.
func TestAContainerIsKilledWhileAReadWaits(t *testing.T) {
	t.Parallel()
	needContainers(t)
	_, k, w, ref, img := halfPulled(t)
	// The shell has to be here, and of the rest not all, however long that takes: what a start
	// would bring meanwhile depends on how busy this machine is, what a read brings does not.
	k.setRate(300 << 10)
	k.stallAfter(4 << 20)
	k.setStall(false)
	if _, err := os.ReadFile(filepath.Join(w.mountOf(ref), "bin/busybox")); err != nil {
		t.Fatal(err)
	}
	k.setStall(true)
	runc := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("runc", append([]string{"--root", filepath.Join(w.root, "run", "runc")}, args...)...).CombinedOutput(); err != nil {
			t.Errorf("runc %v: %v: %s", args, err, out)
		}
	}
	// The first process must stay able to hear of signals: its child reads.
	script := `trap "exit 3" TERM; echo ready; cat /data/00199 & wait $!`
	for _, c := range []struct {
		name string
		end  func(r *foilRun, id string)
		code int
	}{
		{"foil run gets SIGTERM", func(r *foilRun, _ string) { _ = r.cmd.Process.Signal(syscall.SIGTERM) }, 3},
		{"runc kill", func(_ *foilRun, id string) { runc("kill", id, "KILL") }, 128 + 9},
		{"foil run gets SIGKILL", func(r *foilRun, id string) {
			_ = r.cmd.Process.Kill()
			<-r.done
			// Nobody is left to clean up; the user can.
			if out, stderr, code := command(t, "rm", "--root", w.root, "--force", id); code != 0 {
				t.Errorf("foil rm --force: exit code %d, %s%s", code, out, stderr)
			}
		}, -1},
	} {
		id := unique(t)
		r := w.run(t, "--rm", "--name", id, ref, "--", "/bin/sh", "-c", script)
		r.prints("ready")
		eventually(t, c.name+": a read waits", func() error { return waitsAtTheGate() })
		c.end(r, id)
		if code := r.ends(); code != c.code {
			t.Errorf("%s: exit code %d, want %d: %s", c.name, code, c.code, r.errOut.String())
		}
		w.leavesNothing(t, id)
	}
	k.open()
	intact(t, w, ref, img)
}

// waitsAtTheGate returns nil when some process is held back in a read: the
// kernel says so in its stack.
func waitsAtTheGate() error {
	stacks, err := filepath.Glob("/proc/[0-9]*/stack")
	if err != nil {
		return err
	}
	err = errors.New("no process reads")
	for _, path := range stacks {
		b, _ := os.ReadFile(path)
		cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		if !bytes.HasPrefix(cmdline, []byte("cat\x00/data/00199")) {
			continue
		}
		if bytes.Contains(b, []byte("fanotify_")) {
			return nil
		}
		err = fmt.Errorf("the process that reads does not wait for an event's answer, but here:\n%s", b)
	}
	return err
}

func TestContainersOfOneImage(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	ref := s.push("app", "1", manyFiles(t, 10, 1000, 12, 0))
	w := startWorker(t, workerRoot(t))
	base := unique(t)
	var ids []string
	var runs []*foilRun
	for i := range 3 {
		id := fmt.Sprint(base, "-", i)
		ids = append(ids, id)
		runs = append(runs, w.run(t, "--rm", "--name", id, ref, "--", "/bin/sh", "-c",
			`trap "exit 5" TERM; echo mine >/data/00000; cat /version; echo; sleep 1000 & wait $!`))
	}
	for _, r := range runs {
		r.prints("12")
	}
	mounts, err := kernel.Mounts(w.root)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, m := range mounts {
		count[m.Type]++
	}
	if count["erofs"] != 1 || count["overlay"] != 3 {
		t.Errorf("mounts by type: %v", count)
	}
	for _, r := range runs {
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		if code := r.ends(); code != 5 {
			t.Errorf("exit code %d: %s", code, r.errOut.String())
		}
	}
	w.leavesNothing(t, ids...)
	if b, err := os.ReadFile(filepath.Join(w.mountOf(ref), "data/00000")); err != nil || strings.HasPrefix(string(b), "mine") {
		t.Errorf("a container wrote to the image: %v", err)
	}

	// What passes through, on the same image.
	for _, c := range []struct {
		name string
		args []string
		code int
		out  string
	}{
		{"exit code", []string{"--rm", ref, "--", "/bin/sh", "-c", "exit 7"}, 7, ""},
		{"the image's command", []string{"--rm", ref}, 0, "hello\n"},
		{"no network", []string{"--rm", "--net", "none", ref, "--", "/bin/sh", "-c", "while read a b; do case $a in *:) echo $a;; esac; done </proc/net/dev"}, 0, "lo:\n"},
		{"not found", []string{"--rm", ref, "--", "/no/such"}, 127, ""},
		{"not executable", []string{"--rm", ref, "--", "/version"}, 126, ""},
		{"environment", []string{"--rm", "-e", "A=b c", ref, "--", "/bin/sh", "-c", "echo $A"}, 0, "b c\n"},
	} {
		out, stderr, code := command(t, append([]string{"run", "--root", w.root}, c.args...)...)
		if code != c.code || out != c.out {
			t.Errorf("%s: exit code %d, want %d; output %q, want %q; %s", c.name, code, c.code, out, c.out, stderr)
		}
	}
	w.leavesNothing(t)
}

func TestRunWithoutAnImageOrAServer(t *testing.T) {
	t.Parallel()
	needContainers(t)
	s := startServer(t, t.TempDir())
	img := manyFiles(t, 3, 1000, 13, 0)
	here, gone := s.push("here", "1", img), s.push("gone", "1", manyFiles(t, 3, 1000, 14, 0))
	w := startWorker(t, workerRoot(t), "--give-up", "1s")
	_, stderr, code := command(t, "run", "--root", w.root, "--rm", s.addr+"/no/such:image")
	if code != 125 || !strings.Contains(stderr, "no/such") {
		t.Errorf("an unknown image: exit code %d, %q", code, stderr)
	}
	w.mustPull(here, api.Complete)
	s.kill()
	if out, stderr, code := command(t, "run", "--root", w.root, "--rm", here); code != 0 || out != "hello\n" {
		t.Errorf("an image that is here, with no server: exit code %d, %q, %q", code, out, stderr)
	}
	_, stderr, code = command(t, "run", "--root", w.root, "--rm", gone)
	if code != 125 || !strings.Contains(stderr, s.addr) {
		t.Errorf("a server that is gone: exit code %d, %q", code, stderr)
	}
	w.leavesNothing(t)
}

// An old kernel, as far as the daemon can tell.
func TestOldKernel(t *testing.T) {
	t.Parallel()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip(err)
	}
	s := startServer(t, t.TempDir())
	ref := s.push("app", "1", newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("a", 0o644, "a")}.Gzip(t)))
	var uts syscall.Utsname
	if err := syscall.Uname(&uts); err != nil {
		t.Fatal(err)
	}
	var release strings.Builder
	for _, c := range uts.Release {
		if c == 0 {
			break
		}
		release.WriteByte(byte(c))
	}
	t.Run("no pre-content events", func(t *testing.T) {
		root := workerRoot(t)
		w := &worker{root: root, client: api.Dial(root)}
		w.process = startProgram(t, strace, "-f", "-qq", "-o", os.DevNull, "-e", "trace=fanotify_init", "-e", "inject=fanotify_init:error=EINVAL", foil, "node", "--root", root)
		t.Cleanup(w.client.Close)
		eventually(t, "the daemon ends or answers", func() error {
			select {
			case <-w.done:
				return nil
			default:
			}
			_, err := w.client.Status(t.Context())
			return err
		})
		if _, err := w.client.Status(t.Context()); err == nil {
			// It has another gate.
			w.mustPull(ref, api.Complete)
			endNode(t, w)
			return
		}
		out := w.log.String()
		for _, want := range []string{"pre-content", "6.14", release.String(), "foil doctor"} {
			if !strings.Contains(out, want) {
				t.Errorf("the error does not say %q:\n%s", want, out)
			}
		}
		eventually(t, "no keeper is left", func() error {
			if pids := pidsOf(t, root, "keeper"); len(pids) > 0 {
				return fmt.Errorf("%v", pids)
			}
			return nil
		})
	})
	t.Run("no EROFS", func(t *testing.T) {
		root := workerRoot(t)
		w := &worker{root: root, client: api.Dial(root)}
		w.process = startProgram(t, strace, "-f", "-qq", "-o", os.DevNull, "-e", "trace=fsopen", "-e", "inject=fsopen:error=ENODEV", foil, "node", "--root", root)
		t.Cleanup(w.client.Close)
		eventually(t, "the daemon answers", func() error {
			_, err := w.client.Status(t.Context())
			return err
		})
		_, err := w.pull(ref, api.Complete)
		if err == nil {
			t.Fatal("pulled without a filesystem")
		}
		for _, want := range []string{"erofs", "6.12", release.String(), "foil doctor"} {
			if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(want)) {
				t.Errorf("the error does not say %q: %v", want, err)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(root, "rootfs", "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		endNode(t, w)
	})
}

// endNode ends a daemon under strace, which passes no signal on.
func endNode(t *testing.T, w *worker) {
	t.Helper()
	for _, pid := range pidsOf(t, w.root, "node") {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	select {
	case <-w.done:
	case <-time.After(time.Minute):
		t.Error("the daemon does not end")
	}
}
