// Package e2e holds the tests of the whole: the real program, as processes that
// can be killed, over real mounts, with a link that can be slowed and cut.
package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/kernel/kerneltest"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// foil is the program under test, built by TestMain; busybox a static program
// for images.
var foil, busybox string

// programEnv names the program under test, where it has been built.
const programEnv = "FOIL_E2E_PROGRAM"

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	kerneltest.OwnMounts()
	// Files that tests make to compare with get the modes that are asked for.
	syscall.Umask(0o022)
	if os.Geteuid() != 0 {
		fmt.Println("skip: these tests mount filesystems and need root")
		return 0
	}
	dir, err := os.MkdirTemp("", "foil-e2e-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	if foil = os.Getenv(programEnv); foil == "" {
		foil = filepath.Join(dir, "foil")
		build := exec.Command("go", "build", "-tags", "lockorder", "-o", foil, "hydrofoil.dev/foil/cmd/foil")
		build.Env = append(os.Environ(), "CGO_ENABLED=0") // as it is shipped
		build.Stdout, build.Stderr = os.Stdout, os.Stderr
		if err := build.Run(); err != nil {
			fmt.Println("build foil:", err)
			return 1
		}
	}
	for _, p := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if _, err := os.Stat(p); err == nil {
			busybox = p
		}
	}
	return m.Run()
}

// process is one process of a test.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	log  *logtest.Buffer // what it wrote, for the report of a failed test
	done chan struct{}
	err  error
}

func start(t testing.TB, args ...string) *process {
	t.Helper()
	return startProgram(t, foil, args...)
}

func startProgram(t testing.TB, program string, args ...string) *process {
	t.Helper()
	return startCommand(t, exec.Command(program, args...))
}

func startCommand(t testing.TB, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, log: new(logtest.Buffer), done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	started := make(chan error)
	go func() {
		// The signal comes when the thread ends that began the process, so that
		// thread stays: one that mounts something may be ended by Go's runtime.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.signal(syscall.SIGTERM)
		select {
		case <-p.done:
		case <-time.After(time.Minute):
			p.signal(syscall.SIGQUIT) // for the stacks of its goroutines, in its log
			select {
			case <-p.done:
			case <-time.After(10 * time.Second):
				p.kill()
			}
			t.Errorf("%s did not end on SIGTERM", strings.Join(cmd.Args, " "))
		}
		if t.Failed() {
			t.Logf("log of %s:\n%s", strings.Join(cmd.Args, " "), p.log)
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// server is a running `foil serve`.
type server struct {
	*process
	root string
	addr string
}

func startServer(t testing.TB, root string) *server {
	t.Helper()
	return startServerAt(t, root, freeAddr(t))
}

func startServerAt(t testing.TB, root, addr string) *server {
	t.Helper()
	s := &server{root: root, addr: addr}
	s.process = start(t, "serve", "--root", root, "--listen", addr)
	eventually(t, "the server answers", func() error {
		select {
		case <-s.done:
			t.Fatalf("foil serve ended: %v\n%s", s.err, s.log)
		default:
		}
		resp, err := http.Get("http://" + addr + "/v2/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
	return s
}

// ports counts what freeAddr has given away.
var ports atomic.Uint32

// freeAddr returns an address for a process that is started later, and again: on
// a loopback address of this test binary's own, and below the ports that kernels
// choose from. Of a port that was free a moment ago somebody else may have become
// the owner, among them the tests of another package.
func freeAddr(t testing.TB) string {
	t.Helper()
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d:%d", 64+pid>>16&63, pid>>8&255, pid&255, 10_000+ports.Add(1))
}

// worker is a running `foil node`.
type worker struct {
	*process
	root   string
	hosts  string // directory of hosts.toml, for its containerd; empty: none
	client *api.Client
	// containerd is the directory of its containerd; empty: it does not know.
	containerd string
}

// workerRoot makes a worker's root on a filesystem that can be marked, and
// unmounts at the end whatever is mounted below it.
func workerRoot(t testing.TB) string {
	t.Helper()
	root, err := os.MkdirTemp("", "foil-worker-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endKeeper(t, root)
		mounts, err := kernel.Mounts(root)
		if err != nil {
			t.Error(err)
		}
		for i := len(mounts) - 1; i >= 0; i-- {
			if err := kernel.Unmount(mounts[i].Target, true); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return root
}

// endKeeper ends the keeper of a root whose daemon is gone, if it is still
// there: with something incomplete it stays on purpose.
func endKeeper(t testing.TB, root string) {
	t.Helper()
	for _, pid := range pidsOf(t, root, "keeper") {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		eventually(t, "the keeper is gone", func() error {
			if err := syscall.Kill(pid, 0); err == nil {
				return fmt.Errorf("process %d is there", pid)
			}
			return nil
		})
	}
}

// pidsOf finds this test's own processes `foil <command> ... <root>...`.
func pidsOf(t testing.TB, root, command string) []int {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		if err != nil {
			continue
		}
		args := strings.Split(string(b), "\x00")
		if len(args) > 2 && args[1] == command && strings.Contains(string(b), root) {
			var pid int
			if _, err := fmt.Sscanf(d, "/proc/%d/", &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// gateEnv is the gate of workers; empty: the one that a daemon under systemd has here. Set it
// to run any of these tests with another.
const gateEnv = "FOIL_E2E_GATE"

var bestGate = sync.OnceValue(func() string {
	gate, _, err := kernel.ChooseGate(context.Background(), os.TempDir(), true)
	if err != nil {
		return "auto" // it is said where it is needed
	}
	return gate
})

func startWorker(t testing.TB, root string, flags ...string) *worker {
	t.Helper()
	w := &worker{root: root, client: api.Dial(root)}
	if !slices.Contains(flags, "--gate") {
		flags = append(flags, "--gate", cmp.Or(os.Getenv(gateEnv), bestGate()))
	}
	w.process = start(t, append([]string{"node", "--root", root}, flags...)...)
	t.Cleanup(w.client.Close)
	eventually(t, "the daemon answers", func() error {
		select {
		case <-w.done:
			t.Fatalf("foil node ended: %v\n%s", w.err, w.log)
		default:
		}
		_, err := w.client.Status(t.Context())
		return err
	})
	return w
}

// pull follows a pull until the event, and returns all events.
func (w *worker) pull(ref string, until api.EventKind) ([]api.Event, error) {
	w.t.Helper()
	var events []api.Event
	for ev, err := range w.client.Pull(w.t.Context(), api.PullRequest{Ref: ref, Until: until}) {
		if err != nil {
			return events, err
		}
		events = append(events, ev)
		if ev.Err != "" {
			return events, &api.Error{Code: ev.Code, Message: ev.Err}
		}
	}
	return events, nil
}

func (w *worker) mustPull(ref string, until api.EventKind) []api.Event {
	w.t.Helper()
	events, err := w.pull(ref, until)
	if err != nil {
		w.t.Fatalf("pull %s: %v", ref, err)
	}
	if last := events[len(events)-1].Event; last != until {
		w.t.Fatalf("pull %s ended with the event %q, want %q", ref, last, until)
	}
	return events
}

// mountOf returns where the rootfs of an image is mounted.
func (w *worker) mountOf(ref string) string {
	w.t.Helper()
	return filepath.Join(w.root, "rootfs", w.imageOf(ref).Rootfs, "mnt")
}

func (w *worker) imageOf(ref string) api.Image {
	w.t.Helper()
	images, err := w.client.Images(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, img := range images {
		if img.Ref == ref {
			return img
		}
	}
	w.t.Fatalf("no image %s among %v", ref, images)
	return api.Image{}
}

// verify runs `foil verify` and returns what it said.
func (w *worker) verify(ref string) (last api.VerifyEvent, bad []string) {
	w.t.Helper()
	for ev, err := range w.client.Verify(w.t.Context(), ref) {
		if err != nil {
			w.t.Fatalf("verify %s: %v", ref, err)
		}
		if ev.Bad != "" {
			bad = append(bad, ev.Bad)
		}
		last = ev
	}
	if !last.Done {
		w.t.Fatalf("verify %s ended before it was done", ref)
	}
	return last, bad
}

// eventually waits until cond returns nil.
func eventually(t testing.TB, what string, cond func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after two minutes: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// command runs foil to its end and returns what it printed and its exit code.
func command(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, foil, args...)
	var out, errs bytes.Buffer
	cmd.Stderr = &errs
	cmd.Stdout = &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("foil %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
