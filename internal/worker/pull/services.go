package pull

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/start"
)

// service is what runs in a container, as in bundle.ImageRequest.
type service struct{ entrypoint, args []string }

func (s service) equal(o service) bool {
	same := func(a, b []string) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }
	return same(s.entrypoint, o.entrypoint) && same(s.args, o.args)
}

// Ready ends what p does for the start of a container.
func (p *Pull) Ready() {
	p.start.Ready()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stream != nil {
		p.stream.ReleaseAfter(start.HoldAfter)
	}
}

// Whole tells that no container begins on the image before all of it is here: nothing is held back, or put off for what
// else runs.
func (p *Pull) Whole() {
	if !p.start.Whole() {
		return // each of two may be behind the other while they change places
	}
	p.mu.Lock()
	behind := p.behind
	if p.stream != nil {
		p.stream.Release()
	}
	p.mu.Unlock()
	if behind != nil {
		behind.Whole()
	}
}

// mostJoined bounds the services that join one pull.
const mostJoined = 64

// join has the startup set of what is asked for come, unless it is coming already:
// what is new of it comes ahead of the rest. A pull is begun for one service; others
// of the image that are started while it runs join it.
func (p *Pull) join(req api.PullRequest) {
	if req.NoStartup || p.s.opts.NoStartup {
		return
	}
	s := service{req.Entrypoint, req.Args}
	p.mu.Lock()
	if !p.req.NoStartup && s.equal(service{p.req.Entrypoint, p.req.Args}) || slices.ContainsFunc(p.joined, s.equal) || len(p.joined) == mostJoined {
		p.mu.Unlock()
		return
	}
	p.joined = append(p.joined, s)
	if p.stream != nil {
		p.stream.Join(s.entrypoint, s.args)
	}
	behind, r := p.behind, p.rootfs
	p.mu.Unlock()
	if behind != nil {
		behind.join(req)
	}
	if r != nil {
		p.start.Joined(r, req.Probed)
	}
}

// waitBehind notes that another pull fills the rootfs that p wants, or, with
// nil, does so no more: whoever waits for p joins that one.
func (p *Pull) waitBehind(other *Pull) {
	p.mu.Lock()
	p.behind = other
	services := append([]service{{p.req.Entrypoint, p.req.Args}}, p.joined...)
	p.mu.Unlock()
	if other != nil && p.start.IsWhole() {
		other.Whole()
	}
	if other == nil || !p.wantsSet() {
		return
	}
	for _, s := range services {
		other.join(api.PullRequest{Entrypoint: s.entrypoint, Args: s.args, Probed: p.req.Probed})
	}
}

// Runs has the startup set come of what is about to run in a container, unless the pull was
// begun for that.
func (p *Pull) Runs(args []string) {
	p.mu.Lock()
	img, req := p.image, bundle.ImageRequest{Entrypoint: p.req.Entrypoint, Args: p.req.Args}
	p.mu.Unlock()
	var config ocispec.Image
	if img == nil || json.Unmarshal(img.Config, &config) != nil || slices.Equal(req.Service(config.Config), args) {
		return
	}
	p.join(api.PullRequest{Entrypoint: args})
}

// Bound tells what the memory limits of a container leave, in bytes, that is about to be started on the image.
func (p *Pull) Bound(left int64) { p.start.Bound(left) }

// report sends a trace to the image's server.
func (p *Pull) report(ctx context.Context, encoded []byte) error {
	p.mu.Lock()
	img, req := p.image, p.req
	p.mu.Unlock()
	if img == nil {
		return errors.New("the pull has not come as far as to know its image")
	}
	return p.s.SendTrace(ctx, req, img.Digest.String(), encoded)
}
