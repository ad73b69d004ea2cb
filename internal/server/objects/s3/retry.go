package s3

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"syscall"
	"time"

	"github.com/minio/minio-go/v7"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/server/objects"
)

// defaultAttempts is how often something is tried that fails; reads that make progress begin to count anew.
const defaultAttempts = 6

// pauses between them: some 7 s in all.
var pauses = backoff.Backoff{First: 200 * time.Millisecond, Most: 3 * time.Second}

// mostAfter is how long a store may ask to be left alone.
const mostAfter = 20 * time.Second

// do tries fn until it works, is refused, or has failed too often. Every try has a context of its own. What fn does must be safe
// to be done twice, also when the first time worked and nobody heard of it. Errors: ErrNotFound, UnavailableError, ENOSPC; those
// of ctx.
func (b *Bucket) do(ctx context.Context, op, key string, fn func(ctx context.Context) error) error {
	for failures := 0; ; {
		var a attempt
		err := fn(context.WithValue(ctx, attemptKey{}, &a))
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s object %s: %w", op, key, context.Cause(ctx))
		}
		told, again := b.judge(op, key, err, a.after)
		if failures++; !again || failures >= b.attempts {
			if again {
				b.metrics.retries.WithLabelValues("failed").Inc()
			}
			return told
		}
		b.metrics.retries.WithLabelValues("again").Inc()
		pause := max(backoff.Spread(pauses.Pause(failures)), min(a.after, mostAfter))
		if err := b.wait(ctx, pause); err != nil {
			return fmt.Errorf("%s object %s: %w", op, key, err)
		}
	}
}

// judge turns an error of the client into ours, and reports whether it may go away by itself.
func (b *Bucket) judge(op, key string, err error, after time.Duration) (told error, again bool) {
	var own *objects.UnavailableError
	switch {
	case errors.Is(err, objects.ErrNotFound), errors.Is(err, objects.ErrRange), errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%s object %s: %w", op, key, err), false
	case errors.As(err, &own):
		return err, true
	}
	unavailable := &objects.UnavailableError{Op: op, Key: key, Reason: err.Error(), After: after}
	var e minio.ErrorResponse
	if !errors.As(err, &e) {
		// There was no answer. A certificate that nobody vouches for stays one.
		_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
		_, other := errors.AsType[x509.HostnameError](err)
		if unknown {
			unavailable.Reason += "; name its authority by ca=FILE"
		}
		return unavailable, !unknown && !other
	}
	refused := func(hint string) (error, bool) {
		return fmt.Errorf("%s object %s: the object store refused it: %s (%s)%s", op, key, e.Error(), e.Code, hint), false
	}
	switch e.Code {
	case minio.NoSuchKey:
		return fmt.Errorf("%s object %s: %w", op, key, objects.ErrNotFound), false
	case minio.NoSuchBucket:
		return refused(": make the bucket, or name another one")
	case "QuotaExceeded", "EntityTooLarge", "XMinioStorageFull", "InsufficientCapacity":
		return fmt.Errorf("%s object %s: the object store has no room for it: %s: %w", op, key, e.Error(), syscall.ENOSPC), false
	case "InvalidAccessKeyId", "SignatureDoesNotMatch", minio.AccessDenied:
		return refused(": look at the credentials, and whether they may read, write, list and delete in this bucket")
	case "RequestTimeTooSkewed":
		return refused(": set this machine's clock")
	case "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded",
		"ExpiredToken", "OperationAborted", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody":
		return unavailable, true
	}
	again = e.StatusCode >= 500 && e.StatusCode != http.StatusNotImplemented && e.StatusCode != http.StatusInsufficientStorage ||
		slices.Contains([]int{http.StatusRequestTimeout, http.StatusTooManyRequests, 499}, e.StatusCode)
	switch {
	case e.StatusCode == http.StatusInsufficientStorage:
		return fmt.Errorf("%s object %s: the object store has no room for it: %s: %w", op, key, e.Error(), syscall.ENOSPC), false
	case again:
		return unavailable, true
	}
	return refused("")
}
