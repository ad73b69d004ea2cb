package serve

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/layer"
)

// rootfsOf lets the bundle endpoint have a rootfs made.
func rootfsOf(g *ingest.Ingester) func(context.Context, *bundles.Resolved) (catalog.Rootfs, error) {
	return func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
		layers := make([]ingest.Descriptor, len(m.Layers))
		for i, l := range m.Layers {
			layers[i] = ingest.Descriptor{Digest: l.Digest, MediaType: l.MediaType, Size: l.Size, DiffID: l.DiffID}
		}
		r, err := g.Rootfs(ctx, layers)
		_, refused := errors.AsType[*layer.RefusedError](err)
		_, wrong := errors.AsType[*layer.DigestError](err)
		if refused || wrong {
			return r, &bundle.Error{Code: bundle.CodeUnsupported, Message: err.Error()}
		}
		return r, err
	}
}

// queue prepares images in the background, one after the other, as they are
// pushed. What does not fit, or was not prepared when the server ended, is
// prepared by its first pull.
type queue struct {
	bundles *bundles.Handler
	log     *slog.Logger
	pushed  chan pushed
	cancel  context.CancelFunc
	work    sync.WaitGroup
}

type pushed struct {
	repository string
	manifest   digest.Digest
}

func newQueue(h *bundles.Handler, log *slog.Logger) *queue {
	ctx, cancel := context.WithCancel(context.Background())
	q := &queue{bundles: h, log: log, pushed: make(chan pushed, 1024), cancel: cancel}
	q.work.Go(func() { q.run(ctx) })
	return q
}

// add is called when a manifest was pushed. It does not block.
func (q *queue) add(repository string, m catalog.Manifest) {
	select {
	case q.pushed <- pushed{repository, m.Digest}:
	default:
		q.log.Warn("too many pushes at once: an image is prepared by its first pull", "repository", repository, "manifest", m.Digest)
	}
}

func (q *queue) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case p := <-q.pushed:
			q.prepare(ctx, p)
		}
	}
}

func (q *queue) prepare(ctx context.Context, p pushed) {
	began := time.Now()
	err := q.bundles.Prepare(ctx, p.repository, p.manifest)
	told, ok := errors.AsType[*bundle.Error](err)
	log := q.log.With("repository", p.repository, "manifest", p.manifest)
	switch {
	case err == nil:
		log.Info("prepared", "took", time.Since(began).Round(time.Millisecond))
	case ctx.Err() != nil:
	case ok && (told.Code == bundle.CodeUnsupported || told.Code == bundle.CodeNotFound):
		// An index without this platform, an artifact, an image that only
		// plain clients can pull, one that was deleted meanwhile.
		log.Info("not served in bundles", "why", told.Message)
	default:
		log.Error("image not prepared", "error", err)
	}
}

func (q *queue) Close() error {
	q.cancel()
	q.work.Wait()
	return nil
}
