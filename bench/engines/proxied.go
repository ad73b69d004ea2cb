package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// proxied is a containerd whose snapshotter is a peer's daemon beside it, which
// fetches lazily what was prepared for that: images by a tag of their own.
type proxied struct {
	*containerdWorker
	root   string // of the daemon: what it has, its configuration and its sockets
	suffix string // of prepared images' tags
	grpc   *site.Process
}

func newProxied(s *site.Site, p Programs, dir, snapshotter, root, suffix string) proxied {
	w := proxied{
		containerdWorker: newContainerd(s, p, filepath.Join(dir, "containerd"), snapshotter),
		root:             filepath.Join(dir, root), suffix: suffix,
	}
	w.proxy = filepath.Join(w.root, "sock")
	return w
}

// findTransfer finds a containerd whose transfer service tells a snapshotter of
// which image a layer is, and a peer's programs, the first of which says its
// version.
func findTransfer(ctx context.Context, p Programs, names ...string) (said string, t tools, err error) {
	t, err = findContainerd(ctx, p)
	if err == nil && (t.major < 2 || t.major == 2 && t.minor < 1) {
		err = fmt.Errorf("bench: %s cannot tell snapshotters which image it pulls (2.1 can); say --containerd", t.version)
	}
	if err != nil {
		return "", t, err
	}
	paths, err := findPrograms(p, names...)
	if err != nil {
		return "", t, err
	}
	said, err = firstLine(ctx, paths[names[0]], "--version")
	return said, t, err
}

// findPrograms finds a peer's programs, by name.
func findPrograms(p Programs, names ...string) (paths map[string]string, err error) {
	paths = map[string]string{}
	for _, name := range names {
		if paths[name], err = find(p.Peers, name); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// launch starts the peer's daemon with a configuration, and containerd when it
// listens.
func (w *proxied) launch(ctx context.Context, daemon, config string, args ...string) error {
	program, err := find(w.programs.Peers, daemon)
	if err != nil {
		return err
	}
	path := filepath.Join(w.root, "config.toml")
	if err := errors.Join(os.MkdirAll(w.root, 0o711), os.WriteFile(path, []byte(config), 0o644)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if w.grpc, err = w.site.Start(link.Edge, nil, program, append(args, "--config", path)...); err != nil {
		return err
	}
	err = started(ctx, w.grpc, daemon, func(context.Context) bool {
		_, err := os.Stat(w.proxy)
		return err == nil
	})
	if err == nil {
		err = w.containerdWorker.Start(ctx)
	}
	if err != nil {
		return errors.Join(err, w.grpc.Stop(syscall.SIGTERM))
	}
	return nil
}

// Forgets: what such daemons have does not outlive them, or is fetched anew.
func (*proxied) Forgets() {}

func (w *proxied) Processes() []int {
	return append(w.containerdWorker.Processes(), w.grpc.PID())
}

func (w *proxied) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	im.Ref += w.suffix
	return w.containerdWorker.Provision(ctx, im, t)
}

// Complete waits until the line has been silent for some seconds: the fetch in the
// background does not say when it is done.
func (w *proxied) Complete(ctx context.Context, _ Image, t *Trial) error {
	return t.Quiet(ctx, 3*time.Second, Complete)
}

// Check sees to it that the image is there and came lazily: what was not prepared,
// or is not found, is unpacked as by the overlayfs snapshotter.
func (w *proxied) Check(ctx context.Context, im Image, _ bool) error {
	ref := im.Ref + w.suffix
	listed, err := w.ctr(ctx, "images", "list", "name=="+ref)
	if err != nil {
		return err
	}
	if !strings.Contains(listed, ref) {
		return fmt.Errorf("bench: containerd does not know %s", ref)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " "+w.root+"/") && strings.Contains(line, " - fuse") {
			return nil
		}
	}
	return fmt.Errorf("bench: no layer of %s came lazily%s", ref, w.grpc.Said())
}

func (w *proxied) Stop() error {
	return errors.Join(w.containerdWorker.Stop(), w.grpc.Stop(syscall.SIGTERM))
}
