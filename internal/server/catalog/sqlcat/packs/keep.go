package packs

import (
	"context"
	"maps"
	"slices"
	"sync"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// kept is which packs ingests rely on. It is in memory: an ingest ends with its process, and what it has not told
// the catalog was never relied on.
type kept struct {
	mu    sync.Mutex
	packs map[string]int           // guarded by mu: how many keep it
	going map[string]chan struct{} // guarded by mu: being replaced; closed when that has ended
}

// begin says that packs are being replaced, unless somebody keeps one.
func (k *kept) begin(packs []string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range packs {
		if k.packs[p] > 0 || k.going[p] != nil {
			return false
		}
	}
	if k.going == nil {
		k.going = make(map[string]chan struct{})
	}
	ended := make(chan struct{})
	for _, p := range packs {
		k.going[p] = ended
	}
	return true
}

func (k *kept) end(packs []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.going[packs[0]])
	for _, p := range packs {
		delete(k.going, p)
	}
}

// keep implements catalog.Keep.
type keep struct {
	c     *Packs
	mu    sync.Mutex
	packs map[string]bool // guarded by mu
}

// Keep implements catalog.Dedup.
func (c *Packs) Keep() catalog.Keep { return &keep{c: c, packs: make(map[string]bool)} }

// Find implements catalog.Keep. It waits for packs that are being replaced: what it finds is then in others.
func (k *keep) Find(ctx context.Context, ids []segment.ID) (catalog.Packs, error) {
	for {
		found, err := k.c.find(ctx, ids)
		if err != nil {
			return catalog.Packs{}, err
		}
		going, more := k.hold(found.Keys)
		if going != nil {
			select {
			case <-going:
			case <-ctx.Done():
				return catalog.Packs{}, ctx.Err()
			}
		} else if !more {
			return found, nil
		}
		// A pack may have gone between the look and the hold: look again.
	}
}

// hold keeps packs and reports whether any was not kept before. If one is being replaced, it returns what
// is closed when that has ended.
func (k *keep) hold(packs []string) (going chan struct{}, more bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.c.kept.mu.Lock()
	defer k.c.kept.mu.Unlock()
	for _, p := range packs {
		if k.packs[p] {
			continue
		}
		if going = k.c.kept.going[p]; going != nil {
			return going, true
		}
		k.add(p)
		more = true
	}
	return nil, more
}

// add is called with both locks held.
func (k *keep) add(pack string) {
	k.packs[pack] = true
	if k.c.kept.packs == nil {
		k.c.kept.packs = make(map[string]int)
	}
	k.c.kept.packs[pack]++
}

// Hold implements catalog.Keep.
func (k *keep) Hold(pack string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.c.kept.mu.Lock()
	defer k.c.kept.mu.Unlock()
	if !k.packs[pack] {
		k.add(pack)
	}
}

// Packs implements catalog.Keep.
func (k *keep) Packs() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.AppendSeq(make([]string, 0, len(k.packs)), maps.Keys(k.packs))
}

// Release implements catalog.Keep.
func (k *keep) Release() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.c.kept.mu.Lock()
	defer k.c.kept.mu.Unlock()
	for pack := range k.packs {
		if k.c.kept.packs[pack]--; k.c.kept.packs[pack] == 0 {
			delete(k.c.kept.packs, pack)
		}
	}
	clear(k.packs)
}
