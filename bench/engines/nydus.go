package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Nydus is containerd with Nydus' snapshotter, which starts a nydusd for each
// image and mounts it by FUSE, as its documents say: images are converted by
// nydusify, and what is prefetched first is a table in them, of the files that
// are touched before ready. The rest follows in the background, as its own
// configuration asks for.
type Nydus struct{}

func (*Nydus) Name() string { return "nydus" }

// The suffix of converted images' tags.
const rafs = "-nydus"

func (*Nydus) Find(ctx context.Context, p Programs) (string, error) {
	t, err := findContainerd(ctx, p)
	if err != nil {
		return "", err
	}
	if t.major < 2 || t.major == 2 && t.minor < 1 {
		return "", fmt.Errorf("bench: %s cannot tell Nydus' snapshotter which image it pulls (2.1 can); say --containerd", t.version)
	}
	for _, name := range []string{"containerd-nydus-grpc", "nydus-image", "nydusify"} {
		if _, err := find(p.Peers, name); err != nil {
			return "", err
		}
	}
	daemon, err := find(p.Peers, "nydusd")
	if err != nil {
		return "", err
	}
	said, err := firstLine(ctx, daemon, "--version")
	if err != nil {
		return "", err
	}
	return "nydusd " + strings.Join(strings.Fields(strings.TrimPrefix(said, "Version:")), " ") + ", " + t.version, nil
}

// Prepare converts an image in the cloud and pushes it.
func (*Nydus) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (result Preparation, err error) {
	dir, err := os.MkdirTemp(s.Dir, "nydusify-")
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	nydusify, err := find(p.Peers, "nydusify")
	if err != nil {
		return result, err
	}
	builder, err := find(p.Peers, "nydus-image")
	if err != nil {
		return result, err
	}
	list := filepath.Join(dir, "prefetch")
	if err := os.WriteFile(list, []byte(strings.Join(im.Touched, "\n")+"\n"), 0o644); err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	began := time.Now()
	// It reads the list from its standard input.
	_, err = s.Run(ctx, link.Cloud, "sh", "-c", `list=$1; shift; exec "$@" <"$list"`, "sh", list,
		nydusify, "convert", "--source", im.Ref, "--target", im.Ref+rafs, "--plain-http", "--source-insecure", "--target-insecure",
		"--nydus-image", builder, "--work-dir", filepath.Join(dir, "work"), "--prefetch-patterns")
	if err != nil {
		return result, err
	}
	result.Time = time.Since(began)
	result.What = fmt.Sprintf("converted to RAFS v6, %d files in its prefetch table", len(im.Touched))
	result.Storage, err = layerBytes(ctx, s, im.Ref+rafs)
	return result, err
}

// Converted is what Prepare pushes.
func (*Nydus) Converted(im Image) []string { return []string{im.Ref + rafs} }

func (*Nydus) Worker(s *site.Site, p Programs, dir string) Worker {
	w := &nydusWorker{containerdWorker: newContainerd(s, p, filepath.Join(dir, "containerd"), "nydus"), root: filepath.Join(dir, "n")}
	w.proxy, w.transfer = filepath.Join(w.root, "sock"), true
	return w
}

type nydusWorker struct {
	*containerdWorker
	root string // short, since sockets with long names are below it
	grpc *site.Process
}

func (w *nydusWorker) Start(ctx context.Context) (err error) {
	if err := os.MkdirAll(w.root, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	paths := map[string]string{}
	for _, name := range []string{"containerd-nydus-grpc", "nydusd", "nydus-image"} {
		if paths[name], err = find(w.programs.Peers, name); err != nil {
			return err
		}
	}
	// The configurations that come with the snapshotter, but that the registry
	// speaks HTTP without TLS, that files are below root, and that control groups
	// and metrics are off, which would be the host's.
	daemonConfig, err := json.Marshal(map[string]any{
		"device": map[string]any{
			"backend": map[string]any{"type": "registry", "config": map[string]any{"scheme": "http", "timeout": 5, "connect_timeout": 5, "retry_limit": 2}},
			"cache":   map[string]any{"type": "blobcache"},
		},
		"mode": "direct", "digest_validate": false, "iostats_files": false, "enable_xattr": true, "amplify_io": 1 << 20,
		"fs_prefetch": map[string]any{"enable": true, "threads_count": 8, "merging_size": 1 << 20, "prefetch_all": true},
	})
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	daemonPath, path := filepath.Join(w.root, "nydusd.json"), filepath.Join(w.root, "config.toml")
	config := fmt.Sprintf("version = 1\nroot = %q\naddress = %q\ndaemon_mode = \"dedicated\"\ncleanup_on_close = false\n", w.root, w.proxy) +
		fmt.Sprintf("[system]\nenable = true\naddress = %q\n", filepath.Join(w.root, "system")) +
		fmt.Sprintf("[daemon]\nnydusd_config = %q\nnydusd_path = %q\nnydusimage_path = %q\nfs_driver = \"fusedev\"\n", daemonPath, paths["nydusd"], paths["nydus-image"]) +
		"recover_policy = \"failover\"\nfailover_policy = \"resend\"\nthreads_number = 4\nlog_rotation_size = 100\n" +
		"[cgroup]\nenable = false\n[log]\nlog_to_stdout = true\nlevel = \"info\"\n[metrics]\naddress = \"\"\n" +
		"[cache_manager]\ndisable = false\ngc_period = \"24h\"\n"
	if err := errors.Join(os.WriteFile(daemonPath, daemonConfig, 0o644), os.WriteFile(path, []byte(config), 0o644)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	w.grpc, err = w.site.Start(link.Edge, nil, paths["containerd-nydus-grpc"], "--config", path)
	if err != nil {
		return err
	}
	err = started(ctx, w.grpc, "containerd-nydus-grpc", func(context.Context) bool {
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

// Forgets: its daemons go on when the snapshotter ends, and would have to be told
// to end apart from it.
func (*nydusWorker) Forgets() {}

// daemons are the nydusd that the snapshotter has started.
func (w *nydusWorker) daemons() (pids []int) {
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", w.grpc.PID()))
	if err != nil {
		return nil
	}
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if err != nil {
			continue // the thread is gone
		}
		for _, field := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func (w *nydusWorker) Processes() []int {
	return append(append(w.containerdWorker.Processes(), w.grpc.PID()), w.daemons()...)
}

func (w *nydusWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	im.Ref += rafs
	c, err := w.containerdWorker.Provision(ctx, im, t)
	t.Join(w.daemons()...)
	return c, err
}

// Complete waits until the line has been silent for some seconds: the fetch in the
// background does not say when it is done.
func (w *nydusWorker) Complete(ctx context.Context, _ Image, t *Trial) error {
	return t.Quiet(ctx, 3*time.Second, Complete)
}

// Check sees to it that the image is there, and mounted by nydusd.
func (w *nydusWorker) Check(ctx context.Context, im Image, _ bool) error {
	listed, err := w.ctr(ctx, "images", "list", "name=="+im.Ref+rafs)
	if err != nil {
		return err
	}
	if !strings.Contains(listed, im.Ref+rafs) {
		return fmt.Errorf("bench: containerd does not know %s", im.Ref+rafs)
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
	return fmt.Errorf("bench: nydusd has not mounted %s%s", im.Ref+rafs, w.grpc.Said())
}

func (w *nydusWorker) Stop() error {
	daemons := w.daemons()
	err := errors.Join(w.containerdWorker.Stop(), w.grpc.Stop(syscall.SIGTERM))
	for _, pid := range daemons {
		if kill := syscall.Kill(pid, syscall.SIGKILL); kill != nil && !errors.Is(kill, syscall.ESRCH) {
			err = errors.Join(err, fmt.Errorf("bench: end nydusd: %w", kill))
		}
	}
	return err
}
