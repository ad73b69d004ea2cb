package runner

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// streams connect a container with an IO.
type streams struct {
	io      IO
	ends    [3]*os.File // what the container gets, without a terminal
	given   []*os.File  // those of ends that are ours to close
	inputs  []*os.File  // our ends of pipes that the container reads
	console *console    // with a terminal

	copies  sync.WaitGroup // of output; ends when every writer has closed its end
	restore func()         // of the terminal
}

// openStreams prepares the streams of a new container.
func openStreams(dir string, o IO) (*streams, error) {
	s := &streams{io: o, restore: func() {}}
	if o.TTY {
		var err error
		s.console, err = listenConsole()
		return s, err
	}
	fail := func(err error) (*streams, error) { return nil, errors.Join(err, s.abort()) }
	null := func(i int) error {
		f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err == nil {
			s.ends[i], s.given = f, append(s.given, f)
		}
		return err
	}
	switch in := o.Stdin.(type) {
	case nil:
		if err := null(0); err != nil {
			return fail(err)
		}
	case *os.File:
		s.ends[0] = in
	default:
		r, w, err := os.Pipe()
		if err != nil {
			return fail(err)
		}
		s.ends[0], s.given, s.inputs = r, append(s.given, r), append(s.inputs, w)
		go func() {
			defer w.Close()
			io.Copy(w, in) // the container has closed its end
		}()
	}
	for i, out := range []io.Writer{1: o.Stdout, 2: o.Stderr} {
		if i == 0 {
			continue
		}
		switch out := out.(type) {
		case nil:
			if err := null(i); err != nil {
				return fail(err)
			}
		case *os.File:
			s.ends[i] = out
		default:
			r, w, err := os.Pipe()
			if err != nil {
				return fail(err)
			}
			s.ends[i], s.given = w, append(s.given, w)
			s.copies.Go(func() {
				defer r.Close()
				if _, err := io.Copy(out, r); err != nil {
					// The container must not block, nor die of SIGPIPE,
					// because nobody wants its output any more.
					io.Copy(io.Discard, r) // ends with the container
				}
			})
		}
	}
	return s, nil
}

// files returns what runc is given: nil is the null device.
func (s *streams) files() (stdin io.Reader, stdout, stderr io.Writer) {
	if s.console != nil {
		return nil, nil, nil
	}
	return s.ends[0], s.ends[1], s.ends[2]
}

// begin connects what can only be connected after the container was created.
func (s *streams) begin() error {
	for _, f := range s.given {
		f.Close()
	}
	s.given = nil
	if s.console == nil {
		return nil
	}
	master, err := s.console.receive()
	if err != nil {
		return err
	}
	s.inputs = append(s.inputs, master)
	if in, ok := s.io.Stdin.(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		old, err := term.MakeRaw(int(in.Fd()))
		if err != nil {
			return fmt.Errorf("switch the terminal to raw mode: %w", err)
		}
		stop := followSize(in, master)
		s.restore = func() {
			stop()
			term.Restore(int(in.Fd()), old) // nothing left to do about it
		}
	}
	if s.io.Stdin != nil {
		go io.Copy(master, s.io.Stdin) // the terminal has gone
	}
	out := s.io.Stdout
	if out == nil {
		out = io.Discard
	}
	s.copies.Go(func() {
		// Reading fails with EIO when the last process has closed the terminal.
		if _, err := io.Copy(out, master); err != nil && !errors.Is(err, unix.EIO) {
			io.Copy(io.Discard, master) // ends with the container
		}
	})
	return nil
}

// end waits for the output of a container that has ended.
func (s *streams) end() {
	s.copies.Wait()
	s.close()
}

// abort undoes what was prepared for a container that was not created.
func (s *streams) abort() error {
	s.close()
	s.copies.Wait()
	return nil
}

func (s *streams) close() {
	s.restore()
	s.restore = func() {}
	for _, f := range append(s.given, s.inputs...) {
		f.Close()
	}
	s.given, s.inputs = nil, nil
	if s.console != nil {
		s.console.close()
	}
}

// followSize gives the container's terminal the size of the caller's until stop
// is called.
func followSize(from, to *os.File) (stop func()) {
	set := func() {
		if ws, err := unix.IoctlGetWinsize(int(from.Fd()), unix.TIOCGWINSZ); err == nil {
			unix.IoctlSetWinsize(int(to.Fd()), unix.TIOCSWINSZ, ws) // only looks
		}
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGWINCH)
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for {
			set()
			select {
			case <-changed:
			case <-quit:
				return
			}
		}
	}()
	return func() {
		signal.Stop(changed)
		close(quit)
		<-gone
	}
}

// console is the socket on which runc hands over the terminal it has made.
type console struct {
	dir, path string
	listener  *net.UnixListener
}

// consoleTimeout is how long runc, which has ended by then, may have taken to
// have its connection accepted.
const consoleTimeout = 10 * time.Second

func listenConsole() (*console, error) {
	// Not in the bundle directory: the path of a socket has at most 107 bytes.
	dir, err := os.MkdirTemp("", "foil-console-")
	if err != nil {
		return nil, err
	}
	c := &console{dir: dir, path: filepath.Join(dir, "s")}
	c.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: c.path, Net: "unix"})
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	return c, nil
}

func (c *console) receive() (*os.File, error) {
	deadline := time.Now().Add(consoleTimeout)
	if err := c.listener.SetDeadline(deadline); err != nil {
		return nil, err
	}
	conn, err := c.listener.AcceptUnix()
	if err != nil {
		return nil, fmt.Errorf("receive the container's terminal: %w", err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(name, oob)
	if err != nil {
		return nil, fmt.Errorf("receive the container's terminal: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("receive the container's terminal: %d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("receive the container's terminal: %d descriptors: %w", len(fds), err)
	}
	// Non-blocking, so that closing it ends a Read that waits.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, err
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "container terminal"), nil
}

func (c *console) close() {
	c.listener.Close()
	os.RemoveAll(c.dir)
}
