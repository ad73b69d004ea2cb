package bundles

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// direct is a connection that a stream has taken over from the HTTP server for
// its frames, which then go from the packs' files to the network by sendfile(2):
// the processor does not touch them. That is possible where the connection
// carries nothing else and nothing is encrypted: with HTTP/1.1 without TLS, as a
// proxy that has TLS and workers in front of it speaks. The response goes on in
// chunks (RFC 9112, section 7.1), of which each carries one or more sections.
//
// System calls of a frame: sendmsg (MSG_MORE) of the end of the chunk before and
// the heads of this one and of the section, sendfile.
type direct struct {
	conn *net.TCPConn
	raw  syscall.RawConn
	most time.Duration
	head []byte // what the next chunk begins with: the end of the last one
	sent func(int64)
	err  error // the first one: what was sent may end in the middle of a section
}

// errShort is returned, wrapped, when a pack has become shorter than it was.
var errShort = fmt.Errorf("the pack ends too soon: %w", errDamaged)

// takeOver makes a stream of p direct; nil when that cannot be.
func (h *Handler) takeOver(p *patient, r *http.Request) (*direct, error) {
	if h.o.GiveBack == nil || !r.ProtoAtLeast(1, 1) || r.ProtoMajor != 1 || r.TLS != nil {
		return nil, nil
	}
	c, buffered, err := p.rc.Hijack()
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("take over the connection: %w", err)
	}
	d := &direct{most: p.most, sent: func(int64) {}}
	if counter, ok := p.w.(interface{ Sent(int64) }); ok {
		d.sent = counter.Sent
	}
	conn, ok := c.(*net.TCPConn)
	if ok {
		d.conn = conn
		d.raw, err = conn.SyscallConn()
	}
	// A client that sends the next request before it has the answer would have to
	// be given what was read of it: none does.
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("take over the connection of %s: %w", r.RemoteAddr, err)
	}
	if n := buffered.Reader.Buffered(); !ok || n > 0 {
		c.Close()
		return nil, fmt.Errorf("take over the connection of %s: it is a %T, and %d bytes of another request have come", r.RemoteAddr, c, n)
	}
	if !h.direct.add(d) {
		c.Close()
		return nil, errors.New("take over the connection: the server ends")
	}
	return d, nil
}

// chunk begins a chunk of n bytes.
func (d *direct) chunk(n int) {
	d.head = append(strconv.AppendInt(d.head, int64(n), 16), "\r\n"...)
}

// patience sets how long what is sent next may take.
func (d *direct) patience() { _ = d.conn.SetWriteDeadline(time.Now().Add(d.most)) }

// small is the size of writes that wait for the next one, or Flush.
const small = 4 << 10

// Write sends b as a chunk.
func (d *direct) Write(b []byte) (int, error) {
	if d.err != nil || len(b) == 0 {
		return 0, d.err // an empty chunk would be the end
	}
	d.chunk(len(b))
	n := len(b)
	if n <= small {
		d.head = append(append(d.head, b...), "\r\n"...)
		d.sent(int64(n))
		return n, nil
	}
	for len(b) > 0 {
		d.patience()
		part := b[:min(len(b), patientBytes)]
		b = b[len(part):]
		out := net.Buffers{d.head, part}
		if _, d.err = out.WriteTo(d.conn); d.err != nil {
			return 0, d.err
		}
		d.head = d.head[:0]
	}
	d.head = append(d.head, "\r\n"...)
	d.sent(int64(n))
	return n, nil
}

// Flush sends what waits.
func (d *direct) Flush() error {
	if d.err != nil || len(d.head) == 0 {
		return d.err
	}
	d.patience()
	_, d.err = d.conn.Write(d.head)
	d.head = d.head[:0]
	return d.err
}

// frame sends a Frame section: length bytes of file, from offset on.
func (d *direct) frame(index uint32, file *os.File, offset int64, length int) (err error) {
	if d.err != nil {
		return writeFailed{d.err}
	}
	defer func() { d.err = err }()
	n := len(bundle.AppendFrameHead(nil, index, length))
	d.chunk(n + length)
	d.head = bundle.AppendFrameHead(d.head, index, length)
	d.patience()
	if err := d.more(d.head); err != nil {
		return writeFailed{err}
	}
	for left := length; left > 0; {
		d.patience()
		m, err := d.sendFile(file, offset, min(left, patientBytes))
		if err != nil {
			return err
		}
		left, offset = left-m, offset+int64(m)
	}
	d.head = append(d.head[:0], "\r\n"...)
	d.sent(int64(n + length))
	return nil
}

// more sends b, after which more comes at once.
func (d *direct) more(b []byte) error {
	for len(b) > 0 {
		var n int
		var err error
		werr := d.raw.Write(func(fd uintptr) bool {
			n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_MORE|unix.MSG_NOSIGNAL)
			return err != unix.EAGAIN
		})
		switch {
		case werr != nil:
			return werr
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("sendmsg", err)
		default:
			b = b[n:]
		}
	}
	return nil
}

// sendFile sends at most n bytes of file. What the file is to blame for is
// errDamaged, all else writeFailed.
func (d *direct) sendFile(file *os.File, offset int64, n int) (m int, err error) {
	rerr := fileControl(file, func(src uintptr) {
		for {
			werr := d.raw.Write(func(fd uintptr) bool {
				at := offset
				m, err = unix.Sendfile(int(fd), int(src), &at, n)
				return err != unix.EAGAIN
			})
			if werr != nil {
				m, err = 0, writeFailed{werr}
				return
			}
			switch {
			case err == unix.EINTR:
				continue
			case err == unix.EIO:
				m, err = 0, fmt.Errorf("%w: %w", errDamaged, os.NewSyscallError("sendfile", err))
			case err != nil:
				m, err = 0, writeFailed{os.NewSyscallError("sendfile", err)}
			case m == 0:
				err = errShort
			}
			return
		}
	})
	if err == nil {
		err = rerr
	}
	return m, err
}

// fileControl calls fn with a file's descriptor.
func fileControl(file *os.File, fn func(fd uintptr)) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(fn)
}

// end ends the response.
func (d *direct) end() error {
	d.head = append(d.head, "0\r\n\r\n"...)
	return d.Flush()
}

// taken are the connections that were taken over. The HTTP server does not know
// of them any more, so that Drain has to wait for them.
type taken struct {
	mu    sync.Mutex
	conns map[*direct]struct{} // guarded by mu; a connection that was given back may be here twice
	over  bool                 // guarded by mu: none may be added
	none  chan struct{}        // guarded by mu: closed when conns is empty; nil if nobody waits
}

func (t *taken) add(c *direct) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return false
	}
	if t.conns == nil {
		t.conns = map[*direct]struct{}{}
	}
	t.conns[c] = struct{}{}
	return true
}

func (t *taken) remove(c *direct) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, c)
	if len(t.conns) == 0 && t.none != nil {
		close(t.none)
		t.none = nil
	}
}

// Drain waits for the streams that have taken their connections over from the
// HTTP server, which must have been shut down, and cuts those off that go on
// when ctx ends.
func (h *Handler) Drain(ctx context.Context) {
	t := &h.direct
	t.mu.Lock()
	t.over = true
	if len(t.conns) == 0 {
		t.mu.Unlock()
		return
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	none := t.none
	t.mu.Unlock()
	select {
	case <-none:
		return
	case <-ctx.Done():
	}
	t.mu.Lock()
	for c := range t.conns {
		c.conn.Close()
	}
	t.mu.Unlock()
	<-none
}
