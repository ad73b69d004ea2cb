package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/api/apitest"
	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

const testRef = "registry.example/busybox:1"

// host is a worker whose daemon is a fake with plain directories, and whose
// runc is real.
type host struct {
	*Worker
	dir string

	mu         sync.Mutex
	images     []api.Image
	containers []api.Container
	status     api.Status
	removed    []string // images, in the order of the requests

	// pull is what the daemon does for a pull; nil: resolved, mounted, complete.
	pull  func(ctx context.Context, emit func(api.Event) error) error
	pulls int
	// separate daemons make no container with a pull.
	separate bool
}

// hosts counts them: IDs name cgroups, which all share.
var hosts atomic.Int64

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("running containers needs root")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		t.Skip("runc is not installed")
	}
	if _, err := exec.LookPath("busybox"); err != nil {
		t.Skip("busybox is not installed (busybox-static)")
	}
	h := &host{dir: t.TempDir()}
	stop, err := apitest.Start(h.dir, apitest.Funcs{
		Pull_: func(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
			h.mu.Lock()
			h.pulls++
			h.mu.Unlock()
			emit, done, err := h.into(req, emit)
			defer done()
			if err != nil {
				return err
			}
			if h.pull != nil {
				return h.pull(ctx, emit)
			}
			return story(emit, api.Resolved, api.Mounted, api.Complete)
		},
		Images_: func(context.Context) ([]api.Image, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			return slices.Clone(h.images), nil
		},
		RemoveImage_: func(_ context.Context, ref string) error {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.removed = append(h.removed, ref)
			n := len(h.images)
			h.images = slices.DeleteFunc(h.images, func(i api.Image) bool { return i.Ref == ref })
			if n == len(h.images) {
				return &api.Error{Code: api.CodeNotFound, Message: "no image " + ref}
			}
			return nil
		},
		CreateContainer_: func(_ context.Context, req api.ContainerRequest) (*api.Container, error) { return h.create(req) },
		Containers_: func(context.Context) ([]api.Container, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			return slices.Clone(h.containers), nil
		},
		RemoveContainer_: func(_ context.Context, id string) error {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.containers = slices.DeleteFunc(h.containers, func(c api.Container) bool { return c.ID == id })
			return nil
		},
		Status_: func(context.Context) (*api.Status, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			return &h.status, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	client := api.Dial(h.dir)
	h.Worker = &Worker{Client: client, Runner: &runner.Runner{StateRoot: StateRoot(h.dir)}}
	t.Cleanup(func() {
		client.Close()
		stop()
		left, err := h.Runner.List(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, c := range left {
			t.Errorf("runc still knows container %s (%s)", c.ID, c.Status)
			if err := h.Runner.Delete(context.Background(), c.ID); err != nil {
				t.Error(err)
			}
		}
	})
	return h
}

func story(emit func(api.Event) error, kinds ...api.EventKind) error {
	for i, kind := range kinds {
		ev := api.Event{Event: kind, Ref: testRef, Digest: "sha256:1", BytesMoved: int64(100 * (i + 1)), BytesTotal: 1000}
		if err := emit(ev); err != nil {
			return err
		}
	}
	return nil
}

// into has emit make the container that a pull is to make, and done remove what there is
// of one that was not made.
func (h *host) into(req api.PullRequest, emit func(api.Event) error) (_ func(api.Event) error, done func(), err error) {
	if req.Container == "" || h.separate {
		return emit, func() {}, nil
	}
	dir := filepath.Join(h.dir, "containers", req.Container)
	made := false
	done = func() {
		if !made {
			_ = os.RemoveAll(dir)
		}
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, done, err
	}
	err = emit(api.Event{Event: api.Reserved, Ref: testRef, Container: &api.Container{ID: req.Container, Dir: dir, Rootfs: filepath.Join(dir, "rootfs")}})
	return func(ev api.Event) (err error) {
		if ev.Event == api.Mounted {
			if ev.Container, err = h.create(api.ContainerRequest{ID: req.Container, Ref: req.Ref}); err != nil {
				return err
			}
			made = true
		}
		return emit(ev)
	}, done, err
}

// create makes a root directory of busybox.
func (h *host) create(req api.ContainerRequest) (*api.Container, error) {
	dir := filepath.Join(h.dir, "containers", req.ID)
	c := api.Container{ID: req.ID, Ref: req.Ref, Dir: dir, Rootfs: filepath.Join(dir, "rootfs")}
	var err error
	c.Config, err = json.Marshal(ocispec.Image{Config: ocispec.ImageConfig{
		Entrypoint: []string{"/bin/busybox"}, Cmd: []string{"echo", "hello"}, Env: []string{"PATH=/bin"},
	}})
	if err != nil {
		return nil, err
	}
	for _, d := range []string{"bin", "etc", "dev", "proc", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(c.Rootfs, d), 0o755); err != nil {
			return nil, err
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(c.Rootfs, "bin/busybox"), program, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(c.Rootfs, "etc/data"), nil, 0o644); err != nil {
		return nil, err
	}
	if err := os.Symlink("busybox", filepath.Join(c.Rootfs, "bin/sh")); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.containers = append(h.containers, c)
	return &c, nil
}

// options returns Options that run a shell script and record events.
func (h *host) options(script string) (*Options, *record) {
	rec := new(record)
	o := &Options{
		Pull: api.PullRequest{Ref: testRef},
		Spec: runner.SpecOptions{ID: fmt.Sprintf("launch-%d-%d", os.Getpid(), hosts.Add(1))},
		IO:   runner.IO{Stdout: &rec.stdout, Stderr: &rec.stderr},
		Emit: func(ev api.Event) { rec.events = append(rec.events, ev) },
	}
	if script != "" {
		o.Spec.Entrypoint = []string{"/bin/sh", "-c", script}
	}
	return o, rec
}

type record struct {
	events         []api.Event
	stdout, stderr bytes.Buffer
}

func (r *record) kinds() []api.EventKind {
	var k []api.EventKind
	for _, ev := range r.events {
		if ev.Event != api.Complete { // comes when it comes
			k = append(k, ev.Event)
		}
	}
	return k
}

func mustProbe(t *testing.T, s string) *probe.Probe {
	t.Helper()
	if s == "" {
		return nil
	}
	p, err := probe.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRun(t *testing.T) {
	const forever = "while :; do sleep 1; done"
	// The first process of a container has no default signal handlers.
	const heedsTERM = "trap 'exit 3' TERM; echo up; while :; do busybox sleep 0.05; done"
	base := []api.EventKind{api.Resolved, api.Mounted, api.Started}
	exited := append(slices.Clone(base), api.Exited)
	ready := append(slices.Clone(base), api.Ready, api.Exited)
	for i, test := range []struct {
		name, script, probe string
		until               api.EventKind
		code                int
		stdout, err         string
		events              []api.EventKind
	}{
		{"image's command", "", "", "", 0, "hello\n", "", exited},
		{"exit code", "exit 7", "", "", 7, "", "", exited},
		{"probe exit", "echo x", "exit", "", 0, "x\n", "", ready},
		{"probe exit fails", "exit 1", "exit", "", 1, "", "", exited},
		{"probe stdout", "echo up", "stdout:^up$", "", 0, "up\n", "", ready},
		{"probe stderr", "echo up >&2", "stdout:^up$", "", 0, "", "", ready},
		{"probe never", "echo down", "stdout:^up$", "", 0, "down\n", "", exited},
		{"until ready", heedsTERM, "stdout:^up$", api.Ready, 0, "up\n", "", ready},
		{"until ready, no handler", "echo up; " + forever, "stdout:up", api.Ready, 0, "up\n", "", ready},
		{"until ready, by exec", heedsTERM, "exec:true", api.Ready, 0, "", "", ready},
		{"until ready, never", "echo down", "stdout:^up$", api.Ready, 0, "down\n", "ended before it was ready", exited},
		{"until ready, fails", "exit 9", "stdout:^up$", api.Ready, 9, "", "", exited},
		{"until complete", heedsTERM, "", api.Complete, 0, "", "", exited},
		{"until ready and complete", heedsTERM, "stdout:up", api.Complete, 0, "up\n", "", ready},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			o, rec := h.options(test.script)
			o.Probe, o.Until, o.Remove = mustProbe(t, test.probe), test.until, true
			o.Grace = 500 * time.Millisecond
			h.separate = i%2 == 1
			code, err := h.Run(t.Context(), *o)
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			if code != test.code {
				t.Errorf("code %d, want %d", code, test.code)
			}
			if got := rec.stdout.String(); test.stdout != "" && got != test.stdout {
				t.Errorf("stdout %q, want %q", got, test.stdout)
			}
			if diff := cmp.Diff(test.events, rec.kinds()); diff != "" {
				t.Error(diff)
			}
			var before float64
			for _, ev := range rec.events {
				if ev.Ref != testRef || ev.Digest != "sha256:1" || ev.Time.IsZero() || ev.Elapsed <= 0 ||
					(ev.ExitCode != nil) != (ev.Event == api.Exited) {
					t.Errorf("event %+v", ev)
				}
				if ev.Event == api.Complete {
					continue // another goroutine's
				}
				if ev.Elapsed < before {
					t.Errorf("event %+v comes before the one before it, at %v", ev, before)
				}
				before = ev.Elapsed
			}
			if len(h.containers) != 0 {
				t.Errorf("left: %+v", h.containers)
			}
		})
	}
}

// A run of an image that is here asks no server, and one that must ask does.
func TestPolicy(t *testing.T) {
	complete := api.Image{Ref: testRef, State: "complete", Digest: "sha256:1", ContentHere: 10, ContentTotal: 10}
	pulling := api.Image{Ref: testRef, State: "pulling", Digest: "sha256:1", ContentHere: 5, ContentTotal: 10}
	for _, test := range []struct {
		policy Policy
		images []api.Image
		pulls  int
		err    string
	}{
		{"", nil, 1, ""},
		{"", []api.Image{complete}, 0, ""},
		{PullMissing, []api.Image{pulling}, 1, ""},
		{PullAlways, []api.Image{complete}, 1, ""},
		{PullNever, []api.Image{pulling}, 0, ""},
		{PullNever, nil, 0, "pull it with \"foil pull " + testRef},
	} {
		t.Run(fmt.Sprint(test.policy, len(test.images), test.pulls), func(t *testing.T) {
			h := newHost(t)
			h.images = test.images
			o, rec := h.options("")
			o.Policy = test.policy
			// An earlier pull's counts are not this run's.
			h.status.Pulls = []api.PullStatus{{Event: api.Event{Ref: testRef, Digest: "sha256:1", BytesMoved: 777}}}
			_, err := h.Run(t.Context(), *o)
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Fatalf("error %v, want %q", err, test.err)
			}
			if h.pulls != test.pulls {
				t.Errorf("%d pulls, want %d", h.pulls, test.pulls)
			}
			if err != nil {
				return
			}
			last := rec.events[len(rec.events)-1]
			if moved := map[int]int64{0: 0, 1: 777}[test.pulls]; last.Event == api.Exited && last.BytesMoved != moved {
				t.Errorf("%d bytes moved, want %d: %+v", last.BytesMoved, moved, last)
			}
		})
	}
}

// What keeps a container from starting leaves nothing, and has its own code.
func TestNotStarted(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(h *host, o *Options)
		code int
		err  string
	}{
		{"no such command", func(_ *host, o *Options) { o.Spec.Entrypoint = []string{"nope"} }, ExitNoCommand, "executable file not found"},
		{"no such file", func(_ *host, o *Options) { o.Spec.Entrypoint = []string{"/bin/nope"} }, ExitNoCommand, "no such file"},
		{"not executable", func(_ *host, o *Options) { o.Spec.Entrypoint = []string{"/etc/data"} }, ExitNoExec, "permission denied"},
		{"a directory", func(_ *host, o *Options) { o.Spec.Entrypoint = []string{"/bin"} }, ExitNoExec, `exec: "/bin": `},
		{"no such user", func(_ *host, o *Options) { o.Spec.User = "nobody-here" }, ExitFailed, "nobody-here"},
		{"bad name", func(_ *host, o *Options) { o.Pull.Ref = "busybox" }, ExitFailed, "no registry host"},
		{"no runc", func(h *host, _ *Options) { h.Runner.Command = "runc-is-not-here" }, ExitFailed, "runc is not installed"},
		{"pull fails", func(h *host, _ *Options) {
			h.pull = func(_ context.Context, emit func(api.Event) error) error {
				return errors.Join(story(emit, api.Resolved), &api.Error{Code: api.CodeUnavailable, Message: "server gone"})
			}
		}, ExitFailed, "server gone"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHost(t)
			o, _ := h.options("")
			test.set(h, o)
			_, err := h.Run(t.Context(), *o)
			h.Runner.Command = ""
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Fatalf("error %v, want %q", err, test.err)
			}
			if got := ExitCode(err); got != test.code {
				t.Errorf("code %d, want %d: %v", got, test.code, err)
			}
			h.nothing(t)
		})
	}
}

// nothing fails the test if anything of a container is there, or runc waits for one.
func (h *host) nothing(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.containers) != 0 {
		t.Errorf("left: %+v", h.containers)
	}
	children, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range children {
		pids, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for _, pid := range strings.Fields(string(pids)) {
			if name, err := os.ReadFile("/proc/" + pid + "/comm"); err == nil && strings.HasPrefix(string(name), "runc") {
				t.Errorf("runc runs still, process %s", pid)
			}
		}
	}
}

func TestSignals(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		name, script string
		sig          os.Signal
		code         int
	}{
		{"handled", "trap 'exit 42' USR1; echo up; while :; do busybox sleep 0.05; done", syscall.SIGUSR1, 42},
		{"killed", "echo up; while :; do busybox sleep 0.05; done", syscall.SIGKILL, 137},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, _ := h.options(test.script)
			signals := make(chan os.Signal, 1)
			o.Signals, o.Remove = signals, true
			o.Probe = mustProbe(t, "stdout:up")
			o.Emit = func(ev api.Event) {
				if ev.Event == api.Ready {
					signals <- test.sig
				}
			}
			code, err := h.Run(t.Context(), *o)
			if err != nil || code != test.code {
				t.Errorf("got %d, %v; want %d", code, err, test.code)
			}
		})
	}
}

// A signal during the pull ends the run, and not the pull.
func TestInterruptedBeforeTheStart(t *testing.T) {
	h := newHost(t)
	left := make(chan struct{})
	h.pull = func(ctx context.Context, emit func(api.Event) error) error {
		defer close(left)
		if err := story(emit, api.Resolved); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	signals := make(chan os.Signal, 1)
	o, _ := h.options("")
	o.Signals = signals
	o.Emit = func(api.Event) { signals <- os.Interrupt }
	_, err := h.Run(t.Context(), *o)
	if !errors.Is(err, ErrInterrupted) || ExitCode(err) != ExitInterrupted {
		t.Errorf("got %v, code %d", err, ExitCode(err))
	}
	<-left
	h.nothing(t)
}

type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// A signal that finds runc hanging ends the run, and what runc began is removed.
func TestInterruptedWhileTheStartHangs(t *testing.T) {
	h := newHost(t)
	deleted := filepath.Join(h.dir, "deleted")
	h.Runner.Command = filepath.Join(h.dir, "runc")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in\n*run*--detach*)\n  for a; do [ \"$p\" != --bundle ] || cat \"$a/config.json\" >/dev/null; p=$a; done\n  echo begun; exec sleep 1000;;\n*delete*) : > %s;;\nesac\nexec runc \"$@\"\n", deleted)
	if err := os.WriteFile(h.Runner.Command, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 1)
	o, _ := h.options("")
	o.Signals = signals
	o.IO.Stdout = writerFunc(func(b []byte) (int, error) {
		signals <- os.Interrupt
		return len(b), nil
	})
	_, err := h.Run(t.Context(), *o)
	h.Runner.Command = ""
	if !errors.Is(err, ErrInterrupted) || ExitCode(err) != ExitInterrupted {
		t.Errorf("got %v, code %d", err, ExitCode(err))
	}
	if _, err := os.Stat(deleted); err != nil {
		t.Errorf("runc was not told to delete the container: %v", err)
	}
	h.nothing(t)
}

// The rest of the image cannot be had: the container goes on, the story says so.
func TestPullFailsAfterTheStart(t *testing.T) {
	h := newHost(t)
	started := make(chan struct{})
	h.pull = func(_ context.Context, emit func(api.Event) error) error {
		if err := story(emit, api.Resolved, api.Mounted); err != nil {
			return err
		}
		<-started
		return &api.Error{Code: api.CodeUnavailable, Message: "server gone"}
	}
	o, rec := h.options("busybox sleep 0.5; exit 5")
	emit := o.Emit
	o.Emit = func(ev api.Event) {
		emit(ev)
		if ev.Event == api.Started {
			close(started)
		}
	}
	code, err := h.Run(t.Context(), *o)
	if code != 5 || err != nil {
		t.Errorf("got %d, %v", code, err)
	}
	want := []api.EventKind{api.Resolved, api.Mounted, api.Started, api.Failed, api.Exited}
	if diff := cmp.Diff(want, rec.kinds()); diff != "" {
		t.Error(diff)
	}
	if last := rec.events[len(rec.events)-1]; last.Err != "" {
		t.Errorf("the end has the error of the pull: %+v", last)
	}
}

func TestContainersAndRemove(t *testing.T) {
	h := newHost(t)
	h.images = []api.Image{{Ref: testRef, State: "complete", Digest: "sha256:1"}}
	ended, _ := h.options("true")
	if code, err := h.Run(t.Context(), *ended); code != 0 || err != nil {
		t.Fatal(code, err)
	}
	runs, _ := h.options("echo up; while :; do busybox sleep 0.05; done")
	runs.Probe = mustProbe(t, "stdout:up")
	up, gone := make(chan struct{}), make(chan int)
	runs.Emit = func(ev api.Event) {
		if ev.Event == api.Ready {
			close(up)
		}
	}
	go func() {
		code, err := h.Run(t.Context(), *runs)
		if err != nil {
			t.Error(err)
		}
		gone <- code
	}()
	<-up

	list, err := h.Containers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range list {
		got = append(got, fmt.Sprint(c.ID, " ", c.State, " ", c.PID > 0, " ", c.Running()))
	}
	want := []string{ended.Spec.ID + " stopped false false", runs.Spec.ID + " running true true"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	if _, err := h.Remove(t.Context(), "Nothing", false); err == nil || !strings.Contains(err.Error(), "foil ps -a") {
		t.Errorf("remove what is not there: %v", err)
	}
	if _, err := h.Remove(t.Context(), "registry.example/other:1", true); err == nil {
		t.Error("an image that is not there was removed")
	}
	removed, err := h.Remove(t.Context(), ended.Spec.ID, false)
	if diff := cmp.Diff([]Removed{{"container", ended.Spec.ID}}, removed); err != nil || diff != "" {
		t.Error(err, diff)
	}
	removed, err = h.Remove(t.Context(), "registry.example/busybox:1", true)
	if diff := cmp.Diff([]Removed{{"container", runs.Spec.ID}, {"image", testRef}}, removed); err != nil || diff != "" {
		t.Error(err, diff)
	}
	if code := <-gone; code != 137 {
		t.Errorf("the container ended with %d, want 137", code)
	}
}
