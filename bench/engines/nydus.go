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
	said, t, err := findTransfer(ctx, p, "nydusd", "nydus-image", "nydusify", "containerd-nydus-grpc")
	if err != nil {
		return "", err
	}
	fields := strings.Fields(said) // nydusd, Version: and the number
	if len(fields) == 0 {
		return "", errors.New("bench: nydusd does not say its version")
	}
	return "nydusd " + fields[len(fields)-1] + ", " + t.version, nil
}

// Prepare converts an image in the cloud and pushes it.
func (*Nydus) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (result Preparation, err error) {
	dir, err := os.MkdirTemp(s.Dir, "nydusify-")
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	paths, err := findPrograms(p, "nydusify", "nydus-image")
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
		paths["nydusify"], "convert", "--source", im.Ref, "--target", im.Ref+rafs, "--plain-http", "--source-insecure", "--target-insecure",
		"--nydus-image", paths["nydus-image"], "--work-dir", filepath.Join(dir, "work"), "--prefetch-patterns")
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

func (*Nydus) Foresee(layers int64) time.Duration { return pace(time.Second, layers, 20e6) }

func (*Nydus) Worker(s *site.Site, p Programs, dir string) Worker {
	w := &nydusWorker{newProxied(s, p, dir, "nydus", "n", rafs)} // short, since sockets with long names are below it
	w.transfer = true
	return w
}

// nydusWorker is not started anew between two images: its daemons go on when the
// snapshotter ends, and would have to be told to end apart from it.
type nydusWorker struct{ proxied }

func (w *nydusWorker) Start(ctx context.Context) (err error) {
	if err := os.MkdirAll(w.root, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	paths, err := findPrograms(w.programs, "nydusd", "nydus-image")
	if err != nil {
		return err
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
	// nydusd wants to raise its limit of open files to a million, which root may not
	// do everywhere, and the snapshotter cannot tell it to leave it as it is.
	wrapper := filepath.Join(w.root, "nydusd")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n \"$(ulimit -Hn)\"\nexec '%s' \"$@\" --rlimit-nofile 0\n", paths["nydusd"])
	daemonPath := filepath.Join(w.root, "nydusd.json")
	config := fmt.Sprintf("version = 1\nroot = %q\naddress = %q\ndaemon_mode = \"dedicated\"\ncleanup_on_close = false\n", w.root, w.proxy) +
		fmt.Sprintf("[system]\nenable = true\naddress = %q\n", filepath.Join(w.root, "system")) +
		fmt.Sprintf("[daemon]\nnydusd_config = %q\nnydusd_path = %q\nnydusimage_path = %q\nfs_driver = \"fusedev\"\n", daemonPath, wrapper, paths["nydus-image"]) +
		"recover_policy = \"failover\"\nfailover_policy = \"resend\"\nthreads_number = 4\nlog_rotation_size = 100\n" +
		"[cgroup]\nenable = false\n[log]\nlog_to_stdout = true\nlevel = \"info\"\n[metrics]\naddress = \"\"\n" +
		"[cache_manager]\ndisable = false\ngc_period = \"24h\"\n"
	if err := errors.Join(os.WriteFile(wrapper, []byte(script), 0o755), os.WriteFile(daemonPath, daemonConfig, 0o644)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return w.launch(ctx, "containerd-nydus-grpc", config)
}

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

func (w *nydusWorker) Processes() []int { return append(w.proxied.Processes(), w.daemons()...) }

func (w *nydusWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	c, err := w.proxied.Provision(ctx, im, t)
	t.Join(w.daemons()...)
	return c, err
}

func (w *nydusWorker) Stop() error {
	daemons := w.daemons()
	err := w.proxied.Stop()
	for _, pid := range daemons {
		if kill := syscall.Kill(pid, syscall.SIGKILL); kill != nil && !errors.Is(kill, syscall.ESRCH) {
			err = errors.Join(err, fmt.Errorf("bench: end nydusd: %w", kill))
		}
	}
	return err
}
