package dedup

import (
	"context"
	"errors"

	"hydrofoil.dev/foil/internal/server/objects"
)

// Rebuild records in the catalog all packs of the object store, in the order of their keys. It tells each of
// them to done, with the error of one that is damaged, and goes on. Errors: those of the catalog and of listing.
func (s *Store) Rebuild(ctx context.Context, done func(key string, err error)) error {
	return s.Objects.List(ctx, prefix, func(key string, _ int64) error {
		p, err := s.ReadPack(ctx, key)
		if errors.Is(err, ErrBadPack) || errors.Is(err, objects.ErrNotFound) {
			done(key, err)
			return nil
		}
		if err == nil {
			err = s.Catalog.AddPack(ctx, p)
		}
		if err == nil {
			done(key, nil)
		}
		return err
	})
}
