package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/minio/minio-go/v7"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Open implements objects.Store. It makes one request; a reader that breaks off makes others.
func (b *Bucket) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := check(ctx, "open", key); err != nil {
		return nil, err
	}
	r := &reader{b: b, ctx: ctx, key: key, total: -1, pos: offset, end: -1}
	if length >= 0 {
		r.end = offset + length
	}
	if offset < 0 || length >= 0 && r.end < offset {
		return nil, fmt.Errorf("open object %s: %w: %d bytes from %d", key, objects.ErrRange, length, offset)
	}
	if length == 0 {
		size, err := b.Stat(ctx, key)
		if err == nil {
			_, err = objects.CheckRange(offset, length, size)
		}
		if err != nil {
			return nil, fmt.Errorf("open object %s: %w", key, err)
		}
		r.total = size
		return r, nil
	}
	if err := b.do(ctx, "open", key, r.request); err != nil {
		return nil, err
	}
	return r, nil
}

// OpenWithin implements objects.Within.
func (b *Bucket) OpenWithin(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := check(ctx, "open", key); err != nil {
		return nil, err
	}
	if offset < 0 || length <= 0 {
		return nil, fmt.Errorf("open object %s: %w: %d bytes from %d", key, objects.ErrRange, length, offset)
	}
	r := &reader{b: b, ctx: ctx, key: key, total: -1, pos: offset, end: offset + length, within: true}
	if err := b.do(ctx, "open", key, r.request); err != nil {
		return nil, err
	}
	return r, nil
}

// reader reads bytes pos to end of an object. It belongs to one goroutine.
type reader struct {
	b    *Bucket
	ctx  context.Context
	key  string
	etag string // of the object; empty: it is not known yet

	total    int64 // bytes of the object; < 0: not known
	pos, end int64 // end < 0: to the object's end
	within   bool  // the end may be after the object's

	body     io.ReadCloser // nil: to be asked for
	cancel   context.CancelFunc
	failures int // since bytes came
}

// Size implements objects.Sized.
func (r *reader) Size() int64 { return r.total }

// request asks for what is left.
func (r *reader) request(ctx context.Context) error {
	var o minio.GetObjectOptions
	switch {
	case r.end >= 0:
		o.Set("Range", fmt.Sprintf("bytes=%d-%d", r.pos, r.end-1))
	case r.pos > 0:
		o.Set("Range", fmt.Sprintf("bytes=%d-", r.pos))
	}
	if r.etag != "" {
		if err := o.SetMatchETag(r.etag); err != nil {
			return err
		}
	}
	bodyCtx, cancel := context.WithCancel(ctx)
	body, info, header, err := r.b.core.GetObject(bodyCtx, r.b.at.Bucket, r.b.name(r.key), o)
	if err != nil {
		cancel()
		return r.refused(ctx, err)
	}
	fail := func(err error) error {
		cancel()
		return errors.Join(err, body.Close())
	}
	offset, total, err := rangeOf(header, info)
	if err != nil {
		return fail(err)
	}
	end := total
	if r.end >= 0 {
		end = r.end
	}
	if r.within {
		end = min(end, total)
	}
	switch {
	case r.total >= 0 && total != r.total:
		return fail(fmt.Errorf("the object has %d bytes, and had %d", total, r.total))
	case end > total:
		_, err := objects.CheckRange(r.pos, end-r.pos, total)
		return fail(err)
	case offset != r.pos:
		return fail(fmt.Errorf("illegal answer: it begins at %d, and bytes from %d were asked for", offset, r.pos))
	}
	r.total, r.end, r.etag, r.body, r.cancel = total, end, info.ETag, body, cancel
	return nil
}

// refused explains why there is no answer with bytes.
func (r *reader) refused(ctx context.Context, err error) error {
	e, _ := errors.AsType[minio.ErrorResponse](err)
	switch e.StatusCode {
	case http.StatusPreconditionFailed:
		return fmt.Errorf("it was replaced while it was read: %w", objects.ErrNotFound)
	case http.StatusRequestedRangeNotSatisfiable:
		size, serr := r.b.ask(ctx, r.key)
		if ctx.Err() != nil || serr != nil {
			return errors.Join(serr, ctx.Err())
		}
		length := int64(-1)
		if r.end >= 0 && !r.within {
			length = r.end - r.pos
		}
		if length, serr = objects.CheckRange(r.pos, length, size); serr != nil {
			return serr
		}
		if length > 0 {
			return err
		}
		r.total, r.end = size, r.pos // the end of the object
		return nil
	}
	return err
}

func (r *reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.end < 0 || r.pos < r.end {
		if r.body == nil {
			if err := r.b.do(r.ctx, "read", r.key, r.request); err != nil {
				return 0, err
			}
			continue
		}
		if int64(len(p)) > r.end-r.pos {
			p = p[:r.end-r.pos]
		}
		watch := time.AfterFunc(r.b.at.Timeout, r.cancel)
		n, err := r.body.Read(p)
		watch.Stop()
		r.pos += int64(n)
		if n > 0 {
			r.failures = 0
			return n, nil
		}
		if err == nil {
			continue
		}
		if cause := r.ctx.Err(); cause != nil {
			return 0, fmt.Errorf("read object %s: %w", r.key, cause)
		}
		r.drop()
		if r.failures++; r.failures >= r.b.attempts {
			r.b.metrics.retries.WithLabelValues("failed").Inc()
			// Not the error itself: a cut connection is no object that was cut.
			return 0, &objects.UnavailableError{Op: "read", Key: r.key, Reason: fmt.Sprintf("its answer broke off at byte %d: %v", r.pos, err)}
		}
		r.b.metrics.retries.WithLabelValues("again").Inc()
		if r.failures > 1 {
			if err := r.b.wait(r.ctx, backoff.Spread(pauses.Pause(r.failures-1))); err != nil {
				return 0, fmt.Errorf("read object %s: %w", r.key, err)
			}
		}
	}
	return 0, io.EOF
}

// drop ends the answer that is being read.
func (r *reader) drop() {
	if r.body != nil {
		r.cancel()
		_ = r.body.Close() // what it says is known, or of no interest
		r.body = nil
	}
}

func (r *reader) Close() error {
	if r.body != nil && r.pos == r.end {
		// The connection can be used again once its end was seen, which has come.
		watch := time.AfterFunc(time.Second, r.cancel)
		_, _ = io.CopyN(io.Discard, r.body, 1)
		watch.Stop()
	}
	r.drop()
	r.pos, r.end = 0, 0
	return nil
}
