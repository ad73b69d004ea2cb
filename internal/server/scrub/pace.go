package scrub

import (
	"context"
	"io"

	"golang.org/x/time/rate"

	"hydrofoil.dev/foil/internal/server/objects"
)

// paceBytes is how much is read at once: what the limiter must be able to grant.
const paceBytes = 256 << 10

// paced is a store whose readers together read at most so many bytes a second.
type paced struct {
	objects.Store
	limit *rate.Limiter
}

func newPaced(s objects.Store, bytes int64) *paced {
	if bytes <= 0 {
		return &paced{s, rate.NewLimiter(rate.Inf, 0)}
	}
	return &paced{s, rate.NewLimiter(rate.Limit(bytes), paceBytes)}
}

// Open implements objects.Store.
func (p *paced) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r, err := p.Store.Open(ctx, key, offset, length)
	if err != nil || p.limit.Limit() == rate.Inf {
		return r, err
	}
	return &pacedReader{ctx, r, p.limit}, nil
}

type pacedReader struct {
	ctx context.Context
	io.ReadCloser
	limit *rate.Limiter
}

func (r *pacedReader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b[:min(len(b), paceBytes)])
	if werr := r.limit.WaitN(r.ctx, n); werr != nil {
		return n, werr
	}
	return n, err
}
