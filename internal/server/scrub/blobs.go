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
	"hydrofoil.dev/foil/internal/server/stores"
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

// blob looks at one blob: its intact copies, or, if there is none, what it is made from. Errors: those that are no damage.
func (s *Scrubber) blob(ctx context.Context, b catalog.Blob) (read int64, err error) {
	key := catalog.BlobKey(b.Digest)
	var sound objects.Store // that has an intact copy
	wrongs := 0
	for i, store := range s.o.Objects.Here() {
		n, wrong := s.hashIn(ctx, store, key, b.Digest)
		read += n
		switch {
		case wrong == nil:
			sound = store
			continue
		case ctx.Err() != nil:
			return read, ctx.Err()
		case errors.Is(wrong, objects.ErrNotFound):
			continue
		case !damage(wrong):
			return read, wrong
		}
		wrongs++
		f := Finding{Key: key, Of: b.Digest, Why: wrong.Error()}
		if !s.o.Check && i == 0 {
			err = s.mendBlob(ctx, b, &f)
		} else if !s.o.Check {
			err = s.mendCopy(ctx, b, &f, store, sound)
		}
		if err != nil {
			return read, err
		}
		if err := s.found(f); err != nil {
			return read, err
		}
	}
	if sound != nil || wrongs > 0 || s.o.Elsewhere {
		return read, nil
	}
	// Not if it was deleted meanwhile.
	if _, err := s.o.Catalog.AnyBlob(ctx, b.Digest); errors.Is(err, catalog.ErrNotFound) {
		return read, nil
	}
	n, wrong := s.blobsOf().Verify(ctx, b.Digest)
	read += n
	if wrong == nil {
		return read, nil
	}
	if ctx.Err() != nil {
		return read, ctx.Err()
	}
	f := Finding{Key: key, Of: b.Digest, Why: "it has no intact copy: " + wrong.Error()}
	if _, perr := s.o.Objects.Stat(ctx, key); perr == nil {
		return read, nil // it was pushed meanwhile
	}
	switch {
	case errors.Is(wrong, restore.ErrUnproven):
		f.Why = "object " + key + ": " + objects.ErrNotFound.Error()
		if away := s.o.Objects.Away(); away != "" {
			f.Why += "; " + away
		} else if !s.o.Check {
			f.Why += "; it cannot be made of others: " + wrong.Error() + "; push it again"
		}
	case !restore.Damage(wrong):
		// Nothing is damaged: the encoder is not there.
	case !s.o.Check:
		if err := s.o.Blobs.Repair(ctx, b.Digest); err == nil {
			f.Mended = "its recipe and packs from another store"
		} else if ctx.Err() != nil {
			return read, ctx.Err()
		} else {
			f.Why += "; " + err.Error() + "; push it again"
		}
	}
	return read, s.found(f)
}

// blobsOf makes blobs from what is read at the pace of the scrub.
func (s *Scrubber) blobsOf() *restore.Blobs {
	b := s.o.Blobs.From(s.store)
	b.Workers = 1
	return b
}

// mendCopy makes an intact copy in another store again.
func (s *Scrubber) mendCopy(ctx context.Context, b catalog.Blob, f *Finding, to, sound objects.Store) error {
	var err error
	if sound != nil {
		err = stores.CopyDigest(ctx, to, sound, f.Key, b.Digest)
	} else {
		err = s.o.Blobs.Make(ctx, b.Digest, to)
	}
	if err == nil {
		f.Mended = "from another store, or from its recipe and packs"
		return nil
	}
	f.Why += "; " + err.Error()
	return ctx.Err()
}

func (s *Scrubber) mendBlob(ctx context.Context, b catalog.Blob, f *Finding) error {
	err := s.o.Blobs.Heal(ctx, b.Digest)
	if err == nil {
		f.Mended = "from another store, or from its recipe and packs"
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.Why += "; it cannot be made of others: " + err.Error()
	defer s.o.Exclude(b.Digest)()
	switch _, wrong := s.hashIn(ctx, s.o.Objects.Root(), f.Key, b.Digest); {
	case wrong == nil:
		f.Mended = "it was pushed again, or read right the second time" // a memory that fails reads wrong bytes, too
	case errors.Is(wrong, objects.ErrNotFound):
		f.Why += "; push it again"
	case !damage(wrong):
		return cmpCtx(ctx, wrong)
	default:
		to, err := s.aside(f.Key)
		if err != nil {
			return err
		}
		f.Why += "; push it again; what is left of it is " + to
	}
	return nil
}

// aside moves an object out of the way, to damaged/ below the root.
func (s *Scrubber) aside(key string) (string, error) {
	dir := filepath.Join(s.o.Root, "damaged")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	from := filepath.Join(rootdir.Objects(s.o.Root), filepath.FromSlash(key))
	to := filepath.Join(dir, strings.ReplaceAll(key, "/", "-"))
	if err := os.Rename(from, to); err != nil {
		return "", fmt.Errorf("move what is damaged out of the way: %w", err)
	}
	return to, errors.Join(durable.Sync(dir), durable.Sync(filepath.Dir(from)))
}

// hash compares an object with its digest. Errors: *layer.DigestError; the store's.
func (s *Scrubber) hash(ctx context.Context, key string, want digest.Digest) (read int64, err error) {
	return hash(ctx, s.store, key, want)
}

// hashIn does so in one store, at the same pace.
func (s *Scrubber) hashIn(ctx context.Context, store objects.Store, key string, want digest.Digest) (read int64, err error) {
	return hash(ctx, &paced{store, s.store.limit}, key, want)
}

func hash(ctx context.Context, store objects.Store, key string, want digest.Digest) (read int64, err error) {
	object, err := store.Open(ctx, key, 0, -1)
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
