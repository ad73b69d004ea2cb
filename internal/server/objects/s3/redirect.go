package s3

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/minio/minio-go/v7"
)

// Redirects makes URLs by which others read objects of a bucket, with nothing but the URL, for a while.
type Redirects struct {
	client *minio.Client
	bucket *Bucket
	ttl    time.Duration
}

// The least and the most that a URL of Redirects counts.
const (
	LeastTTL = 10 * time.Second
	MostTTL  = 7 * 24 * time.Hour
)

// NewRedirects returns those of a bucket that clients reach at an endpoint of their own, http:// or https://HOST[:PORT]. Nothing is asked
// of the store: a URL is a signature.
func (b *Bucket) NewRedirects(endpoint string, ttl time.Duration) (*Redirects, error) {
	fail := func(err error) (*Redirects, error) { return nil, fmt.Errorf("redirects to the store: %w", err) }
	if err := checkEndpoint(endpoint); err != nil {
		return fail(err)
	}
	if ttl < LeastTTL || ttl > MostTTL {
		return fail(fmt.Errorf("for %v: want %v to %v", ttl, LeastTTL, MostTTL))
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return fail(err)
	}
	creds, err := findCredentials(b.at)
	if err != nil {
		return fail(err)
	}
	at := b.at
	at.Endpoint = endpoint
	client, err := minio.New(u.Host, &minio.Options{Creds: creds, Secure: u.Scheme == "https", Region: at.region(), BucketLookup: at.lookup()})
	if err != nil {
		return fail(err)
	}
	return &Redirects{client, b, ttl}, nil
}

// Of returns the URL of an object.
func (r *Redirects) Of(ctx context.Context, key string) (string, error) {
	if err := check(ctx, "redirect to", key); err != nil {
		return "", err
	}
	u, err := r.client.PresignedGetObject(ctx, r.bucket.at.Bucket, r.bucket.name(key), r.ttl, nil)
	if err != nil {
		return "", fmt.Errorf("redirect to object %s: %w", key, err)
	}
	return u.String(), nil
}
