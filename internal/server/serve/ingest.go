package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// rootfsOf lets the bundle endpoint have a rootfs made, by Ingester.Rootfs or
// Repair.
//
// A blob that is lost or damaged is taken out of the repository: it cannot be
// served, and a client asks which blobs are here before it pushes. The next push
// of the image brings it back.
func rootfsOf(get func(context.Context, []ingest.Descriptor) (catalog.Rootfs, error), cat catalog.Repositories, store objects.Store, log *slog.Logger) func(context.Context, *bundles.Resolved) (catalog.Rootfs, error) {
	return func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
		r, err := get(ctx, descriptors(m))
		if err == nil || ctx.Err() != nil {
			return r, err
		}
		wrong, ok := errors.AsType[*layer.DigestError](err)
		var lost []digest.Digest
		if l, is := errors.AsType[lostError](err); is {
			lost = l
		} else if ok && wrong.What == "blob" {
			lost = []digest.Digest{wrong.Layer}
		} else if errors.Is(err, objects.ErrNotFound) {
			for _, l := range m.Layers {
				if _, serr := store.Stat(ctx, catalog.BlobKey(l.Digest)); errors.Is(serr, objects.ErrNotFound) {
					lost = append(lost, l.Digest)
				}
			}
		}
		for _, d := range lost {
			log.Error("blob is lost or damaged: push it again", "repository", m.Repository, "digest", d, "error", err)
			if uerr := cat.UnlinkBlob(ctx, m.Repository, d); uerr != nil && !errors.Is(uerr, catalog.ErrNotFound) {
				log.Error("damaged blob is still offered", "repository", m.Repository, "digest", d, "error", uerr)
			}
		}
		if len(lost) > 0 {
			return r, &bundle.Error{Code: bundle.CodeCorrupt, Message: fmt.Sprintf("layer %s is lost or damaged on the server; push the image again", lost[0])}
		}
		_, refused := errors.AsType[*layer.RefusedError](err)
		if refused || ok {
			return r, &bundle.Error{Code: bundle.CodeUnsupported, Message: err.Error()}
		}
		return r, err
	}
}

// repair compares the blobs with their digests before it has the rootfs
// repaired: plain clients pull them as they are. One that is lost or damaged is restored, if it
// can be.
func repair(g *ingest.Ingester, store objects.Store, blobs *restore.Blobs) func(context.Context, []ingest.Descriptor) (catalog.Rootfs, error) {
	return func(ctx context.Context, layers []ingest.Descriptor) (catalog.Rootfs, error) {
		var lost lostError
		for _, l := range layers {
			err := verifyBlob(ctx, store, l.Digest)
			_, wrong := errors.AsType[*layer.DigestError](err)
			if wrong = wrong || errors.Is(err, objects.ErrNotFound); wrong && blobs.Heal(ctx, l.Digest) == nil {
				continue
			}
			if wrong {
				lost = append(lost, l.Digest)
			} else if err != nil {
				return catalog.Rootfs{}, err
			}
		}
		if len(lost) > 0 {
			return catalog.Rootfs{}, lost
		}
		return g.Repair(ctx, layers)
	}
}

// lostError lists blobs whose bytes are gone or others.
type lostError []digest.Digest

func (e lostError) Error() string { return fmt.Sprintf("%d layers are lost or damaged", len(e)) }

// verifyBlob reads a blob. Errors: *layer.DigestError; the store's.
func verifyBlob(ctx context.Context, store objects.Store, d digest.Digest) error {
	object, err := store.Open(ctx, catalog.BlobKey(d), 0, -1)
	if err != nil {
		return err
	}
	defer object.Close()
	hash := d.Algorithm().Hash()
	buf := make([]byte, 256<<10)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := object.Read(buf)
		hash.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if got := digest.NewDigest(d.Algorithm(), hash); got != d {
		return &layer.DigestError{Layer: d, What: "blob", Got: got, Want: d}
	}
	return nil
}

func descriptors(m *bundles.Resolved) []ingest.Descriptor {
	layers := make([]ingest.Descriptor, len(m.Layers))
	for i, l := range m.Layers {
		layers[i] = ingest.Descriptor{Digest: l.Digest, MediaType: l.MediaType, Size: l.Size, DiffID: l.DiffID}
	}
	return layers
}

// recipeOf lets the bundle endpoint have the recipe of a layer, whose rootfs it had made
// before.
func recipeOf(g *ingest.Ingester) func(context.Context, *bundles.Resolved, int) (catalog.Layer, error) {
	return func(ctx context.Context, m *bundles.Resolved, n int) (catalog.Layer, error) {
		return g.Recipe(ctx, descriptors(m)[n])
	}
}

// makeRecipes makes, in the background, the recipes of layers that were ingested
// before there were any. It ends when close is called.
func makeRecipes(g *ingest.Ingester, blobs objects.Store, log *slog.Logger) (close func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() {
		err := g.MakeRecipes(ctx, blobs, func(blob digest.Digest, err error) {
			log.Warn("a recipe cannot be made: workers cannot prove images of this layer", "layer", blob, "error", err)
		})
		if err != nil && ctx.Err() == nil {
			log.Error("recipes are not made until the server is started again", "error", err)
		}
	})
	return func() error {
		cancel()
		work.Wait()
		return nil
	}
}

// prove finds out, in the background, how layers were compressed. It ends when close is called.
func (s *Server) prove(p *parts) (close func() error) {
	return background(func(ctx context.Context) {
		for _, err := range p.encoders.Check(ctx) {
			if ctx.Err() == nil {
				s.log.Warn("layers of some tools cannot be restored from packs: those that have no intact copy wait for a foil that has this encoder (make build), and no other one loses its intact copy", "error", err)
			}
		}
		proofs := ingest.Proofs{Encoders: p.encoders, Blobs: p.here, Failed: func(blob digest.Digest, err error) {
			s.log.Warn("it is not known how a layer was compressed: its blob cannot be made again", "layer", blob, "error", err)
		}}
		if p.modes != nil {
			proofs.Proven = func(blob digest.Digest) { p.modes.converter.Look(blob) }
		}
		if err := p.ingester.Prove(ctx, proofs); err != nil && ctx.Err() == nil {
			s.log.Error("how layers were compressed is not found out until the server is started again", "error", err)
		}
	})
}

// toldHealed logs what becomes of blobs that were lost.
func toldHealed(log *slog.Logger) func(digest.Digest, error) {
	return func(d digest.Digest, err error) {
		if err != nil {
			log.Error("a lost blob could not be made again: push it again", "digest", d, "error", err)
			return
		}
		log.Warn("a lost blob was made again from packs: look after the disk", "digest", d)
	}
}

// toldFailed logs what becomes of blobs that did not come out right.
func toldFailed(log *slog.Logger) func(d digest.Digest, why, mended error) {
	return func(d digest.Digest, why, mended error) {
		if mended != nil {
			log.Error("a blob does not come out of packs and recipe: push it again", "digest", d, "error", why, "others", mended)
			return
		}
		log.Warn("a blob did not come out of packs and recipe, which were mended from another store: look after the disk", "digest", d, "error", why)
	}
}

// queue prepares images in the background, one after the other, as they are
// pushed. What does not fit, or was not prepared when the server ended, is
// prepared by its first pull.
type queue struct {
	bundles *bundles.Handler
	guard   *guard.Guard          // says whether there is time left for who pushes
	front   *upstream.Accelerator // nil: there is no upstream
	catalog catalog.Repositories
	log     *slog.Logger
	pushed  chan pushed
	cancel  context.CancelFunc
	work    sync.WaitGroup
}

type pushed struct {
	repository string
	manifest   digest.Digest
	tag        string // that was pushed to the upstream; empty: none
	// charge takes how long it took to prepare it; nil: nobody is charged.
	charge func(time.Duration)
}

func newQueue(h *bundles.Handler, g *guard.Guard, front *upstream.Accelerator, cat catalog.Repositories, log *slog.Logger) *queue {
	ctx, cancel := context.WithCancel(context.Background())
	q := &queue{bundles: h, guard: g, front: front, catalog: cat, log: log, pushed: make(chan pushed, 1024), cancel: cancel}
	q.work.Go(func() { q.run(ctx) })
	return q
}

// add is called when a manifest was pushed, and waits for the catalog at most.
//
// An image that was here may be pushed again because something is wrong with
// it: nobody gets it then before it was verified.
func (q *queue) add(ctx context.Context, repository string, m catalog.Manifest) {
	charge, err := q.guard.Work(ctx)
	ctx = context.WithoutCancel(ctx)
	// A manifest that was here keeps the time of its first push.
	if before, err := q.catalog.Manifest(ctx, repository, m.Digest); err == nil && before.Pushed.Before(m.Pushed) {
		_ = q.bundles.Suspect(ctx, repository, m.Digest) // it is no image, or prepare finds the same error
	}
	if err != nil {
		q.log.Info("an image is prepared by its first pull", "repository", repository, "manifest", m.Digest, "why", err)
		return
	}
	select {
	case q.pushed <- pushed{repository: repository, manifest: m.Digest, charge: charge}:
	default:
		q.log.Warn("too many pushes at once: an image is prepared by its first pull", "repository", repository, "manifest", m.Digest)
	}
}

// told is called when a manifest was pushed to the upstream. It reports whether
// there is room for it.
func (q *queue) told(p upstream.Pushed) bool {
	select {
	case q.pushed <- pushed{repository: p.Repository, manifest: p.Digest, tag: p.Tag}:
		return true
	default:
		return false
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
	log := q.log.With("repository", p.repository, "manifest", p.manifest)
	err := q.bundles.Prepare(ctx, p.repository, p.manifest)
	if p.charge != nil {
		p.charge(time.Since(began))
	}
	told, ok := errors.AsType[*bundle.Error](err)
	if p.tag != "" {
		log = log.With("tag", p.tag)
		// From now on it is here, also when the upstream is not.
		if err := q.front.Follow(ctx, p.repository, p.tag, p.manifest); err != nil && ctx.Err() == nil {
			log.Warn("a tag that was pushed to the upstream cannot be looked up", "error", err)
		}
	}
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
