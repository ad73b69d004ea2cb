// Package rootdir is where things are below a server's root, and who may use it.
package rootdir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/objects"
)

// ErrUsed is returned, wrapped, by Lock while another process has the root.
var ErrUsed = errors.New("another server uses")

// ErrNoCatalog is returned, wrapped, by Check.
var ErrNoCatalog = errors.New("the catalog is missing")

// Catalog is the directory of the catalog.
func Catalog(root string) string { return filepath.Join(root, "catalog") }

// CatalogFile is the catalog.
func CatalogFile(root string) string { return filepath.Join(Catalog(root), "catalog.db") }

// Objects is the directory of the object store.
func Objects(root string) string { return filepath.Join(root, "objects") }

// Webhooks is the file of events that wait for their receivers.
func Webhooks(root string) string { return filepath.Join(root, "webhooks.db") }

// Mend is what to do when the catalog cannot be used.
func Mend(root string) string {
	return fmt.Sprintf("foil server rebuild --root %s makes it anew from the objects; docs/backup.md has more", root)
}

// Lock takes the root for this process, until the process ends or unlocks it. Errors: ErrUsed.
func Lock(root string) (unlock func() error, err error) {
	path := filepath.Join(root, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w %s, or foil server rebuild does: stop it, or name another root", ErrUsed, root)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() error {
		// Closing is not enough: a program that this process is just starting has the lock too, until it has begun.
		return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close())
	}, nil
}

// Check sees to it that no empty catalog takes the place of one that is gone: the server would remove all
// blobs, which no repository would hold. Errors: ErrNoCatalog.
func Check(ctx context.Context, root string, store objects.Store) error {
	info, err := os.Stat(CatalogFile(root))
	if err == nil && info.Size() > 0 {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	found, err := hasObjects(ctx, store)
	if err == nil && found {
		err = fmt.Errorf("%w: %s is not there or empty, and there are objects. %s", ErrNoCatalog, CatalogFile(root), Mend(root))
	}
	return err
}

// hasObjects reports whether there are objects that only a catalog makes sense of.
func hasObjects(ctx context.Context, store objects.Store) (bool, error) {
	found := errors.New("found")
	for _, prefix := range []string{"journal/", "blobs/", "packs/"} {
		err := store.List(ctx, prefix, func(string, int64) error { return found })
		if errors.Is(err, found) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}
