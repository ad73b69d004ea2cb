package scrub

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/startup"
)

func (s *Scrubber) layers(ctx context.Context, after string) error {
	return s.o.Catalog.EachLayer(ctx, func(row catalog.Layer) error {
		if row.Blob.String() <= after || row.Refused != "" {
			return nil
		}
		n, err := s.layer(ctx, row)
		if err != nil {
			return err
		}
		return s.done("layers", row.Blob.String(), 2, n)
	})
}

// layer looks at the entry list of a layer, at its recipe, and whether the segments rest somewhere.
func (s *Scrubber) layer(ctx context.Context, row catalog.Layer) (read int64, err error) {
	defer s.o.Readers.Begin()()
	if row, err = s.o.Catalog.Layer(ctx, row.Blob); errors.Is(err, catalog.ErrNotFound) {
		return 0, nil // it was collected meanwhile
	} else if err != nil {
		return 0, err
	}
	read, wrong := s.list(ctx, row)
	if wrong == nil && row.Recipe.Key != "" {
		var n int64
		if n, wrong = s.hash(ctx, row.Recipe.Key, row.Recipe.Digest); wrong != nil {
			wrong = fmt.Errorf("recipe: %w", wrong)
		}
		read += n
	}
	if wrong == nil {
		return read, nil
	}
	if ctx.Err() != nil || !derivedDamage(wrong) {
		return read, cmpCtx(ctx, wrong)
	}
	f := Finding{Key: row.Entries, Of: row.Blob, Why: wrong.Error()}
	if s.o.Check {
		return read, s.found(f)
	}
	_, held := s.o.Catalog.AnyBlob(ctx, row.Blob)
	if errors.Is(held, catalog.ErrNotFound) && !s.o.Elsewhere {
		if err := s.o.Catalog.DropLayer(ctx, row.Blob); err != nil {
			return read, err
		}
		f.Mended = "forgotten: no repository holds the layer"
		return read, s.found(f)
	}
	if mended, err := s.layerFromCopies(ctx, row); err != nil {
		return read, err
	} else if mended {
		f.Mended = "copied from another store"
		return read, s.found(f)
	}
	if away := s.o.Objects.Away(); away != "" {
		f.Why += "; it may be whole in a store that is not here: " + away
		return read, s.found(f)
	}
	err = s.o.Ingester.RepairLayer(ctx, row.Blob)
	switch {
	case err == nil:
		f.Mended = "ingested again from its blob"
	case ctx.Err() != nil:
		return read, ctx.Err()
	case s.o.Elsewhere && errors.Is(err, objects.ErrNotFound):
		if err := s.o.Catalog.DropLayer(ctx, row.Blob); err != nil {
			return read, err
		}
		f.Mended = "forgotten: the next pull brings the layer from the upstream"
	default:
		f.Why += "; " + err.Error()
	}
	return read, s.found(f)
}

// layerFromCopies mends the entry list and the recipe of a layer from other stores. It reports whether both are right then, and
// whether the segments rest somewhere.
func (s *Scrubber) layerFromCopies(ctx context.Context, row catalog.Layer) (bool, error) {
	for _, key := range []string{row.Entries, row.Recipe.Key} {
		if key == "" {
			continue
		}
		_, right, err := s.right(ctx, s.o.Objects.Root(), key)
		if err != nil {
			return false, cmpCtx(ctx, err)
		}
		if !right {
			if right, err = s.fromCopy(ctx, key); err != nil || !right {
				return false, err
			}
		}
	}
	_, wrong := s.list(ctx, row)
	return wrong == nil, ctx.Err()
}

var errMissing = errors.New("it rests nowhere")

// list reads an entry list, and looks its segments up.
func (s *Scrubber) list(ctx context.Context, row catalog.Layer) (read int64, err error) {
	object, err := s.store.Open(ctx, row.Entries, 0, -1)
	if err != nil {
		return 0, err
	}
	defer object.Close()
	if read, err = s.store.Stat(ctx, row.Entries); err != nil {
		return 0, err
	}
	list, err := layer.NewListReader(object)
	if err != nil {
		return read, err
	}
	defer list.Close()
	var ids []segment.ID
	look := func() error {
		places, err := s.o.Catalog.Locate(ctx, ids)
		if err != nil {
			return err
		}
		for i, p := range places {
			if p.Frame == nil || s.missing[ids[i]] {
				return fmt.Errorf("segment %s: %w", ids[i], errMissing)
			}
		}
		ids = ids[:0]
		return nil
	}
	for {
		e, err := list.Next()
		if err == io.EOF {
			return read, look()
		}
		if err != nil {
			return read, err
		}
		for _, g := range e.Segments {
			if !g.ID.IsHole() {
				ids = append(ids, g.ID)
			}
		}
		if len(ids) >= 4096 {
			if err := look(); err != nil {
				return read, err
			}
		}
	}
}

// derivedDamage is damage for what is made of blobs.
func derivedDamage(err error) bool {
	for _, target := range []error{layer.ErrBadList, errMissing, planner.ErrMissing, planner.ErrCorrupt, startup.ErrCorrupt} {
		if errors.Is(err, target) {
			return true
		}
	}
	return damage(err)
}

func (s *Scrubber) rootfs(ctx context.Context, after string) error {
	return s.o.Catalog.EachRootfs(ctx, func(r catalog.Rootfs) error {
		if r.ChainID.String() <= after {
			return nil
		}
		n, err := s.tree(ctx, r)
		if err != nil {
			return err
		}
		return s.done("rootfs", r.ChainID.String(), 1, n)
	})
}

// tree looks at the TOC of a rootfs, at its index and at its orders.
func (s *Scrubber) tree(ctx context.Context, r catalog.Rootfs) (read int64, err error) {
	defer s.o.Readers.Begin()()
	if r, err = s.o.Catalog.Rootfs(ctx, r.ChainID); errors.Is(err, catalog.ErrNotFound) {
		return 0, nil // it was collected meanwhile
	} else if err != nil {
		return 0, err
	}
	b, wrong := objects.Read(ctx, s.store, r.Key, maxObject)
	if wrong == nil && toc.Digest(b) != r.TOC {
		wrong = &layer.DigestError{Layer: r.TOC, What: "TOC", Got: toc.Digest(b), Want: r.TOC}
	}
	if wrong != nil {
		if ctx.Err() != nil || !derivedDamage(wrong) {
			return read, cmpCtx(ctx, wrong)
		}
		f := Finding{Key: r.Key, Of: r.ChainID, Why: wrong.Error()}
		if !s.o.Check {
			if err := s.mendTree(ctx, r, &f); err != nil {
				return read, err
			}
		}
		return int64(len(b)), s.found(f)
	}
	read = int64(len(b))
	t, err := toc.DecodeContents(b)
	if err != nil {
		return read, s.found(Finding{Key: r.Key, Of: r.ChainID, Why: err.Error()}) // it is what was stored
	}
	n, err := s.index(ctx, r, t)
	if err != nil {
		return read + n, err
	}
	more, err := s.orders(ctx, r, t)
	return read + n + more, err
}

// mendTree flattens the layers of an image that has the rootfs again.
func (s *Scrubber) mendTree(ctx context.Context, r catalog.Rootfs, f *Finding) error {
	layers, err := s.layersOf(ctx, r.ChainID)
	if err != nil {
		return err
	}
	if layers == nil {
		f.Mended = "forgotten: no image has it"
		return s.o.Catalog.DropRootfs(ctx, r.ChainID)
	}
	made, err := s.o.Ingester.Repair(ctx, layers)
	switch {
	case err == nil:
		f.Mended = "from the entry lists of its layers"
		s.o.Remade(r.TOC)
		s.o.Remade(made.TOC)
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		f.Why += "; " + err.Error()
	}
	return nil
}

// index compares a frame index with what the catalog says now.
func (s *Scrubber) index(ctx context.Context, r catalog.Rootfs, t *toc.TOC) (read int64, err error) {
	if r.Index == "" {
		return 0, nil
	}
	b, wrong := objects.Read(ctx, s.store, r.Index, maxObject)
	if wrong == nil {
		_, wrong = planner.Decode(b, t, r.TOC)
	}
	if wrong != nil && (ctx.Err() != nil || !derivedDamage(wrong)) {
		return 0, cmpCtx(ctx, wrong)
	}
	read = int64(len(b))
	x, err := planner.Build(ctx, t, r.TOC, s.o.Catalog)
	if errors.Is(err, planner.ErrMissing) {
		return read, nil // the layer was named
	}
	if err != nil {
		return read, err
	}
	now := x.Encode()
	if wrong == nil && string(now) == string(b) {
		return read, nil
	}
	if s.o.Check {
		if wrong == nil {
			return read, nil
		}
		return read, s.found(Finding{Key: r.Index, Of: r.ChainID, Why: wrong.Error()})
	}
	if err := objects.Put(ctx, s.o.Objects, r.Index, now); err != nil {
		return read, err
	}
	s.o.Remade(r.TOC)
	if wrong == nil {
		s.s.Report.Remade++
		return read, nil
	}
	return read, s.found(Finding{Key: r.Index, Of: r.ChainID, Why: wrong.Error(), Mended: "from the catalog"})
}

// orders deletes the orders of a rootfs that cannot be read: the next pull guesses them anew. That is also so of those that an older version
// has guessed, so it is no finding.
func (s *Scrubber) orders(ctx context.Context, r catalog.Rootfs, t *toc.TOC) (read int64, err error) {
	prefix := fmt.Sprintf("orders/%s/%s-", r.TOC.Algorithm(), r.TOC.Encoded())
	err = s.o.Objects.List(ctx, prefix, func(key string, _ int64) error {
		config := digest.NewDigestFromEncoded(r.TOC.Algorithm(), strings.TrimPrefix(key, prefix))
		b, wrong := objects.Read(ctx, s.store, key, maxObject)
		if wrong == nil {
			read += int64(len(b))
			_, wrong = planner.DecodeOrder(b, config, r.TOC, len(t.Segments))
		}
		if wrong == nil || s.o.Check || errors.Is(wrong, objects.ErrNotFound) {
			return nil
		}
		if ctx.Err() != nil || !derivedDamage(wrong) {
			return cmpCtx(ctx, wrong)
		}
		s.s.Report.Remade++
		return s.o.Objects.Delete(ctx, key)
	})
	return read, err
}

func (s *Scrubber) startup(ctx context.Context, after string) error {
	return s.o.Catalog.EachStartupImage(ctx, func(m catalog.StartupImage) error {
		name := m.Repository + " " + m.ChainID.String()
		if name <= after || m.Key == "" {
			return nil
		}
		n, wrong := s.pages(ctx, m)
		if wrong != nil && (ctx.Err() != nil || !derivedDamage(wrong)) {
			return cmpCtx(ctx, wrong)
		}
		if wrong != nil {
			if err := s.mendPages(ctx, m, wrong); err != nil {
				return err
			}
		}
		return s.done("startup", name, 1, n)
	})
}

// pages looks at a store of startup pages. One that is of another TOC than the rootfs has now is built anew before it is used.
func (s *Scrubber) pages(ctx context.Context, m catalog.StartupImage) (read int64, err error) {
	r, err := s.o.Catalog.Rootfs(ctx, m.ChainID)
	if errors.Is(err, catalog.ErrNotFound) || err == nil && r.TOC != m.TOC {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	b, err := objects.Read(ctx, s.store, r.Key, maxObject)
	if err != nil || toc.Digest(b) != r.TOC {
		return 0, cmpCtx(ctx, nil) // found before
	}
	t, err := toc.DecodeContents(b)
	if err != nil {
		return 0, nil
	}
	return startup.Examine(ctx, s.store, m.Key, t, m.TOC)
}

func (s *Scrubber) mendPages(ctx context.Context, m catalog.StartupImage, wrong error) error {
	now, err := s.o.Catalog.StartupImage(ctx, m.Repository, m.ChainID)
	if err != nil || now.Key != m.Key {
		return err // another one was built meanwhile
	}
	f := Finding{Key: m.Key, Of: m.ChainID, Why: wrong.Error()}
	switch {
	case s.o.Check:
	case s.o.LostSet != nil:
		s.o.LostSet(ctx, now, wrong)
		f.Mended = "built anew from the packs"
	default:
		now.Built, now.Key, now.Previous = now.Wanted-1, "", ""
		if err := s.o.Catalog.PutBuilt(ctx, now); err != nil {
			return err
		}
		f.Mended = "forgotten; the server builds it anew from the packs when it starts"
	}
	return s.found(f)
}

func (s *Scrubber) manifests(ctx context.Context) error {
	// In no order that a name could say: they are few bytes, and looked at from the first one again.
	return s.o.Catalog.EachManifest(ctx, func(m manifest) error {
		if m.Digest.Algorithm().FromBytes(m.Bytes) != m.Digest {
			err := s.found(Finding{Key: m.Repository + "@" + m.Digest.String(), Of: m.Digest, Why: "its bytes in the catalog are others: foil server rebuild takes them from the journal"})
			if err != nil {
				return err
			}
		}
		return s.done("manifests", "", 1, int64(len(m.Bytes)))
	})
}

// maxObject bounds what is read at once.
const maxObject = 1 << 30
