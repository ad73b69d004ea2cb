package restore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/deflate"
	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/parts"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Damage reports whether an error of a restore says that something of what it is made from is lost or has other bytes.
func Damage(err error) bool {
	for _, target := range []error{encoder.ErrMismatch, deflate.ErrPlaintext, parts.ErrLength, recipe.ErrCorrupt, layer.ErrBadList, segment.ErrCorrupt, ErrMissing} {
		if errors.Is(err, target) {
			return true
		}
	}
	return dedup.Damage(err)
}

// Repair finds another store from whose packs, entry list and recipe a blob comes out right, and copies those that it needs to the
// root's store, where these are not right. A pack is copied only if all of it is right. Errors: stores.ErrNoCopy, with why.
func (b *Blobs) Repair(ctx context.Context, d digest.Digest) error {
	set, ok := b.Store.Objects.(*stores.Set)
	if !ok {
		return fmt.Errorf("blob %s: %w", d, stores.ErrNoCopy)
	}
	errs := []error{fmt.Errorf("blob %s: %w", d, stores.ErrNoCopy)}
	for _, store := range set.Here()[1:] {
		seen := &recorded{Store: store, keys: map[string]bool{}}
		if _, err := b.From(seen).Verify(ctx, d); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			errs = append(errs, err)
			continue
		}
		if err := b.copyFrom(ctx, set.Root(), store, seen.keys); err != nil {
			errs = append(errs, fmt.Errorf("mend blob %s: %w", d, err))
			continue
		}
		return nil
	}
	return errors.Join(errs...)
}

// copyFrom makes objects of the root's store those of another one, by which a blob came out right. The bytes are those that each object had
// before: nobody who reads it finds others.
func (b *Blobs) copyFrom(ctx context.Context, root, from objects.Store, keys map[string]bool) error {
	for key := range keys {
		if strings.HasPrefix(key, "packs/") {
			if (&dedup.Store{Objects: root}).Sound(ctx, key) == nil {
				continue
			}
			// Others need other frames of it.
			if err := (&dedup.Store{Objects: from}).Sound(ctx, key); err != nil {
				return err
			}
		}
		if err := stores.Copy(ctx, root, from, key, nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// recorded is a store that knows what was read of it.
type recorded struct {
	objects.Store
	mu   sync.Mutex
	keys map[string]bool // guarded by mu
}

// Open implements objects.Store.
func (r *recorded) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r.mu.Lock()
	r.keys[key] = true
	r.mu.Unlock()
	return r.Store.Open(ctx, key, offset, length)
}

// Pins count who takes a blob apart: its recipe is about to be another one, by which nobody has made it yet, so that its object
// must stay. The zero value is ready.
type Pins struct {
	mu sync.Mutex
	n  map[digest.Digest]int // guarded by mu
}

// Pin pins a blob until it is released.
func (p *Pins) Pin(d digest.Digest) (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n == nil {
		p.n = map[digest.Digest]int{}
	}
	p.n[d]++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.n[d]--; p.n[d] == 0 {
			delete(p.n, d)
		}
	})
}

// Pinned reports whether a blob is.
func (p *Pins) Pinned(d digest.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n[d] > 0
}
