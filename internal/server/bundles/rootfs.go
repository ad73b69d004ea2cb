package bundles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// rootfs returns the rootfs of an image. If it cannot be had because a layer
// was refused, the error says which and why.
func (h *Handler) rootfs(ctx context.Context, m *Resolved, get func(context.Context, *Resolved) (catalog.Rootfs, error)) (catalog.Rootfs, error) {
	r, err := get(ctx, m)
	if err == nil && r.ChainID != m.ChainID {
		err = fmt.Errorf("rootfs of %s: got %s, want %s", m.Manifest.Digest, r.ChainID, m.ChainID)
	}
	if err == nil || ctx.Err() != nil {
		return r, err
	}
	var told *bundle.Error
	if errors.As(err, &told) {
		return r, err
	}
	for _, l := range m.Layers {
		if layer, lerr := h.o.Catalog.Layer(ctx, l.Digest); lerr == nil && layer.Refused != "" {
			return r, unsupported("layer %s cannot be served in a bundle: %s", l.Digest, layer.Refused)
		}
	}
	return r, err
}

// encodedTOC reads the TOC of a rootfs, verified.
func (h *Handler) encodedTOC(ctx context.Context, r catalog.Rootfs) ([]byte, error) {
	b, err := objects.Read(ctx, h.o.Objects, r.Key, bundle.MaxImage-4*bundle.MaxManifest)
	if err != nil {
		return nil, fmt.Errorf("read TOC of %s: %w", r.ChainID, err)
	}
	if toc.Digest(b) != r.TOC {
		return nil, fmt.Errorf("read TOC of %s: %w: object %s", r.ChainID, errDamaged, r.Key)
	}
	return b, nil
}

// index returns the index of a rootfs. layers are the blobs that it was flattened from, and encoded is its TOC; or nil if the
// caller does not have them.
func (h *Handler) index(ctx context.Context, r catalog.Rootfs, layers []digest.Digest, encoded []byte) (*planner.Index, error) {
	for {
		x, err := h.cachedIndex(ctx, r, layers, encoded)
		if err != nil {
			return nil, err
		}
		// Packs that are known now stay until whoever reads them has ended, and those of an older index may be gone.
		known, err := h.o.Catalog.PacksKnown(ctx, x.Packs())
		if err != nil || known {
			return x, err
		}
		h.indices.Drop(string(r.TOC))
		if r, err = h.o.Catalog.Rootfs(ctx, r.ChainID); err != nil {
			return nil, err
		}
	}
}

func (h *Handler) cachedIndex(ctx context.Context, r catalog.Rootfs, layers []digest.Digest, encoded []byte) (*planner.Index, error) {
	return h.indices.Get(ctx, string(r.TOC), func(ctx context.Context) (*planner.Index, error) {
		b := encoded
		if b == nil {
			var err error
			if b, err = h.encodedTOC(ctx, r); err != nil {
				return nil, err
			}
		}
		t, err := toc.DecodeContents(b) // encodedTOC has verified it
		if err != nil {
			return nil, fmt.Errorf("read TOC of %s: %w: %w", r.ChainID, errDamaged, err)
		}
		return h.loadIndex(ctx, r, layers, t)
	})
}

// errOutdated is why an index is built anew whose segments have moved to other packs.
var errOutdated = errors.New("some of its packs are gone")

// loadIndex reads the index object, or builds it anew and keeps it.
func (h *Handler) loadIndex(ctx context.Context, r catalog.Rootfs, layers []digest.Digest, t *toc.TOC) (*planner.Index, error) {
	if r.Index != "" {
		b, err := objects.Read(ctx, h.o.Objects, r.Index, 1<<30)
		if err == nil {
			var x *planner.Index
			if x, err = planner.Decode(b, t, r.TOC); err == nil {
				var known bool
				if known, err = h.o.Catalog.PacksKnown(ctx, x.Packs()); known {
					return x, nil
				}
				if err == nil {
					err = errOutdated
				}
			}
		}
		level := slog.LevelWarn
		if errors.Is(err, errOutdated) { // the collector has compacted them
			level = slog.LevelInfo
		}
		h.log.Log(ctx, level, "frame index is rebuilt", "chain_id", r.ChainID, "error", err)
	}
	// Of what the catalog knows to be an image of the rootfs the layers need not be told.
	places, err := h.packs.Places(ctx, layers, r.ChainID)
	if err != nil {
		return nil, err
	}
	x, err := planner.Build(ctx, t, r.TOC, places)
	if err != nil {
		return nil, err
	}
	r.Index = ""
	if err := h.saveIndex(ctx, r, x); err != nil {
		h.log.Warn("frame index cannot be kept", "chain_id", r.ChainID, "error", err)
	}
	return x, nil
}

func (h *Handler) saveIndex(ctx context.Context, r catalog.Rootfs, x *planner.Index) error {
	r.Index = "indices/" + strings.Replace(string(r.TOC), ":", "/", 1) + "-" + objects.Random()
	if err := objects.Put(ctx, h.o.Objects, r.Index, x.Encode()); err != nil {
		return err
	}
	return h.o.Catalog.PutRootfs(ctx, r)
}
