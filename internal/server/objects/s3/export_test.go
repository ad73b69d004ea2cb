package s3

import (
	"context"
	"time"
)

// Hurry has a bucket pause for next to nothing before it tries again, so many times.
func Hurry(b *Bucket, attempts int) *Bucket {
	b.attempts = attempts
	b.wait = func(ctx context.Context, _ time.Duration) error {
		select {
		case <-time.After(time.Millisecond):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return b
}

// PartSize is that of a stream's parts.
const PartSize = partSize

// Attempts is how often something is tried.
const Attempts = defaultAttempts
