package objects

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"hydrofoil.dev/foil/internal/durable"
)

// Dir is a Store in a local directory: the object a/b is the file a/b. Objects
// that are being written are in the subdirectory .tmp, which no key can name.
//
// The system calls of one object that is made durable, in this order, because
// a crash between any two of them must leave nothing or the whole object:
//
//	openat(.tmp/X, O_CREAT|O_EXCL), write..., fsync, close
//	mkdirat of missing parents; fsync of the parent of each, outermost first
//	renameat(.tmp/X, a/b), fsync(a)
//
// One process uses a directory at a time.
type Dir struct {
	root string
	// durable has the directories whose own name is known to be on disk: a
	// directory that exists may have been made by another writer, or another
	// process that was killed, and not have been synced yet.
	durable sync.Map // path -> struct{}
}

const tempDir = ".tmp"

// OpenDir opens the store in dir, which is made when missing, and removes what
// writers that were interrupted left behind.
func OpenDir(dir string) (*Dir, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open object directory %s: %w", dir, err)
	}
	d := &Dir{root: root}
	tmp := filepath.Join(root, tempDir)
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("open object directory: %w", err)
	}
	if err := os.RemoveAll(tmp); err != nil {
		return nil, fmt.Errorf("open object directory: remove what was left unfinished: %w", err)
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, fmt.Errorf("open object directory: %w", err)
	}
	for _, p := range []string{filepath.Dir(root), root} {
		if err := durable.Sync(p); err != nil {
			return nil, fmt.Errorf("open object directory: %w", err)
		}
	}
	d.durable.Store(root, struct{}{})
	return d, nil
}

// ViewDir returns the store in dir for reading, also while another process uses it.
func ViewDir(dir string) (Store, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("view object directory %s: %w", dir, err)
	}
	return view{&Dir{root: root}}, nil
}

type view struct{ *Dir }

var errView = errors.New("the store was opened for reading")

func (view) Create(_ context.Context, key string) (Writer, error) {
	return nil, fmt.Errorf("create object %s: %w", key, errView)
}

func (view) Delete(_ context.Context, key string) error {
	return fmt.Errorf("delete object %s: %w", key, errView)
}

func (view) AdoptFile(_ context.Context, key, _ string) error {
	return fmt.Errorf("adopt object %s: %w", key, errView)
}

func (d *Dir) path(key string) string { return filepath.Join(d.root, filepath.FromSlash(key)) }

// Create implements Store.
func (d *Dir) Create(ctx context.Context, key string) (Writer, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("create object %s: %w", key, err)
	}
	f, err := os.CreateTemp(filepath.Join(d.root, tempDir), "*")
	if err != nil {
		return nil, fmt.Errorf("create object %s: %w", key, err)
	}
	return &dirWriter{ctx: ctx, dir: d, key: key, file: f}, nil
}

// dirWriter is one object in the making. It belongs to one goroutine.
type dirWriter struct {
	ctx  context.Context
	dir  *Dir
	key  string
	file *os.File // nil after Commit or Close
	err  error    // the first failed write: such an object is never committed
}

func (w *dirWriter) Write(p []byte) (int, error) {
	if w.file == nil {
		return 0, fmt.Errorf("write object %s: %w", w.key, fs.ErrClosed)
	}
	if err := w.ctx.Err(); err != nil {
		return 0, fmt.Errorf("write object %s: %w", w.key, err)
	}
	n, err := w.file.Write(p)
	if err != nil {
		w.err = cmp.Or(w.err, err)
		err = fmt.Errorf("write object %s: %w", w.key, err)
	}
	return n, err
}

func (w *dirWriter) Commit() error {
	if w.file == nil {
		return fmt.Errorf("commit object %s: %w", w.key, fs.ErrClosed)
	}
	defer w.Close()
	if w.err != nil {
		return fmt.Errorf("commit object %s: a write failed: %w", w.key, w.err)
	}
	if err := w.ctx.Err(); err != nil {
		return fmt.Errorf("commit object %s: %w", w.key, err)
	}
	if err := w.file.Sync(); err != nil {
		return fmt.Errorf("commit object %s: %w", w.key, err)
	}
	if err := w.dir.rename(w.file.Name(), w.key); err != nil {
		return fmt.Errorf("commit object %s: %w", w.key, err)
	}
	// The name is gone from .tmp: Close has nothing to remove.
	err := w.file.Close()
	w.file = nil
	if err != nil {
		return fmt.Errorf("commit object %s: %w", w.key, err)
	}
	return nil
}

func (w *dirWriter) Close() error {
	if w.file == nil {
		return nil
	}
	err := errors.Join(w.file.Close(), os.Remove(w.file.Name()))
	w.file = nil
	if err != nil {
		return fmt.Errorf("drop unfinished object %s: %w", w.key, err)
	}
	return nil
}

// AdoptFile implements Adopter.
func (d *Dir) AdoptFile(ctx context.Context, key, path string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	if err := durable.Sync(path); err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	err := d.rename(path, key)
	if errors.Is(err, syscall.EXDEV) {
		return d.adoptCopy(ctx, key, path)
	}
	if err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	return nil
}

// adoptCopy hides AdoptFile, so that a file of another file system is copied.
func (d *Dir) adoptCopy(ctx context.Context, key, path string) error {
	return Adopt(ctx, struct{ Store }{d}, key, path)
}

// rename makes the synced file at from the object key, durably.
func (d *Dir) rename(from, key string) error {
	to := d.path(key)
	parent := filepath.Dir(to)
	if err := d.makeDurable(parent); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return durable.Sync(parent)
}

// makeDurable makes dir, which is in root, and sees to it that its name and
// those of its parents are on disk.
func (d *Dir) makeDurable(dir string) error {
	if _, ok := d.durable.Load(dir); ok {
		return nil
	}
	parent := filepath.Dir(dir)
	if err := d.makeDurable(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := durable.Sync(parent); err != nil {
		return err
	}
	d.durable.Store(dir, struct{}{})
	return nil
}

// Open implements Store.
func (d *Dir) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	f, err := os.Open(d.path(key))
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, notFound(err))
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrNotFound
	}
	if err == nil {
		length, err = CheckRange(offset, length, info.Size())
	}
	if err == nil && offset > 0 {
		_, err = f.Seek(offset, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	return &dirReader{key: key, file: f, size: info.Size(), rest: io.LimitedReader{R: f, N: length}}, nil
}

type dirReader struct {
	key  string
	file *os.File
	size int64
	rest io.LimitedReader
}

func (r *dirReader) Read(p []byte) (int, error) {
	n, err := r.rest.Read(p)
	if err == io.EOF && r.rest.N > 0 {
		err = io.ErrUnexpectedEOF // objects do not shrink: the file was damaged
	}
	if err != nil && err != io.EOF {
		err = fmt.Errorf("read object %s: %w", r.key, err)
	}
	return n, err
}

// WriteTo lets a network connection take the bytes with sendfile(2).
func (r *dirReader) WriteTo(w io.Writer) (int64, error) {
	n, err := io.Copy(w, &r.rest)
	if err == nil && r.rest.N > 0 {
		err = fmt.Errorf("read object %s: %w", r.key, io.ErrUnexpectedEOF)
	}
	return n, err
}

// Size implements Sized.
func (r *dirReader) Size() int64 { return r.size }

// File implements InFile.
func (r *dirReader) File() *os.File { return r.file }

func (r *dirReader) Close() error { return r.file.Close() }

// Stat implements Store.
func (d *Dir) Stat(ctx context.Context, key string) (int64, error) {
	if err := CheckKey(key); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("stat object %s: %w", key, err)
	}
	info, err := os.Lstat(d.path(key))
	if err == nil && !info.Mode().IsRegular() {
		err = ErrNotFound
	}
	if err != nil {
		return 0, fmt.Errorf("stat object %s: %w", key, notFound(err))
	}
	return info.Size(), nil
}

// Delete implements Store. The directories that an object was in stay.
func (d *Dir) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("delete object %s: %w", key, err)
	}
	path := d.path(key)
	err := syscall.Unlink(path) // os.Remove would take an empty directory as well
	switch {
	case err == nil:
		err = durable.Sync(filepath.Dir(path))
	case errors.Is(notFound(err), ErrNotFound), errors.Is(err, syscall.EISDIR):
		err = nil
	}
	if err != nil {
		return fmt.Errorf("delete object %s: %w", key, err)
	}
	return nil
}

// List implements Store.
func (d *Dir) List(ctx context.Context, prefix string, fn func(key string, size int64) error) error {
	return d.list(ctx, "", prefix, fn)
}

// list goes through the directory named by dir, which is empty or ends in '/'.
func (d *Dir) list(ctx context.Context, dir, prefix string, fn func(string, int64) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("list objects %s: %w", prefix, err)
	}
	entries, err := os.ReadDir(d.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list objects %s: %w", prefix, err)
	}
	// In key order a directory a, whose keys start with a/, is after the file a-b.
	order := func(e fs.DirEntry) string {
		if e.IsDir() {
			return e.Name() + "/"
		}
		return e.Name()
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(order(a), order(b)) })
	for _, e := range entries {
		key := dir + order(e)
		switch {
		case strings.HasPrefix(e.Name(), "."):
			// .tmp
		case e.IsDir():
			if strings.HasPrefix(key, prefix) || strings.HasPrefix(prefix, key) {
				err = d.list(ctx, key, prefix, fn)
			}
		case strings.HasPrefix(key, prefix) && e.Type().IsRegular():
			var info fs.FileInfo
			info, err = e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				err = nil // deleted meanwhile
			} else if err != nil {
				err = fmt.Errorf("list objects %s: %w", prefix, err)
			} else {
				err = fn(key, info.Size())
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// notFound turns the errors of a missing file into ErrNotFound. ENOTDIR: a
// parent of the key is an object.
func notFound(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return ErrNotFound
	}
	return err
}
