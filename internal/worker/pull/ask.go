package pull

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// Ask calls fn for the hosts of an image's registry, with the query that
// names the image, until one knows the path. A manifest's digest takes the place
// of the tag.
func (s *Puller) Ask(ctx context.Context, req api.PullRequest, manifest string, fn func(c *remote.Client, query url.Values) error) error {
	r, err := ParseRef(req.Ref)
	if err != nil {
		return err
	}
	if manifest != "" {
		r.Reference = manifest
	}
	ask, err := s.opts.Hosts.For(ctx, s.Want(r, req))
	if err != nil {
		return api.Errorf(api.CodeInvalid, "%s: %w", r, err)
	}
	for i, host := range ask {
		err = fn(host.Client, url.Values{"repository": {host.Repository}, "reference": {r.Reference}})
		if err == nil || i == len(ask)-1 || ctx.Err() != nil {
			break
		}
		s.log.Debug("this host does not answer for the image; asking the next one", "ref", r.Name, "host", host.Client.Base(), "error", err)
	}
	return err
}

// About is how an image is asked for that may be here.
func (s *Puller) About(name string, credential credentials.Credential) api.PullRequest {
	img := s.images.Get(name)
	return api.PullRequest{Ref: name, PlainHTTP: img != nil && img.Plain, Credential: credential}
}

// SendTrace sends an encoded trace to the server of an image.
func (s *Puller) SendTrace(ctx context.Context, req api.PullRequest, manifest string, encoded []byte) error {
	return s.Ask(ctx, req, manifest, func(c *remote.Client, query url.Values) error {
		return c.Send(ctx, bundle.TracePath, query, bundle.MediaTypeTrace, encoded)
	})
}

// errHeader ends a stream of which only the header was wanted.
var errHeader = errors.New("the header is here")

// TOC asks the server of an image for its encoded TOC, which is to have a digest.
func (s *Puller) TOC(ctx context.Context, req api.PullRequest, want digest.Digest) ([]byte, error) {
	r, err := ParseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	encoded, err := s.header(ctx, r, req)
	switch {
	case err != nil:
		return nil, AsError(fmt.Errorf("table of contents of %s: %w", r, err))
	case digest.FromBytes(encoded) != want:
		return nil, api.Errorf(api.CodeConflict, "%s has changed on its server just now: try again", r)
	}
	return encoded, nil
}

// mayPull asks the registry of an image, with the credential of a request and no other, whether it may be pulled.
func (s *Puller) mayPull(ctx context.Context, r Ref, req api.PullRequest) error {
	if _, err := s.header(ctx, r, req); err != nil {
		return AsError(fmt.Errorf("the image is being pulled with other credentials, and these are not accepted: %w", err))
	}
	return nil
}

// header asks the server of an image for its header, and returns the encoded TOC.
func (s *Puller) header(ctx context.Context, r Ref, req api.PullRequest) (encoded []byte, err error) {
	platform, err := parsePlatform(req.Platform)
	if err != nil {
		return nil, err
	}
	err = s.Ask(ctx, req, "", func(c *remote.Client, query url.Values) error {
		f := fetch.Start(ctx, fetch.Options{
			Client: c,
			Name:   r.Name,
			Request: bundle.Request{
				Versions: []int{bundle.Version},
				Image: bundle.ImageRequest{
					Repository: query.Get("repository"), Reference: query.Get("reference"), Platform: platform, Header: true,
				},
			},
			Open: func(_ context.Context, img *bundle.Image, _ *toc.TOC) (*arena.Arena, error) {
				encoded = img.TOC
				return nil, errHeader
			},
			GiveUp: s.opts.GiveUp,
			Logger: s.log,
		})
		if err := f.Wait(); !errors.Is(err, errHeader) {
			return err
		}
		return nil
	})
	return encoded, err
}

// LayerAnswer is an answer about a layer, which must be closed.
type LayerAnswer struct {
	*bundle.LayerReader
	stream *remote.Stream
}

// patience is how long is waited for one section of an answer about a layer, whatever signs of life come: a server may
// have to make a recipe.
const patience = 5 * time.Minute

// Next returns the next section.
func (a *LayerAnswer) Next() (any, error) {
	a.stream.Limit(patience)
	return a.LayerReader.Next()
}

// Close ends the answer.
func (a *LayerAnswer) Close() error { return a.stream.Close() }

// Layer asks the server of an image, by its manifest, about one of its layers: at bundle.RecipePath, or
// bundle.ContentsPath for contents.
func (s *Puller) Layer(ctx context.Context, req api.PullRequest, manifest, path string, layer int, contents []bundle.ContentRun) (answer *LayerAnswer, err error) {
	platform, err := parsePlatform(req.Platform)
	if err != nil {
		return nil, err
	}
	err = s.Ask(ctx, req, manifest, func(c *remote.Client, query url.Values) error {
		q := bundle.LayerRequest{
			Versions: []int{bundle.Version}, Layer: layer, Contents: contents,
			Image: bundle.ImageRequest{Repository: query.Get("repository"), Reference: query.Get("reference"), Platform: platform},
		}
		stream, err := c.StreamAside(ctx, path, &q)
		if err == nil {
			answer = &LayerAnswer{bundle.NewLayerReader(stream, &q), stream}
		}
		return err
	})
	return answer, err
}
