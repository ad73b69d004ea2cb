package node

import (
	"os"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// A pull is begun for one service, whose startup set comes with it. Another
// service of the image that is started while it runs joins it: what is new of that
// one's set comes ahead of the rest (fetch.Pull.Join), and until that one is ready too the
// mount has no read-ahead.

// service is what runs in a container, as in bundle.ImageRequest.
type service struct{ entrypoint, args []string }

func (s service) equal(o service) bool {
	same := func(a, b []string) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }
	return same(s.entrypoint, o.entrypoint) && same(s.args, o.args)
}

// mostJoined bounds the services that join one pull.
const mostJoined = 64

// join has the startup set of what is asked for come, unless it is coming
// already.
func (p *pull) join(req api.PullRequest) {
	if req.NoStartup || p.n.opts.NoStartup {
		return
	}
	s := service{req.Entrypoint, req.Args}
	p.mu.Lock()
	defer p.mu.Unlock()
	first := service{p.req.Entrypoint, p.req.Args}
	if !p.req.NoStartup && s.equal(first) || slices.ContainsFunc(p.joined, s.equal) || len(p.joined) == mostJoined {
		return
	}
	p.joined = append(p.joined, s)
	if p.fetch != nil {
		p.fetch.Join(0, s.entrypoint, s.args)
	}
	if p.other != nil {
		p.other.join(req)
	}
	if r := p.rootfs; r != nil && !p.over {
		p.n.work.Go(func() { p.startAgain(r, req.Probed) })
	}
}

// waitBehind notes that another pull fills the rootfs that p wants, or, with
// nil, does so no more: whoever waits for p joins that one.
func (p *pull) waitBehind(other *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.other = other
	if other == nil || !p.wantsStartup() {
		return
	}
	for _, s := range append([]service{{p.req.Entrypoint, p.req.Args}}, p.joined...) {
		other.join(api.PullRequest{Entrypoint: s.entrypoint, Args: s.args, Probed: p.req.Probed})
	}
}

// startAgain takes the read-ahead from a mount until a service that has joined
// is ready, as far as anybody says so; else for settle.
func (p *pull) startAgain(r *rootfs, probed bool) {
	n := p.n
	p.mu.Lock()
	next := p.nextReady
	p.mu.Unlock()
	n.mu.Lock()
	file := r.readAheadFile
	if file != "" {
		r.starts++
	}
	n.mu.Unlock()
	if file == "" {
		return
	}
	defer func() {
		n.mu.Lock()
		r.starts--
		n.mu.Unlock()
		n.endStart(r)
	}()
	if err := os.WriteFile(r.path(readAheadName), []byte(file), 0o600); err != nil {
		n.log.Debug("take a mount's read-ahead", "rootfs", r.rec.ChainID, "error", err)
		return
	}
	if err := n.setReadAhead(r); err != nil {
		n.log.Debug("take a mount's read-ahead", "rootfs", r.rec.ChainID, "error", err)
		return
	}
	settled := time.NewTimer(settle)
	defer settled.Stop()
	after := settled.C
	if probed {
		after = nil
	}
	select {
	case <-next:
	case <-after:
	case <-p.ctx.Done():
	}
}
