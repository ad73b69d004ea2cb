package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// BBR is the congestion control that a server wants (Linux 4.9). With the others a
// connection loses what it has learned of its path after an idle time of its
// retransmission timeout, some 200 ms and more, unless IdleRestart says otherwise.
const BBR = "bbr"

// UseCongestion has the named congestion control control a TCP socket, or what a
// listening one accepts, whatever the host's default is.
//
// Errors: unix.ENOENT if the kernel does not have it, and unix.EPERM if this
// process may not choose it (net.ipv4.tcp_allowed_congestion_control).
func UseCongestion(socket syscall.Conn, name string) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = useCongestion(int(fd), name) })
	if cerr != nil {
		return cerr
	}
	return err
}

func useCongestion(fd int, name string) error {
	if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
		return fmt.Errorf("choose congestion control %s: %w", name, err)
	}
	return nil
}

// FlightBytes is how much of one connection a long path may hold, in bytes: 1 Gbit/s at a
// round trip of 130 ms.
const FlightBytes = 16 << 20

// LetSend lets FlightBytes of a TCP socket, or of each that a listening one accepts, be in
// flight, whatever net.ipv4.tcp_wmem says: 4 MiB is Linux's default, 110 Mbit/s at most at a
// round trip of 300 ms. It takes memory for what is in flight only.
//
// Errors: unix.EPERM without CAP_NET_ADMIN, unless tcp_wmem allows as much.
func LetSend(socket syscall.Conn) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	return flight(raw, unix.SO_SNDBUFFORCE, "/proc/sys/net/ipv4/tcp_wmem")
}

// LetReceive lets FlightBytes be on their way to a TCP socket, whatever net.ipv4.tcp_rmem
// says: before Linux 6.16 that is 6 MiB, half of them for the kernel's own use. The socket must
// not be connected yet, since how large a window can be is agreed on then (RFC 7323, section 2).
//
// Errors: unix.EPERM without CAP_NET_ADMIN, unless tcp_rmem allows as much.
func LetReceive(raw syscall.RawConn) error {
	return flight(raw, unix.SO_RCVBUFFORCE, "/proc/sys/net/ipv4/tcp_rmem")
}

// flight sets an option, which the kernel doubles for its own use (socket(7)).
func flight(raw syscall.RawConn, option int, setting string) error {
	var err error
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, FlightBytes)
	}); cerr != nil {
		return cerr
	}
	if err == nil {
		return nil
	}
	most, rerr := mostBytes(setting)
	if rerr == nil && most >= 2*FlightBytes {
		return nil
	}
	return errors.Join(fmt.Errorf("raise the limit of a socket's buffer, %d bytes (%s): %w", most, setting, err), rerr)
}

// mostBytes is the last of the three numbers of tcp_wmem or tcp_rmem.
func mostBytes(setting string) (int64, error) {
	b, err := os.ReadFile(setting)
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b))
	if len(fields) != 3 {
		return 0, fmt.Errorf("%s: %q, want three numbers", setting, b)
	}
	return strconv.ParseInt(fields[2], 10, 64)
}

// FlightFix is what to do where a process may not do this.
const FlightFix = "give foil CAP_NET_ADMIN, or raise the limits on both hosts: sysctl -w net.ipv4.tcp_wmem='4096 16384 33554432' net.ipv4.tcp_rmem='4096 131072 33554432'"

func probeFlight(ctx context.Context, _ string) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		return "", err
	}
	return "", errors.Join(LetSend(l.(*net.TCPListener)), LetReceive(raw))
}

// BBRFix is what to do where there is no BBR.
const BBRFix = "on a host of foil serve: load the module (modprobe tcp_bbr), or else let idle connections keep their rate: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"

// IdleRestart reports whether connections without BBR begin slowly again after they
// were idle.
func IdleRestart() bool { return idleRestart("/proc/sys") }

func idleRestart(sysctls string) bool {
	b, err := os.ReadFile(sysctls + "/net/ipv4/tcp_slow_start_after_idle")
	return err != nil || strings.TrimSpace(string(b)) != "0"
}

func probeBBR(context.Context, string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	if err := useCongestion(fd, BBR); err != nil {
		if IdleRestart() {
			return "", err
		}
		return "none, but idle connections keep their rate", nil
	}
	return "", nil
}
