package site

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// WaitWithin is Wait for a container in a network namespace of its own, at path, whose loopback it asks
// every so often. The probe must be one that asks over a network.
func (r Readiness) WaitWithin(ctx context.Context, path string, every time.Duration, p *Process) error {
	if !r.Network() {
		return fmt.Errorf("bench: probe %s does not ask over a network", r.Probe)
	}
	result := make(chan error, 1)
	go func() {
		// The thread stays in the namespace, and ends with the goroutine.
		runtime.LockOSThread()
		result <- r.askWithin(ctx, path, every, p)
	}()
	return <-result
}

func (r Readiness) askWithin(ctx context.Context, path string, every time.Duration, p *Process) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bench: open %s: %w", path, err)
	}
	err = errors.Join(unix.Setns(fd, unix.CLONE_NEWNET), unix.Close(fd))
	if err != nil {
		return fmt.Errorf("bench: enter %s: %w", path, err)
	}
	what := "wait for " + r.Probe
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if conn, err := net.DialTimeout("tcp4", net.JoinHostPort("127.0.0.1", r.port), 5*time.Second); err == nil {
			_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
			ready := r.try(ctx, conn)
			conn.Close()
			if ready {
				return nil
			}
		}
		select {
		case <-p.Done:
			return p.endedEarly(what)
		case <-ctx.Done():
			return p.gaveUp(ctx, what)
		case <-ticker.C:
		}
	}
}
