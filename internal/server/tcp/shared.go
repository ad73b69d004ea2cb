package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Conn is a connection whose sending has a price: what is sent by the kernel for one client takes processors from others.
type Conn struct {
	*net.TCPConn
	raw syscall.RawConn
	pay atomic.Pointer[func() (end func())]
}

const (
	// sharedBytes is what is sent between two payments: some 50 µs of a processor.
	sharedBytes = 128 << 10
	// freeBytes is what is sent for nothing.
	freeBytes = 8 << 10
)

type connKey struct{}

// Pay has the connection of a request pay for what it sends from now on: pay is called before each piece, and end after it. The
// connection does not wait between them. It does nothing where the connection is of no Listener that is Shared.
func Pay(ctx context.Context, pay func() (end func())) {
	if c, ok := ctx.Value(connKey{}).(*Conn); ok {
		c.pay.Store(&pay)
	}
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (sent int, err error) {
	pay := c.pay.Load()
	if pay == nil || len(b) <= freeBytes {
		return c.TCPConn.Write(b)
	}
	err = c.send(*pay, func(fd int) (more bool, err error) {
		n, err := unix.Write(fd, b[sent:min(len(b), sent+sharedBytes)])
		sent += max(0, n)
		return sent < len(b), err
	})
	return sent, err
}

// ReadFrom sends a file by sendfile(2), as net.TCPConn does.
func (c *Conn) ReadFrom(src io.Reader) (sent int64, err error) {
	pay := c.pay.Load()
	if pay == nil {
		return c.TCPConn.ReadFrom(src)
	}
	file, left, limits := fileOf(src)
	if file == nil {
		return io.Copy(struct{ io.Writer }{c}, src)
	}
	var serr error
	if err := file.Read(func(in uintptr) bool {
		serr = c.send(*pay, func(fd int) (more bool, err error) {
			if left <= 0 {
				return false, nil
			}
			n, err := unix.Sendfile(fd, int(in), nil, int(min(left, sharedBytes)))
			if n > 0 {
				sent += int64(n)
				left -= int64(n)
			}
			return err != nil || n > 0, err
		})
		return true
	}); err != nil {
		return sent, err
	}
	for _, l := range limits {
		l.N -= sent
	}
	if sent == 0 && (errors.Is(serr, unix.EINVAL) || errors.Is(serr, unix.ENOSYS)) { // no file that can be sent so
		return io.Copy(struct{ io.Writer }{c}, src)
	}
	return sent, serr
}

// fileOf returns the file that src reads, how much of it, and what counts that; nil: it reads something else.
func fileOf(src io.Reader) (file syscall.RawConn, left int64, limits []*io.LimitedReader) {
	left = 1<<63 - 1
	for {
		switch r := src.(type) {
		case *io.LimitedReader:
			left = min(left, r.N)
			limits = append(limits, r)
			src = r.R
			continue
		case *net.TCPConn, *net.UnixConn:
			return nil, 0, nil
		case syscall.Conn:
			raw, err := r.SyscallConn()
			if err != nil {
				return nil, 0, nil
			}
			return raw, left, limits
		}
		return nil, 0, nil
	}
}

// send calls one, which sends some without waiting, until nothing more is to be sent. It waits for the client between payments.
func (c *Conn) send(pay func() (end func()), one func(fd int) (more bool, err error)) error {
	var failed error
	err := c.raw.Write(func(fd uintptr) (done bool) {
		for {
			end := pay()
			more, err := one(int(fd))
			end()
			switch {
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				return false
			case err != nil:
				failed = &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError("write", err)}
				return true
			case !more:
				return true
			}
		}
	})
	if failed != nil {
		return failed
	}
	return err
}
