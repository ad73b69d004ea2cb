// Package s3 is the object store in a bucket that speaks S3.
//
// # What is expected of the store
//
// An object is what was written last, or was written last and acknowledged, as soon as that is acknowledged: for reads and for
// listings, which come in the order of keys. Nothing else is: no conditional writes, no checksums of one kind or another, no versions.
//
// # Objects
//
// The object a/b is the object PREFIX/a/b of the bucket. One of at most partSize is written by one PUT. A longer one is a multipart
// upload, which begins when there is a whole part, and is completed by Commit. So nothing is there before Commit.
//
// # Checksums
//
// Each PUT is signed together with the SHA-256 of its bytes, taken where they were written. A store that gets others refuses them. What
// is read has digests above this package, in each format and for each blob. A body that ends too early is
// continued with If-Match, so that it is of one object.
//
// # Errors and tries
//
// What may go away is tried again, with growing pauses (retry.go). A request that was carried out though its answer was lost is
// done twice: writing the same bytes under the same key and deleting are the same the second time; completing an upload is not, so that
// the object is looked at, which bears the name of its upload. When all tries have failed it is not
// known whether a write was carried out, or will be.
//
// That an object is not there is believed only if the store says so in its own words; and an answer that is cut is never an object that
// is shorter. Who calls acts on both: blobs that are lost are taken out of repositories.
package s3

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/server/objects"
)

// answerTimeout is for how long the store may take to make one object of parts; others have Location.Timeout.
const answerTimeout = 10 * time.Minute

// Bucket is an objects.Store.
type Bucket struct {
	at       Location
	core     *minio.Core
	patient  *minio.Core // for what takes the store long
	metrics  *Metrics
	attempts int
	wait     func(ctx context.Context, pause time.Duration) error

	mu   sync.Mutex
	open map[string]bool // guarded by mu: IDs of multipart uploads of this process
}

// Open returns the store at a location. It asks nothing of it yet. m may be nil.
func Open(at Location, m *Metrics) (*Bucket, error) {
	if at.Timeout == 0 {
		at.Timeout = defaultTimeout
	}
	if m == nil {
		m = NewMetrics()
	}
	b := &Bucket{at: at, metrics: m, attempts: defaultAttempts, wait: backoff.Wait, open: map[string]bool{}}
	endpoint := at.Endpoint
	if endpoint == "" {
		endpoint = amazon
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", at, err)
	}
	creds, err := findCredentials(at)
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", at, err)
	}
	for answer, core := range map[time.Duration]**minio.Core{at.Timeout: &b.core, max(answerTimeout, 2*at.Timeout): &b.patient} {
		o := &minio.Options{Creds: creds, Secure: u.Scheme == "https", Region: at.region(), BucketLookup: at.lookup(), MaxRetries: 1}
		if o.Transport, err = newTransport(at, answer, m); err != nil {
			return nil, fmt.Errorf("store %s: %w", at, err)
		}
		if *core, err = minio.NewCore(u.Host, o); err != nil {
			return nil, fmt.Errorf("store %s: %w", at, err)
		}
	}
	return b, nil
}

// lookup is how the bucket is named in requests.
func (l Location) lookup() minio.BucketLookupType {
	switch {
	case l.Style == StyleHost:
		return minio.BucketLookupDNS
	case l.Style == StylePath || l.Endpoint != "":
		return minio.BucketLookupPath
	}
	return minio.BucketLookupAuto
}

// Location is where the bucket is.
func (b *Bucket) Location() Location { return b.at }

// name is the key in the bucket; of an empty one what all begin with.
func (b *Bucket) name(key string) string {
	if b.at.Prefix == "" {
		return key
	}
	return b.at.Prefix + "/" + key
}

// missing reports whether an error says that an object is not there.
func missing(err error) bool {
	e, ok := errors.AsType[minio.ErrorResponse](err)
	return ok && e.Code == minio.NoSuchKey
}

// check is what every method begins with.
func check(ctx context.Context, op, key string) error {
	if err := objects.CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s object %s: %w", op, key, err)
	}
	return nil
}

// Stat implements objects.Store.
func (b *Bucket) Stat(ctx context.Context, key string) (size int64, err error) {
	if err := check(ctx, "stat", key); err != nil {
		return 0, err
	}
	err = b.do(ctx, "stat", key, func(ctx context.Context) error {
		info, err := b.core.StatObject(ctx, b.at.Bucket, b.name(key), minio.StatObjectOptions{})
		size = info.Size
		if !missing(err) {
			return err
		}
		// The answer to a HEAD has no body: nobody knows who said so.
		size, err = b.ask(ctx, key)
		return err
	})
	return size, err
}

// ask returns an object's size as a GET says it.
func (b *Bucket) ask(ctx context.Context, key string) (int64, error) {
	var o minio.GetObjectOptions
	o.Set("Range", "bytes=0-0")
	body, info, header, err := b.core.GetObject(ctx, b.at.Bucket, b.name(key), o)
	e, _ := errors.AsType[minio.ErrorResponse](err)
	if e.StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return 0, nil // it is empty
	}
	if err != nil {
		return 0, err
	}
	defer body.Close()
	_, total, err := rangeOf(header, info)
	return total, err
}

// rangeOf reads where an answer begins in the object, and how many bytes that has.
func rangeOf(header http.Header, info minio.ObjectInfo) (offset, total int64, err error) {
	s := header.Get("Content-Range")
	if s == "" {
		return 0, info.Size, nil
	}
	rest, ok := strings.CutPrefix(s, "bytes ")
	first, rest, ok1 := strings.Cut(rest, "-")
	_, size, ok2 := strings.Cut(rest, "/")
	offset, err1 := strconv.ParseInt(first, 10, 64)
	total, err2 := strconv.ParseInt(size, 10, 64)
	if !ok || !ok1 || !ok2 || err1 != nil || err2 != nil || offset < 0 || total < offset {
		return 0, 0, fmt.Errorf("illegal answer: Content-Range %q", s)
	}
	return offset, total, nil
}

// Delete implements objects.Store.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := check(ctx, "delete", key); err != nil {
		return err
	}
	err := b.do(ctx, "delete", key, func(ctx context.Context) error {
		return b.core.RemoveObject(ctx, b.at.Bucket, b.name(key), minio.RemoveObjectOptions{})
	})
	if errors.Is(err, objects.ErrNotFound) {
		return nil
	}
	return err
}

// listed is how many objects one answer lists.
const listed = 1000

// List implements objects.Store.
func (b *Bucket) List(ctx context.Context, prefix string, fn func(key string, size int64) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("list objects %s: %w", prefix, err)
	}
	all := ""
	if b.at.Prefix != "" {
		all = b.at.Prefix + "/"
	}
	last := ""
	var fnErr error
	err := b.do(ctx, "list", prefix, func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		o := minio.ListObjectsOptions{Prefix: all + prefix, Recursive: true, MaxKeys: listed, StartAfter: last}
		for info := range b.core.ListObjectsIter(ctx, b.at.Bucket, o) {
			if info.Err != nil {
				return info.Err
			}
			if info.Key <= last {
				return fmt.Errorf("the listing is out of order: %q comes after %q", info.Key, last)
			}
			last = info.Key
			key, ok := strings.CutPrefix(info.Key, all)
			if !ok || objects.CheckKey(key) != nil {
				continue // a directory that somebody made, or another's
			}
			if fnErr = fn(key, info.Size); fnErr != nil {
				return nil
			}
		}
		return ctx.Err()
	})
	if fnErr != nil {
		return fnErr
	}
	return err
}

// sum is what a PUT is signed with.
func sum(p []byte) string {
	s := sha256.Sum256(p)
	return hex.EncodeToString(s[:])
}
