package site

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/link"
)

// Readiness tells when a container at the edge does what it is there for. It
// is the same for all engines and looks from outside, over the loopback of the
// edge or at what the container writes: whoever starts it has no say.
type Readiness struct {
	Probe string // as foil run takes it
	try   func(ctx context.Context, conn net.Conn) bool
	port  string
	line  *regexp.Regexp
	exec  string // a command for the container's shell
}

// ParseReadiness takes a probe that can be looked at from outside. redis means
// that a PING must be answered, for which foil's own probe is the open port.
func ParseReadiness(probe string, redis bool) (Readiness, error) {
	kind, rest, _ := strings.Cut(probe, ":")
	port, path, _ := strings.Cut(rest, "/")
	r := Readiness{Probe: probe, port: port}
	switch {
	case kind == "tcp" && port != "" && redis:
		r.try = tryRedis
	case kind == "tcp" && port != "":
		r.try = func(context.Context, net.Conn) bool { return true }
	case kind == "http" && port != "":
		r.try = func(ctx context.Context, conn net.Conn) bool { return tryHTTP(conn, "/"+path) }
	case kind == "exit" && rest == "":
	case kind == "exec" && rest != "":
		r.port, r.exec = "", rest
	case kind == "stdout" && rest != "":
		line, err := regexp.Compile("(?m)" + rest)
		if err != nil {
			return r, fmt.Errorf("bench: probe %q: %w", probe, err)
		}
		r.port, r.line = "", line
	default:
		return r, fmt.Errorf("bench: probe %q: what can be looked at from outside is tcp:PORT, http:PORT/PATH, exec:CMD, stdout:REGEX and exit", probe)
	}
	return r, nil
}

// Network reports whether readiness is asked for over a network.
func (r Readiness) Network() bool { return r.try != nil }

// Ends reports whether the container is ready by its end.
func (r Readiness) Ends() bool { return r.try == nil && r.line == nil && r.exec == "" }

// Wait returns when the container is ready that p runs in the foreground.
func (r Readiness) Wait(ctx context.Context, l *link.Link, p *Process) error {
	if r.line != nil {
		return r.waitLine(ctx, p)
	}
	if r.exec != "" {
		return r.waitExec(ctx, p)
	}
	if r.try == nil {
		select {
		case <-p.Done:
			if p.Err != nil {
				return fmt.Errorf("bench: %s: %w%s", p.name, p.Err, p.Said())
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("bench: wait for the container's end: %w", context.Cause(ctx))
		}
	}
	k, err := newKnocker(l, r.port)
	if err != nil {
		return err
	}
	return r.waitNetwork(ctx, k, p)
}

// waitExec runs the probe's command in the container, over and over. It enters
// all namespaces and the root of the container's first process, whoever made
// them, with that process's environment.
func (r Readiness) waitExec(ctx context.Context, p *Process) error {
	if p.Init == nil {
		return fmt.Errorf("bench: wait for %s: %s runs no container to enter", r.Probe, p.name)
	}
	return p.Until(ctx, "wait for "+r.Probe, func() bool {
		pid, err := p.Init(ctx)
		if err != nil {
			return false
		}
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			return false
		}
		enter := []string{"--target", strconv.Itoa(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd"}
		cmd := exec.CommandContext(ctx, "nsenter", append(enter, "--", "/bin/sh", "-c", r.exec)...)
		cmd.Env = strings.Split(strings.TrimRight(string(environment), "\x00"), "\x00")
		cmd.WaitDelay = time.Second
		return cmd.Run() == nil
	})
}

func tryRedis(_ context.Context, conn net.Conn) bool {
	if _, err := io.WriteString(conn, "PING\r\n"); err != nil {
		return false
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && strings.TrimSpace(answer) == "+PONG"
}

func tryHTTP(conn net.Conn, path string) bool {
	request, err := http.NewRequest(http.MethodGet, "http://localhost"+path, nil)
	if err != nil || request.Write(conn) != nil {
		return false
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode < 400
}
