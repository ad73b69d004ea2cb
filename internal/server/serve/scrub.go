package serve

import (
	"context"

	"hydrofoil.dev/foil/internal/server/scrub"
)

// scrubber reads what rests, all the time, until close is called.
func (s *Server) scrubber(p *parts, m *scrub.Metrics) (close func() error) {
	o := scrub.Options{
		Root: s.opts.Root, Catalog: p.local, Objects: p.here, Blobs: p.blobs, Ingester: p.ingester, Rate: int64(s.opts.ScrubRate),
		Elsewhere: p.front != nil, Exclude: p.registry.Exclude, Remade: p.bundle.Remade, LostSet: p.bundle.LostSet,
		Readers: p.readers, Metrics: m, Log: s.log,
	}
	return background(func(ctx context.Context) { scrub.Always(ctx, o) })
}
