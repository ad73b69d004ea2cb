package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// timeout is far beyond what anything here takes.
const timeout = 60 * time.Second

// beds counts them: IDs, which are names of cgroups as well, must differ.
var beds atomic.Int64

// bed is a runner with one bundle directory, whose rootfs holds busybox.
type bed struct {
	*Runner
	dir, rootfs string
	id          string
}

func newBed(tb testing.TB) *bed {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("running containers needs root")
	}
	if _, err := exec.LookPath("runc"); err != nil {
		tb.Skip("runc is not installed")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		tb.Skip("busybox is not installed (busybox-static)")
	}
	dir := tb.TempDir()
	b := &bed{
		Runner: &Runner{StateRoot: filepath.Join(dir, "state")},
		dir:    filepath.Join(dir, "bundle"), rootfs: filepath.Join(dir, "bundle", "rootfs"),
		id: fmt.Sprintf("test-%d-%d", os.Getpid(), beds.Add(1)),
	}
	for _, d := range []string{"bin", "etc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(b.rootfs, d), 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		tb.Fatal(err)
	}
	b.write(tb, "bin/busybox", string(program), 0o755)
	for _, name := range []string{"sh", "id", "env", "cat", "sleep", "kill", "stty", "ls"} {
		b.link(tb, name)
	}
	tb.Cleanup(func() {
		list, err := b.List(context.Background())
		if err != nil {
			tb.Error(err)
		}
		for _, c := range list {
			tb.Errorf("container %s is left behind (%s)", c.ID, c.Status)
			if err := b.Delete(context.Background(), c.ID); err != nil {
				tb.Error(err)
			}
		}
	})
	return b
}

func (b *bed) write(tb testing.TB, name, text string, mode os.FileMode) {
	tb.Helper()
	if err := os.WriteFile(filepath.Join(b.rootfs, name), []byte(text), mode); err != nil {
		tb.Fatal(err)
	}
}

// link makes name a command of busybox.
func (b *bed) link(tb testing.TB, name string) {
	tb.Helper()
	if err := os.Symlink("busybox", filepath.Join(b.rootfs, "bin", name)); err != nil {
		tb.Fatal(err)
	}
}

// configure writes config.json.
func (b *bed) configure(tb testing.TB, image ocispec.ImageConfig, o SpecOptions) {
	tb.Helper()
	o.ID, o.Dir, o.Rootfs = b.id, b.dir, b.rootfs
	s, err := Spec(ocispec.Image{Config: image}, o)
	if err != nil {
		tb.Fatal(err)
	}
	if err := WriteSpec(b.dir, s); err != nil {
		tb.Fatal(err)
	}
}

// runOut runs a container to its end and returns exit code and output.
func (b *bed) runOut(tb testing.TB, image ocispec.ImageConfig, o SpecOptions) (code int, stdout, stderr string) {
	tb.Helper()
	b.configure(tb, image, o)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var out, errs bytes.Buffer
	code, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdout: &out, Stderr: &errs, TTY: o.TTY}})
	if err != nil {
		tb.Fatalf("%v\n%s", err, errs.String())
	}
	return code, out.String(), errs.String()
}

func sh(script string) ocispec.ImageConfig {
	return ocispec.ImageConfig{Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{script}}
}

func TestRun(t *testing.T) {
	tests := []struct {
		name  string
		image ocispec.ImageConfig
		opts  SpecOptions
		code  int
		want  string // regular expression on stdout
	}{
		{"exit code", sh("exit 42"), SpecOptions{}, 42, `^$`},
		{"killed by a signal", sh("sh -c 'kill -9 $$'; exit $?"), SpecOptions{}, 137, ``},
		{"image command", ocispec.ImageConfig{Cmd: []string{"/bin/busybox", "echo", "from cmd"}}, SpecOptions{}, 0, `^from cmd\n$`},
		{"arguments keep the entrypoint", sh("echo no"), SpecOptions{Args: []string{"echo yes"}}, 0, `^yes\n$`},
		{"entrypoint drops the command", sh("echo no"), SpecOptions{Entrypoint: []string{"/bin/busybox", "echo"}}, 0, `^\n$`},
		{"program found in PATH", ocispec.ImageConfig{Cmd: []string{"id", "-u"}}, SpecOptions{}, 0, `^0\n$`},
		{"environment", ocispec.ImageConfig{Env: []string{"A=1", "B=2"}, Cmd: []string{"env"}},
			SpecOptions{Env: []string{"B=3", "C=x=y"}}, 0, `(?s)PATH=/usr/local/sbin.*\nA=1\nB=3\nC=x=y\n`},
		{"working directory is made", ocispec.ImageConfig{WorkingDir: "/not/there", Cmd: []string{"sh", "-c", "pwd; echo hi > file; cat /not/there/file"}},
			SpecOptions{}, 0, `^/not/there\nhi\n$`},
		{"working directory given", ocispec.ImageConfig{WorkingDir: "/tmp", Cmd: []string{"sh", "-c", "pwd"}}, SpecOptions{Cwd: "bin"}, 0, `^/bin\n$`},
		{"user by name, with groups", ocispec.ImageConfig{User: "web", Cmd: []string{"id"}}, SpecOptions{}, 0, `^uid=1000\(web\) gid=1001\(web\) groups=1001\(web\),3000\(extra\)\n$`},
		{"user and group by name", ocispec.ImageConfig{User: "web:extra", Cmd: []string{"id"}}, SpecOptions{}, 0, `^uid=1000\(web\) gid=3000\(extra\)`},
		{"user by numbers that nobody has", ocispec.ImageConfig{User: "4000000000:77", Cmd: []string{"sh", "-c", "id -u; id -g"}}, SpecOptions{User: "12345:77"}, 0, `^12345\n77\n$`},
		{"home is the user's", ocispec.ImageConfig{User: "web", Cmd: []string{"sh", "-c", "echo $HOME"}}, SpecOptions{}, 0, `^/home/web\n$`},
		{"own process IDs", sh("echo $$"), SpecOptions{}, 0, `^1\n$`},
		{"devices", sh("echo x > /dev/null && ls /dev/pts/ptmx /dev/shm -d && cat /dev/zero | busybox head -c 3 | busybox wc -c"), SpecOptions{}, 0, `3\n$`},
		{"kernel settings are out of reach", sh("echo 1 > /proc/sys/vm/drop_caches || echo refused"), SpecOptions{}, 0, `^refused\n$`},
		{"host network", sh("busybox ip -o link | busybox wc -l; cat /etc/resolv.conf"), SpecOptions{}, 0, ``},
		{"no network", sh("busybox ip -o link | busybox grep -v 'lo:' | busybox grep -c UP; busybox ip addr show lo"), SpecOptions{Net: NoNetwork}, 0, `(?s)^0\n.*127\.0\.0\.1`},
		{"host name", sh("busybox hostname; cat /etc/hostname; cat /etc/hosts"), SpecOptions{Net: NoNetwork, Hostname: "box"}, 0, `(?s)^box\nbox\n.*127.0.0.1\tbox\n`},
		{"no terminal", sh("busybox tty"), SpecOptions{}, 1, `^not a tty\n$`},
		{"terminal", sh("busybox tty; echo $TERM"), SpecOptions{TTY: true}, 0, `^/dev/(pts/0|console)\r\nxterm\r\n$`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBed(t)
			b.write(t, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\nweb:x:1000:1001:web:/home/web:/bin/sh\n", 0o644)
			b.write(t, "etc/group", "root:x:0:\nweb:x:1001:\nextra:x:3000:root,web\n", 0o644)
			code, out, errs := b.runOut(t, tt.image, tt.opts)
			if code != tt.code {
				t.Errorf("exit code %d, want %d\nstdout %q\nstderr %q", code, tt.code, out, errs)
			}
			if !regexp.MustCompile(tt.want).MatchString(out) {
				t.Errorf("stdout %q does not match %s\nstderr %q", out, tt.want, errs)
			}
		})
	}
}

func TestRunPassesStreams(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("cat; echo to stderr >&2"), SpecOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	large := strings.Repeat("0123456789abcdef", 1<<16)
	var out, errs bytes.Buffer
	code, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdin: strings.NewReader(large), Stdout: &out, Stderr: &errs}})
	if err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if out.String() != large {
		t.Errorf("%d bytes came back of %d", out.Len(), len(large))
	}
	if errs.String() != "to stderr\n" {
		t.Errorf("stderr %q", errs.String())
	}
}

// A file is the container's own stream: no goroutine copies.
func TestRunHandsOverFiles(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("cat"), SpecOptions{})
	name := filepath.Join(b.dir, "out")
	out, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := os.Open(filepath.Join(b.dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if code, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdin: in, Stdout: out}}); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	want, _ := os.ReadFile(in.Name())
	if got, _ := os.ReadFile(name); !bytes.Equal(got, want) || len(want) == 0 {
		t.Errorf("got %d bytes, want %d", len(got), len(want))
	}
}

// until returns a writer and a channel that is closed when text was written.
func until(text string) (io.Writer, <-chan struct{}) {
	w := &untilWriter{text: text, seen: make(chan struct{})}
	return w, w.seen
}

type untilWriter struct {
	text string
	buf  bytes.Buffer
	done bool
	seen chan struct{}
}

func (w *untilWriter) Write(p []byte) (int, error) {
	w.buf.Write(p)
	if !w.done && strings.Contains(w.buf.String(), w.text) {
		w.done = true
		close(w.seen)
	}
	return len(p), nil
}

func TestSignalsReachTheContainer(t *testing.T) {
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGUSR1} {
		t.Run(sig.String(), func(t *testing.T) {
			b := newBed(t)
			b.configure(t, sh("trap 'echo term; exit 7' TERM; trap 'echo usr1; exit 8' USR1; echo ready; while :; do sleep 0.01; done"), SpecOptions{})
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			out, ready := until("ready\n")
			code, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdout: out}, Started: func(c *Container) {
				select {
				case <-ready:
					// To this process, as a terminal or a supervisor would.
					if err := unix.Kill(os.Getpid(), sig); err != nil {
						t.Error(err)
					}
				case <-c.Done():
					t.Error("the container ended early")
				}
			}})
			if want := map[unix.Signal]int{unix.SIGTERM: 7, unix.SIGUSR1: 8}[sig]; err != nil || code != want {
				t.Errorf("exit code %d, %v, want %d", code, err, want)
			}
		})
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("echo ready; sleep 1000"), SpecOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, ready := until("ready\n")
	_, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdout: out}, Started: func(*Container) {
		<-ready
		cancel()
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestLifeCycle(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"), SpecOptions{Net: NoNetwork})
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, ready := until("ready\n")

	if list, err := b.List(ctx); err != nil || len(list) != 0 {
		t.Errorf("list of none: %v, %v", list, err)
	}
	c, err := b.Start(ctx, b.id, b.dir, IO{Stdout: out})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := b.State(ctx, b.id)
	if err != nil || s.Status != "running" || s.PID != c.PID() || s.Bundle != b.dir {
		t.Errorf("state %+v, %v", s, err)
	}
	if _, err := b.Start(ctx, b.id, b.dir, IO{}); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("started a second container of that ID: %v", err)
	}
	<-ready
	if list, err := b.List(ctx); err != nil || len(list) != 1 || list[0].Status != "running" || list[0].ID != b.id {
		t.Errorf("list %+v, %v", list, err)
	}

	var echo bytes.Buffer
	if code, err := b.Exec(ctx, b.id, []string{"/bin/sh", "-c", "echo inside $HOSTNAME; exit 3"}, IO{Stdout: &echo}); err != nil || code != 3 || echo.String() != "inside "+b.id+"\n" {
		t.Errorf("exec: exit code %d, %v, %q", code, err, echo.String())
	}
	if code, err := b.Exec(ctx, b.id, []string{"/bin/true-ish"}, IO{}); err == nil {
		t.Errorf("exec of nothing: exit code %d", code)
	}

	if err := b.Kill(ctx, b.id, unix.SIGTERM); err != nil {
		t.Error(err)
	}
	if code, err := c.Wait(ctx); err != nil || code != 9 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if s, err := b.State(ctx, b.id); err != nil || s.Status != "stopped" {
		t.Errorf("state %+v, %v", s, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := b.State(ctx, b.id); !errors.Is(err, ErrNotFound) {
		t.Errorf("state of a deleted container: %v", err)
	}
	if err := b.Kill(ctx, b.id, unix.SIGTERM); !errors.Is(err, ErrNotFound) {
		t.Errorf("kill of a deleted container: %v", err)
	}
	if _, err := b.Exec(ctx, b.id, []string{"/bin/sh"}, IO{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("exec in a deleted container: %v", err)
	}
	if err := b.Delete(ctx, b.id); err != nil {
		t.Errorf("delete of a deleted container: %v", err)
	}
}

// Everything in the container goes with it, and Close does not wait for what
// it leaves running.
func TestCloseKills(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("sleep 1000 & sleep 1000 & echo ready; sleep 1000"), SpecOptions{})
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out, ready := until("ready\n")
	c, err := b.Start(ctx, b.id, b.dir, IO{Stdout: out})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	<-ready
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if code, err := c.Wait(ctx); err != nil || code != 137 {
		t.Errorf("exit code %d, %v", code, err)
	}
}

func TestErrorsSayWhatIsWrong(t *testing.T) {
	b := newBed(t)
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()

	b.configure(t, ocispec.ImageConfig{Cmd: []string{"/no/such/program"}}, SpecOptions{})
	if _, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir}); err == nil || !strings.Contains(err.Error(), "/no/such/program") {
		t.Errorf("missing program: %v", err)
	}
	missing := &Runner{StateRoot: b.StateRoot, Command: "no-such-runc"}
	if _, err := missing.Run(ctx, RunOptions{ID: b.id, Dir: b.dir}); err == nil || !strings.Contains(err.Error(), "runc is not installed") {
		t.Errorf("missing runc: %v", err)
	}
	if _, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.rootfs}); err == nil || !strings.Contains(err.Error(), "config.json") {
		t.Errorf("missing config.json: %v", err)
	}
}

func BenchmarkStartExit(b *testing.B) {
	bd := newBed(b)
	bd.configure(b, sh("exit 0"), SpecOptions{})
	for i := 0; b.Loop(); i++ {
		if code, err := bd.Run(context.Background(), RunOptions{ID: fmt.Sprint(bd.id, i), Dir: bd.dir}); err != nil || code != 0 {
			b.Fatalf("exit code %d, %v", code, err)
		}
	}
}
