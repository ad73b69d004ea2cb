package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/backoff"
)

var (
	// ErrNotEmpty is returned by Stop: the keeper holds something and goes on.
	ErrNotEmpty = errors.New("the keeper still holds descriptors")
	// ErrBusy is returned by Start when another daemon uses the keeper.
	ErrBusy = errors.New("another daemon uses this keeper; stop it first")
	// ErrClosed is returned after Close or Stop.
	ErrClosed = errors.New("keeper client is closed")
)

// Options say where the keeper is and how to start one.
type Options struct {
	// Socket is the path of its Unix socket (at most 100 bytes), in a directory that exists.
	Socket string
	// Command starts a keeper on Socket: a program and its arguments. It
	// prints "ready" and a newline to standard output when it listens. Nil: this same
	// program (even if its file was replaced) with "keeper --socket Socket".
	Command []string
	// Env is added to the keeper's environment.
	Env []string
	// Logger gets what an operator should know. Nil: slog.Default().
	Logger *slog.Logger
	// Restarted, when set, is called after the keeper died and a new one holds everything again.
	Restarted func(pid int)
}

// Client is the daemon's side. It remembers what it has put; when the keeper
// dies it starts another and puts everything again, before any other request.
type Client struct {
	o      Options
	log    *slog.Logger
	held   map[string]*os.File
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // watch

	// turn has one token, for whoever uses conn: a request, or watch while it restarts
	// the keeper.
	turn chan struct{}
	// The rest belongs to the holder of turn.
	conn  *conn
	files map[string]*os.File // put and not dropped
	order []string            // their names, as they were first put
	pid   int
	proc  *exec.Cmd // the keeper, if this process started it
	ended bool      // Close or Stop

	pidMu    sync.Mutex
	shownPID int // guarded by pidMu
}

// Start connects to the keeper at o.Socket, or starts one, and learns what it
// holds. A keeper that another daemon has just left by dying may be busy for a
// moment; Start waits for it up to five seconds.
func Start(ctx context.Context, o Options) (*Client, error) {
	if len(o.Socket) > 100 {
		return nil, fmt.Errorf("start keeper: socket path of %d bytes, more than 100: %s", len(o.Socket), o.Socket)
	}
	c := &Client{o: o, log: o.Logger, turn: make(chan struct{}, 1), files: map[string]*os.File{}, held: map[string]*os.File{}}
	if c.log == nil {
		c.log = slog.Default()
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	err := c.connect(ctx)
	if err == nil {
		err = c.learn(ctx)
		if err != nil {
			c.conn.close()
		}
	}
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.setPID(c.pid)
	c.turn <- struct{}{}
	c.wg.Go(c.watch)
	return c, nil
}

// Held returns what the keeper held when Start found it, by name. The files
// are the caller's to use; each must stay open until its name is dropped or
// the client closed.
func (c *Client) Held() map[string]*os.File { return c.held }

// PID returns the keeper's process ID, 0 while there is none that holds
// everything: until then the daemon's death would lose something.
func (c *Client) PID() int {
	c.pidMu.Lock()
	defer c.pidMu.Unlock()
	return c.shownPID
}

func (c *Client) setPID(pid int) {
	c.pidMu.Lock()
	c.shownPID = pid
	c.pidMu.Unlock()
}

// Put gives the keeper a duplicate of f's descriptor under name (1 to 255 bytes), in place of what had the
// name. f must stay open until Drop, so that it can be put again. If the keeper dies it waits for the next one.
func (c *Client) Put(ctx context.Context, name string, f *os.File) error {
	if len(name) < 1 || len(name) > maxName {
		return fmt.Errorf("put %q with the keeper: a name has 1 to %d bytes", name, maxName)
	}
	return c.do(ctx, func(ctx context.Context) error {
		if err := c.conn.put(ctx, name, f); err != nil {
			return fmt.Errorf("put %s with the keeper: %w", name, err)
		}
		c.remember(name, f)
		return nil
	})
}

func (c *Client) remember(name string, f *os.File) {
	if _, ok := c.files[name]; !ok {
		c.order = append(c.order, name)
	}
	c.files[name] = f
}

// Drop takes name from the keeper; a name that is not there is no error.
func (c *Client) Drop(ctx context.Context, name string) error {
	if len(name) < 1 || len(name) > maxName {
		return fmt.Errorf("drop %q from the keeper: a name has 1 to %d bytes", name, maxName)
	}
	return c.do(ctx, func(ctx context.Context) error {
		// Forgotten first: if the keeper dies meanwhile the name is not put again.
		if _, ok := c.files[name]; ok {
			delete(c.files, name)
			c.order = slices.DeleteFunc(c.order, func(n string) bool { return n == name })
		}
		if _, _, err := c.conn.ask(ctx, message{kind: kindDrop, name: name}); err != nil {
			return fmt.Errorf("drop %s from the keeper: %w", name, err)
		}
		return nil
	})
}

// Stop ends the keeper, which must hold nothing (ErrNotEmpty), and closes the
// client.
func (c *Client) Stop(ctx context.Context) error {
	err := c.do(ctx, func(ctx context.Context) error {
		if _, _, err := c.conn.ask(ctx, message{kind: kindStop}); err != nil {
			return fmt.Errorf("stop keeper: %w", err)
		}
		c.ended = true
		if c.proc != nil {
			c.proc.Wait()
		}
		return nil
	})
	if err != nil {
		return err
	}
	return c.Close()
}

// Close disconnects. The keeper lives on and keeps what it holds.
func (c *Client) Close() error {
	c.cancel()
	c.wg.Wait()
	return nil
}

// do runs fn with the turn, and again with the next keeper if this one dies
// meanwhile.
func (c *Client) do(ctx context.Context, fn func(context.Context) error) error {
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the keeper: %w", ctx.Err())
		case <-c.ctx.Done():
			return ErrClosed
		case <-c.turn:
		}
		if c.ended {
			c.turn <- struct{}{}
			return ErrClosed
		}
		conn := c.conn
		tctx, cancel := context.WithTimeout(ctx, answerTimeout)
		err := fn(tctx)
		if err != nil && tctx.Err() != nil {
			// Its answer may still come and would be taken for the next one's.
			conn.close()
		}
		cancel()
		c.turn <- struct{}{}
		if err == nil || !errors.Is(err, errGone) {
			return err
		}
		// Let watch have the turn.
		select {
		case <-conn.replaced:
		case <-ctx.Done():
			return err
		case <-c.ctx.Done():
			return ErrClosed
		}
	}
}

// watch waits for the keeper's death, and then is the first to act: nobody
// gets an answer from a dead keeper, so every request that fails waits for watch.
func (c *Client) watch() {
	<-c.turn
	conn := c.conn
	c.turn <- struct{}{}
	for {
		select {
		case <-conn.gone:
		case <-c.ctx.Done():
		}
		<-c.turn
		if c.ended || c.ctx.Err() != nil {
			c.ended = true
			c.conn.close()
			close(c.conn.replaced)
			if c.proc != nil && c.proc.ProcessState == nil {
				c.proc.Process.Release()
			}
			c.setPID(0)
			c.turn <- struct{}{}
			return
		}
		old := conn
		c.setPID(0)
		c.log.Error("keeper is gone; starting another: until it holds the gate, a crash of the daemon would be a hazard", "pid", c.pid, "err", old.err)
		begin := time.Now()
		pauses := backoff.Backoff{First: 5 * time.Millisecond, Most: time.Second}
		for n := 1; ; n++ {
			err := c.connect(c.ctx)
			if err == nil {
				if err = c.putAgain(); err == nil {
					break
				}
				c.conn.close()
			}
			if c.ctx.Err() != nil {
				break
			}
			c.log.Error("keeper cannot be restarted; trying again", "err", err)
			_ = backoff.Wait(c.ctx, pauses.Pause(n)) // the next attempt sees that it ended
		}
		conn = c.conn
		if c.ctx.Err() == nil {
			c.setPID(c.pid)
			c.log.Info("a new keeper holds everything again", "pid", c.pid, "descriptors", len(c.files), "after", time.Since(begin))
		}
		pid := c.pid
		if conn != old { // else the client was closed meanwhile
			close(old.replaced)
		}
		c.turn <- struct{}{}
		if c.o.Restarted != nil && c.ctx.Err() == nil {
			c.o.Restarted(pid)
		}
	}
}

func (c *Client) putAgain() error {
	for _, name := range c.order {
		err := c.conn.put(c.ctx, name, c.files[name])
		if errors.Is(err, os.ErrClosed) {
			c.log.Warn("descriptor was closed before it was dropped from the keeper", "name", name)
			continue
		}
		if err != nil {
			return fmt.Errorf("put %s again: %w", name, err)
		}
	}
	return nil
}

// learn fetches what the keeper holds.
func (c *Client) learn(ctx context.Context) error {
	all, err := c.conn.all(ctx)
	if err != nil {
		return fmt.Errorf("learn what the keeper holds: %w", err)
	}
	for name, f := range all {
		c.held[name] = f
	}
	for _, name := range sortedKeys(c.held) {
		c.remember(name, c.held[name])
	}
	return nil
}

func sortedKeys(m map[string]*os.File) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// connect sets conn and pid, starting a keeper if none listens.
func (c *Client) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		conn, pid, err := dial(ctx, c.o.Socket)
		switch {
		case err == nil:
			if c.proc != nil && c.proc.Process.Pid != pid {
				c.reap()
			}
			c.conn, c.pid = conn, pid
			return nil
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
			if err := c.launch(ctx); err != nil && !errors.Is(err, ErrRunning) {
				return err
			}
		case errors.Is(err, ErrBusy), errors.Is(err, errGone):
			// Its last owner, or itself, is just dying.
		default:
			return fmt.Errorf("connect to keeper at %s: %w", c.o.Socket, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("connect to keeper at %s: %w", c.o.Socket, errors.Join(err, ctx.Err()))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// reap takes leave of a keeper that this process started and that does not
// listen any more.
func (c *Client) reap() {
	c.proc.Process.Kill() // it may still be on its way out
	c.proc.Wait()
	c.proc = nil
}

// launch starts a keeper and waits until it listens.
func (c *Client) launch(ctx context.Context) error {
	if c.proc != nil {
		c.reap()
	}
	argv := c.o.Command
	if argv == nil {
		argv = []string{"/proc/self/exe", "keeper", "--socket", c.o.Socket}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	defer r.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	// One P from the start: its arenas and caches are what a Go program's memory is.
	cmd.Env = append(append(os.Environ(), "GOMAXPROCS=1"), c.o.Env...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = w, w
	// Its own session: no terminal's hang-up and no signal to the daemon's
	// process group reaches it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return fmt.Errorf("start keeper: %w", err)
	}
	if d, ok := ctx.Deadline(); ok {
		r.SetReadDeadline(d)
	}
	stop := context.AfterFunc(ctx, func() { r.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	// It says "ready", or why not and then ends.
	var out strings.Builder
	buf := make([]byte, 512)
	for out.Len() < 8192 && !strings.HasSuffix(out.String(), "ready\n") {
		n, rerr := r.Read(buf)
		out.Write(buf[:n])
		if rerr != nil && n == 0 {
			err = rerr
			break
		}
	}
	if strings.HasSuffix(out.String(), "ready\n") {
		c.proc = cmd
		return nil
	}
	cmd.Process.Kill()
	cmd.Wait()
	said := strings.TrimSpace(out.String())
	if strings.Contains(said, ErrRunning.Error()) {
		return ErrRunning
	}
	if said == "" && err != nil && !errors.Is(err, io.EOF) {
		said = err.Error()
	}
	return fmt.Errorf("start keeper (%s): it ended before it was ready (%v): %s", strings.Join(argv, " "), cmd.ProcessState, said)
}

// answerTimeout is how long a keeper may take for an answer; it takes
// microseconds unless it is stopped.
const answerTimeout = 10 * time.Second

// errGone is a request that got no answer because the keeper has gone.
var errGone = errors.New("the keeper is gone")

// conn is one connection. A goroutine reads it all the time, so that the
// keeper's end is noticed at once.
type conn struct {
	p       *packets
	answers chan answer
	gone    chan struct{} // closed when nothing can be read any more
	err     error         // why; valid when gone is closed
	// replaced is closed, by watch, when the client has another connection
	// or is closed.
	replaced chan struct{}
	quit     chan struct{} // closed by close
	once     sync.Once
}

type answer struct {
	m   message
	fds []int
	err error
}

func dial(ctx context.Context, socket string) (*conn, int, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, 0, err
	}
	c := &conn{p: newPackets(nc.(*net.UnixConn)), answers: make(chan answer), gone: make(chan struct{}),
		replaced: make(chan struct{}), quit: make(chan struct{})}
	go c.read()
	m, _, err := c.ask(ctx, message{kind: kindHello, lowest: minVersion, highest: Version})
	if err == nil && m.kind != kindWelcome {
		err = fmt.Errorf("keeper answers Hello with a message of type %d", m.kind)
	}
	if err != nil {
		c.close()
		return nil, 0, err
	}
	return c, int(m.pid), nil
}

// read is conn's goroutine; it ends with close, or before.
func (c *conn) read() {
	defer close(c.gone)
	for {
		m, fds, err := c.p.receive()
		var unknown unknownKind
		if err != nil && !errors.As(err, &unknown) && !errors.Is(err, errTruncated) {
			c.err = err
			return
		}
		select {
		case c.answers <- answer{m, fds, err}:
		case <-c.quit:
			closeAll(fds)
			c.err = ErrClosed
			return
		}
	}
}

// close ends the connection and waits for its goroutine.
func (c *conn) close() {
	c.once.Do(func() {
		close(c.quit)
		c.p.c.Close()
	})
	<-c.gone
}

// ask sends a request and returns its answer.
func (c *conn) ask(ctx context.Context, m message, fds ...int) (message, []int, error) {
	if err := c.p.send(m, fds...); err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed) {
			err = errGone
		}
		return message{}, nil, err
	}
	return c.answer(ctx)
}

func (c *conn) answer(ctx context.Context) (message, []int, error) {
	select {
	case a := <-c.answers:
		if a.err != nil {
			return message{}, nil, a.err
		}
		if a.m.kind == kindError {
			return message{}, nil, keeperError(a.m)
		}
		return a.m, a.fds, nil
	case <-c.gone:
		return message{}, nil, errGone
	case <-ctx.Done():
		return message{}, nil, ctx.Err()
	}
}

func keeperError(m message) error {
	switch m.code {
	case codeBusy:
		return ErrBusy
	case codeNotEmpty:
		return fmt.Errorf("%w: %s", ErrNotEmpty, m.text)
	}
	return errors.New(m.text)
}

func (c *conn) put(ctx context.Context, name string, f *os.File) error {
	if _, err := f.Stat(); errors.Is(err, os.ErrClosed) {
		return err
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var aerr error
	err = rc.Control(func(fd uintptr) {
		_, _, aerr = c.ask(ctx, message{kind: kindPut, name: name}, int(fd))
	})
	if err != nil {
		return err
	}
	return aerr
}

// all returns everything the keeper holds.
func (c *conn) all(ctx context.Context) (map[string]*os.File, error) {
	files := map[string]*os.File{}
	m, fds, err := c.ask(ctx, message{kind: kindAll})
	for {
		if err == nil && (m.kind != kindItems || len(m.names) != len(fds)) {
			closeAll(fds)
			err = fmt.Errorf("keeper answers with a message of type %d, %d names and %d descriptors", m.kind, len(m.names), len(fds))
		}
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			return nil, err
		}
		for i, name := range m.names {
			files[name] = os.NewFile(uintptr(fds[i]), name)
		}
		if !m.more {
			return files, nil
		}
		m, fds, err = c.answer(ctx)
	}
}
