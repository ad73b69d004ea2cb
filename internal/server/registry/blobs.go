package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/objects"
)

// getBlob answers GET and HEAD.
func (r *Registry) getBlob(w http.ResponseWriter, req *http.Request, name, arg string) error {
	d, err := parseDigest(arg)
	if err != nil {
		return err
	}
	look := r.opts.Catalog.Blob
	if req.Method == http.MethodHead { // whoever pushes relies on the answer
		look = r.opts.Catalog.Exists
	}
	b, err := look(req.Context(), name, d)
	if err != nil {
		return orUnknown(err, blobUnknown, "repository %s has no blob %s", name, d)
	}
	h := w.Header()
	h.Set("Docker-Content-Digest", d.String())
	h.Set("Etag", etag(d))
	h.Set("Accept-Ranges", "bytes")
	h.Set("Cache-Control", "max-age=31536000, immutable")
	if matches(req.Header.Get("If-None-Match"), d) {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	offset, length, status := int64(0), b.Size, http.StatusOK
	if rng := req.Header.Get("Range"); rng != "" && ifRange(req, d) {
		var ok bool
		offset, length, ok, err = parseRange(rng, b.Size)
		if err != nil {
			h.Set("Content-Range", fmt.Sprintf("bytes */%d", b.Size))
			return err
		}
		if ok {
			status = http.StatusPartialContent
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, offset+length-1, b.Size))
		}
	}
	if whole, err := r.checkObject(req.Context(), name, b); err != nil || !whole {
		h.Del("Content-Range")
		return cmp.Or(err, errorf(blobUnknown, "repository %s has lost blob %s: push it again", name, d))
	}
	var body io.ReadCloser
	if req.Method != http.MethodHead {
		if body, err = r.opts.Store.Open(req.Context(), catalog.BlobKey(d), offset, length); err != nil {
			h.Del("Content-Range")
			return fmt.Errorf("blob %s of %s: %w", d, name, err)
		}
		defer body.Close()
		if offset == 0 {
			r.opts.Pulled(req, d)
		}
	}
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.FormatInt(length, 10))
	w.WriteHeader(status)
	if body == nil {
		return nil
	}
	if n, err := io.Copy(w, body); err != nil || n != length {
		if req.Context().Err() == nil {
			r.log.Warn("blob not sent to its end", "repository", name, "digest", d, "sent", n, "of", length, "error", err)
		}
		// The status is out: all that is left is to break the connection, so
		// that the client cannot take what came for the whole.
		panic(http.ErrAbortHandler)
	}
	return nil
}

// checkObject reports whether the object of a blob is there, with all its bytes.
// One that is lost is taken out of the repository: clients ask for a blob before
// they push it, and must not be told that they need not.
func (r *Registry) checkObject(ctx context.Context, name string, b catalog.Blob) (bool, error) {
	whole := func() (bool, error) {
		size, err := r.opts.Store.Stat(ctx, catalog.BlobKey(b.Digest))
		if err != nil && !errors.Is(err, objects.ErrNotFound) {
			return false, fmt.Errorf("blob %s of %s: %w", b.Digest, name, err)
		}
		return err == nil && size == b.Size, nil
	}
	if ok, err := whole(); ok || err != nil {
		return ok, err
	}
	defer r.blobs.lock(b.Digest.String())()
	if ok, err := whole(); ok || err != nil { // it was being pushed
		return ok, err
	}
	if r.opts.Heal != nil {
		err := r.opts.Heal(ctx, b.Digest)
		if ok, serr := whole(); err == nil && ok && serr == nil {
			r.log.Warn("blob was lost or cut, and was made again from packs: look after the disk", "repository", name, "digest", b.Digest)
			return true, nil
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	r.log.Error("blob is lost or cut: push it again", "repository", name, "digest", b.Digest)
	err := r.opts.Catalog.UnlinkBlob(context.WithoutCancel(ctx), name, b.Digest)
	if errors.Is(err, catalog.ErrNotFound) {
		err = nil
	}
	return false, err
}

func etag(d digest.Digest) string { return `"` + d.String() + `"` }

// matches reports whether an If-None-Match header names d.
func matches(header string, d digest.Digest) bool {
	for tag := range strings.SplitSeq(header, ",") {
		if tag = strings.TrimPrefix(strings.TrimSpace(tag), "W/"); tag == "*" || tag == etag(d) {
			return true
		}
	}
	return false
}

// ifRange reports whether an If-Range header, if there is one, lets the Range
// header count.
func ifRange(req *http.Request, d digest.Digest) bool {
	header := req.Header.Get("If-Range")
	return header == "" || header == etag(d)
}

// parseRange reads a Range header for a blob of size bytes. Not ok means that
// the whole blob is the answer: several ranges and other units may be ignored
// (RFC 9110, section 14.2). A range that ends before it begins may be as well,
// but the conformance program wants it refused.
func parseRange(header string, size int64) (offset, length int64, ok bool, err error) {
	spec, found := strings.CutPrefix(header, "bytes=")
	if !found || strings.Contains(spec, ",") {
		return 0, size, false, nil
	}
	first, last, found := strings.Cut(strings.TrimSpace(spec), "-")
	if !found {
		return 0, size, false, nil
	}
	unsatisfiable := errorf(rangeInvalid, "range %q is not in the blob's %d bytes", header, size)
	if first == "" { // the last n bytes
		n, err := strconv.ParseUint(last, 10, 63)
		if err != nil {
			return 0, size, false, nil
		}
		if n == 0 || size == 0 {
			return 0, 0, false, unsatisfiable
		}
		length = min(int64(n), size)
		return size - length, length, true, nil
	}
	from, err := strconv.ParseUint(first, 10, 63)
	if err != nil {
		return 0, size, false, nil
	}
	to := uint64(size) - 1
	if last != "" {
		if to, err = strconv.ParseUint(last, 10, 63); err != nil {
			return 0, size, false, nil
		}
	}
	if int64(from) >= size || to < from {
		return 0, 0, false, unsatisfiable
	}
	to = min(to, uint64(size)-1)
	return int64(from), int64(to-from) + 1, true, nil
}

func (r *Registry) deleteBlob(w http.ResponseWriter, req *http.Request, name, arg string) error {
	d, err := parseDigest(arg)
	if err != nil {
		return err
	}
	defer r.blobs.lock(d.String())()
	// Once begun it is done, even if the client goes.
	ctx := context.WithoutCancel(req.Context())
	if r.opts.Bounds != nil {
		if err := r.opts.Bounds.MayRemove(ctx, name, d); err != nil {
			return err
		}
	}
	if err := r.opts.Catalog.UnlinkBlob(ctx, name, d); err != nil {
		return orUnknown(err, blobUnknown, "repository %s has no blob %s", name, d)
	}
	if err := r.removeUnheld(ctx, d); err != nil {
		// The repository no longer has it, which is what was asked for; the
		// next start removes the object.
		r.log.Error("object of a deleted blob not removed", "digest", d, "error", err)
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// RemoveUnheld removes the object of a blob, unless a repository holds it.
func (r *Registry) RemoveUnheld(ctx context.Context, d digest.Digest) error {
	defer r.blobs.lock(d.String())()
	return r.removeUnheld(ctx, d)
}

// removeUnheld removes the object of a blob that no repository holds. The
// digest must be locked.
func (r *Registry) removeUnheld(ctx context.Context, d digest.Digest) error {
	_, err := r.opts.Catalog.AnyBlob(ctx, d)
	if !errors.Is(err, catalog.ErrNotFound) {
		return err
	}
	return r.opts.Store.Delete(ctx, catalog.BlobKey(d))
}

// Exclude keeps a blob from being written, linked or removed until unlock is called.
func (r *Registry) Exclude(d digest.Digest) (unlock func()) { return r.blobs.lock(d.String()) }

// commitBlob makes the file at path, whose digest was verified, a blob of the
// repository, durably.
func (r *Registry) commitBlob(ctx context.Context, name string, d digest.Digest, size int64, path string) error {
	defer r.blobs.lock(d.String())()
	// From here to the end whatever the client does: a half-committed blob
	// helps nobody. An object that is there already is replaced: its equal
	// might be in the page cache only, left by a process that was killed.
	ctx = context.WithoutCancel(ctx)
	if err := objects.Adopt(ctx, r.opts.Store, catalog.BlobKey(d), path); err != nil {
		return err
	}
	err := r.opts.Catalog.LinkBlob(ctx, name, catalog.Blob{Digest: d, Size: size})
	if err == nil {
		r.opts.Pushed(d)
	}
	if _, refused := errors.AsType[*catalog.Refusal](err); refused {
		err = errors.Join(err, r.removeUnheld(ctx, d))
	}
	return err
}

// room says early what LinkBlob would say of a blob of so many bytes. d may be empty: it is not known yet.
func (r *Registry) room(ctx context.Context, name string, d digest.Digest, bytes int64) error {
	if r.opts.Bounds == nil {
		return nil
	}
	err := r.opts.Bounds.Room(ctx, name, bytes)
	if err == nil || d == "" {
		return err
	}
	if _, here := r.opts.Catalog.Blob(ctx, name, d); here == nil {
		return nil // it takes nothing
	}
	return err
}

// mountBlob makes a blob that is here a blob of the repository as well. Without
// from, any repository will do. It reports whether there was one that whoever asks may pull
// from: a digest is no permission.
func (r *Registry) mountBlob(ctx context.Context, name, from string, d digest.Digest) (bool, error) {
	defer r.blobs.lock(d.String())()
	b, err := r.mountable(ctx, from, d)
	if errors.Is(err, catalog.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	size, err := r.opts.Store.Stat(ctx, catalog.BlobKey(d))
	if errors.Is(err, objects.ErrNotFound) || err == nil && size != b.Size {
		return false, nil // lost: it can be pushed
	}
	if err == nil {
		err = r.opts.Catalog.LinkBlob(context.WithoutCancel(ctx), name, b)
	}
	if err == nil {
		r.opts.Pushed(d)
	}
	return err == nil, err
}

// mountable finds a blob where it may be pulled. Errors: catalog.ErrNotFound.
func (r *Registry) mountable(ctx context.Context, from string, d digest.Digest) (catalog.Blob, error) {
	cat := r.opts.Catalog
	if from != "" {
		err := r.opts.Guard.Check(ctx, access.Pull, from, d.String())
		if _, denied := errors.AsType[*guard.Denied](err); denied {
			cat, err = r.hidden.opts.Catalog, nil
		}
		if err != nil {
			return catalog.Blob{}, err
		}
		return cat.Blob(ctx, from, d)
	}
	if r.opts.Guard == nil {
		return cat.AnyBlob(ctx, d)
	}
	holders, err := cat.Holders(ctx, d)
	if err != nil {
		return catalog.Blob{}, err
	}
	for _, name := range holders {
		if r.opts.Guard.May(ctx, access.Pull, name) {
			return cat.Blob(ctx, name, d)
		}
	}
	return catalog.Blob{}, catalog.ErrNotFound
}
