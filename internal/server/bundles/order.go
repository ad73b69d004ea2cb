package bundles

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
)

// guessKeeps is how many frames a guess keeps decoded, 512 KiB each: what a program imports lies in
// many directories.
const guessKeeps = 64

// order returns the order in which an image's segments are likely to be needed,
// as far as can be guessed. It is kept as an object. Without any the image arrives
// in the order of its TOC: late, but right.
func (h *Handler) order(ctx context.Context, m *Resolved, x *planner.Index, encoded []byte) (planner.Order, error) {
	return h.orders.Get(ctx, string(m.Config.Digest)+" "+string(x.TOC()), func(ctx context.Context) (planner.Order, error) {
		key := planner.OrderKey(m.Config.Digest, x.TOC())
		b, err := objects.Read(ctx, h.o.Objects, key, 1<<30)
		if err == nil {
			var o planner.Order
			if o, err = planner.DecodeOrder(b, m.Config.Digest, x.TOC(), x.Len()); err == nil {
				return o, nil
			}
		}
		if !errors.Is(err, objects.ErrNotFound) {
			h.log.Warn("order is guessed anew", "image", ref(m.Repository, m.Reference), "error", err)
		}
		t, err := toc.Decode(encoded)
		if err != nil {
			return nil, fmt.Errorf("read TOC of %s: %w: %w", m.ChainID, errDamaged, err)
		}
		o := h.guess(ctx, m, x, t, m.Image.Config)
		if err := objects.Put(ctx, h.o.Objects, key, o.Encode(m.Config.Digest, x.TOC())); err != nil {
			h.log.Warn("guessed order cannot be kept", "image", ref(m.Repository, m.Reference), "error", err)
		}
		return o, nil
	})
}

// serviceOrder is order for a container that runs something else than the image says, and is known by
// no trace. It is kept in memory only. One is guessed at a time: whoever comes meanwhile with
// another one gets the image's.
func (h *Handler) serviceOrder(ctx context.Context, m *Resolved, x *planner.Index, encoded []byte, service []string) (planner.Order, error) {
	config := m.Image.Config
	if slices.Equal(service, slices.Concat(config.Entrypoint, config.Cmd)) {
		return h.order(ctx, m, x, encoded)
	}
	key := fmt.Sprintf("%s %s %x", m.Config.Digest, x.TOC(), sha256.Sum256(fmt.Appendf(nil, "%q", service)))
	o, err := h.orders.Get(ctx, key, func(ctx context.Context) (planner.Order, error) {
		if !h.guessing.TryLock() {
			return nil, errGuessing
		}
		defer h.guessing.Unlock()
		t, err := toc.Decode(encoded)
		if err != nil {
			return nil, fmt.Errorf("read TOC of %s: %w: %w", m.ChainID, errDamaged, err)
		}
		config.Entrypoint, config.Cmd = nil, service
		return h.guess(ctx, m, x, t, config), nil
	})
	if errors.Is(err, errGuessing) {
		return h.order(ctx, m, x, encoded)
	}
	return o, err
}

var errGuessing = errors.New("another order is being guessed")

func (h *Handler) guess(ctx context.Context, m *Resolved, x *planner.Index, t *toc.TOC, config ocispec.ImageConfig) planner.Order {
	began := time.Now()
	o := planner.Guess(ctx, &planner.Contents{TOC: t, Index: x, Objects: h.o.Objects, Keep: guessKeeps}, config)
	h.log.Debug("order guessed", "image", ref(m.Repository, m.Reference), "took", time.Since(began))
	return o
}
