package dedup

import (
	"context"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Places says where segments rest, from the tables of some packs alone. It is for one goroutine.
type Places struct {
	store   *Store
	keys    []string // of packs; where something was found last comes first
	damaged map[catalog.Resting]bool
	unread  map[string]bool // packs whose tables are lost or damaged: as if they held nothing
}

// Places returns those of the packs that layers need, and the layers of images of a rootfs, which may be empty.
func (s *Store) Places(ctx context.Context, layers []digest.Digest, rootfs digest.Digest) (*Places, error) {
	packs, err := s.Catalog.PacksOf(ctx, layers, rootfs)
	if err != nil {
		return nil, err
	}
	return &Places{store: s, keys: packs.Keys, damaged: packs.Damaged}, nil
}

// Locate returns where segments rest, in the order of ids; one that rests nowhere has a nil Frame. Errors: those of the
// object store that say nothing about the packs.
func (p *Places) Locate(ctx context.Context, ids []segment.ID) ([]catalog.Location, error) {
	places := make([]catalog.Location, len(ids))
	left := make([]int, 0, len(ids))
	for i := range ids {
		if !ids[i].IsHole() {
			left = append(left, i)
		}
	}
	_, err := p.look(ctx, p.keys, ids, places, left)
	return places, err
}

// look looks in packs, which are among keys, for those of ids that left names, and returns what it does not find.
func (p *Places) look(ctx context.Context, packs []string, ids []segment.ID, places []catalog.Location, left []int) ([]int, error) {
	for _, key := range slices.Clone(packs) {
		if len(left) == 0 {
			break
		}
		if p.unread[key] {
			continue
		}
		t, err := p.store.Table(ctx, key)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil && !Damage(err) {
			return nil, fmt.Errorf("locate segments: %w", err)
		}
		if err != nil {
			if p.unread == nil {
				p.unread = make(map[string]bool)
			}
			p.unread[key] = true
			continue
		}
		n := len(left)
		left = slices.DeleteFunc(left, func(i int) bool {
			at, ok := t.Find(ids[i])
			if !ok || len(p.damaged) > 0 && p.damaged[catalog.Resting{Pack: key, ID: ids[i]}] {
				return false
			}
			places[i] = at
			return true
		})
		if len(left) < n {
			at := slices.Index(p.keys, key)
			copy(p.keys[1:at+1], p.keys[:at])
			p.keys[0] = key
		}
	}
	return left, nil
}

// finderPacks is how many packs a Finder looks at before it asks for hooks.
const finderPacks = 16

// Finder looks for segments in all packs, by their hooks: see catalog.Keep. Those in which it finds something it keeps. It is
// for one goroutine.
type Finder struct {
	Places
	keep catalog.Keep
}

// NewFinder returns one. keep is the caller's to release.
func (s *Store) NewFinder(keep catalog.Keep) *Finder { return &Finder{Places{store: s}, keep} }

// Locate is that of Places, for all packs. It may miss some of what rests in a large store.
func (f *Finder) Locate(ctx context.Context, ids []segment.ID) ([]catalog.Location, error) {
	places := make([]catalog.Location, len(ids))
	left := make([]int, 0, len(ids))
	for i := range ids {
		if !ids[i].IsHole() {
			left = append(left, i)
		}
	}
	left, err := f.look(ctx, f.keys, ids, places, left)
	if err != nil || len(left) == 0 {
		return places, err
	}
	rest := make([]segment.ID, len(left))
	for n, i := range left {
		rest[n] = ids[i]
	}
	found, err := f.keep.Find(ctx, rest)
	if err != nil {
		return nil, err
	}
	for at := range found.Damaged {
		if f.damaged == nil {
			f.damaged = make(map[catalog.Resting]bool)
		}
		f.damaged[at] = true
	}
	var fresh []string
	for _, key := range found.Keys {
		if !slices.Contains(f.keys, key) {
			fresh = append(fresh, key)
		}
	}
	f.keys = append(f.keys, fresh...)
	if _, err := f.look(ctx, fresh, ids, places, left); err != nil {
		return nil, err
	}
	f.keys = f.keys[:min(len(f.keys), finderPacks)]
	return places, nil
}
