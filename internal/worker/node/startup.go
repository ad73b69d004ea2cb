package node

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// about is the pull that a question about an image would be. An image that is
// here was asked for without TLS before if it was then.
func (n *Node) about(req api.AboutImage) (api.PullRequest, error) {
	name, err := api.NormalRef(req.Ref)
	if err != nil {
		return api.PullRequest{}, err
	}
	p := n.again(name, req.Credential)
	p.Platform = req.Platform
	p.PlainHTTP = p.PlainHTTP || req.PlainHTTP
	return p, nil
}

// Startup asks an image's server what it has of startup sets.
func (n *Node) Startup(ctx context.Context, req api.AboutImage) (*bundle.StartupReport, error) {
	v := new(bundle.StartupReport)
	return v, n.askStartup(ctx, req, func(c *fetch.Client, query url.Values) error {
		return c.Get(ctx, bundle.StartupPath, query, v)
	})
}

// StartupService asks an image's server for one startup set.
func (n *Node) StartupService(ctx context.Context, req api.AboutImage) (*bundle.ServiceReport, error) {
	v := new(bundle.ServiceReport)
	return v, n.askStartup(ctx, req, func(c *fetch.Client, query url.Values) error {
		query.Set("service", req.Service)
		return c.Get(ctx, bundle.StartupPath, query, v)
	})
}

// ForgetStartup has an image's server forget startup sets.
func (n *Node) ForgetStartup(ctx context.Context, req api.AboutImage) error {
	return n.askStartup(ctx, req, func(c *fetch.Client, query url.Values) error {
		if req.Service != "" {
			query.Set("service", req.Service)
		}
		return c.Delete(ctx, bundle.StartupPath, query)
	})
}

func (n *Node) askStartup(ctx context.Context, req api.AboutImage, fn func(c *fetch.Client, query url.Values) error) error {
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	p, err := n.about(req)
	if err != nil {
		return err
	}
	if err := n.atServer(ctx, p, "", fn); err != nil {
		return asError(fmt.Errorf("startup sets of %s: %w", p.Ref, err))
	}
	return nil
}

// errHeader ends a stream of which only the header was wanted.
var errHeader = errors.New("the header is here")

// TOC returns the encoded TOC of an image: what is here, if it is the one that is
// wanted, else the server's.
func (n *Node) TOC(ctx context.Context, req api.AboutImage) ([]byte, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	p, err := n.about(req)
	if err != nil {
		return nil, err
	}
	r, release, err := n.lookup(p.Ref)
	if err == nil {
		defer release()
		if req.TOC == "" || r.rec.TOC.String() == req.TOC {
			return os.ReadFile(r.path("toc"))
		}
	}
	if req.TOC == "" {
		return nil, err
	}
	b, err := n.fetchTOC(ctx, p)
	switch {
	case err != nil:
		return nil, asError(fmt.Errorf("table of contents of %s: %w", p.Ref, err))
	case digest.FromBytes(b).String() != req.TOC:
		return nil, errorf(api.CodeConflict, "%s has changed on its server just now: try again", p.Ref)
	}
	return b, nil
}

// fetchTOC pulls the header of an image.
func (n *Node) fetchTOC(ctx context.Context, req api.PullRequest) ([]byte, error) {
	r, err := parseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	platform, err := parsePlatform(req.Platform)
	if err != nil {
		return nil, err
	}
	var encoded []byte
	err = n.atServer(ctx, req, "", func(c *fetch.Client, query url.Values) error {
		f := fetch.Start(ctx, fetch.Options{
			Client: c,
			Name:   r.name,
			Request: bundle.Request{
				Versions: []int{bundle.Version},
				Images: []bundle.ImageRequest{{
					Repository: query.Get("repository"), Reference: query.Get("reference"), Platform: platform, Header: true,
				}},
			},
			Open: func(_ context.Context, img *bundle.Image, _ *toc.TOC) (*arena.Arena, error) {
				encoded = img.TOC
				return nil, errHeader
			},
			GiveUp: n.opts.GiveUp,
			Logger: n.log,
		})
		if err := f.Wait(); !errors.Is(err, errHeader) {
			return err
		}
		return nil
	})
	return encoded, err
}
