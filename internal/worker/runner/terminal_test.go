package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// openTerminal makes a terminal: what is written to person is typed.
func openTerminal(tb testing.TB, rows, cols uint16) (person, terminal *os.File) {
	tb.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		tb.Skipf("no terminals here: %v", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		tb.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		tb.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		tb.Fatal(err)
	}
	person = os.NewFile(uintptr(fd), "person")
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { person.Close(); terminal.Close() })
	return person, terminal
}

func TestTerminal(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("stty size; echo ready; read line; echo got $line; stty size; cat; exit $?"), SpecOptions{TTY: true})
	person, terminal := openTerminal(t, 33, 77)
	before, err := term.GetState(int(terminal.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	out := &expectWriter{seen: make(chan string, 100)}
	c, err := b.Start(ctx, b.id, b.dir, IO{Stdin: terminal, Stdout: out, TTY: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	out.expect(t, c, "33 77\r\nready\r\n")

	// The size follows, and a line typed arrives.
	if err := unix.IoctlSetWinsize(int(person.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 11, Col: 22}); err != nil {
		t.Fatal(err)
	}
	// The terminal is not the one of this process: what its session would get.
	if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	waitSize(t, c, 11, 22)
	if _, err := io.WriteString(person, "hello\r"); err != nil {
		t.Fatal(err)
	}
	out.expect(t, c, "got hello\r\n11 22\r\n")

	// The interrupt key is the container's own.
	if _, err := io.WriteString(person, "\x03"); err != nil {
		t.Fatal(err)
	}
	if code, err := c.Wait(ctx); err != nil || code != 130 {
		t.Errorf("exit code %d, %v, want 130", code, err)
	}
	after, err := term.GetState(int(terminal.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(*before) != fmt.Sprint(*after) {
		t.Errorf("the terminal was not restored: %v, before %v", *after, *before)
	}
}

// waitSize waits until the container's terminal has a size.
func waitSize(tb testing.TB, c *Container, rows, cols uint16) {
	tb.Helper()
	for {
		ws, err := unix.IoctlGetWinsize(int(c.streams.inputs[0].Fd()), unix.TIOCGWINSZ)
		if err == nil && ws.Row == rows && ws.Col == cols {
			return
		}
		select {
		case <-c.Done():
			tb.Fatal("the container ended early")
		default:
		}
	}
}

type expectWriter struct{ seen chan string }

func (w *expectWriter) Write(p []byte) (int, error) {
	w.seen <- string(p)
	return len(p), nil
}

func (w *expectWriter) expect(tb testing.TB, c *Container, text string) {
	tb.Helper()
	var all bytes.Buffer
	for !strings.Contains(all.String(), text) {
		select {
		case s := <-w.seen:
			all.WriteString(s)
		case <-c.Done():
			tb.Fatalf("the container ended after %q, want %q", all.String(), text)
		}
	}
}

func TestTerminalIsNotForBundlesWithout(t *testing.T) {
	b := newBed(t)
	b.configure(t, sh("echo no"), SpecOptions{})
	_, err := b.Run(context.Background(), RunOptions{ID: b.id, Dir: b.dir, IO: IO{TTY: true}})
	if err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("a console socket without a terminal: %v", err)
	}
}
