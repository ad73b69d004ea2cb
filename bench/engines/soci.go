package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	said, t, err := findTransfer(ctx, p, "soci-snapshotter-grpc", "soci")
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

func (*SOCI) Foresee(layers int64) time.Duration { return pace(2*time.Second, layers, 20e6) }

func (*SOCI) Worker(s *site.Site, p Programs, dir string) Worker {
	w := &sociWorker{newProxied(s, p, dir, "soci", "soci", indexed)}
	w.transfer = true
	return w
}

type sociWorker struct{ proxied }

func (w *sociWorker) Start(ctx context.Context) error {
	// The registry speaks HTTP without TLS, containerd is not where it would be by
	// default, and lists of what to prefetch are heeded, which is off by default; all
	// else is as it comes.
	config := fmt.Sprintf("[content_store]\ncontainerd_address = %q\n", w.containerdWorker.socket()) +
		fmt.Sprintf("[prefetch]\nenable = true\n[resolver.host.%q]\n[[resolver.host.%q.mirrors]]\nhost = %q\ninsecure = true\n", RegistryAddr, RegistryAddr, "http://"+RegistryAddr)
	return w.launch(ctx, "soci-snapshotter-grpc", config, "--address", w.proxy, "--root", filepath.Join(w.root, "root"))
}

// Complete marks nothing: the fetch of the rest in the background begins after
// half a minute of silence, if a container does not ask for it before.
func (w *sociWorker) Complete(ctx context.Context, _ Image, t *Trial) error {
	return t.Quiet(ctx, 3*time.Second, Quiet)
}
