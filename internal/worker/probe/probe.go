// Package probe tells when a container is ready.
//
// A probe is written as
//
//	exit            its first process has ended, with exit code 0
//	stdout:REGEX    it has written a line that REGEX (RE2) matches; a line that
//	                is not finished counts as well
//	tcp:PORT        something accepts connections on PORT of its loopback
//	http:PORT/PATH  GET of PATH there answers with a status from 200 to 399
//	exec:CMD        /bin/sh -c CMD, run in it, ends with exit code 0
//
// tcp and http look from within the container's network namespace. With the
// host's network whatever listens on the port counts, also when it was there
// before.
package probe

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Probe is one test of readiness. Make one with Parse; it serves one container.
type Probe struct {
	text string
	kind kind
	port uint16
	path string         // of http, with its slash
	cmd  string         // of exec
	re   *regexp.Regexp // of stdout

	seen  chan struct{} // closed when re has matched
	ready sync.Once     // closes seen
}

type kind int

const (
	exit kind = iota
	stdout
	tcp
	http
	exec
)

// Parse reads the form that the package comment describes.
func Parse(s string) (*Probe, error) {
	p, err := parse(s)
	if err != nil {
		return nil, fmt.Errorf("probe %q: %w (probes are exit, stdout:REGEX, tcp:PORT, http:PORT/PATH and exec:CMD)", s, err)
	}
	return p, nil
}

func parse(s string) (*Probe, error) {
	p := &Probe{text: s, seen: make(chan struct{})}
	name, arg, hasArg := strings.Cut(s, ":")
	if name != "exit" && arg == "" {
		if hasArg {
			return nil, errors.New("nothing after the colon")
		}
		return nil, errors.New("unknown kind, or nothing after it")
	}
	var err error
	switch name {
	case "exit":
		if hasArg {
			return nil, errors.New("exit takes no argument")
		}
		p.kind = exit
	case "stdout":
		p.kind = stdout
		p.re, err = regexp.Compile(arg)
	case "tcp":
		p.kind = tcp
		p.port, err = parsePort(arg)
	case "http":
		p.kind = http
		port, path, _ := strings.Cut(arg, "/")
		p.path = "/" + path
		if strings.ContainsAny(path, " \r\n") {
			return nil, errors.New("a path must have no spaces")
		}
		p.port, err = parsePort(port)
	case "exec":
		p.kind, p.cmd = exec, arg
	default:
		err = errors.New("unknown kind")
	}
	return p, err
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is no port: want 1 to 65535", s)
	}
	return uint16(n), nil
}

// String returns the probe as it was parsed.
func (p *Probe) String() string { return p.text }

// ErrExited is returned, wrapped, by Wait when the container has ended and was
// not ready before.
var ErrExited = errors.New("the container has ended before it was ready")

// Container is what a probe looks at: a *runner.Container.
type Container interface {
	PID() int              // of its first process
	Done() <-chan struct{} // closed when it has ended
	Wait(context.Context) (exitCode int, err error)
	// Exec runs a command in it and returns its exit code.
	Exec(ctx context.Context, args []string) (exitCode int, err error)
}

// Intervals between two tries grow from the first to the second. A try of exec
// starts processes; one of tcp costs little more than a system call.
var intervals = map[kind][2]time.Duration{
	tcp:  {time.Millisecond, 10 * time.Millisecond},
	http: {2 * time.Millisecond, 50 * time.Millisecond},
	exec: {5 * time.Millisecond, 200 * time.Millisecond},
}

// Wait blocks until the container is ready (nil). Errors: ErrExited; that of
// ctx when it ends first. For stdout probes the container's output must go
// through Writer.
func (p *Probe) Wait(ctx context.Context, c Container) error {
	if err := p.wait(ctx, c); err != nil {
		return fmt.Errorf("wait for probe %s: %w", p, err)
	}
	return nil
}

func (p *Probe) wait(ctx context.Context, c Container) error {
	switch p.kind {
	case exit:
		code, err := c.Wait(ctx)
		if err == nil && code != 0 {
			err = fmt.Errorf("%w: exit code %d", ErrExited, code)
		}
		return err
	case stdout:
		select {
		case <-p.seen:
			return nil
		case <-c.Done():
			// Done means that all output has been written.
			select {
			case <-p.seen:
				return nil
			default:
				return ErrExited
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	watcher := make(chan struct{})
	go func() {
		defer close(watcher)
		select {
		case <-c.Done():
			cancel(ErrExited)
		case <-stop:
		}
	}()
	defer func() { close(stop); <-watcher }()

	if p.kind == exec {
		return p.poll(ctx, func() bool {
			code, err := c.Exec(ctx, []string{"/bin/sh", "-c", p.cmd})
			return err == nil && code == 0
		})
	}
	return inNetworkOf(c.PID(), func() error {
		return p.poll(ctx, func() bool {
			if p.kind == tcp {
				return p.tryTCP(ctx)
			}
			return p.tryHTTP(ctx)
		})
	})
}

// poll calls try until it returns true or ctx ends.
func (p *Probe) poll(ctx context.Context, try func() bool) error {
	interval, longest := intervals[p.kind][0], intervals[p.kind][1]
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
		if try() {
			return nil
		}
		timer.Reset(interval)
		interval = min(interval*5/4, longest)
	}
}
