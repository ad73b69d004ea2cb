package registry

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/leftover"
)

// postUpload begins an upload, or mounts a blob, or takes a whole blob.
func (r *Registry) postUpload(w http.ResponseWriter, req *http.Request, name, _ string) error {
	q := req.URL.Query()
	if mount := q.Get("mount"); mount != "" {
		d, err := parseDigest(mount)
		if err != nil {
			return err
		}
		from := q.Get("from")
		if from != "" {
			if err := checkName(from); err != nil {
				return err
			}
		}
		ok, err := r.mountBlob(req.Context(), name, from, d)
		if err != nil {
			return err
		}
		if ok {
			return blobCreated(w, name, d)
		}
		// It is not here: the client may send it.
	}
	alg := digest.Canonical
	var whole digest.Digest
	if s := q.Get("digest"); s != "" {
		d, err := parseDigest(s)
		if err != nil {
			return err
		}
		whole, alg = d, d.Algorithm()
	} else if s := q.Get("digest-algorithm"); s != "" {
		alg = digest.Algorithm(s)
		if err := checkAlgorithm(alg); err != nil {
			return err
		}
	}
	// Of what is announced it is known before it is sent that it has no room.
	if err := r.room(req.Context(), name, whole, max(1, req.ContentLength)); err != nil {
		return err
	}
	s, err := r.uploads.create(req.Context(), name, alg, interrupt(w))
	if err != nil {
		return err
	}
	if whole != "" {
		err := r.receive(s, req, whole)
		if err == nil {
			return r.finish(w, req, s, whole)
		}
		// Nobody knows the name of this upload: it cannot be continued.
		return r.drop(s, err)
	}
	if err := s.close(); err != nil {
		return err
	}
	uploadHeaders(w, name, s.id, 0)
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// getUpload says how far an upload is.
func (r *Registry) getUpload(w http.ResponseWriter, req *http.Request, name, id string) error {
	size, err := r.uploads.size(name, guard.Subject(req.Context()), id)
	if err != nil {
		return err
	}
	uploadHeaders(w, name, id, size)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// patchUpload adds to an upload: a chunk with its Content-Range, or whatever
// comes.
func (r *Registry) patchUpload(w http.ResponseWriter, req *http.Request, name, id string) error {
	s, err := r.uploads.open(req.Context(), name, guard.Subject(req.Context()), id, interrupt(w))
	if err != nil {
		return err
	}
	if err := r.receive(s, req, ""); err != nil {
		return r.keepOrDrop(w, s, err)
	}
	if err := s.close(); err != nil {
		return err
	}
	uploadHeaders(w, name, id, s.size)
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// putUpload adds the rest, if there is one, and makes the upload a blob.
func (r *Registry) putUpload(w http.ResponseWriter, req *http.Request, name, id string) error {
	d, err := parseDigest(req.URL.Query().Get("digest"))
	if err != nil {
		return err
	}
	s, err := r.uploads.open(req.Context(), name, guard.Subject(req.Context()), id, interrupt(w))
	if err != nil {
		return err
	}
	err = s.use(d.Algorithm())
	if err == nil {
		err = r.receive(s, req, d)
	}
	if err != nil {
		return r.keepOrDrop(w, s, err)
	}
	return r.finish(w, req, s, d)
}

// deleteUpload cancels.
func (r *Registry) deleteUpload(w http.ResponseWriter, req *http.Request, name, id string) error {
	s, err := r.uploads.open(req.Context(), name, guard.Subject(req.Context()), id, interrupt(w))
	if err != nil {
		return err
	}
	if err := s.remove(); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// interrupt returns what stops a request from reading its body.
func interrupt(w http.ResponseWriter) func() {
	rc := http.NewResponseController(w)
	return func() {
		// An error means that the request is over.
		_ = rc.SetReadDeadline(time.Unix(1, 0))
	}
}

var contentRange = regexp.MustCompile(`^([0-9]+)-([0-9]+)$`)

// receive adds the request's body to the upload, if it is the chunk that comes
// next. What arrived before an error stays. d is of the whole blob; empty: it is not known yet.
func (r *Registry) receive(s *session, req *http.Request, d digest.Digest) error {
	want := req.ContentLength // < 0: not known
	if header := req.Header.Get("Content-Range"); header != "" {
		m := contentRange.FindStringSubmatch(header)
		if m == nil || max(len(m[1]), len(m[2])) > 18 {
			return errorf(uploadInvalid, "Content-Range %q: a chunk wants FIRST-LAST", header)
		}
		// 18 digits fit.
		first, _ := strconv.ParseInt(m[1], 10, 64)
		last, _ := strconv.ParseInt(m[2], 10, 64)
		if first != s.size {
			return errorf(chunkOutOfOrder, "Content-Range %q: the upload has %d bytes, and the next chunk begins there", header, s.size)
		}
		if length := last - first + 1; length < 0 || want >= 0 && want != length {
			return errorf(sizeInvalid, "Content-Range %q is not of the Content-Length %d", header, want)
		} else if want < 0 {
			want = length
		}
	}
	if err := r.room(req.Context(), s.repo, d, s.size+max(0, want)); err != nil {
		return err
	}
	body := io.Reader(bodyReader{req.Body})
	if want >= 0 {
		body = io.LimitReader(body, want)
	}
	got, err := r.copyTo(s, req, body, d)
	if err != nil {
		return err
	}
	if want >= 0 && got == want && req.ContentLength < 0 {
		// Chunked: only the body itself can say that it is over.
		if n, err := io.ReadFull(req.Body, make([]byte, 1)); n > 0 || err != io.EOF {
			return errorf(sizeInvalid, "more came than the %d bytes of the Content-Range", want)
		}
	}
	if want >= 0 && got < want {
		return errorf(sizeInvalid, "%d bytes came, and %d were announced", got, want)
	}
	return nil
}

// roomEvery is after how many bytes it is asked again whether there is room for an upload of which nobody says how long it
// will be.
const roomEvery = 64 << 20

// copyTo copies a body to an upload.
func (r *Registry) copyTo(s *session, req *http.Request, body io.Reader, d digest.Digest) (got int64, err error) {
	buf := make([]byte, 64<<10)
	for {
		n, err := io.CopyBuffer(s, io.LimitReader(body, roomEvery), buf)
		if got += n; err != nil || n < roomEvery {
			return got, err
		}
		if err := r.room(req.Context(), s.repo, d, s.size); err != nil {
			return got, err
		}
	}
}

// bodyReader tells failures to read a request's body from those to write what
// it holds.
type bodyReader struct{ r io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && err != io.EOF {
		err = errorf(uploadInvalid, "the body broke off (%v): ask how far the upload is, and continue from there", err)
	}
	return n, err
}

// keepOrDrop ends a request that failed with err, which it returns: when the
// disk is full, or a limit that will be there when it is continued, the upload is
// given up, so that it does not stay full; otherwise it can be continued.
func (r *Registry) keepOrDrop(w http.ResponseWriter, s *session, err error) error {
	if k := classify(err).kind; k == noSpace || k == overQuota || k == uploadTooLarge {
		return r.drop(s, err)
	}
	uploadHeaders(w, s.repo, s.id, s.size)
	if err := s.close(); err != nil {
		r.log.Error("upload not kept", "upload", s.id, "error", err)
	}
	return err
}

// drop ends a request that failed with err, which it returns, and its upload.
func (r *Registry) drop(s *session, err error) error {
	if err := s.remove(); err != nil {
		r.log.Error("upload not dropped", "upload", s.id, "error", err)
	}
	return err
}

// finish makes a complete upload a blob, which ends the upload.
func (r *Registry) finish(w http.ResponseWriter, req *http.Request, s *session, d digest.Digest) error {
	if got := s.digest(); got != d {
		return r.drop(s, errorf(digestInvalid, "the blob's digest is %s, not %s: the upload was dropped", got, d))
	}
	if err := r.commitBlob(req.Context(), s.repo, d, s.size, s.path()); err != nil {
		err = fmt.Errorf("store blob %s of %s: %w", d, s.repo, err)
		if _, statErr := os.Lstat(s.path()); statErr != nil {
			return r.drop(s, err) // the store has the bytes already
		}
		return r.keepOrDrop(w, s, err)
	}
	if err := s.remove(); err != nil {
		r.log.Warn("finished upload not removed", "upload", s.id, "error", err)
	}
	return blobCreated(w, s.repo, d)
}

func uploadHeaders(w http.ResponseWriter, name, id string, size int64) {
	h := w.Header()
	h.Set("Location", "/v2/"+name+"/blobs/uploads/"+id)
	h.Set("Docker-Upload-Uuid", id)
	// An upload of nothing has no last byte; by custom it is said like this.
	h.Set("Range", fmt.Sprintf("0-%d", max(size-1, 0)))
}

func blobCreated(w http.ResponseWriter, name string, d digest.Digest) error {
	h := w.Header()
	h.Set("Location", "/v2/"+name+"/blobs/"+d.String())
	h.Set("Docker-Content-Digest", d.String())
	w.WriteHeader(http.StatusCreated)
	return nil
}

// expiry is when an upload that nobody continues is dropped.
func (r *Registry) expiry() time.Duration {
	if idle := r.opts.Guard.Limits().UploadIdle; idle > 0 {
		return time.Duration(idle)
	}
	return r.opts.UploadExpiry
}

// clean removes what crashes left behind, at once, and forgotten uploads, once
// an hour.
func (r *Registry) clean(ctx context.Context) {
	if err := r.removeOrphans(ctx); err != nil && ctx.Err() == nil {
		r.log.Error("objects without a repository not removed", "error", err)
	}
	tick := time.NewTicker(time.Hour)
	defer tick.Stop()
	begun, ages := time.Now(), leftover.Ages{}
	for {
		ages.Keep = r.expiry()
		ids, err := r.uploads.expire(ctx, &ages, time.Now(), time.Since(begun))
		if len(ids) > 0 {
			r.log.Info("dropped uploads that nobody continued", "uploads", ids)
		}
		if err != nil && ctx.Err() == nil {
			r.log.Error("old uploads not dropped", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
