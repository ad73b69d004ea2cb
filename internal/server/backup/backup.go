// Package backup copies a server's root while the server runs, and makes a root of a copy.
//
// A copy is a directory of the same layout: objects, and a catalog that names none that the copy lacks. Objects never change under
// their names, so they are hard links where the file system allows, and bytes elsewhere. The order makes the copy consistent:
//
//  1. the objects that there are;
//  2. the catalog, as one transaction sees it (VACUUM INTO);
//  3. what was added to the journal meanwhile, again until compaction took nothing away on the way;
//  4. the other objects that were added meanwhile.
//
// What the catalog of step 2 names was there then: it is in 1 or in 4, unless it was added after 1 and deleted before 4. The same is
// true of the journal, which is ahead of that catalog; who restores it has the catalog catch up. What is missing is
// looked for at the end, and the steps are done again; what is missing still the server has lost before. Uploads under way are not
// copied, nor is the lock. The file "complete" is written last: a directory without it is no backup.
package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// complete is the file that says that a copy is one.
const complete = "complete"

// besides is what is copied of a root besides objects and the catalog, if it is there.
var besides = []string{"access", "upstream"}

// Report is what was copied.
type Report struct {
	Objects int64         `json:"objects"`
	Bytes   int64         `json:"bytes"`
	Linked  int64         `json:"linked"` // objects that take no room of their own
	Catalog int64         `json:"catalog_bytes"`
	Missing []string      `json:"missing,omitempty"` // blobs and packs that the server has lost
	Took    time.Duration `json:"took"`
}

type copier struct {
	ctx    context.Context
	report Report
	dirs   map[string]bool // that were written to
	// vanished counts files that were deleted between being seen and being copied.
	vanished int
}

// Backup copies the root to the directory to, which it makes and which must not be there. A server may run. Errors:
// those of the files; one that is interrupted leaves a directory that is no backup.
func Backup(ctx context.Context, root, to string) (*Report, error) {
	r, err := backup(ctx, root, to)
	if err != nil {
		return nil, fmt.Errorf("back up %s to %s: %w", root, to, err)
	}
	return r, nil
}

func backup(ctx context.Context, root, to string) (*Report, error) {
	begin := time.Now()
	if at, is, err := rootdir.InDatabase(root); err != nil {
		return nil, err
	} else if is {
		return nil, fmt.Errorf("its catalog is in %s: have the database copy it (pg_dump, or a base backup), and after it the objects; docs/operations.md says in which order", at)
	}
	if _, err := os.Stat(rootdir.CatalogFile(root)); err != nil {
		return nil, fmt.Errorf("it is no server's root, or its catalog is gone: %w. %s", err, rootdir.Mend(root))
	}
	if at, is, err := rootdir.InBucket(root); err != nil {
		return nil, err
	} else if is {
		return nil, fmt.Errorf("%w, %s: have the store copy it; the catalog can be rebuilt from it (foil server rebuild --store; docs/operations.md)", rootdir.ErrElsewhere, at)
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return nil, err
	}
	c := &copier{ctx: ctx, dirs: map[string]bool{}}
	for range 3 {
		if err := c.copy(root, to); err != nil {
			return nil, err
		}
		var err error
		if c.report.Missing, err = missing(ctx, root, to); err != nil {
			return nil, err
		}
		if len(c.report.Missing) == 0 {
			break
		}
	}
	for _, name := range besides {
		err := c.tree(filepath.Join(root, name), filepath.Join(to, name), false)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	info, err := os.Stat(rootdir.CatalogFile(to))
	if err != nil {
		return nil, err
	}
	c.report.Catalog = info.Size()
	if err := c.finish(to); err != nil {
		return nil, err
	}
	c.report.Took = time.Since(begin)
	return &c.report, nil
}

// copy does steps 1 to 4.
func (c *copier) copy(root, to string) error {
	from, objects := rootdir.Objects(root), rootdir.Objects(to)
	if err := c.tree(from, objects, true); err != nil {
		return err
	}
	if err := snapshot(c.ctx, root, to); err != nil {
		return err
	}
	for c.vanished = 1; c.vanished > 0; {
		c.vanished = 0
		err := c.tree(filepath.Join(from, journal.Prefix), filepath.Join(objects, journal.Prefix), true)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return c.tree(from, objects, true)
}

// Restore makes the directory root, which must not be there, of a backup.
func Restore(ctx context.Context, from, root string) (*Report, error) {
	begin := time.Now()
	fail := func(err error) (*Report, error) {
		return nil, fmt.Errorf("restore %s from %s: %w", root, from, err)
	}
	if _, err := os.Stat(filepath.Join(from, complete)); err != nil {
		return fail(fmt.Errorf("it is no backup, or was not finished: %w", err))
	}
	beside := root + ".new"
	if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
		return fail(errors.Join(fmt.Errorf("%s is there: name another root", root), err))
	}
	if err := os.RemoveAll(beside); err != nil {
		return fail(err)
	}
	if err := os.Mkdir(beside, 0o700); err != nil {
		return fail(err)
	}
	c := &copier{ctx: ctx, dirs: map[string]bool{}}
	// The catalog changes in place: never a link.
	for _, name := range append([]string{"objects", "catalog"}, besides...) {
		err := c.tree(filepath.Join(from, name), filepath.Join(beside, name), name == "objects")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail(err)
		}
	}
	if err := c.sync(beside); err != nil {
		return fail(err)
	}
	if err := os.Rename(beside, root); err != nil {
		return fail(err)
	}
	if err := durable.Sync(filepath.Dir(root)); err != nil {
		return fail(err)
	}
	c.report.Took = time.Since(begin)
	return &c.report, nil
}

// snapshot makes the copy's catalog anew.
func snapshot(ctx context.Context, root, to string) error {
	if err := os.RemoveAll(rootdir.Catalog(to)); err != nil {
		return err
	}
	if err := os.Mkdir(rootdir.Catalog(to), 0o700); err != nil {
		return err
	}
	return sqlite.Copy(ctx, rootdir.CatalogFile(root), rootdir.CatalogFile(to))
}

// missing returns the objects that the copy's catalog names and that the copy lacks. An accelerator's need not be there.
func missing(ctx context.Context, root, to string) (lacks []string, err error) {
	if _, err := os.Stat(filepath.Join(root, "upstream")); err == nil {
		return nil, nil
	}
	cat, err := sqlite.Open(ctx, rootdir.CatalogFile(to))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, cat.Close()) }()
	err = cat.EachKey(ctx, func(key string) error {
		_, err := os.Lstat(filepath.Join(rootdir.Objects(to), filepath.FromSlash(key)))
		if errors.Is(err, fs.ErrNotExist) {
			lacks = append(lacks, key)
			return nil
		}
		return err
	})
	return lacks, err
}

// tree copies a directory, or a file. What is there already stays; what vanishes meanwhile was deleted.
func (c *copier) tree(from, to string, link bool) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			if path != from && errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		if err := c.ctx.Err(); err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if e.IsDir() {
			if strings.HasPrefix(e.Name(), ".") {
				return fs.SkipDir // objects that are being written
			}
			if err := os.Mkdir(target, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			c.dirs[target] = true
			return nil
		}
		if !e.Type().IsRegular() {
			return nil
		}
		return c.file(path, target, link)
	})
}

// file copies one file.
func (c *copier) file(from, to string, link bool) error {
	if link {
		err := os.Link(from, to)
		switch {
		case err == nil:
			c.report.Objects++
			c.report.Linked++
			if info, err := os.Stat(to); err == nil {
				c.report.Bytes += info.Size()
			}
			return nil
		case errors.Is(err, fs.ErrExist):
			return nil
		case errors.Is(err, fs.ErrNotExist):
			c.vanished++
			return nil
		case !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EMLINK) && !errors.Is(err, unix.EOPNOTSUPP):
			return err
		}
		if _, err := os.Lstat(to); err == nil {
			return nil
		}
	}
	in, err := os.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		c.vanished++
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	// Under another name until it is whole: an interrupted copy must not look like an object.
	out, err := os.OpenFile(to+".part", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(out, in)
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err == nil {
		err = os.Rename(to+".part", to)
	}
	c.report.Objects++
	c.report.Bytes += n
	return err
}

// sync makes all names durable.
func (c *copier) sync(top string) error {
	for dir := range c.dirs {
		if err := durable.Sync(dir); err != nil {
			return err
		}
	}
	return durable.Sync(top)
}

// finish says that the copy is whole.
func (c *copier) finish(to string) error {
	c.dirs[rootdir.Catalog(to)] = true
	if err := errors.Join(durable.Sync(rootdir.CatalogFile(to)), c.sync(to)); err != nil {
		return err
	}
	if err := durable.Replace(filepath.Join(to, complete), []byte(time.Now().UTC().Format(time.RFC3339)+"\n")); err != nil {
		return err
	}
	return durable.Sync(filepath.Dir(filepath.Clean(to)))
}
