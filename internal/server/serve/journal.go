package serve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// checkedAtStart is up to which size a catalog is looked at as a whole before the server starts, bytes. A
// larger one is looked at meanwhile.
const checkedAtStart = 64 << 20

// openCatalog opens the catalog, and has it log its changes to the journal in store.
func (s *Server) openCatalog(ctx context.Context, store objects.Store) (*sqlcat.Catalog, error) {
	root := s.opts.Root
	mend := func(err error) error {
		if errors.Is(err, catalog.ErrDamaged) || errors.Is(err, journal.ErrStale) {
			return fmt.Errorf("%w. %s", err, rootdir.Mend(root))
		}
		return err
	}
	cat, err := rootdir.OpenCatalog(ctx, root, rootdir.CatalogOptions{At: s.opts.Catalog, Store: store, Log: s.log, Metrics: &s.database})
	if err != nil {
		return nil, mend(err)
	}
	j := journal.New(store, journal.Options{Log: s.log})
	s.closers = append(s.closers, j.Close, cat.Close)
	size := int64(0) // a database looks after itself
	info, err := os.Stat(rootdir.CatalogFile(root))
	if err == nil {
		size = info.Size()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if size <= checkedAtStart {
		if err := cat.Check(ctx); err != nil {
			return nil, mend(err)
		}
	}
	if err := j.Attach(ctx, cat); err != nil {
		return nil, mend(err)
	}
	// All there is of a new root: so it can be rebuilt from its first push on.
	if _, err := cat.LogMore(ctx); err != nil {
		return nil, err
	}
	s.closers = append(s.closers, background(func(ctx context.Context) {
		if size > checkedAtStart {
			if err := cat.Check(ctx); err != nil && ctx.Err() == nil {
				s.log.Error("the catalog is damaged: stop the server and rebuild it", "error", err, "fix", rootdir.Mend(root))
			}
		}
		logOlder(ctx, cat, s.log)
	}))
	return cat, nil
}

// background runs work until it returns; the function that it returns ends it.
func background(work func(ctx context.Context)) (end func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { work(ctx) })
	return func() error {
		cancel()
		wg.Wait()
		return nil
	}
}

// logOlder writes to the journal what was in the catalog before there was one.
func logOlder(ctx context.Context, cat catalog.Logged, log *slog.Logger) {
	for n := 0; ; n++ {
		whole, err := cat.LogMore(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			log.Error("the journal lacks what is older than it, until the server is started again", "error", err)
			return
		case err != nil:
			return
		case whole && n > 0: // else it was before
			log.Info("the journal has everything: the catalog can be rebuilt from it")
			return
		case whole:
			return
		}
	}
}

// lockRoot makes the root and takes it.
func lockRoot(root string) (unlock func() error, err error) {
	if err := os.MkdirAll(filepath.Clean(root), 0o700); err != nil {
		return nil, err
	}
	return rootdir.Lock(root)
}
