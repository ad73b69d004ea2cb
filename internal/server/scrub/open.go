package scrub

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/encoder/programs"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Run makes one pass over a root that no server uses; with o.Check one may. It sets those of o's fields that are of the root.
// Errors: rootdir.ErrUsed; those of Pass.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if _, err := os.Stat(rootdir.CatalogFile(o.Root)); err != nil {
		return nil, fmt.Errorf("scrub %s: it is no server's root, or its catalog is gone: %w. %s", o.Root, err, rootdir.Mend(o.Root))
	}
	if _, err := os.Stat(filepath.Join(o.Root, "upstream")); err == nil {
		o.Elsewhere = true
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	end, err := o.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("scrub %s: %w", o.Root, err)
	}
	defer func() { err = errors.Join(err, end()) }()
	return New(o).Pass(ctx)
}

// open opens what is below the root.
func (o *Options) open(ctx context.Context) (end func() error, err error) {
	if o.Check {
		if o.Objects, err = stores.View(o.Root); err != nil {
			return nil, err
		}
		if o.Catalog, end, err = sqlite.OpenCopy(ctx, rootdir.CatalogFile(o.Root)); err != nil {
			return nil, err
		}
		closeCatalog, closeEncoders := end, o.openBlobs()
		return func() error { return errors.Join(closeEncoders(), closeCatalog()) }, nil
	}
	var ends []func() error
	end = func() error {
		var errs []error
		for i := len(ends) - 1; i >= 0; i-- {
			errs = append(errs, ends[i]())
		}
		return errors.Join(errs...)
	}
	fail := func(err error) (func() error, error) {
		if errors.Is(err, catalog.ErrDamaged) || errors.Is(err, journal.ErrStale) {
			err = fmt.Errorf("%w. %s", err, rootdir.Mend(o.Root))
		}
		return nil, errors.Join(err, end())
	}
	unlock, err := rootdir.Lock(o.Root)
	if errors.Is(err, rootdir.ErrUsed) {
		return nil, fmt.Errorf("%w; or have it do this itself: foil serve --scrub-rate; --check changes nothing and runs beside it", err)
	}
	if err != nil {
		return nil, err
	}
	ends = append(ends, unlock)
	if o.Objects, err = stores.Recorded(o.Root); err != nil {
		return fail(err)
	}
	dir := o.Objects.Root()
	if err := rootdir.Check(ctx, o.Root, dir); err != nil {
		return fail(err)
	}
	if o.Catalog, err = sqlite.Open(ctx, rootdir.CatalogFile(o.Root)); err != nil {
		return fail(err)
	}
	j := journal.New(dir, journal.Options{Log: o.Log})
	ends = append(ends, j.Close, o.Catalog.Close)
	if err := o.Catalog.Check(ctx); err != nil {
		return fail(err)
	}
	if err := j.Attach(ctx, o.Catalog); err != nil {
		return fail(err)
	}
	ends = append(ends, o.openBlobs())
	front := restore.NewStore(o.Blobs, restore.StoreOptions{Wanted: func(context.Context, digest.Digest) bool { return false },
		Failed: func(digest.Digest, error, error) {}})
	ends = append(ends, front.Close)
	o.Ingester = &ingest.Ingester{Objects: front, Catalog: o.Catalog, Intact: o.intact}
	ends = append(ends, o.Ingester.Close)
	return end, nil
}

// openBlobs sets Blobs.
func (o *Options) openBlobs() (end func() error) {
	encoders := &encoder.Set{Programs: programs.Program}
	o.Blobs = &restore.Blobs{Store: &dedup.Store{Objects: o.Objects, Catalog: o.Catalog}, Encoders: encoders}
	return encoders.Close
}

// intact makes a blob an object before it is ingested again; there is nobody else who could remove it.
func (o *Options) intact(ctx context.Context, d digest.Digest) (release func(), err error) {
	if _, err = o.Objects.Stat(ctx, catalog.BlobKey(d)); stores.Absent(err) {
		err = o.Blobs.Heal(ctx, d)
		if errors.Is(err, restore.ErrUnproven) {
			err = nil
		}
	}
	return func() {}, err
}
