package collect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
)

const (
	packsAtOnce = 8    // reviewed, or compacted to one
	deadMost    = 0.05 // of all bytes: more is compacted
	deadPack    = 0.5  // of a pack: it is compacted anyway
	later       = 10 * time.Minute
	configMost  = 4 << 20 // bytes of a config
)

// index finds out of which rootfs manifests are, and which packs layers need, of those that the catalog does not know it of.
func (c *Collector) index(ctx context.Context, _ Mode, _ *Report) error {
	for {
		manifests, err := c.o.Garbage.Unindexed(ctx, perStep)
		if err != nil {
			return err
		}
		if len(manifests) == 0 {
			break
		}
		for _, m := range manifests {
			chain, err := c.chainOf(ctx, m.Manifest)
			if err == nil {
				err = c.o.Garbage.PutImage(ctx, m, chain)
			}
			if err != nil {
				return err
			}
		}
	}
	for {
		layers, err := c.o.Garbage.Unpacked(ctx, perStep)
		if err != nil || len(layers) == 0 {
			return err
		}
		for _, l := range layers {
			if err := c.pack(ctx, l); err != nil {
				return err
			}
		}
	}
}

// tidy keeps the catalog small.
func (c *Collector) tidy(ctx context.Context, _ Mode, _ *Report) error {
	for {
		more, err := c.o.Garbage.Tidy(ctx)
		if err != nil || !more {
			return err
		}
	}
}

// chainOf returns the chain ID of an image, and none for everything else; also when its config is lost.
func (c *Collector) chainOf(ctx context.Context, m catalog.Manifest) (digest.Digest, error) {
	if !oci.IsManifest(m.MediaType) {
		return "", nil
	}
	var image ocispec.Manifest
	if err := json.Unmarshal(m.Bytes, &image); err != nil || image.Config.Digest.Validate() != nil || image.Config.Size > configMost {
		return "", nil
	}
	object, err := c.o.Objects.Open(ctx, catalog.BlobKey(image.Config.Digest), 0, -1)
	if errors.Is(err, objects.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer object.Close()
	b, err := io.ReadAll(io.LimitReader(object, configMost))
	if err != nil {
		return "", err
	}
	var config struct {
		RootFS struct {
			DiffIDs []digest.Digest `json:"diff_ids"`
		} `json:"rootfs"`
	}
	if err := json.Unmarshal(b, &config); err != nil || len(config.RootFS.DiffIDs) == 0 {
		return "", nil
	}
	for _, d := range config.RootFS.DiffIDs {
		if d.Validate() != nil {
			return "", nil
		}
	}
	return flatten.ChainID(config.RootFS.DiffIDs), nil
}

// errUnreadable is told of an entry list that is lost or damaged.
var errUnreadable = errors.New("its entry list cannot be read")

// pack records which packs a layer needs. One whose list cannot be read is repaired by its next pull; until then nothing
// that it may need is known.
func (c *Collector) pack(ctx context.Context, l catalog.Layer) error {
	keep := c.o.Catalog.Keep()
	defer keep.Release()
	finder := c.store.NewFinder(keep)
	var ids []segment.ID
	flush := func() error {
		_, err := finder.Locate(ctx, ids)
		ids = ids[:0]
		return err
	}
	err := c.each(ctx, l, func(id segment.ID) error {
		if ids = append(ids, id); len(ids) < 4096 {
			return nil
		}
		return flush()
	})
	if err == nil {
		err = flush()
	}
	if errors.Is(err, errUnreadable) {
		c.o.Log.Error("the packs of a layer are not known: it is ingested again", "layer", l.Blob, "error", err)
		return c.o.Garbage.DropLayer(ctx, l.Blob)
	}
	if err != nil {
		return err
	}
	return c.o.Garbage.PutPacks(ctx, l.Blob, keep.Packs())
}

// each calls fn for the segments that the entry list of a layer names. Errors: errUnreadable.
func (c *Collector) each(ctx context.Context, l catalog.Layer, fn func(segment.ID) error) error {
	object, err := c.o.Objects.Open(ctx, l.Entries, 0, -1)
	if errors.Is(err, objects.ErrNotFound) {
		return fmt.Errorf("layer %s: %w: %w", l.Blob, errUnreadable, err)
	}
	if err != nil {
		return err
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	for err == nil {
		var e *layer.Entry
		if e, err = list.Next(); err != nil {
			break
		}
		for _, s := range e.Segments {
			if s.ID.IsHole() {
				continue
			}
			if err := fn(s.ID); err != nil {
				list.Close()
				return err
			}
		}
	}
	if list != nil {
		list.Close()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	if errors.Is(err, layer.ErrBadList) {
		return fmt.Errorf("layer %s: %w: %w", l.Blob, errUnreadable, err)
	}
	return err
}

// packs reviews packs, forgets those that are dead, and compacts.
func (c *Collector) packs(ctx context.Context, m Mode, r *Report) error {
	d := c.Due(m)
	d.Limit = packsAtOnce
	if !m.Now {
		d.Grace = later // who ingests is done with new ones
	}
	for tried := map[string]bool{}; ; {
		packs, err := c.o.Garbage.PacksToReview(ctx, d)
		if err != nil {
			return err
		}
		packs = untried(packs, tried)
		if len(packs) == 0 {
			break
		}
		if err := c.review(ctx, packs, r); err != nil {
			return err
		}
	}
	for { // one that could not be replaced waits for another review
		stats, err := c.o.Garbage.GarbageStats(ctx, d)
		if err != nil {
			return err
		}
		share := deadPack
		if float64(stats.DeadBytes) > deadMost*float64(stats.PackBytes) {
			share = deadMost
		}
		packs, err := c.o.Garbage.PacksToCompact(ctx, share, packsAtOnce)
		if err != nil {
			return err
		}
		if len(packs) == 0 {
			return nil
		}
		if err := c.compact(ctx, packs, r); err != nil {
			return err
		}
	}
}

// untried returns packs that this pass has not looked at, and notes that it does.
func untried(packs []catalog.PackUse, tried map[string]bool) (fresh []catalog.PackUse) {
	for _, p := range packs {
		if !tried[p.Key] {
			tried[p.Key] = true
			fresh = append(fresh, p)
		}
	}
	return fresh
}

// needs is what layers need of packs.
type needs struct {
	live    []map[segment.ID]bool // by pack
	dead    []int64               // bytes, by pack
	unknown []bool                // by pack: the list of a layer cannot be read
}

// mark reads the tables of packs, and the entry lists of all layers that may need something of them, each once. What
// two packs have is live in both, if the layer may need both.
func (c *Collector) mark(ctx context.Context, packs []catalog.PackUse) (needs, error) {
	n := needs{make([]map[segment.ID]bool, len(packs)), make([]int64, len(packs)), make([]bool, len(packs))}
	tables := make([]*dedup.Table, len(packs))
	layers := make(map[digest.Digest][]int) // the packs that they may need
	for i, p := range packs {
		t, err := c.store.Table(ctx, p.Key)
		if err != nil && (ctx.Err() != nil || !dedup.Damage(err)) {
			return n, err
		}
		if n.live[i] = make(map[segment.ID]bool); err != nil {
			c.o.Log.Error("a pack is not collected whose table is damaged: a scrub mends it", "pack", p.Key, "error", err)
			n.unknown[i] = true
			continue
		}
		tables[i], packs[i].Frames = t, t.Frames
		for _, d := range p.Layers {
			layers[d] = append(layers[d], i)
		}
	}
	for d, of := range layers {
		l, err := c.o.Catalog.Layer(ctx, d)
		if errors.Is(err, catalog.ErrNotFound) {
			continue
		}
		if err == nil {
			err = c.each(ctx, l, func(id segment.ID) error {
				for _, i := range of {
					if _, ok := tables[i].Find(id); ok && !packs[i].Damaged[id] {
						n.live[i][id] = true
					}
				}
				return nil
			})
		}
		if errors.Is(err, errUnreadable) {
			c.o.Log.Error("packs that a layer needs are not collected until its next pull repairs it", "layer", d, "error", err)
			for _, i := range of {
				n.unknown[i] = true
			}
			err = nil
		}
		if err != nil {
			return n, err
		}
	}
	for i := range packs {
		for _, f := range packs[i].Frames {
			raw := int64(0)
			for _, s := range f.Segments {
				if !n.live[i][s.ID] {
					raw += int64(s.Length)
				}
			}
			n.dead[i] += int64(f.Length) * raw / max(1, int64(f.RawLength))
		}
	}
	return n, nil
}

// review counts what is dead in packs, and forgets those where everything is.
func (c *Collector) review(ctx context.Context, packs []catalog.PackUse, r *Report) error {
	defer c.o.Readers.Begin()()
	n, err := c.mark(ctx, packs)
	if err != nil {
		return err
	}
	for i, p := range packs {
		one := packs[i : i+1]
		switch {
		case n.unknown[i]:
			err = c.o.Garbage.Postpone(ctx, one, time.Now().Add(time.Hour))
		case len(n.live[i]) > 0:
			err = c.o.Garbage.PutDead(ctx, p, n.dead[i])
		default:
			var gone bool
			if gone, err = c.replace(ctx, one, nil, r); gone {
				r.Packs++
			}
		}
		if err != nil {
			return err
		}
		c.o.At("reviewed")
	}
	return nil
}

// replace has the catalog forget packs, unless somebody has come to use one.
func (c *Collector) replace(ctx context.Context, packs []catalog.PackUse, by *catalog.Pack, r *Report) (bool, error) {
	err := c.o.Garbage.ReplacePacks(ctx, packs, by)
	if errors.Is(err, catalog.ErrInUse) {
		r.Busy += len(packs)
		return false, c.o.Garbage.Postpone(ctx, packs, time.Now().Add(later))
	}
	return err == nil, err
}

// compact copies what is live in packs to one.
func (c *Collector) compact(ctx context.Context, packs []catalog.PackUse, r *Report) error {
	defer c.o.Readers.Begin()()
	size := int64(0)
	for i, p := range packs { // as many as one pack takes
		if size += p.Size - p.Dead; size > c.o.PackSize && i > 0 {
			packs = packs[:i]
			break
		}
	}
	n, err := c.mark(ctx, packs)
	if err != nil {
		return err
	}
	live := 0
	for i := range packs {
		if live += len(n.live[i]); n.unknown[i] {
			return c.o.Garbage.Postpone(ctx, packs[i:i+1], time.Now().Add(time.Hour))
		}
	}
	if live == 0 {
		gone, err := c.replace(ctx, packs, nil, r)
		if gone {
			r.Packs += len(packs)
		}
		return err
	}
	by, err := c.store.Compact(ctx, packs, func(i int, id segment.ID) bool { return n.live[i][id] }, c.wait)
	if err != nil {
		if errors.Is(err, segment.ErrCorrupt) || errors.Is(err, objects.ErrNotFound) {
			c.o.Log.Error("packs are damaged and not compacted: pulls of their images repair them", "error", err)
			return c.o.Garbage.Postpone(ctx, packs, time.Now().Add(time.Hour))
		}
		return err
	}
	c.o.At("copied")
	gone, err := c.replace(ctx, packs, &by, r)
	if !gone { // nobody knows it, or whether somebody does is not known: the sweep asks
		if err == nil {
			err = c.o.Objects.Delete(ctx, by.Key)
		}
		return err
	}
	c.o.At("replaced")
	r.Compacted += len(packs)
	r.Copied += by.Size
	return nil
}

// wait keeps the rate.
func (c *Collector) wait(ctx context.Context, bytes int) error {
	for bytes > 0 {
		n := min(bytes, c.limiter.Burst())
		if err := c.limiter.WaitN(ctx, n); err != nil {
			return err
		}
		bytes -= n
	}
	return nil
}
