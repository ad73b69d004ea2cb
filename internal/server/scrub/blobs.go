package scrub

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

func (s *Scrubber) blobs(ctx context.Context, after string) error {
	for {
		page, err := s.o.Catalog.BlobsAfter(ctx, digest.Digest(after), pageSize)
		if err != nil || len(page) == 0 {
			return err
		}
		for _, b := range page {
			after = b.Digest.String()
			n, err := s.blob(ctx, b)
			if err != nil {
				return err
			}
			if err := s.done("blobs", after, 1, n); err != nil {
				return err
			}
		}
	}
}

// blob looks at one blob. Errors: those that are no damage.
func (s *Scrubber) blob(ctx context.Context, b catalog.Blob) (read int64, err error) {
	key := catalog.BlobKey(b.Digest)
	read, wrong := s.hash(ctx, key, b.Digest)
	switch {
	case wrong == nil:
		return read, nil
	case ctx.Err() != nil:
		return read, ctx.Err()
	case errors.Is(wrong, objects.ErrNotFound):
		// Not if it was deleted meanwhile.
		if _, err := s.o.Catalog.AnyBlob(ctx, b.Digest); errors.Is(err, catalog.ErrNotFound) || s.o.Elsewhere {
			return read, nil
		}
	case !damage(wrong):
		return read, wrong
	}
	f := Finding{Key: key, Of: b.Digest, Why: wrong.Error()}
	if !s.o.Check {
		if err := s.mendBlob(ctx, b, &f); err != nil {
			return read, err
		}
	}
	return read, s.found(f)
}

func (s *Scrubber) mendBlob(ctx context.Context, b catalog.Blob, f *Finding) error {
	err := s.restore(ctx, b)
	if err == nil {
		f.Mended = "from its recipe and packs"
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.Why += "; it cannot be made of others: " + err.Error()
	defer s.o.Exclude(b.Digest)()
	switch _, wrong := s.hash(ctx, f.Key, b.Digest); {
	case wrong == nil:
		f.Mended = "it was pushed again, or read right the second time" // a memory that fails reads wrong bytes, too
	case errors.Is(wrong, objects.ErrNotFound):
		f.Why += "; push it again"
	case !damage(wrong):
		return cmpCtx(ctx, wrong)
	default:
		to, err := s.aside(ctx, f.Key)
		if err != nil {
			return err
		}
		f.Why += "; push it again; what is left of it is " + to
	}
	return nil
}

// errNotExact says that a blob cannot be made of its tar stream.
var errNotExact = errors.New("no exact way back is known")

// restore makes a blob of its recipe and packs. It is in its place only if it has its digest.
func (s *Scrubber) restore(ctx context.Context, b catalog.Blob) error {
	row, err := s.o.Catalog.Layer(ctx, b.Digest)
	if errors.Is(err, catalog.ErrNotFound) {
		return errNotExact
	}
	if err != nil {
		return err
	}
	if row.Recipe.Key == "" || row.DiffID != row.Blob {
		return errNotExact
	}
	tar, err := restore.OpenTar(ctx, &dedup.Store{Objects: s.o.Objects, Catalog: s.o.Catalog}, row)
	if err != nil {
		return err
	}
	defer tar.Close()
	w, err := s.o.Objects.Create(ctx, catalog.BlobKey(b.Digest))
	if err != nil {
		return err
	}
	defer w.Close()
	hash := b.Digest.Algorithm().Hash()
	if _, err := io.Copy(io.MultiWriter(w, hash), tar); err != nil {
		return err
	}
	if got := digest.NewDigest(b.Digest.Algorithm(), hash); got != b.Digest {
		return fmt.Errorf("its recipe and packs give %s", got)
	}
	return w.Commit()
}

// aside moves an object out of the way, to damaged/ below the root.
func (s *Scrubber) aside(ctx context.Context, key string) (string, error) {
	dir := filepath.Join(s.o.Root, "damaged")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	from := filepath.Join(rootdir.Objects(s.o.Root), filepath.FromSlash(key))
	to := filepath.Join(dir, strings.ReplaceAll(key, "/", "-"))
	if _, is, err := rootdir.InBucket(s.o.Root); is || err != nil {
		if err == nil {
			err = s.fetchAside(ctx, key, to)
		}
		return to, errors.Join(err, durable.Sync(dir))
	}
	if err := os.Rename(from, to); err != nil {
		return "", fmt.Errorf("move what is damaged out of the way: %w", err)
	}
	return to, errors.Join(durable.Sync(dir), durable.Sync(filepath.Dir(from)))
}

// fetchAside is aside for an object that is in no file.
func (s *Scrubber) fetchAside(ctx context.Context, key, to string) error {
	object, err := s.store.Open(ctx, key, 0, -1)
	if err != nil {
		return fmt.Errorf("move what is damaged out of the way: %w", err)
	}
	defer object.Close()
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, object)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("move what is damaged out of the way: %w", errors.Join(err, os.Remove(to)))
	}
	return s.o.Objects.Delete(ctx, key)
}

// hash compares an object with its digest. Errors: *layer.DigestError; the store's.
func (s *Scrubber) hash(ctx context.Context, key string, want digest.Digest) (read int64, err error) {
	object, err := s.store.Open(ctx, key, 0, -1)
	if err != nil {
		return 0, err
	}
	defer object.Close()
	hash := want.Algorithm().Hash()
	if read, err = io.CopyBuffer(hash, struct{ io.Reader }{object}, make([]byte, paceBytes)); err != nil {
		return read, err
	}
	if got := digest.NewDigest(want.Algorithm(), hash); got != want {
		return read, &layer.DigestError{Layer: want, What: "blob", Got: got, Want: want}
	}
	return read, nil
}

// damage reports whether an error says that bytes are lost or others.
func damage(err error) bool {
	_, other := errors.AsType[*layer.DigestError](err)
	return other || dedup.Damage(err)
}

func cmpCtx(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
