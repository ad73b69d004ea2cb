package kerneltest

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// SocketOption returns what a socket has for an option that is a number (getsockopt(2)).
func SocketOption(tb testing.TB, socket syscall.Conn, level, option int) int {
	tb.Helper()
	raw, err := socket.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	var got int
	cerr := raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), level, option) })
	if cerr != nil || err != nil {
		tb.Fatalf("option %d of level %d: %v, %v", option, level, cerr, err)
	}
	return got
}
