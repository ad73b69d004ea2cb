package runner

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func (b *bed) spec(t *testing.T, script string, o SpecOptions) *specs.Spec {
	t.Helper()
	o.ID, o.Dir, o.Rootfs = b.id, b.dir, b.rootfs
	s, err := Spec(ocispec.Image{Config: sh(script)}, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// left fails the test if runc knows a container.
func (b *bed) left(t *testing.T) {
	t.Helper()
	list, err := b.List(t.Context())
	if err != nil || len(list) != 0 {
		t.Errorf("runc knows %+v, %v", list, err)
	}
}

// A start that begins before its configuration is known ends as any other, also with a
// configuration that no pipe holds, and if runc is so slow that it finds the file.
func TestBegin(t *testing.T) {
	large := []string{"A=" + strings.Repeat("a", 100<<10), "B=" + strings.Repeat("b", 100<<10)}
	const slow = `#!/bin/sh
while [ -L "$(dirname "$0")/bundle/config.json" ]; do sleep 0.01; done
exec runc "$@"
`
	for _, test := range []struct {
		name string
		env  []string
		tty  bool
		slow bool
	}{
		{name: "pipe"}, {name: "large", env: large}, {name: "terminal", tty: true},
		{name: "slow", slow: true}, {name: "slow and large", slow: true, env: large},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBed(t)
			if test.slow {
				b.Command = filepath.Join(filepath.Dir(b.dir), "slow-runc")
				if err := os.WriteFile(b.Command, []byte(slow), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			var out bytes.Buffer
			s, err := b.Begin(ctx, b.id, b.dir, IO{Stdout: &out, TTY: test.tty})
			if err != nil {
				t.Fatal(err)
			}
			c, err := s.Configure(b.spec(t, "echo ${#A} ${#B}; exit 7", SpecOptions{Env: test.env, TTY: test.tty}))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if fi, err := os.Lstat(filepath.Join(b.dir, configName)); err != nil || !fi.Mode().IsRegular() {
				t.Errorf("config.json: %v, %v", fi, err)
			}
			code, err := c.Wait(ctx)
			want := "0 0\n"
			if test.env != nil {
				want = "102400 102400\n"
			}
			if got := strings.ReplaceAll(out.String(), "\r", ""); err != nil || code != 7 || got != want {
				t.Errorf("code %d, %v, output %q, want %q", code, err, got, want)
			}
		})
	}
}

// Nothing is left of a start that comes to nothing, whatever the reason.
func TestBegunForNothing(t *testing.T) {
	begin := func(t *testing.T, ctx context.Context) (*bed, *Starting) {
		t.Helper()
		b := newBed(t)
		s, err := b.Begin(ctx, b.id, b.dir, IO{})
		if err != nil {
			t.Fatal(err)
		}
		return b, s
	}
	t.Run("aborted", func(t *testing.T) {
		b, s := begin(t, t.Context())
		if err := s.Abort(); err != nil {
			t.Error(err)
		}
		b.left(t)
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		b, s := begin(t, ctx)
		cancel()
		if c, err := s.Configure(b.spec(t, "sleep 1000", SpecOptions{})); !errors.Is(err, context.Canceled) {
			t.Errorf("container %v, error %v", c, err)
		}
		b.left(t)
	})
	// As when the process that was to configure it is killed: its end of the pipe closes.
	t.Run("orphaned", func(t *testing.T) {
		b, s := begin(t, t.Context())
		if err := s.config.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.cmd.Wait(); err == nil {
			t.Error("runc ended well without a configuration")
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
		b.left(t)
	})
	t.Run("bad configuration", func(t *testing.T) {
		b, s := begin(t, t.Context())
		spec := b.spec(t, "true", SpecOptions{})
		spec.Process.Args = []string{"/no/such/program"}
		if _, err := s.Configure(spec); err == nil || !strings.Contains(err.Error(), "/no/such/program") {
			t.Errorf("error %v", err)
		}
		b.left(t)
	})
	t.Run("no runc", func(t *testing.T) {
		b := newBed(t)
		b.Command = "no-such-runc"
		if _, err := b.Begin(t.Context(), b.id, b.dir, IO{}); err == nil || !strings.Contains(err.Error(), "runc is not installed") {
			t.Errorf("error %v", err)
		}
		b.Command = ""
	})
}
