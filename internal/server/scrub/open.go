package scrub

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// Run makes one pass over a root that no server uses; with o.Check one may. It sets those of o's fields that are of the root.
// Errors: rootdir.ErrUsed; those of Pass.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if _, is, err := rootdir.InDatabase(o.Root); err != nil {
		return nil, fmt.Errorf("scrub %s: %w", o.Root, err)
	} else if _, err := os.Stat(rootdir.CatalogFile(o.Root)); err != nil && !is {
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
		if o.Objects, err = rootdir.ViewStore(o.Root); err != nil {
			return nil, err
		}
		o.Catalog, end, err = rootdir.SnapshotCatalog(ctx, o.Root)
		return end, err
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
	dir, err := rootdir.OpenStore(ctx, o.Root)
	if err != nil {
		return fail(err)
	}
	if o.Catalog, err = rootdir.OpenCatalog(ctx, o.Root, rootdir.CatalogOptions{Store: dir, Log: o.Log}); err != nil {
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
	o.Objects = dir
	o.Ingester = &ingest.Ingester{Objects: dir, Catalog: o.Catalog}
	ends = append(ends, o.Ingester.Close)
	return end, nil
}
