package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// This test binary is also the keeper.
const keeperEnv = "FOIL_KEEPER_TEST_SOCKET"

func TestMain(m *testing.M) {
	socket := os.Getenv(keeperEnv)
	if socket == "" {
		os.Exit(m.Run())
	}
	err := Serve(context.Background(), socket, func() {
		fmt.Println("ready")
		Detach()
	})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

const patience = 2 * time.Minute

func options(t testing.TB, dir string) Options {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "keeper")
	return Options{
		Socket: socket, Command: []string{exe}, Env: []string{keeperEnv + "=" + socket},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

// start starts a client whose keeper is killed when the test ends.
func start(t testing.TB, o Options) *Client {
	t.Helper()
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pid := c.PID()
		c.Close()
		if pid != 0 {
			unix.Kill(pid, unix.SIGKILL)
		}
	})
	return c
}

// file makes a file with content.
func file(t testing.TB, content string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(content); err != nil {
		t.Fatal(err)
	}
	return f
}

// contents reads what held files hold, and closes them.
func contents(t testing.TB, held map[string]*os.File) map[string]string {
	t.Helper()
	got := map[string]string{}
	for name, f := range held {
		b := make([]byte, 100)
		n, err := f.ReadAt(b, 0)
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		got[name] = string(b[:n])
		f.Close()
	}
	return got
}

// again connects anew, as the next daemon would.
func again(t testing.TB, o Options, c *Client) *Client {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	return start(t, o)
}

func TestHold(t *testing.T) {
	ctx := t.Context()
	o := options(t, t.TempDir())
	c := start(t, o)
	if len(c.Held()) != 0 {
		t.Errorf("a new keeper holds %v", c.Held())
	}
	for _, step := range []struct{ name, content string }{{"a", "1"}, {"b", "2"}, {"a", "3"}, {"gone", "4"}} {
		if err := c.Put(ctx, step.name, file(t, step.content)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"gone", "never there"} {
		if err := c.Drop(ctx, name); err != nil {
			t.Error(err)
		}
	}
	if err := c.Put(ctx, "", file(t, "")); err == nil {
		t.Error("put without a name")
	}
	if err := c.Put(ctx, strings.Repeat("x", 256), file(t, "")); err == nil {
		t.Error("put with a name too long")
	}
	if err := c.Stop(ctx); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("stop while it holds: %v", err)
	}
	pid := c.PID()
	c = again(t, o, c)
	if c.PID() != pid {
		t.Errorf("another keeper: %d, was %d", c.PID(), pid)
	}
	if diff := cmp.Diff(map[string]string{"a": "3", "b": "2"}, contents(t, c.Held())); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
	for _, name := range []string{"a", "b"} {
		if err := c.Drop(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(o.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket after stop: %v", err)
	}
	if err := c.Put(ctx, "a", file(t, "")); !errors.Is(err, ErrClosed) {
		t.Errorf("put after stop: %v", err)
	}
}

func TestHoldMany(t *testing.T) {
	const n = 1000 // several messages
	o := options(t, t.TempDir())
	c := start(t, o)
	f := file(t, "x")
	long := strings.Repeat("n", 250)
	for i := range n {
		if err := c.Put(t.Context(), long+strconv.Itoa(i), f); err != nil {
			t.Fatal(err)
		}
	}
	c = again(t, o, c)
	if got := contents(t, c.Held()); len(got) != n || got[long+"999"] != "x" {
		t.Errorf("%d held, want %d", len(got), n)
	}
}

func TestSocketMode(t *testing.T) {
	o := options(t, t.TempDir())
	start(t, o)
	st, err := os.Stat(o.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode().Perm() != 0o600 {
		t.Errorf("socket mode %v, want 0600", st.Mode())
	}
}

func TestOneKeeper(t *testing.T) {
	o := options(t, t.TempDir())
	start(t, o)
	if err := Serve(t.Context(), o.Socket, nil); !errors.Is(err, ErrRunning) {
		t.Errorf("a second keeper: %v, want ErrRunning", err)
	}
}

func TestOneOwner(t *testing.T) {
	o := options(t, t.TempDir())
	c := start(t, o)
	if _, _, err := dial(t.Context(), o.Socket); !errors.Is(err, ErrBusy) {
		t.Errorf("a second client: %v, want ErrBusy", err)
	}
	c.Close()
	again(t, o, c)
}

// TestKilled: the client notices at once, and everything is put again.
func TestKilled(t *testing.T) {
	o := options(t, t.TempDir())
	restarted := make(chan int, 1)
	o.Restarted = func(pid int) { restarted <- pid }
	c := start(t, o)
	put := func(name, content string) *os.File {
		f := file(t, content)
		if err := c.Put(t.Context(), name, f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	put("a", "1")
	put("b", "2")
	put("closed", "3").Close()
	for i := range 5 {
		old := c.PID()
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// A request meanwhile waits, and is done after the others.
		put("late", strconv.Itoa(i))
		select {
		case pid := <-restarted:
			if pid == old || pid == 0 {
				t.Errorf("new keeper %d, old one %d", pid, old)
			}
		case <-time.After(patience):
			t.Fatal("the keeper is not restarted")
		}
	}
	c = again(t, o, c)
	if diff := cmp.Diff(map[string]string{"a": "1", "b": "2", "late": "4"}, contents(t, c.Held())); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
}

// A keeper is shown only when it holds everything: whoever waits for one knows then that
// the daemon may die.
func TestShownWhenItHoldsEverything(t *testing.T) {
	const n = 1000
	o := options(t, t.TempDir())
	c := start(t, o)
	f := file(t, "x")
	for i := range n {
		if err := c.Put(t.Context(), strconv.Itoa(i), f); err != nil {
			t.Fatal(err)
		}
	}
	old := c.PID()
	if err := unix.Kill(old, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end, pid := time.Now().Add(patience), old; pid == 0 || pid == old; pid = c.PID() {
		if time.Now().After(end) {
			t.Fatal("the keeper is not restarted")
		}
		time.Sleep(100 * time.Microsecond) // the only processor, it may be, is the client's as well
	}
	c = again(t, o, c)
	if got := len(contents(t, c.Held())); got != n {
		t.Errorf("when it was shown, the new keeper held %d of %d", got, n)
	}
}

func TestCannotStart(t *testing.T) {
	o := options(t, t.TempDir())
	o.Socket = filepath.Join(t.TempDir(), "no such directory", "keeper")
	o.Env = []string{keeperEnv + "=" + o.Socket}
	_, err := Start(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("error %v, want what the keeper said", err)
	}
	o.Command = []string{"/does/not/exist"}
	if _, err := Start(t.Context(), o); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want ErrNotExist", err)
	}
}

// TestConversation holds the keeper to its protocol, message by message.
func TestConversation(t *testing.T) {
	o := options(t, t.TempDir())
	c := start(t, o)
	pid := c.PID()
	t.Cleanup(func() { unix.Kill(pid, unix.SIGKILL) })
	c.Close()
	var p *packets
	connect := func() {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: o.Socket})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
		p = newPackets(c)
	}
	ask := func(raw []byte, fds ...int) message {
		t.Helper()
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		if _, _, err := p.c.WriteMsgUnix(raw, oob, nil); err != nil {
			t.Fatal(err)
		}
		m, got, err := p.receive()
		if err != nil {
			t.Fatal(err)
		}
		closeAll(got)
		return m
	}
	want := func(m message, k kind, c code) {
		t.Helper()
		if m.kind != k || m.code != c {
			t.Errorf("answer %+v, want type %d, code %d", m, k, c)
		}
	}
	hello := func(lowest, highest uint16) []byte {
		return appendMessage(nil, message{kind: kindHello, lowest: lowest, highest: highest})
	}
	put := appendMessage(nil, message{kind: kindPut, name: "x"})
	fd := int(file(t, "").Fd())

	connect()
	want(ask(put, fd), kindError, codeInvalid) // before Hello
	want(ask(hello(2, 9)), kindError, codeVersion)
	want(ask(hello(0, 0)), kindError, codeVersion)
	// welcomed retries until the keeper has noticed the end of the connection before.
	welcomed := func(raw []byte) message {
		t.Helper()
		m := ask(raw)
		for m.code == codeBusy {
			m = ask(raw)
		}
		want(m, kindWelcome, 0)
		return m
	}
	m := welcomed(hello(1, 9)) // a newer daemon
	if m.version != 1 {
		t.Errorf("version %d, want 1", m.version)
	}
	want(ask([]byte{77, 1, 2, 3}), kindError, codeUnknown)
	want(ask(put), kindError, codeInvalid) // no descriptor
	want(ask(put, fd, fd), kindError, codeInvalid)
	want(ask(appendMessage(nil, message{kind: kindOK})), kindError, codeInvalid)
	want(ask(put, fd), kindOK, 0) // it still works
	want(ask([]byte{byte(kindPut), 9, 'x'}, fd), kindError, codeInvalid)
	if _, _, err := p.receive(); err == nil { // what is no message ends the connection
		t.Error("the connection goes on")
	}
	connect()
	if m = welcomed(hello(1, 1)); m.held != 1 {
		t.Errorf("%d held, want 1", m.held)
	}
}

// BenchmarkMemory reports the resident memory of a keeper that holds 100
// descriptors.
func BenchmarkMemory(b *testing.B) {
	o := options(b, b.TempDir())
	for b.Loop() {
		c, err := Start(b.Context(), o)
		if err != nil {
			b.Fatal(err)
		}
		f := file(b, "")
		for i := range 100 {
			if err := c.Put(b.Context(), strconv.Itoa(i), f); err != nil {
				b.Fatal(err)
			}
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.PID()))
		if err != nil {
			b.Fatal(err)
		}
		for _, line := range strings.Split(string(status), "\n") {
			fields := strings.Fields(line)
			if len(fields) == 3 && (fields[0] == "VmRSS:" || fields[0] == "RssAnon:") {
				kib, _ := strconv.ParseFloat(fields[1], 64)
				b.ReportMetric(kib, strings.TrimSuffix(fields[0], ":")+"-KiB")
			}
		}
		for i := range 100 {
			if err := c.Drop(b.Context(), strconv.Itoa(i)); err != nil {
				b.Fatal(err)
			}
		}
		if err := c.Stop(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// TestRootGone: a keeper whose root is gone ends, unless what it holds is open somewhere.
func TestRootGone(t *testing.T) {
	for _, used := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "root")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(dir, "keeper")
		ready, ended := make(chan struct{}), make(chan error, 1)
		go func() { ended <- serve(t.Context(), socket, func() { close(ready) }, time.Millisecond) }()
		<-ready
		c, _, err := dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "arena")
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.put(t.Context(), "arena", f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		stays := func(why string) {
			t.Helper()
			select {
			case err := <-ended:
				t.Fatalf("it ended %s: %v", why, err)
			case <-time.After(20 * time.Millisecond):
			}
		}
		stays("while a daemon uses it")
		var reader *os.File // as a mount would be
		if used {
			if reader, err = os.Open(path); err != nil {
				t.Fatal(err)
			}
		}
		c.close()
		if used {
			stays("while somebody has open what it holds")
			reader.Close()
		}
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("it did not end")
		}
	}
}
