package scrub

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

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

// Rate is how many bytes a second are read, as the value of a flag; 0: nothing bounds it.
type Rate int64

// String, Set and Type make it the value of a flag.
func (r *Rate) String() string { return strconv.FormatInt(int64(*r), 10) }

// Type names what Set takes.
func (r *Rate) Type() string { return "rate" }

// Set reads "100000", "64K", "20M" or "1G".
func (r *Rate) Set(s string) error {
	digits, shift := s, 0
	if i := strings.IndexAny(s, "KMG"); i >= 0 && i == len(s)-1 {
		digits, shift = s[:i], 10*(1+strings.IndexByte("KMG", s[i]))
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || n > 1<<30 && shift > 0 {
		return fmt.Errorf("want bytes a second like 20M, not %q", s)
	}
	*r = Rate(n << shift)
	return nil
}
