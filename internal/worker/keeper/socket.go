package keeper

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// packets sends and receives messages with descriptors on one connection.
type packets struct {
	c        *net.UnixConn
	buf, oob []byte
}

func newPackets(c *net.UnixConn) *packets {
	return &packets{c: c, buf: make([]byte, maxMessage), oob: make([]byte, unix.CmsgSpace(maxFDs*4))}
}

// errTruncated is a message whose descriptors did not all fit in this process.
var errTruncated = errors.New("receive descriptors: no more can be open (raise the limit of open files)")

// receive returns the next message and its descriptors, which are the
// caller's, and close-on-exec. It returns io.EOF when the other side is gone, a parse error
// with no descriptors, or errTruncated.
func (p *packets) receive() (message, []int, error) {
	n, oobn, flags, _, err := p.c.ReadMsgUnix(p.buf, p.oob)
	if err != nil {
		return message{}, nil, err
	}
	if n == 0 {
		return message{}, nil, io.EOF
	}
	fds, err := parseRights(p.oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errTruncated
	}
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("parse keeper message: longer than %d bytes", maxMessage)
	}
	var m message
	if err == nil {
		m, err = parseMessage(p.buf[:n])
	}
	if err != nil {
		closeAll(fds)
		return message{}, nil, err
	}
	return m, fds, nil
}

func parseRights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("receive descriptors: %w", err)
	}
	var fds []int
	for _, m := range msgs {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		got, err := unix.ParseUnixRights(&m)
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("receive descriptors: %w", err)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// send sends m with fds, which stay the caller's.
func (p *packets) send(m message, fds ...int) error {
	b := appendMessage(nil, m)
	if len(b) > maxMessage {
		return fmt.Errorf("send keeper message: %d bytes, more than %d", len(b), maxMessage)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := p.c.WriteMsgUnix(b, oob, nil)
	return err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// peer returns who is at the other end.
func peer(c *net.UnixConn) (*unix.Ucred, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	cerr := rc.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	return cred, errors.Join(cerr, err)
}
