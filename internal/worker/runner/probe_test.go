package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"testing"

	"hydrofoil.dev/foil/internal/worker/probe"
)

func TestProbes(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	serve := fmt.Sprintf("echo starting; sleep 0.1; mkdir -p /www; echo ok > /www/up; echo serving; exec busybox httpd -f -p %d -h /www", port)
	for _, network := range []Network{HostNetwork, NoNetwork} {
		for _, text := range []string{"stdout:^serv", fmt.Sprintf("tcp:%d", port), fmt.Sprintf("http:%d/up", port), "exec:cat /www/up"} {
			t.Run(string(network)+" "+text, func(t *testing.T) {
				b := newBed(t)
				for _, name := range []string{"mkdir", "httpd"} {
					b.link(t, name)
				}
				b.configure(t, sh(serve), SpecOptions{Net: network})
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				p, err := probe.Parse(text)
				if err != nil {
					t.Fatal(err)
				}
				var out bytes.Buffer
				c, err := b.Start(ctx, b.id, b.dir, IO{Stdout: p.Writer(&out)})
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if err := p.Wait(ctx, c); err != nil {
					t.Error(err)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestProbeOfAContainerThatFails(t *testing.T) {
	for _, text := range []string{"exit", "stdout:never", "tcp:1", "http:1/", "exec:false"} {
		t.Run(text, func(t *testing.T) {
			b := newBed(t)
			b.configure(t, sh("exit 3"), SpecOptions{Net: NoNetwork})
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			p, err := probe.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			var waited error
			code, err := b.Run(ctx, RunOptions{ID: b.id, Dir: b.dir, IO: IO{Stdout: p.Writer(nil)}, Started: func(c *Container) {
				waited = p.Wait(ctx, c)
			}})
			if err != nil || code != 3 || !errors.Is(waited, probe.ErrExited) {
				t.Errorf("exit code %d, %v, probe: %v", code, err, waited)
			}
		})
	}
}
