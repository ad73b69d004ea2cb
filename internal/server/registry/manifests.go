package registry

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/webhooks"
)

// getManifest answers GET and HEAD. There is no negotiation: a manifest is
// what was pushed, and the client says with Accept what it would have liked.
func (r *Registry) getManifest(w http.ResponseWriter, req *http.Request, name, arg string) error {
	tag, d, err := parseReference(arg)
	if err != nil {
		return err
	}
	ctx := req.Context()
	unknown := func(err error) error {
		return orUnknown(err, manifestUnknown, "repository %s has no manifest %s", name, arg)
	}
	if tag != "" {
		if d, err = r.opts.Catalog.Tag(ctx, name, tag); err != nil {
			return unknown(err)
		}
	}
	m, err := r.opts.Catalog.Manifest(ctx, name, d)
	if err != nil {
		return unknown(err)
	}
	h := w.Header()
	h.Set("Docker-Content-Digest", d.String())
	h.Set("Etag", etag(d))
	if matches(req.Header.Get("If-None-Match"), d) {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	end, err := r.opts.Guard.Large(ctx, int64(len(m.Bytes))) // in memory until the client has taken it
	if err != nil {
		return err
	}
	defer end()
	h.Set("Content-Type", m.MediaType)
	h.Set("Content-Length", strconv.Itoa(len(m.Bytes)))
	w.WriteHeader(http.StatusOK)
	if req.Method != http.MethodHead {
		r.opts.Shown(req, m)
		_, _ = w.Write(m.Bytes) // a client that is gone is no failure of ours
		r.opts.Webhooks.Pulled(happened(ctx, name, m, tag))
	}
	return nil
}

// heavyManifest is parseManifest, when it is the client's turn if there is much to read.
func (r *Registry) heavyManifest(ctx context.Context, b []byte, contentType string) (catalog.Manifest, references, error) {
	if len(b) >= limit.HeavyBytes {
		leave, err := r.opts.Heavy.Enter(ctx, guard.ClientOf(ctx))
		if err != nil {
			return catalog.Manifest{}, references{}, err
		}
		defer leave()
	}
	return parseManifest(b, contentType)
}

func (r *Registry) putManifest(w http.ResponseWriter, req *http.Request, name, arg string) error {
	tag, want, err := parseReference(arg)
	if err != nil {
		return err
	}
	var tags []string
	if tag != "" {
		tags = []string{tag}
	} else {
		for _, t := range req.URL.Query()["tag"] {
			if !ValidTag(t) {
				return errorf(manifestInvalid, "%q is no tag: it wants at most 128 of a-z A-Z 0-9 . _ -", t)
			}
			tags = append(tags, t)
		}
	}
	small, err := r.opts.Guard.Large(req.Context(), req.ContentLength)
	if err != nil {
		return err
	}
	defer small()
	b, err := io.ReadAll(http.MaxBytesReader(w, req.Body, r.opts.MaxManifest))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return errorf(manifestTooLarge, "the manifest is larger than the %d bytes that this registry takes", tooLarge.Limit)
		}
		return errorf(manifestInvalid, "the manifest did not arrive: %v", err)
	}
	m, refs, err := r.heavyManifest(req.Context(), b, req.Header.Get("Content-Type"))
	if err != nil {
		return err
	}
	alg := digest.Canonical
	if want != "" {
		alg = want.Algorithm()
	}
	m.Digest = alg.FromBytes(b)
	m.Pushed = time.Now()
	if want != "" && m.Digest != want {
		return errorf(digestInvalid, "the manifest's digest is %s, not %s", m.Digest, want)
	}
	if err := r.checkReferences(req.Context(), name, refs); err != nil {
		return err
	}
	if err := r.opts.Catalog.PutManifest(context.WithoutCancel(req.Context()), name, m, tags...); err != nil {
		return err
	}
	if r.opts.OnManifest != nil {
		r.opts.OnManifest(req.Context(), name, m)
	}
	r.opts.Webhooks.Happened(webhooks.Push, happened(req.Context(), name, m, tags...))
	h := w.Header()
	h.Set("Location", "/v2/"+name+"/manifests/"+m.Digest.String())
	h.Set("Docker-Content-Digest", m.Digest.String())
	if m.Subject != "" {
		h.Set("Oci-Subject", m.Subject.String())
	}
	if want != "" {
		for _, t := range tags {
			h.Add("Oci-Tag", t)
		}
	}
	w.WriteHeader(http.StatusCreated)
	return nil
}

// checkReferences sees to it that the repository has everything that a
// manifest refers to.
func (r *Registry) checkReferences(ctx context.Context, name string, refs references) error {
	missing := func(d ocispec.Descriptor, what string) error {
		return errorf(manifestRefUnknown, "the manifest refers to %s, and repository %s has no such %s: push it first", d.Digest, name, what)
	}
	fits := func(d ocispec.Descriptor, size int64) error {
		if refs.sized && d.Size != size {
			return errorf(manifestInvalid, "the manifest says that %s has %d bytes, and it has %d: no client could pull it", d.Digest, d.Size, size)
		}
		return nil
	}
	for _, d := range refs.blobs {
		b, err := r.opts.Catalog.Exists(ctx, name, d.Digest) // it stays until the manifest names it
		if errors.Is(err, catalog.ErrNotFound) {
			return missing(d, "blob")
		}
		if err := cmp.Or(err, fits(d, b.Size)); err != nil {
			return err
		}
	}
	for _, d := range refs.any {
		m, err := r.opts.Catalog.Manifest(ctx, name, d.Digest)
		size := int64(len(m.Bytes))
		if errors.Is(err, catalog.ErrNotFound) {
			var b catalog.Blob
			b, err = r.opts.Catalog.Exists(ctx, name, d.Digest)
			size = b.Size
		}
		if errors.Is(err, catalog.ErrNotFound) {
			return missing(d, "manifest")
		}
		if err := cmp.Or(err, fits(d, size)); err != nil {
			return err
		}
	}
	return nil
}

func (r *Registry) deleteManifest(w http.ResponseWriter, req *http.Request, name, arg string) error {
	tag, d, err := parseReference(arg)
	if err != nil {
		return err
	}
	ctx := context.WithoutCancel(req.Context())
	if tag != "" {
		err = r.opts.Catalog.DeleteTag(ctx, name, tag)
	} else {
		err = r.opts.Catalog.DeleteManifest(ctx, name, d)
	}
	if err != nil {
		return orUnknown(err, manifestUnknown, "repository %s has no manifest %s", name, arg)
	}
	r.opts.Webhooks.Happened(webhooks.Delete, happened(ctx, name, catalog.Manifest{Digest: d}, tag))
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// happened says what of a repository webhooks are told of; tags may be empty.
func happened(ctx context.Context, name string, m catalog.Manifest, tags ...string) webhooks.Data {
	return webhooks.Data{Repository: name, Digest: m.Digest.String(), Tags: slices.DeleteFunc(tags, func(t string) bool { return t == "" }),
		MediaType: m.MediaType, Size: int64(len(m.Bytes)), Subject: guard.Subject(ctx)}
}
