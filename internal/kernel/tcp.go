package kernel

import (
	"context"
	"fmt"
	"os"
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
