// Package near keeps what was read of a distant object store, or written to it, on a local disk.
//
// # What is kept
//
// Blocks of objects that are read in pieces: packs, indices, tables of contents. A block that is missing is read together with those
// after it; how many grows while an object is read in order, and then they are read ahead. What is written is kept as it goes by. Blobs
// are kept as they are pushed, since they are ingested next, and small ones when they are read as a whole; others are passed through, and
// the journal always is. Page caches of the kernel are what keeps the hottest of it in memory.
//
// Objects do not change under their keys but by this store, which forgets what it replaces or deletes. What another process deletes may be
// read here until it is evicted: who asks for an object has asked the catalog first.
//
// # Files
//
// Each object has a sparse file of its own in the directory. Which blocks are in it is known in memory only: the directory is emptied
// when it is opened, so that nothing is believed after a crash. What was used longest ago goes when there is more than the limit; a
// reader goes on with a file that was removed.
package near

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"hydrofoil.dev/foil/internal/server/objects"
)

const (
	// blockSize is what is here or not, bytes.
	blockSize = 256 << 10
	// fewest and most are how many blocks are read at once.
	fewest, most = 4, 32
	// fetches is how many reads of the store may be under way.
	fetches = 64
)

// Options of a Store. Limit is required.
type Options struct {
	Dir     string       // is emptied
	Limit   int64        // bytes of objects; files that are open after they were removed come on top
	Log     *slog.Logger // nil means slog.Default
	Metrics *Metrics     // nil: nobody counts
}

// Store is an objects.Store. Close ends what it does in the background; the store behind it is not closed.
type Store struct {
	objects.Store
	o   Options
	ctx context.Context // of fetches: they serve all who wait for the same bytes
	end context.CancelFunc
	all sync.WaitGroup
	sem chan struct{}

	mu      sync.Mutex
	entries map[string]*entry // guarded by mu
	recent  *list.List        // guarded by mu: of entries; what was used last comes first
	used    int64             // guarded by mu: bytes of entries
	failed  bool              // guarded by mu: it was told that the disk fails
}

// Open returns a store in front of another one.
func Open(inner objects.Store, o Options) (*Store, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	fail := func(err error) (*Store, error) { return nil, fmt.Errorf("open the cache of the object store: %w", err) }
	if err := os.RemoveAll(o.Dir); err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return fail(err)
	}
	s := &Store{Store: inner, o: o, sem: make(chan struct{}, fetches), entries: map[string]*entry{}, recent: list.New()}
	s.ctx, s.end = context.WithCancel(context.Background())
	return s, nil
}

// Close waits for fetches, and removes the files.
func (s *Store) Close() error {
	s.end()
	s.all.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		s.remove(e)
	}
	return nil
}

// Unwrap returns the store behind it.
func (s *Store) Unwrap() objects.Store { return s.Store }

// inBlocks reports whether an object is read block by block.
func inBlocks(key string) bool {
	for _, prefix := range []string{"blobs/", "journal/", "claims/"} {
		if strings.HasPrefix(key, prefix) {
			return false
		}
	}
	return true
}

// find returns the entry of an object, and makes one if it is to be kept in blocks. nil: it is not here. Who gets one lets go of it.
func (s *Store) find(key string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		if !inBlocks(key) {
			return nil
		}
		e = &entry{s: s, key: key, size: -1, changed: make(chan struct{})}
		s.put(e)
	}
	s.recent.MoveToFront(e.place)
	e.users++
	return e
}

// put adds an entry, in the place of the one that the key has. s.mu is held.
func (s *Store) put(e *entry) {
	if old := s.entries[e.key]; old != nil {
		s.remove(old)
	}
	s.entries[e.key] = e
	e.place = s.recent.PushFront(e)
	s.used += e.bytes
	s.evict(e)
}

// remove forgets an entry. s.mu is held.
func (s *Store) remove(e *entry) {
	if s.entries[e.key] != e {
		return
	}
	delete(s.entries, e.key)
	s.recent.Remove(e.place)
	s.used -= e.bytes
	s.o.Metrics.bytes.Set(float64(s.used))
	e.gone = true
	if e.path != "" {
		_ = os.Remove(e.path) // what is left is removed by the next Open
	}
	if e.users == 0 {
		e.close()
	}
}

// evict makes room; keep stays. s.mu is held.
func (s *Store) evict(keep *entry) {
	for at := s.recent.Back(); at != nil && s.used > s.o.Limit; {
		e := at.Value.(*entry)
		at = at.Prev()
		if e != keep && e.bytes > 0 {
			s.remove(e)
		}
	}
	s.o.Metrics.bytes.Set(float64(s.used))
}

// grown counts bytes that came to be in an entry.
func (s *Store) grown(e *entry, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.gone {
		return
	}
	e.bytes += n
	s.used += n
	s.evict(e)
}

// letGo is the end of find.
func (s *Store) letGo(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.users--; e.users == 0 && e.gone {
		e.close()
	}
}

// drop forgets an object.
func (s *Store) drop(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[key]; e != nil {
		s.remove(e)
	}
}

// trouble tells, once, that the disk fails. Everything goes on without it.
func (s *Store) trouble(err error) {
	s.mu.Lock()
	told := s.failed
	s.failed = true
	s.mu.Unlock()
	if !told {
		s.o.Log.Warn("the cache of the object store cannot be written: what is not in it is read from the store", "dir", s.o.Dir, "error", err)
	}
}

// newFile makes a file for an object.
func (s *Store) newFile() (*os.File, error) {
	return os.OpenFile(filepath.Join(s.o.Dir, objects.Random()+objects.Random()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
}

// Open implements objects.Store.
func (s *Store) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := objects.CheckKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	if length == 0 || offset < 0 {
		return s.Store.Open(ctx, key, offset, length)
	}
	e := s.find(key)
	if e == nil && offset == 0 && length < 0 && strings.HasPrefix(key, "blobs/") {
		return s.openSmall(ctx, key)
	}
	if e == nil {
		return s.Store.Open(ctx, key, offset, length)
	}
	r, err := e.open(ctx, offset, length)
	if err == nil {
		return r, nil
	}
	s.letGo(e)
	if errors.Is(err, errNoDisk) {
		return s.Store.Open(ctx, key, offset, length)
	}
	return nil, err
}

// openSmall opens a blob to read it as a whole, and keeps it if it is small.
func (s *Store) openSmall(ctx context.Context, key string) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	sizes, ok := r.(objects.Sized)
	if !ok || sizes.Size() > blockSize {
		return r, nil
	}
	defer r.Close()
	b := make([]byte, sizes.Size())
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("read object %s: %w", key, err)
	}
	if f, err := s.newFile(); err != nil {
		s.trouble(err)
	} else if _, err := f.Write(b); err != nil {
		s.trouble(err)
		_ = os.Remove(f.Name()) // nothing rests in it
		_ = f.Close()
	} else {
		s.keep(key, f, int64(len(b)))
	}
	return sized{io.NopCloser(bytes.NewReader(b)), int64(len(b))}, nil
}

// ReadAhead implements objects.Ahead.
func (s *Store) ReadAhead(key string, last int64) {
	if objects.CheckKey(key) != nil || !inBlocks(key) {
		return
	}
	e := s.find(key)
	defer s.letGo(e)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case last < 0:
		e.fetch(0, most)
	case e.size >= 0:
		e.fetch(max(0, e.size-last)/blockSize, most)
	}
}

// Delete implements objects.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	defer s.drop(key)
	return s.Store.Delete(ctx, key)
}

// Create implements objects.Store.
func (s *Store) Create(ctx context.Context, key string) (objects.Writer, error) {
	w, err := s.Store.Create(ctx, key)
	if err != nil || !inBlocks(key) {
		return w, err
	}
	f, err := s.newFile()
	if err != nil {
		s.trouble(err)
	}
	return &writer{Writer: w, s: s, key: key, file: f}, nil
}

// writer keeps what goes by.
type writer struct {
	objects.Writer
	s    *Store
	key  string
	file *os.File // nil: it is not kept
	size int64
}

func (w *writer) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.size += int64(n)
	if w.file != nil {
		_, ferr := w.file.Write(p[:n])
		if ferr != nil {
			w.s.trouble(ferr)
		}
		if ferr != nil || w.size > w.s.o.Limit/4 {
			w.drop()
		}
	}
	return n, err
}

func (w *writer) drop() {
	if w.file != nil {
		_ = os.Remove(w.file.Name()) // nothing rests in it
		_ = w.file.Close()
		w.file = nil
	}
}

func (w *writer) Commit() error {
	if err := w.Writer.Commit(); err != nil {
		w.s.drop(w.key) // it may have been replaced all the same
		return err
	}
	f := w.file
	w.file = nil
	w.s.keep(w.key, f, w.size)
	return nil
}

func (w *writer) Close() error {
	w.drop()
	return w.Writer.Close()
}

// keep has an object in a file; nil: it is not kept, and what was of it is forgotten.
func (s *Store) keep(key string, f *os.File, size int64) {
	if f == nil {
		s.drop(key)
		return
	}
	e := &entry{s: s, key: key, path: f.Name(), file: f, size: size, bytes: size, changed: make(chan struct{})}
	e.have = make([]bool, blocks(size))
	for i := range e.have {
		e.have[i] = true
	}
	e.missing = 0
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(e)
}

// AdoptFile implements objects.Adopter: the file stays here, too.
func (s *Store) AdoptFile(ctx context.Context, key, path string) error {
	if err := objects.CheckKey(key); err != nil {
		return err
	}
	kept := s.link(path)
	if err := objects.Adopt(ctx, s.Store, key, path); err != nil {
		s.drop(key)
		if kept != nil {
			_ = os.Remove(kept.Name()) // it is a second name
			_ = kept.Close()
		}
		return err
	}
	size := int64(0)
	if kept != nil {
		if info, err := kept.Stat(); err == nil {
			size = info.Size()
		}
	}
	s.keep(key, kept, size)
	return nil
}

// link gives a file a second name here. nil: it is not kept.
func (s *Store) link(path string) *os.File {
	info, err := os.Stat(path)
	if err != nil || info.Size() > s.o.Limit/4 || !info.Mode().IsRegular() {
		return nil
	}
	name := filepath.Join(s.o.Dir, objects.Random()+objects.Random())
	if err := os.Link(path, name); err != nil {
		return nil
	}
	f, err := os.Open(name)
	if err != nil {
		_ = os.Remove(name) // it is a second name
		return nil
	}
	return f
}

func blocks(size int64) int64 { return (size + blockSize - 1) / blockSize }
