package probe

import (
	"bufio"
	"context"
	"fmt"
	"net"
	nethttp "net/http"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// answerTimeout bounds one HTTP request. It is long: a server that waits for
// bytes of its image is not to be asked again and again meanwhile.
const answerTimeout = 30 * time.Second

// loopbacks are tried in this order.
var loopbacks = []string{"127.0.0.1", "::1"}

// inNetworkOf calls fn in the network namespace of a process. fn must not hand
// its dialing to other goroutines.
func inNetworkOf(pid int, fn func() error) error {
	name := fmt.Sprintf("/proc/%d/ns/net", pid)
	var own, other unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &own); err != nil {
		return &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/net", Err: err}
	}
	ns, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrExited, err)
	}
	defer ns.Close()
	if err := unix.Fstat(int(ns.Fd()), &other); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if own.Dev == other.Dev && own.Ino == other.Ino {
		return fn()
	}
	return <-onOwnThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the container's network namespace: %w", err)
		}
		return fn()
	})
}

// onOwnThread calls fn on a thread that ends with it, so that no other goroutine
// can find itself in the wrong namespace.
func onOwnThread(fn func() error) <-chan error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread never ends: it would stay in the namespace,
			// and it is what /proc/self shows. Kept busy, it is not the one
			// that the next goroutine gets.
			defer runtime.UnlockOSThread()
			result <- <-onOwnThread(fn)
			return
		}
		// Never unlocked: this is what ends the thread.
		result <- fn()
	}()
	return result
}

// dial connects to the port on a loopback address. The address is a literal and
// of one family, so that the socket is made by the calling thread.
func (p *Probe) dial(ctx context.Context) (net.Conn, error) {
	var err error
	for _, ip := range loopbacks {
		var conn net.Conn
		var d net.Dialer
		conn, err = d.DialContext(ctx, "tcp", net.JoinHostPort(ip, fmt.Sprint(p.port)))
		if err == nil {
			return conn, nil
		}
	}
	return nil, err
}

func (p *Probe) tryTCP(ctx context.Context) bool {
	conn, err := p.dial(ctx)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

func (p *Probe) tryHTTP(ctx context.Context) bool {
	conn, err := p.dial(ctx)
	if err != nil {
		return false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if conn.SetDeadline(time.Now().Add(answerTimeout)) != nil {
		return false
	}
	// Not by net/http's client: its transport dials from other goroutines.
	req, err := nethttp.NewRequestWithContext(ctx, nethttp.MethodGet, fmt.Sprintf("http://localhost:%d%s", p.port, p.path), nil)
	if err != nil {
		return false
	}
	req.Close = true
	if req.Write(conn) != nil {
		return false
	}
	resp, err := nethttp.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode >= 200 && resp.StatusCode < 400
}
