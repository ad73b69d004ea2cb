package convert

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/stores"
)

// copies sees to it that each store that is here has the packs, entry lists and recipes that there are; and that no store but
// the root's has a blob that no repository holds.
func (c *Converter) copies(ctx context.Context) error {
	var errs []error
	for _, o := range c.o.Stores.Others() {
		store := o.Store()
		if store == nil {
			continue
		}
		for _, prefix := range stores.Copied {
			errs = append(errs, c.level(ctx, o.Dir, store, prefix))
		}
		errs = append(errs, c.unheld(ctx, store))
	}
	return errors.Join(errs...)
}

// level gives a store what the root's has below a prefix. What only it has is copied back, if it is needed: the root has lost it.
func (c *Converter) level(ctx context.Context, name string, store objects.Store, prefix string) error {
	root := c.o.Stores.Root()
	var alone []string
	flush := func() error {
		lost, err := c.needed(ctx, alone)
		alone = alone[:0]
		for _, key := range lost {
			if err := c.o.Room(); err != nil {
				return err
			}
			if err := stores.Copy(ctx, &paced{root, c.limiter}, store, key, nil, nil); err != nil {
				return fmt.Errorf("copy %s back from store %s: %w", key, name, err)
			}
			c.metrics.mended.Inc()
			c.o.Log.Warn("an object that the root had lost was copied back: look after its disk", "object", key, "store", name)
		}
		return err
	}
	has := map[string]bool{}
	err := store.List(ctx, prefix, func(key string, _ int64) error {
		_, err := root.Stat(ctx, key)
		if err == nil {
			has[key] = true
			return nil
		}
		if !errors.Is(err, objects.ErrNotFound) {
			return err
		}
		if alone = append(alone, key); len(alone) < 200 {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if err != nil {
		return err
	}
	return root.List(ctx, prefix, func(key string, _ int64) error {
		if has[key] {
			return nil // if one of the two is damaged the scrub finds out which
		}
		err := stores.Copy(ctx, &paced{store, c.limiter}, root, key, nil, nil)
		if errors.Is(err, objects.ErrNotFound) {
			return nil // it was collected meanwhile
		}
		if err != nil {
			return fmt.Errorf("copy %s to store %s: %w", key, name, err)
		}
		c.metrics.leveled.Inc()
		c.o.At("leveled")
		return nil
	})
}

// needed returns those of the keys that something in the catalog names.
func (c *Converter) needed(ctx context.Context, keys []string) (needed []string, err error) {
	if len(keys) == 0 {
		return nil, nil
	}
	// Whoever nobody ever named is a stray from the first time on that somebody asks for it.
	strays, err := c.o.Catalog.Strays(ctx, keys, time.Now().Add(time.Hour))
	if err != nil {
		return nil, err
	}
	stray := map[string]bool{}
	for _, key := range strays {
		stray[key] = true
	}
	for _, key := range keys {
		if !stray[key] {
			needed = append(needed, key)
		}
	}
	return needed, nil
}

// unheld removes blobs that were deleted while the store was away.
func (c *Converter) unheld(ctx context.Context, store objects.Store) error {
	var gone []digest.Digest
	err := store.List(ctx, "blobs/", func(key string, _ int64) error {
		parts := strings.Split(key, "/")
		d := digest.Digest(parts[1] + ":" + parts[len(parts)-1])
		if d.Validate() != nil || catalog.BlobKey(d) != key {
			return nil
		}
		_, err := c.o.Catalog.AnyBlob(ctx, d)
		if errors.Is(err, catalog.ErrNotFound) {
			gone = append(gone, d)
			err = nil
		}
		return err
	})
	for _, d := range gone {
		if err == nil {
			err = c.o.RemoveUnheld(ctx, d)
		}
	}
	return err
}
