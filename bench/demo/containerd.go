package demo

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
)

// fullPull is the baseline: containerd with its overlayfs snapshotter, which
// pulls every layer, unpacks it, and then starts the container.
type fullPull struct {
	demo   *demo
	dir    string
	daemon *process
	runs   int
}

func (d *demo) startContainerd(ctx context.Context) (*fullPull, error) {
	f := &fullPull{demo: d, dir: filepath.Join(d.dir, "containerd")}
	if err := os.MkdirAll(f.dir, 0o711); err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	// Nothing but what ctr needs; Kubernetes' plugin would look for a network.
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = %q\n[plugins.\"io.containerd.internal.v1.opt\"]\npath = %q\n",
		filepath.Join(f.dir, "root"), filepath.Join(f.dir, "state"), f.socket(), filepath.Join(f.dir, "opt"))
	path := filepath.Join(f.dir, "config.toml")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	daemon, err := d.start(link.Edge, nil, "containerd", "--config", path)
	if err != nil {
		return nil, err
	}
	f.daemon = daemon
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errTooLong)
	defer cancel()
	return f, daemon.until(ctx, "start containerd", func() bool {
		_, err := f.ctr(ctx, "version")
		return err == nil
	})
}

func (f *fullPull) socket() string { return filepath.Join(f.dir, "sock") }

func (f *fullPull) ctr(ctx context.Context, args ...string) (string, error) {
	return f.demo.run(ctx, link.Edge, "ctr", append([]string{"--address", f.socket(), "--namespace", "demo"}, args...)...)
}

func (f *fullPull) name() string { return "containerd, full pull" }

// pullAndRun is one measured run.
func (f *fullPull) pullAndRun(ctx context.Context, ref string, built *images.Built) (r result, err error) {
	f.runs++
	id := fmt.Sprintf("full-%d", f.runs)
	m := f.demo.measure()
	if _, err := f.ctr(ctx, "images", "pull", "--plain-http", "--snapshotter", "overlayfs", ref); err != nil {
		return r, err
	}
	args := []string{"--address", f.socket(), "--namespace", "demo", "run", "--rm", "--net-host", "--snapshotter", "overlayfs", ref, id}
	p, err := f.demo.start(link.Edge, nil, "ctr", append(args, f.demo.options.Command...)...)
	if err != nil {
		return r, err
	}
	defer func() {
		if stopErr := f.stopContainer(p, id); err == nil {
			err = stopErr
		}
	}()
	if err := f.demo.ready.wait(ctx, f.demo.link, p); err != nil {
		return r, err
	}
	r = m.ready()
	r.moved = m.moved() // a full pull has nothing left to move

	listed, err := f.ctr(ctx, "images", "list", "name=="+ref)
	if err != nil {
		return r, err
	}
	if !strings.Contains(listed, built.Digest.String()) {
		return r, fmt.Errorf("demo: containerd's %s is not %s:\n%s", ref, built.Digest, listed)
	}
	return r, nil
}

func (f *fullPull) stopContainer(p *process, id string) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, errTooLong)
	defer cancel()
	if _, err := f.ctr(ctx, "tasks", "kill", "--signal", "SIGKILL", id); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("demo: container %s does not end%s", id, p.said())
	}
}

// mounted calls fn with the path of an image's file tree, mounted for reading.
func (f *fullPull) mounted(ctx context.Context, ref string, fn func(tree string) error) (err error) {
	tree := filepath.Join(f.dir, "tree")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	if _, err := f.ctr(ctx, "images", "mount", "--snapshotter", "overlayfs", ref, tree); err != nil {
		return err
	}
	defer func() {
		_, unmountErr := f.ctr(context.WithoutCancel(ctx), "images", "unmount", "--rm", "--snapshotter", "overlayfs", tree)
		if err == nil {
			err = unmountErr
		}
	}()
	return fn(tree)
}

func (f *fullPull) stop() error { return f.daemon.stop(syscall.SIGTERM) }
