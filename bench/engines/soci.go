package engines

import (
	"context"
	"encoding/json"
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

// SOCI is containerd with the SOCI snapshotter, as its documents say: an index of
// each layer of 10 MiB or more is made by soci convert and stays beside the
// layers, which are not changed, in an image of its own; containerd's transfer
// service pulls it. The files that are touched before ready are its list of what
// to prefetch.
type SOCI struct{}

func (*SOCI) Name() string { return "soci" }

// The suffix of indexed images' tags.
const indexed = "-soci"

func (*SOCI) Find(ctx context.Context, p Programs) (string, error) {
	t, err := findContainerd(ctx, p)
	if err != nil {
		return "", err
	}
	if t.major < 2 || t.major == 2 && t.minor < 1 {
		return "", fmt.Errorf("bench: %s cannot tell the SOCI snapshotter which image it pulls (2.1 can); say --containerd", t.version)
	}
	if _, err := find(p.Peers, "soci"); err != nil {
		return "", err
	}
	daemon, err := find(p.Peers, "soci-snapshotter-grpc")
	if err != nil {
		return "", err
	}
	said, err := firstLine(ctx, daemon, "--version")
	if err != nil {
		return "", err
	}
	return said + ", " + t.version, nil
}

// Prepare indexes an image and pushes it beside the one that it was made from.
func (*SOCI) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (result Preparation, err error) {
	dir, err := os.MkdirTemp(s.Dir, "index-")
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	soci, err := find(p.Peers, "soci")
	if err != nil {
		return result, err
	}
	list, err := json.Marshal(im.Touched)
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	prefetch := filepath.Join(dir, "prefetch.json")
	if err := os.WriteFile(prefetch, list, 0o644); err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if _, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--src-tls-verify=false", "docker://"+im.Ref, "oci:"+from+":image"); err != nil {
		return result, err
	}
	began := time.Now()
	args := []string{"--root", dir, "convert", "--standalone", "--format", "oci-dir", "--prefetch-files-json", prefetch, from, to}
	if _, err := s.Run(ctx, link.Cloud, soci, args...); err != nil {
		return result, err
	}
	result.Time = time.Since(began)
	if _, err := s.Run(ctx, link.Cloud, "skopeo", "copy", "--all", "--dest-tls-verify=false", "oci:"+to, "docker://"+im.Ref+indexed); err != nil {
		return result, err
	}
	result.What = fmt.Sprintf("indexed, %d files to prefetch", len(im.Touched))
	// What is new; the layers are stored once.
	before, err := site.DiskBytes(from)
	if err == nil {
		result.Storage, err = site.DiskBytes(to)
		result.Storage -= before
	}
	return result, err
}

// Converted is what Prepare pushes.
func (*SOCI) Converted(im Image) []string { return []string{im.Ref + indexed} }

func (*SOCI) Worker(s *site.Site, p Programs, dir string) Worker {
	w := &sociWorker{containerdWorker: newContainerd(s, p, filepath.Join(dir, "containerd"), "soci"), root: filepath.Join(dir, "soci")}
	w.proxy, w.transfer = filepath.Join(w.root, "sock"), true
	return w
}

type sociWorker struct {
	*containerdWorker
	root string
	grpc *site.Process
}

func (w *sociWorker) Start(ctx context.Context) (err error) {
	if err := os.MkdirAll(w.root, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	daemon, err := find(w.programs.Peers, "soci-snapshotter-grpc")
	if err != nil {
		return err
	}
	// The registry speaks HTTP without TLS, and lists of what to prefetch are
	// heeded, which is off by default; all else is as it comes.
	config := fmt.Sprintf("[prefetch]\nenable = true\n[resolver.host.%q]\n[[resolver.host.%q.mirrors]]\nhost = %q\ninsecure = true\n", RegistryAddr, RegistryAddr, "http://"+RegistryAddr)
	path := filepath.Join(w.root, "config.toml")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	w.grpc, err = w.site.Start(link.Edge, nil, daemon, "--address", w.proxy, "--root", filepath.Join(w.root, "root"), "--config", path)
	if err != nil {
		return err
	}
	err = started(ctx, w.grpc, "soci-snapshotter-grpc", func(context.Context) bool {
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

// Forgets: it fetches anew what it had when it is started again.
func (*sociWorker) Forgets() {}

func (w *sociWorker) Processes() []int {
	return append(w.containerdWorker.Processes(), w.grpc.PID())
}

func (w *sociWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	im.Ref += indexed
	return w.containerdWorker.Provision(ctx, im, t)
}

// Complete waits until the line has been silent for some seconds. It marks
// nothing: the fetch of the rest in the background begins after half a minute of
// silence, if a container does not ask for it before.
func (w *sociWorker) Complete(ctx context.Context, _ Image, t *Trial) error {
	return t.Quiet(ctx, 3*time.Second, Quiet)
}

// Check sees to it that the image came lazily: a layer without an index, or an
// index that was not found, is unpacked as by the overlayfs snapshotter.
func (w *sociWorker) Check(ctx context.Context, im Image, _ bool) error {
	listed, err := w.ctr(ctx, "images", "list", "name=="+im.Ref+indexed)
	if err != nil {
		return err
	}
	if !strings.Contains(listed, im.Ref+indexed) {
		return fmt.Errorf("bench: containerd does not know %s", im.Ref+indexed)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if !strings.Contains(string(mounts), " "+w.root+"/") {
		return fmt.Errorf("bench: no layer of %s came lazily%s", im.Ref+indexed, w.grpc.Said())
	}
	return nil
}

func (w *sociWorker) Stop() error {
	return errors.Join(w.containerdWorker.Stop(), w.grpc.Stop(syscall.SIGTERM))
}
