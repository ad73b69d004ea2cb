package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	nethttp "net/http"
	"net/http/httptest"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// timeout is far beyond what anything here takes.
const timeout = 60 * time.Second

// fake is a container without a runtime.
type fake struct {
	pid  int
	done chan struct{}
	code int
	exec func(args []string) (int, error)
}

func newFake() *fake { return &fake{pid: os.Getpid(), done: make(chan struct{})} }

func (f *fake) PID() int              { return f.pid }
func (f *fake) Done() <-chan struct{} { return f.done }
func (f *fake) Wait(ctx context.Context) (int, error) {
	select {
	case <-f.done:
		return f.code, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}
func (f *fake) Exec(_ context.Context, args []string) (int, error) { return f.exec(args) }

func mustParse(tb testing.TB, s string) *Probe {
	tb.Helper()
	p, err := Parse(s)
	if err != nil {
		tb.Fatal(err)
	}
	if p.String() != s {
		tb.Errorf("%q became %q", s, p)
	}
	return p
}

func waitContext(tb testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	tb.Cleanup(cancel)
	return ctx
}

func TestParse(t *testing.T) {
	for _, s := range []string{"exit", "stdout:Ready to accept", "stdout:a:b", "tcp:1", "tcp:65535", "http:80", "http:80/", "http:8080/a/b?c=d:e", "exec:redis-cli ping"} {
		mustParse(t, s)
	}
	for _, s := range []string{"", "exit:", "exit:0", "stdout", "stdout:", "stdout:(", "tcp", "tcp:", "tcp:0", "tcp:65536", "tcp:-1", "tcp:x", "tcp:80/", "http:", "http:/x", "http:80/a b", "exec", "exec:", "udp:1", "ready"} {
		if p, err := Parse(s); err == nil {
			t.Errorf("%q was parsed as %+v", s, p)
		} else if !strings.Contains(err.Error(), fmt.Sprintf("%q", s)) {
			t.Errorf("%q is not named in: %v", s, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"exit", "stdout:x", "tcp:1", "http:80/x", "exec:true"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if p, err := Parse(s); err == nil && p.String() != s {
			t.Errorf("%q became %q", s, p)
		}
	})
}

func TestExit(t *testing.T) {
	for code, want := range map[int]error{0: nil, 1: ErrExited} {
		c := newFake()
		c.code = code
		close(c.done)
		if err := mustParse(t, "exit").Wait(waitContext(t), c); !errors.Is(err, want) {
			t.Errorf("exit code %d: %v", code, err)
		}
	}
}

func TestStdout(t *testing.T) {
	tests := []struct {
		name   string
		regex  string
		writes []string
		ready  bool
	}{
		{"a line", "^ready$", []string{"starting\nready\n"}, true},
		{"a line of a terminal", "^ready$", []string{"starting\r\nready\r\n"}, true},
		{"in pieces", "^ready$", []string{"star", "ting\nre", "a", "dy"}, true},
		{"a prompt", "login: $", []string{"login: "}, true},
		{"not across lines", "a.b", []string{"a\nb\n"}, false},
		{"never", "ready", []string{"starting\n", "stopping\n"}, false},
		{"nothing", "ready", nil, false},
		{"after much", "ready", []string{strings.Repeat("x", 3*maxLine), "ready"}, true},
		{"match and go on", "ready", []string{"ready", "more\n"}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, c := mustParse(t, "stdout:"+tt.regex), newFake()
			var out bytes.Buffer
			w := p.Writer(&out)
			for _, s := range tt.writes {
				if n, err := io.WriteString(w, s); n != len(s) || err != nil {
					t.Fatal(n, err)
				}
			}
			if tt.ready {
				if err := p.Wait(waitContext(t), c); err != nil {
					t.Error(err)
				}
			}
			close(c.done)
			if err := p.Wait(waitContext(t), c); (err == nil) != tt.ready || err != nil && !errors.Is(err, ErrExited) {
				t.Errorf("after the end: %v", err)
			}
			if out.String() != strings.Join(tt.writes, "") {
				t.Errorf("passed on %q", out.String())
			}
		})
	}
	t.Run("two streams at once", func(t *testing.T) {
		p := mustParse(t, "stdout:ready")
		var wg sync.WaitGroup
		for range 2 {
			w := p.Writer(nil)
			wg.Go(func() { io.WriteString(w, "ready\n") })
		}
		wg.Wait()
		if err := p.Wait(waitContext(t), newFake()); err != nil {
			t.Error(err)
		}
	})
	t.Run("another kind", func(t *testing.T) {
		if w := mustParse(t, "exit").Writer(os.Stdout); w != os.Stdout {
			t.Errorf("got %T", w)
		}
	})
}

func port(addr net.Addr) int { return addr.(*net.TCPAddr).Port }

func TestTCP(t *testing.T) {
	for _, ip := range loopbacks {
		// A port that refuses at first.
		l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
		if err != nil {
			t.Skipf("no %s here: %v", ip, err)
		}
		addr := l.Addr()
		l.Close()
		p, c := mustParse(t, fmt.Sprintf("tcp:%d", port(addr))), newFake()
		result := make(chan error, 1)
		go func() { result <- p.Wait(waitContext(t), c) }()
		select {
		case err := <-result:
			t.Fatalf("%s: ready before anything listens: %v", ip, err)
		case <-time.After(20 * time.Millisecond):
		}
		l, err = net.Listen("tcp", addr.String())
		if err != nil {
			t.Fatal(err)
		}
		if err := <-result; err != nil {
			t.Errorf("%s: %v", ip, err)
		}
		l.Close()
	}
}

func TestWaitEndsWithTheContainer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // accepts by the kernel, never answers
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
	for _, s := range []string{
		fmt.Sprintf("tcp:%d", port(free.Addr())),
		fmt.Sprintf("http:%d/", port(free.Addr())),
		fmt.Sprintf("http:%d/", port(l.Addr())),
		"exec:false",
		"stdout:x",
	} {
		c := newFake()
		c.exec = func([]string) (int, error) { return 1, nil }
		result := make(chan error, 1)
		go func() { result <- mustParse(t, s).Wait(waitContext(t), c) }()
		time.Sleep(10 * time.Millisecond)
		close(c.done)
		if err := <-result; !errors.Is(err, ErrExited) {
			t.Errorf("%s: %v", s, err)
		}

		ctx, cancel := context.WithCancel(waitContext(t))
		go func() { result <- mustParse(t, s).Wait(ctx, newFakeWith(c.exec)) }()
		time.Sleep(10 * time.Millisecond)
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("%s, cancelled: %v", s, err)
		}
	}
}

func newFakeWith(exec func([]string) (int, error)) *fake {
	c := newFake()
	c.exec = exec
	return c
}

func TestHTTP(t *testing.T) {
	status := nethttp.StatusServiceUnavailable
	asked := make(chan string, 1000)
	var mu sync.Mutex
	srv := httptest.NewServer(nethttp.HandlerFunc(func(w nethttp.ResponseWriter, r *nethttp.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked <- r.URL.String()
		w.WriteHeader(status)
	}))
	defer srv.Close()
	p := mustParse(t, fmt.Sprintf("http:%d/health?full=1", port(srv.Listener.Addr())))
	result := make(chan error, 1)
	go func() { result <- p.Wait(waitContext(t), newFake()) }()
	for range 3 {
		if url := <-asked; url != "/health?full=1" {
			t.Errorf("asked for %s", url)
		}
	}
	select {
	case err := <-result:
		t.Fatalf("ready at status 503: %v", err)
	default:
	}
	mu.Lock()
	status = nethttp.StatusNoContent
	mu.Unlock()
	if err := <-result; err != nil {
		t.Error(err)
	}
}

func TestExec(t *testing.T) {
	calls := 0
	c := newFakeWith(func(args []string) (int, error) {
		if fmt.Sprint(args) != "[/bin/sh -c redis-cli ping]" {
			t.Errorf("called %q", args)
		}
		calls++
		switch calls {
		case 1:
			return 0, errors.New("not yet")
		case 2:
			return 1, nil
		}
		return 0, nil
	})
	if err := mustParse(t, "exec:redis-cli ping").Wait(waitContext(t), c); err != nil || calls != 3 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

// A server in a network namespace of its own, which nobody outside can reach.
func TestNetworkNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	busybox, err := osexec.LookPath("busybox")
	if err != nil {
		t.Skip("busybox is not installed (busybox-static)")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "up"), []byte("yes"), 0o644); err != nil {
		t.Fatal(err)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := port(free.Addr())
	free.Close()
	cmd := osexec.Command(busybox, "sh", "-c", fmt.Sprintf(
		"%[1]s ip link set lo up && %[1]s sleep 0.05 && exec %[1]s httpd -f -p %d -h %s", busybox, port, dir))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Skipf("no network namespace here: %v", err)
	}
	c := newFake()
	c.pid = cmd.Process.Pid
	go func() {
		cmd.Wait()
		close(c.done)
	}()
	defer func() {
		cmd.Process.Kill()
		<-c.done
	}()
	for _, s := range []string{fmt.Sprintf("tcp:%d", port), fmt.Sprintf("http:%d/up", port)} {
		if err := mustParse(t, s).Wait(waitContext(t), c); err != nil {
			t.Errorf("%v\n%s", err, stderr.String())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := mustParse(t, fmt.Sprintf("tcp:%d", port)).Wait(ctx, newFake()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("from outside: %v", err)
	}
}

// The main thread must not be taken into a container's namespace: it would
// stay there.
func TestOwnThreadIsNotTheMainOne(t *testing.T) {
	for range 100 {
		err := <-onOwnThread(func() error {
			if unix.Gettid() == unix.Getpid() {
				return errors.New("on the main thread")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
