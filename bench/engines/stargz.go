package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Stargz is containerd with stargz-snapshotter, as its documents say: images are
// converted to eStargz by ctr-remote images optimize, which runs the container's
// own entrypoint for ten seconds and puts the files that it reads first, and are
// pulled by ctr-remote images rpull. What was traced is prefetched, and the rest
// is fetched in the background.
type Stargz struct{}

func (*Stargz) Name() string { return "stargz" }

// The suffix of converted images' tags.
const estargz = "-esgz"

func (*Stargz) Find(ctx context.Context, p Programs) (string, error) {
	t, err := findContainerd(ctx, p)
	if err != nil {
		return "", err
	}
	paths, err := findPrograms(p, "containerd-stargz-grpc", "ctr-remote")
	if err != nil {
		return "", err
	}
	if _, err := find("", "fusermount"); err != nil {
		return "", fmt.Errorf("%w; the package fuse3 has it", err)
	}
	version := "stargz-snapshotter"
	// A program that was built without its Makefile does not know its version,
	// but the Go linker does.
	if out, err := command(ctx, "go", "version", "-m", paths["containerd-stargz-grpc"]); err == nil {
		for line := range strings.Lines(out) {
			fields := strings.Fields(line)
			if len(fields) > 2 && fields[1] == "github.com/containerd/stargz-snapshotter" {
				version += " " + fields[2]
			}
		}
	}
	return version + ", " + t.version, nil
}

// Prepare converts an image in the cloud, beside the registry, and pushes it.
func (*Stargz) Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (result Preparation, err error) {
	dir, err := os.MkdirTemp(s.Dir, "optimize-")
	if err != nil {
		return result, fmt.Errorf("bench: %w", err)
	}
	w := newContainerd(s, p, dir, "overlayfs")
	w.side = link.Cloud
	if err := w.Start(ctx); err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, w.Stop(), site.RemoveTree(dir)) }()
	if err := w.Pull(ctx, im.Ref); err != nil {
		return result, err
	}
	remote, err := find(p.Peers, "ctr-remote")
	if err != nil {
		return result, err
	}
	began := time.Now()
	args := []string{"images", "optimize", "--oci", "--period", "10"}
	if len(im.Command) > 0 {
		args = append(args, "--args", fmt.Sprintf("[%s]", quoted(im.Command)))
	}
	if _, err := s.Run(ctx, link.Cloud, remote, w.arguments(append(args, im.Ref, im.Ref+estargz)...)...); err != nil {
		return result, err
	}
	if _, err := w.ctr(ctx, "images", "push", "--plain-http", im.Ref+estargz); err != nil {
		return result, err
	}
	result.Time = time.Since(began)
	result.What = "converted to eStargz, its entrypoint traced for 10 s"
	result.Storage, err = layerBytes(ctx, s, im.Ref+estargz)
	return result, err
}

// quoted is a list of JSON strings, without brackets.
func quoted(words []string) string {
	var list []string
	for _, word := range words {
		list = append(list, fmt.Sprintf("%q", word))
	}
	return strings.Join(list, ",")
}

// Converted is what Prepare pushes.
func (*Stargz) Converted(im Image) []string { return []string{im.Ref + estargz} }

// Foresee: the trace takes ten seconds, and compressing anew goes by one core.
func (*Stargz) Foresee(layers int64) time.Duration { return pace(12*time.Second, layers, 1.6e6) }

func (*Stargz) Worker(s *site.Site, p Programs, dir string) Worker {
	return &stargzWorker{proxied: newProxied(s, p, dir, "stargz", "stargz", estargz)}
}

type stargzWorker struct {
	proxied
	remote string
}

func (w *stargzWorker) Start(ctx context.Context) (err error) {
	if w.remote, err = find(w.programs.Peers, "ctr-remote"); err != nil {
		return err
	}
	// The registry speaks HTTP without TLS; all else is as it comes.
	config := fmt.Sprintf("[resolver.host.%q]\n[[resolver.host.%q.mirrors]]\nhost = %q\ninsecure = true\n", RegistryAddr, RegistryAddr, RegistryAddr)
	return w.launch(ctx, "containerd-stargz-grpc", config, "--address", w.proxy, "--root", filepath.Join(w.root, "root"))
}

func (w *stargzWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	if _, err := w.site.Run(ctx, link.Edge, w.remote, w.arguments("images", "rpull", "--plain-http", im.Ref+estargz)...); err != nil {
		return nil, err
	}
	t.Mark(Pulled)
	return w.start(ctx, w.remote, im.Ref+estargz, im.Command, t)
}
