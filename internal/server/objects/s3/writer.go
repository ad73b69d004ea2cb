package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"time"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/server/objects"
)

const (
	// partSize is that of the parts of a stream, of which a writer holds two in memory, bytes.
	partSize = 16 << 20
	// mostParts is how many an object may have. So a stream has at most 160 GB, and a file of known size 5 TB.
	mostParts = 10_000
	// partsAtOnce is how many parts of a file are sent at a time.
	partsAtOnce = 4
)

// uploadMark is the metadata that says which upload has made an object.
const uploadMark = "foil-upload"

// Create implements objects.Store.
func (b *Bucket) Create(ctx context.Context, key string) (objects.Writer, error) {
	if err := check(ctx, "create", key); err != nil {
		return nil, err
	}
	return &writer{ctx: ctx, b: b, key: key}, nil
}

// writer is one object in the making. It belongs to one goroutine.
type writer struct {
	ctx  context.Context
	b    *Bucket
	key  string
	buf  []byte // the part that is being filled
	up   *upload
	sent chan error // of the part that is under way; nil: none is
	next []byte     // its buffer, used again
	err  error      // the first that failed
	done bool
}

func (w *writer) Write(p []byte) (n int, err error) {
	if w.done {
		return 0, fmt.Errorf("write object %s: %w", w.key, fs.ErrClosed)
	}
	if w.err == nil && w.ctx.Err() != nil {
		w.err = fmt.Errorf("write object %s: %w", w.key, w.ctx.Err())
	}
	for w.err == nil && len(p) > 0 {
		take := min(len(p), partSize-len(w.buf))
		w.buf = append(w.buf, p[:take]...)
		p = p[take:]
		n += take
		// A whole part goes when more comes: of an object that has just one there is one PUT.
		if len(w.buf) == partSize && len(p) > 0 {
			w.err = w.send()
		}
	}
	return n, w.err
}

// send begins to send the part in buf, when the one before has been sent.
func (w *writer) send() error {
	if err := w.waitSent(); err != nil {
		return err
	}
	if w.up == nil {
		up, err := w.b.begin(w.ctx, w.key)
		if err != nil {
			return err
		}
		w.up = up
	}
	part, err := w.up.add()
	if err != nil {
		return err
	}
	p := w.buf
	w.buf, w.next = w.next[:0], p
	sent := make(chan error, 1)
	w.sent = sent
	up := w.up
	go func() {
		sent <- up.put(w.ctx, part, func() io.Reader { return bytes.NewReader(p) }, int64(len(p)), sum(p))
	}()
	return nil
}

func (w *writer) waitSent() error {
	if w.sent == nil {
		return nil
	}
	err := <-w.sent
	w.sent = nil
	return err
}

func (w *writer) Commit() error {
	if w.done {
		return fmt.Errorf("commit object %s: %w", w.key, fs.ErrClosed)
	}
	if err := w.commit(); err != nil {
		return errors.Join(err, w.Close())
	}
	w.done, w.buf, w.next = true, nil, nil
	return nil
}

func (w *writer) commit() error {
	if w.err != nil {
		return fmt.Errorf("commit object %s: a write failed: %w", w.key, w.err)
	}
	if err := w.ctx.Err(); err != nil {
		return fmt.Errorf("commit object %s: %w", w.key, err)
	}
	if w.up == nil {
		return w.b.put(w.ctx, w.key, func() io.Reader { return bytes.NewReader(w.buf) }, int64(len(w.buf)), sum(w.buf))
	}
	if err := w.send(); err != nil {
		return err
	}
	if err := w.waitSent(); err != nil {
		return err
	}
	return w.up.complete(w.ctx)
}

// put writes a whole object.
func (b *Bucket) put(ctx context.Context, key string, body func() io.Reader, size int64, sum string) error {
	return b.do(ctx, "commit", key, func(ctx context.Context) error {
		_, err := b.core.PutObject(ctx, b.at.Bucket, b.name(key), body(), size, "", sum, minio.PutObjectOptions{DisableContentSha256: true})
		return err
	})
}

// Close drops what was not committed.
func (w *writer) Close() error {
	if w.done {
		return nil
	}
	w.done = true
	_ = w.waitSent() // it is dropped
	w.buf, w.next = nil, nil
	if w.up == nil {
		return nil
	}
	return w.up.abort(w.ctx)
}

// upload is a multipart upload.
type upload struct {
	b      *Bucket
	key    string
	object string // the key in the bucket
	id     string
	mark   string               // that of its object, by which it is known
	parts  []minio.CompletePart // an element belongs to who sends that part
}

func (b *Bucket) begin(ctx context.Context, key string) (*upload, error) {
	u := &upload{b: b, key: key, object: b.name(key), mark: objects.Random() + objects.Random()}
	err := b.do(ctx, "begin", key, func(ctx context.Context) (err error) {
		// One whose answer is lost is a leftover.
		u.id, err = b.core.NewMultipartUpload(ctx, b.at.Bucket, u.object, minio.PutObjectOptions{UserMetadata: map[string]string{uploadMark: u.mark}})
		return err
	})
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[u.id] = true
	return u, nil
}

// over says that the upload is nobody's any more.
func (u *upload) over() {
	u.b.mu.Lock()
	defer u.b.mu.Unlock()
	delete(u.b.open, u.id)
}

// add makes room for a part and returns its index.
func (u *upload) add() (int, error) {
	if len(u.parts) == mostParts {
		return 0, fmt.Errorf("write object %s: more than %d bytes, the limit of a stream", u.key, int64(mostParts)*partSize)
	}
	u.parts = append(u.parts, minio.CompletePart{})
	return len(u.parts) - 1, nil
}

func (u *upload) put(ctx context.Context, index int, body func() io.Reader, size int64, sum string) error {
	return u.b.do(ctx, "write", u.key, func(ctx context.Context) error {
		part, err := u.b.core.PutObjectPart(ctx, u.b.at.Bucket, u.object, u.id, index+1, body(), size,
			minio.PutObjectPartOptions{Sha256Hex: sum, DisableContentSha256: true})
		u.parts[index] = minio.CompletePart{PartNumber: index + 1, ETag: part.ETag}
		return err
	})
}

// complete makes the parts an object.
func (u *upload) complete(ctx context.Context) error {
	err := u.b.do(ctx, "commit", u.key, func(ctx context.Context) error {
		_, err := u.b.patient.CompleteMultipartUpload(ctx, u.b.at.Bucket, u.object, u.id, u.parts, minio.PutObjectOptions{})
		if e, ok := errors.AsType[minio.ErrorResponse](err); !ok || e.Code != minio.NoSuchUpload && e.StatusCode != http.StatusNotFound {
			return err
		}
		// It may have been completed by a try of which nothing was heard.
		info, serr := u.b.core.StatObject(ctx, u.b.at.Bucket, u.object, minio.StatObjectOptions{})
		if serr != nil || info.Metadata.Get("X-Amz-Meta-"+uploadMark) != u.mark {
			return &objects.UnavailableError{Op: "commit", Key: u.key, Reason: err.Error()}
		}
		return nil
	})
	if err == nil {
		u.over()
	}
	return err
}

// abort removes the parts, also after ctx has ended.
func (u *upload) abort(ctx context.Context) error {
	defer u.over()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), u.b.at.Timeout)
	defer cancel()
	return u.b.do(ctx, "drop", u.key, func(ctx context.Context) error {
		err := u.b.core.AbortMultipartUpload(ctx, u.b.at.Bucket, u.object, u.id)
		if e, ok := errors.AsType[minio.ErrorResponse](err); ok && e.StatusCode == http.StatusNotFound {
			return nil
		}
		return err
	})
}

// AdoptFile makes the file at path an object (see objects.Adopt), and removes it.
func (b *Bucket) AdoptFile(ctx context.Context, key, path string) error {
	if err := check(ctx, "adopt", key); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil {
		err = b.putFile(ctx, key, f, info.Size())
	}
	if err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	return nil
}

// putFile writes an object of size bytes of a file.
func (b *Bucket) putFile(ctx context.Context, key string, f io.ReaderAt, size int64) error {
	if size <= partSize {
		p := make([]byte, size)
		if _, err := f.ReadAt(p, 0); err != nil && err != io.EOF {
			return err
		}
		return b.put(ctx, key, func() io.Reader { return bytes.NewReader(p) }, size, sum(p))
	}
	up, err := b.begin(ctx, key)
	if err != nil {
		return err
	}
	each := max(partSize, (size+mostParts-1)/mostParts)
	send, sctx := errgroup.WithContext(ctx)
	send.SetLimit(partsAtOnce)
	up.parts = make([]minio.CompletePart, (size+each-1)/each)
	for index := range up.parts {
		send.Go(func() error {
			at := int64(index) * each
			n := min(each, size-at)
			hash := sha256.New()
			if _, err := io.Copy(hash, io.NewSectionReader(f, at, n)); err != nil {
				return err
			}
			return up.put(sctx, index, func() io.Reader { return io.NewSectionReader(f, at, n) }, n, hex.EncodeToString(hash.Sum(nil)))
		})
	}
	if err := send.Wait(); err != nil {
		return errors.Join(err, up.abort(ctx))
	}
	if err := up.complete(ctx); err != nil {
		return errors.Join(err, up.abort(ctx))
	}
	return nil
}

// Leftovers drops multipart uploads that began before a time and are none of this process: their parts cost, and no listing
// of objects shows them.
func (b *Bucket) Leftovers(ctx context.Context, before time.Time) (dropped int, err error) {
	for key, id := "", ""; ; {
		var page minio.ListMultipartUploadsResult
		err := b.do(ctx, "list uploads of", b.at.Prefix, func(ctx context.Context) (err error) {
			page, err = b.core.ListMultipartUploads(ctx, b.at.Bucket, b.name(""), key, id, "", listed)
			return err
		})
		if err != nil {
			return dropped, err
		}
		for _, info := range page.Uploads {
			b.mu.Lock()
			own := b.open[info.UploadID]
			b.mu.Unlock()
			if own || !info.Initiated.Before(before) {
				continue
			}
			if err := (&upload{b: b, key: info.Key, object: info.Key, id: info.UploadID}).abort(ctx); err != nil {
				return dropped, err
			}
			dropped++
		}
		if !page.IsTruncated || page.NextKeyMarker == key && page.NextUploadIDMarker == id {
			return dropped, nil
		}
		key, id = page.NextKeyMarker, page.NextUploadIDMarker
	}
}
