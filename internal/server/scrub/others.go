package scrub

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/stores"
)

// others compares what other stores have with what the root's store has. What they lack is none of this: the server copies it.
func (s *Scrubber) others(ctx context.Context) error {
	for _, o := range s.o.Objects.Others() {
		store := o.Store()
		if store == nil {
			if err := s.found(Finding{Key: o.Dir, Why: o.Err().Error()}); err != nil {
				return err
			}
			continue
		}
		for _, prefix := range stores.Copied {
			err := store.List(ctx, prefix, func(key string, _ int64) error {
				n, err := s.other(ctx, o.Dir, store, key)
				if err != nil {
					return err
				}
				return s.done("stores", key, 1, n)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// other compares one object. Where both differ the catalog knows what is right: a copy is never taken for right because it is
// the root's.
func (s *Scrubber) other(ctx context.Context, dir string, store objects.Store, key string) (read int64, err error) {
	defer s.o.Readers.Begin()()
	want, _, err := s.sum(ctx, s.o.Objects.Root(), key)
	if err != nil && !damage(err) {
		return 0, cmpCtx(ctx, err)
	}
	got, read, wrong := s.sum(ctx, store, key)
	switch {
	case errors.Is(err, objects.ErrNotFound), errors.Is(wrong, objects.ErrNotFound):
		return read, nil // it was collected, or the server copies it
	case wrong != nil && !damage(wrong):
		return read, cmpCtx(ctx, wrong)
	case err == nil && wrong == nil && got == want:
		return read, nil
	}
	known, right, err := s.right(ctx, store, key)
	if err != nil || !known || right {
		return read, err // what is wrong with the root's was found before
	}
	f := Finding{Key: key, Why: "in store " + dir + " it has other bytes"}
	if wrong != nil {
		f.Why = "in store " + dir + ": " + wrong.Error()
	}
	if s.o.Check {
		return read, s.found(f)
	}
	_, right, err = s.right(ctx, s.o.Objects.Root(), key)
	if err == nil && right {
		err = stores.CopyDigest(ctx, store, s.o.Objects.Root(), key, want)
	}
	switch {
	case ctx.Err() != nil:
		return read, ctx.Err()
	case err != nil:
		f.Why += "; " + err.Error()
	case !right:
		f.Why += ", and so it has in the root's"
	default:
		f.Mended = "copied from the root's store"
	}
	return read, s.found(f)
}

// sum hashes an object.
func (s *Scrubber) sum(ctx context.Context, store objects.Store, key string) (digest.Digest, int64, error) {
	r, err := (&paced{store, s.store.limit}).Open(ctx, key, 0, -1)
	if err != nil {
		return "", 0, err
	}
	defer r.Close()
	h := digest.Canonical.Hash()
	n, err := io.CopyBuffer(h, struct{ io.Reader }{r}, make([]byte, paceBytes))
	return digest.NewDigest(digest.Canonical, h), n, err
}

// right reports whether a pack, an entry list or a recipe in a store is what the catalog says; not known: the catalog does not
// name it. Errors: those that are no damage.
func (s *Scrubber) right(ctx context.Context, store objects.Store, key string) (known, right bool, err error) {
	in := &paced{store, s.store.limit}
	if strings.HasPrefix(key, "packs/") {
		p, err := s.o.Catalog.Pack(ctx, key)
		if err != nil {
			return false, false, ignoreUnknown(err)
		}
		x, err := (&dedup.Store{Objects: in, Catalog: s.o.Catalog}).Examine(ctx, p)
		return true, err == nil && x.Wrong == nil, err
	}
	parts := strings.Split(key, "/") // KIND/ALGORITHM/AB/HEX-RANDOM
	if len(parts) != 4 {
		return false, false, nil
	}
	hex, _, _ := strings.Cut(parts[3], "-")
	row, err := s.o.Catalog.Layer(ctx, digest.Digest(parts[1]+":"+hex))
	if err != nil {
		return false, false, ignoreUnknown(err)
	}
	switch key {
	case row.Entries:
		err = readList(ctx, in, key)
	case row.Recipe.Key:
		_, err = hash(ctx, in, key, row.Recipe.Digest)
	default:
		return false, false, nil
	}
	if err != nil && (derivedDamage(err) || errors.Is(err, objects.ErrNotFound)) {
		return true, false, nil
	}
	return true, err == nil, err
}

func ignoreUnknown(err error) error {
	if errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	return err
}

// readList reads an entry list to its end. Errors: layer.ErrBadList; the store's.
func readList(ctx context.Context, store objects.Store, key string) error {
	object, err := store.Open(ctx, key, 0, -1)
	if err != nil {
		return err
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	if err != nil {
		return err
	}
	defer list.Close()
	for {
		if _, err := list.Next(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// fromCopy puts a pack, an entry list or a recipe of the root's store in its place again from another one in which it is right. It
// reports whether there is one.
func (s *Scrubber) fromCopy(ctx context.Context, key string) (bool, error) {
	for _, store := range s.o.Objects.Here()[1:] {
		_, right, err := s.right(ctx, store, key)
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		if err != nil || !right {
			continue
		}
		return true, stores.Copy(ctx, s.o.Objects.Root(), store, key, nil, nil)
	}
	return false, nil
}
