package bundles_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/bundles"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// endlessStore makes no object before who wants it gives up.
type endlessStore struct {
	objects.Store
	asked func()
	left  atomic.Bool
}

func (s *endlessStore) Create(ctx context.Context, _ string) (objects.Writer, error) {
	s.asked()
	<-ctx.Done()
	s.left.Store(true)
	return nil, ctx.Err()
}

// TestCloseEndsWhatIsKept: an image is prepared by something that ends before what it found out is kept. Nothing is
// written after Close.
func TestCloseEndsWhatIsKept(t *testing.T) {
	w := plannertest.New(t, nil)
	m, _ := (&server{World: w}).image(t, "r", "1", plannertest.Files{"/a": text(9, 9000)}, ocispec.ImageConfig{})
	asked := make(chan struct{})
	store := &endlessStore{Store: w.Objects, asked: sync.OnceFunc(func() { close(asked) })}
	h := bundles.New(bundles.Options{
		Catalog: w.Catalog, Objects: store, Log: slog.New(slog.DiscardHandler),
		Rootfs: func(ctx context.Context, m *bundles.Resolved) (catalog.Rootfs, error) {
			return w.Catalog.Rootfs(ctx, m.ChainID)
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.Prepare(ctx, "r", m.Digest) }()
	<-asked
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("who prepares it: %v", err)
	}
	if err := h.Close(); err != nil || !store.left.Load() {
		t.Errorf("it is closed (%v), and something is written still", err)
	}
}
