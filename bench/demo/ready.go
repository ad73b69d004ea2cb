package demo

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/link"
)

// A readiness tells when a container at the edge does what it is there for. It
// is the same for both contestants and looks from outside, over the loopback of
// the edge: whoever starts the container has no say.
type readiness struct {
	probe string // as foil run takes it
	try   func(ctx context.Context, conn net.Conn) bool
	port  string
}

// parseReadiness takes a probe that can be looked at from outside. redis means
// that a PING must be answered, for which foil's own probe is the open port.
func parseReadiness(probe string, redis bool) (readiness, error) {
	kind, rest, _ := strings.Cut(probe, ":")
	port, path, _ := strings.Cut(rest, "/")
	r := readiness{probe: probe, port: port}
	switch {
	case kind == "tcp" && port != "" && redis:
		r.try = tryRedis
	case kind == "tcp" && port != "":
		r.try = func(context.Context, net.Conn) bool { return true }
	case kind == "http" && port != "":
		r.try = func(ctx context.Context, conn net.Conn) bool { return tryHTTP(conn, "/"+path) }
	case kind == "exit" && rest == "":
	default:
		return r, fmt.Errorf("demo: probe %q: what can be looked at from outside is tcp:PORT, http:PORT/PATH and exit", probe)
	}
	return r, nil
}

// wait returns when the container is ready that p runs in the foreground.
func (r readiness) wait(ctx context.Context, l *link.Link, p *process) error {
	if r.try == nil {
		select {
		case <-p.done:
			if p.err != nil {
				return fmt.Errorf("demo: %s: %w%s", p.name, p.err, p.said())
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("demo: wait for the container's end: %w", context.Cause(ctx))
		}
	}
	return p.until(ctx, "wait for "+r.probe, func() bool {
		conn, err := l.DialContext(ctx, link.Edge, "tcp4", "127.0.0.1:"+r.port)
		if err != nil {
			return false
		}
		defer conn.Close()
		// One that accepts and does not answer yet has until the next try.
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		return r.try(ctx, conn)
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
