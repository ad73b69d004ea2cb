package bundles

import (
	"context"
	"errors"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/restore"
)

// isDamage reports whether an error says that stored bytes are lost or are not
// what they were, which Repair may make good.
func isDamage(err error) bool {
	for _, target := range []error{errDamaged, planner.ErrMissing, planner.ErrDamaged, restore.ErrMissing, segment.ErrCorrupt, objects.ErrNotFound, layer.ErrBadList} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// suspect has the rootfs of an image repaired before it is served again.
func (h *Handler) suspect(m *Resolved) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.suspects[m.ChainID] = true
}

// suspected reports whether suspect was called, and nothing has been repaired since.
func (h *Handler) suspected(m *Resolved) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.suspects[m.ChainID] && h.o.Repair != nil
}

// described returns what the header of an image is made of: its rootfs and encoded TOC,
// repaired as by whole.
func (h *Handler) described(ctx context.Context, m *Resolved) (r catalog.Rootfs, encoded []byte, err error) {
	if !h.suspected(m) {
		if r, err = h.rootfs(ctx, m, h.o.Rootfs); err == nil {
			h.ahead(ctx, m, r)
			encoded, err = h.encodedTOC(ctx, r)
		}
		if err == nil || !isDamage(err) || ctx.Err() != nil {
			return r, encoded, err
		}
	}
	r, encoded, _, err = h.whole(ctx, m)
	return r, encoded, err
}

// whole returns what an image is served from: its rootfs, encoded TOC and
// index. What turns out to be damaged is repaired, once.
func (h *Handler) whole(ctx context.Context, m *Resolved) (r catalog.Rootfs, encoded []byte, x *planner.Index, err error) {
	if !h.suspected(m) {
		r, encoded, x, err = h.load(ctx, m, h.o.Rootfs)
		if err == nil || !isDamage(err) || ctx.Err() != nil || h.o.Repair == nil {
			return r, encoded, x, err
		}
		h.log.Warn("image is repaired", "image", ref(m.Repository, m.Reference), "error", err)
	}
	r, encoded, x, err = h.load(ctx, m, func(ctx context.Context, m *Resolved) (catalog.Rootfs, error) {
		r, err := h.o.Repair(ctx, m)
		if err == nil {
			h.indices.Drop(string(r.TOC)) // it names frames that are damaged
		}
		return r, err
	})
	if err == nil {
		h.mu.Lock()
		delete(h.suspects, m.ChainID)
		h.mu.Unlock()
	}
	return r, encoded, x, err
}

func (h *Handler) load(ctx context.Context, m *Resolved, rootfs func(context.Context, *Resolved) (catalog.Rootfs, error)) (r catalog.Rootfs, encoded []byte, x *planner.Index, err error) {
	if r, err = h.rootfs(ctx, m, rootfs); err != nil {
		return r, nil, nil, err
	}
	if encoded, err = h.encodedTOC(ctx, r); err != nil {
		return r, nil, nil, err
	}
	x, err = h.index(ctx, r, m.blobs(), encoded)
	return r, encoded, x, err
}

// Remade forgets what is in memory of a rootfs whose frame index was made anew.
func (h *Handler) Remade(toc digest.Digest) { h.indices.Drop(string(toc)) }

// LostSet has the startup pages of an image built anew, whose object is lost or damaged.
func (h *Handler) LostSet(ctx context.Context, m catalog.StartupImage, why error) {
	h.sets.Lost(ctx, m, why)
}
