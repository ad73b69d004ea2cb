package engines

import (
	"context"
	"fmt"
	"strings"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Curl downloads the compressed layers and throws them away: what the bytes
// alone take. It is a reference to draw, not a way to run anything; its Ready is
// the end of the download. An update downloads those layers that are new.
type Curl struct{}

func (*Curl) Name() string { return "curl" }

func (*Curl) Find(ctx context.Context, _ Programs) (string, error) {
	return firstLine(ctx, "curl", "--version")
}

func (*Curl) Prepare(context.Context, *site.Site, Programs, Image) (Preparation, error) {
	return Preparation{What: "none"}, nil
}

// Whole: its only moment is the end of the download.
func (*Curl) Whole() {}

func (*Curl) Worker(s *site.Site, _ Programs, _ string) Worker {
	return &curlWorker{site: s, have: map[string]bool{}}
}

type curlWorker struct {
	site *site.Site
	have map[string]bool // digests
}

func (*curlWorker) Start(context.Context) error { return nil }

func (w *curlWorker) Provision(ctx context.Context, im Image, t *Trial) (*Container, error) {
	host, rest, _ := strings.Cut(im.Ref, "/")
	repository, _, _ := strings.Cut(rest, ":")
	// Three at a time, as containerd does.
	args := []string{"--silent", "--show-error", "--fail", "--parallel", "--parallel-max", "3"}
	for _, layer := range im.Built.Manifest.Layers {
		digest := layer.Digest.String()
		if !w.have[digest] {
			args = append(args, "--output", "/dev/null", fmt.Sprintf("http://%s/v2/%s/blobs/%s", host, repository, digest))
		}
		w.have[digest] = true
	}
	if _, err := w.site.Run(ctx, link.Edge, "curl", args...); err != nil {
		return nil, err
	}
	for _, m := range []Mark{Pulled, Started, Ready, Complete} {
		t.Mark(m)
	}
	return nil, nil
}

func (*curlWorker) Complete(context.Context, Image, *Trial) error { return nil }
func (*curlWorker) Check(context.Context, Image, bool) error      { return nil }
func (*curlWorker) Processes() []int                              { return nil }
func (*curlWorker) Stop() error                                   { return nil }
