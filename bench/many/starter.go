package many

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// every is how often a service is asked whether it is ready: seldom enough that asking many takes little of
// the processors, and often enough for starts that take a second.
const every = 50 * time.Millisecond

// newNamespace makes a network namespace with a loopback, which ends with those of this process.
func newNamespace(ctx context.Context, name string) (path string, err error) {
	for _, args := range [][]string{{"netns", "add", name}, {"-n", name, "link", "set", "lo", "up"}} {
		if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("bench: ip %v: %w: %s", args, err, out)
		}
	}
	return filepath.Join("/run/netns", name), nil
}

// starter is a worker that starts services in namespaces of their own.
type starter interface {
	// start pulls the image and runs it in the foreground of the process that it returns.
	start(ctx context.Context, x *service) (*site.Process, error)
	// end ends what start started.
	end(x *service) error
	stop() error
}

// service is one start.
type service struct {
	id, namespace string
	image         engines.Image
	worker        starter
	process       *site.Process // nil: not started
}

// start returns when it is ready.
func (x *service) start(ctx context.Context) (err error) {
	if x.process, err = x.worker.start(ctx, x); err != nil {
		return err
	}
	return x.image.Ready.WaitWithin(ctx, x.namespace, every, x.process)
}

func (x *service) stop() error {
	if x.process == nil {
		return nil
	}
	return x.worker.end(x)
}

// newStarter makes an empty worker.
func newStarter(ctx context.Context, s *site.Site, p engines.Programs, name, dir string) (starter, error) {
	engine, err := engines.Named(name)
	if err != nil {
		return nil, err
	}
	w := engine.Worker(s, p, dir)
	if err := w.Start(ctx); err != nil {
		return nil, err
	}
	switch name {
	case "hydrofoil":
		return &foil{site: s, worker: w, program: p.Foil, root: dir}, nil
	case "overlayfs":
		ctr := "ctr"
		if p.Containerd != "" {
			ctr = filepath.Join(filepath.Dir(p.Containerd), "ctr")
		}
		return &overlayfs{site: s, worker: w, ctr: ctr, socket: filepath.Join(dir, "sock")}, nil
	}
	return nil, errors.Join(fmt.Errorf("bench: many starts are made by hydrofoil and overlayfs, not by %s", name), w.Stop())
}

// foil is a worker with foil node.
type foil struct {
	site          *site.Site
	worker        engines.Worker
	program, root string
}

func (w *foil) start(_ context.Context, x *service) (*site.Process, error) {
	args := []string{"--net=" + x.namespace, "--", w.program, "run", "--root", w.root, "--rm", "--plain-http", "--probe", x.image.Ready.Probe, "--name", x.id, x.image.Ref}
	if len(x.image.Command) > 0 {
		args = append(append(args, "--"), x.image.Command...)
	}
	return w.site.Start(link.Edge, nil, "nsenter", args...)
}

func (w *foil) end(x *service) error { return x.process.Stop(syscall.SIGTERM) }
func (w *foil) stop() error          { return w.worker.Stop() }

// overlayfs is a worker with containerd.
type overlayfs struct {
	site        *site.Site
	worker      engines.Worker
	ctr, socket string
}

func (w *overlayfs) args(args ...string) []string {
	return append([]string{"--address", w.socket, "--namespace", "bench"}, args...)
}

func (w *overlayfs) start(ctx context.Context, x *service) (*site.Process, error) {
	if _, err := w.site.Run(ctx, link.Edge, w.ctr, w.args("images", "pull", "--snapshotter", "overlayfs", "--plain-http", "--local", x.image.Ref)...); err != nil {
		return nil, err
	}
	args := w.args("run", "--rm", "--with-ns", "network:"+x.namespace, "--snapshotter", "overlayfs", x.image.Ref, x.id)
	return w.site.Start(link.Edge, nil, w.ctr, append(args, x.image.Command...)...)
}

func (w *overlayfs) end(x *service) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, site.ErrTooLong)
	defer cancel()
	_, err := w.site.Run(ctx, link.Edge, w.ctr, w.args("tasks", "kill", "--signal", "SIGKILL", x.id)...)
	select {
	case <-x.process.Done:
		return nil // by itself, perhaps meanwhile
	case <-ctx.Done():
		return errors.Join(err, fmt.Errorf("bench: container %s does not end%s", x.id, x.process.Said()))
	}
}

func (w *overlayfs) stop() error { return w.worker.Stop() }
