package serve

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/near"
	"hydrofoil.dev/foil/internal/server/objects/s3"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// DefaultStoreCache is what is kept of a bucket on the root's disk, bytes.
const DefaultStoreCache = 8 << 30

// DefaultStoreCheck is how often the server asks whether the bucket is still its root's. One that was taken is used for as long, and a
// little longer.
const DefaultStoreCheck = time.Minute

// DefaultStoreRedirectFor is how long a URL counts that a client was sent to.
const DefaultStoreRedirectFor = 5 * time.Minute

// redirects says where clients read blobs themselves; nil: nowhere.
func (s *Server) redirects(p *parts) (func(ctx context.Context, key string) (string, error), error) {
	if s.opts.StoreRedirect == "" {
		return nil, nil
	}
	if s.bucket == nil || p.front != nil {
		return nil, errors.New("clients can be redirected to a bucket (--store) of blobs that were pushed here; an accelerator may not have them yet")
	}
	ttl := s.opts.StoreRedirectFor
	if ttl == 0 {
		ttl = DefaultStoreRedirectFor
	}
	r, err := s.bucket.NewRedirects(s.opts.StoreRedirect, ttl)
	if err != nil {
		return nil, err
	}
	return r.Of, nil
}

// leftoverUploads is after how long parts of an object that nobody completes are dropped.
const leftoverUploads = 24 * time.Hour

// openObjects opens where objects rest.
func (s *Server) openObjects(ctx context.Context, p *parts) error {
	root := s.opts.Root
	_, is, err := rootdir.InBucket(root)
	if err != nil {
		return err
	}
	if !is && s.opts.Store == "" {
		dir, err := objects.OpenDir(rootdir.Objects(root))
		p.rest, p.here = dir, dir
		return err
	}
	counted := s3.NewMetrics()
	bucket, err := rootdir.Attach(ctx, root, s.opts.Store, false, counted)
	if err != nil {
		return err
	}
	cache := near.Options{Dir: filepath.Join(root, "near"), Limit: s.opts.StoreCache, Log: s.log, Metrics: near.NewMetrics()}
	if cache.Limit == 0 {
		cache.Limit = DefaultStoreCache
	}
	front, err := near.Open(bucket, cache)
	if err != nil {
		return err
	}
	p.rest, p.here = bucket, front
	p.bucket = append(counted.Collectors(), cache.Metrics.Collectors()...)
	s.closers = append(s.closers, front.Close)
	s.bucket = bucket
	return nil
}

// holdBucket ends the server when its bucket is another root's, and drops what crashes have left there.
func (s *Server) holdBucket(ctx context.Context) {
	var looked time.Time
	for {
		if time.Since(looked) > leftoverUploads {
			looked = time.Now()
			dropped, err := s.bucket.Leftovers(ctx, looked.Add(-leftoverUploads))
			switch {
			case err != nil && ctx.Err() == nil:
				s.log.Warn("uploads to the bucket that nobody completed are not dropped, until tomorrow", "error", err)
			case dropped > 0:
				s.log.Info("uploads to the bucket that nobody completed were dropped", "uploads", dropped)
			}
		}
		if backoff.Wait(ctx, s.opts.StoreCheck) != nil {
			return
		}
		err := s.bucket.Own(ctx)
		s.away.Store(err != nil)
		if errors.Is(err, rootdir.ErrClaimed) {
			s.log.Error("the server ends: others would remove what it needs, and it what they need", "error", err)
			s.lost.Store(&err)
			_ = s.http.Close() // Wait says why
			return
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("it is not known whether the bucket is still this root's", "error", err)
		}
	}
}
