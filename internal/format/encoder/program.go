package encoder

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// program is one encoder's. Its processes are begun as they are needed, and kept; there are as many as are worked
// with at once, at most one a processor. What is said to them and heard from them is in
// encoders/stream.
type program struct {
	name  string
	file  *os.File      // the program, in memory
	slots chan struct{} // one for each process that may run

	mu      sync.Mutex
	idle    []*process // guarded by mu
	checked bool       // guarded by mu
	bad     error      // guarded by mu: what the check found
}

// program returns an encoder's program. Errors: ErrUnavailable.
func (s *Set) program(name string) (*program, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.programs[name]; p != nil {
		return p, nil
	}
	var elf []byte
	if s.Programs != nil {
		elf = s.Programs(name)
	}
	if elf == nil {
		return nil, unavailable(name, "this foil was built without its program; `make build` builds both")
	}
	file, err := inMemory(name, elf)
	if err != nil {
		return nil, unavailable(name, "%v", err)
	}
	if s.programs == nil {
		s.programs = map[string]*program{}
	}
	p := &program{name: name, file: file, slots: make(chan struct{}, runtime.GOMAXPROCS(0))}
	s.programs[name] = p
	return p, nil
}

// inMemory makes a file that is on no disk.
func inMemory(name string, b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("foil-"+name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(b); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (p *program) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, c := range idle {
		c.end()
	}
	p.file.Close()
}

// process is a running program. It is one goroutine's at a time.
type process struct {
	cmd    *exec.Cmd
	in     *bufio.Writer
	closer io.Closer // of in
	out    *bufio.Reader
	said   bytes.Buffer // on its standard error
}

func (p *program) begin() (*process, error) {
	c := &process{cmd: exec.Command(fmt.Sprintf("/proc/self/fd/%d", p.file.Fd()))}
	c.cmd.Env = []string{"GOMAXPROCS=1"}
	c.cmd.Stderr = &c.said
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("run the program of encoder %s: %w", p.name, err)
	}
	c.in, c.closer, c.out = bufio.NewWriterSize(in, 256<<10), in, bufio.NewReaderSize(out, 256<<10)
	return c, nil
}

// end ends the program, which ends when its input does, or is killed.
func (c *process) end() error {
	c.closer.Close()
	_, _ = io.Copy(io.Discard, c.out)
	if err := c.cmd.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(c.said.Bytes()))
	}
	return nil
}

// say sends a command. Errors stay: the last one's tells.
func (c *process) say(kind byte, b ...[]byte) error {
	n := 0
	for _, part := range b {
		n += len(part)
	}
	head := append(make([]byte, 0, 5), kind)
	_, err := c.in.Write(binary.LittleEndian.AppendUint32(head, uint32(n)))
	for _, part := range b {
		if err == nil {
			_, err = c.in.Write(part)
		}
	}
	return err
}

// hear gives all that comes to w until Z is answered. After an error of w, which it returns, it passes over the rest;
// stop is called then. Any other error is the program's.
func (c *process) hear(w io.Writer, stop func()) (refused, err error) {
	buf := make([]byte, 0, 64<<10)
	for {
		var head [4]byte
		if _, err := io.ReadFull(c.out, head[:]); err != nil {
			return refused, err
		}
		n := int(binary.LittleEndian.Uint32(head[:]))
		if n == 0 {
			return refused, nil
		}
		for n > 0 {
			m := min(n, cap(buf))
			if _, err := io.ReadFull(c.out, buf[:m]); err != nil {
				return refused, err
			}
			n -= m
			if refused != nil {
				continue
			}
			if _, refused = w.Write(buf[:m]); refused != nil {
				stop()
			}
		}
	}
}

// run has talk say what is to be done, and gives what is made to w. The context that talk gets ends when nothing more
// is wanted.
func (p *program) run(ctx context.Context, w io.Writer, talk func(ctx context.Context, c *process) error) (err error) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	p.mu.Lock()
	var c *process
	if n := len(p.idle); n > 0 {
		c, p.idle = p.idle[n-1], p.idle[:n-1]
	}
	p.mu.Unlock()
	if c == nil {
		if c, err = p.begin(); err != nil {
			return err
		}
	}
	talking, stop := context.WithCancel(ctx)
	defer stop()
	talked := make(chan error, 1)
	go func() {
		err := talk(talking, c)
		// Whatever came before: it ends what is heard.
		if serr := errors.Join(c.say('Z'), c.in.Flush()); serr != nil && err == nil {
			err = serr
		}
		talked <- err
	}()
	refused, died := c.hear(w, stop)
	if died != nil {
		stop()
		_ = c.cmd.Process.Kill()
	}
	err = <-talked
	if died != nil {
		return fmt.Errorf("encoder %s died: %w: %w", p.name, died, errors.Join(c.end(), ctx.Err()))
	}
	p.mu.Lock()
	p.idle = append(p.idle, c)
	p.mu.Unlock()
	if refused != nil {
		return refused
	}
	return err
}
