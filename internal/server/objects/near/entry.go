package near

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"hydrofoil.dev/foil/internal/server/objects"
)

// errNoDisk is why an object is read from the store behind: its blocks cannot be kept.
var errNoDisk = errors.New("the cache cannot be written")

// entry is what is here of one object.
type entry struct {
	s   *Store
	key string

	// Of Store.mu.
	place *list.Element
	users int    // readers, fetches, and who is about to be one
	bytes int64  // that are here
	gone  bool   // nobody finds it any more
	path  string // of its file; empty: there is none

	mu      sync.Mutex    // comes before Store.mu
	file    *os.File      // guarded by mu: nil before the first bytes, and after close
	size    int64         // guarded by mu: of the object; < 0: not known yet
	have    []bool        // guarded by mu: which blocks are here; empty while the size is not known
	missing int64         // guarded by mu: how many are not
	under   []*fetch      // guarded by mu: what is coming
	changed chan struct{} // guarded by mu: closed when a block came, or a fetch has ended
	last    int64         // guarded by mu: the block that was read last
	run     int           // guarded by mu: how many were read in order before it
	next    int64         // guarded by mu: the block after the last fetch
	window  int64         // guarded by mu: how many blocks that had
}

// fetch is blocks that are being read from the store.
type fetch struct {
	from, to int64 // to: after the last one
	err      error // of entry.mu: set when it has ended
}

// close lets go of the file: nobody uses the entry, and nobody will.
func (e *entry) close() {
	if e.file != nil {
		_ = e.file.Close() // nothing rests in it
		e.file = nil
	}
}

// tell wakes who waits. e.mu is held.
func (e *entry) tell() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// open returns a reader, which then owns the use of the entry.
func (e *entry) open(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
	want := int64(most)
	if length >= 0 {
		want = min(want, blocks(offset%blockSize+length))
	}
	e.mu.Lock()
	known := e.size >= 0
	e.mu.Unlock()
	if !known {
		err := e.need(ctx, offset/blockSize, want)
		if err != nil && !errors.Is(err, objects.ErrRange) { // its size is known now, and may be the offset
			return nil, err
		}
	}
	e.mu.Lock()
	size, whole := e.size, e.missing == 0
	e.mu.Unlock()
	if size < 0 {
		return nil, fmt.Errorf("open object %s: %w: it ends before %d", e.key, objects.ErrRange, offset)
	}
	length, err := objects.CheckRange(offset, length, size)
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", e.key, err)
	}
	if whole {
		if r := e.wholeReader(offset, length); r != nil {
			return r, nil
		}
	}
	r := &reader{e: e, ctx: ctx, size: size, pos: offset, end: offset + length}
	if length > 0 {
		if err := e.need(ctx, offset/blockSize, want); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// need returns when a block is here. want is how many from there on are going to be read. Errors: errNoDisk; the store's.
func (e *entry) need(ctx context.Context, block, want int64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch block {
	case e.last:
	case e.last + 1:
		e.run++
	default:
		e.run = 0
	}
	e.last = block
	missed := false
	for {
		if e.is(block) {
			if !missed {
				e.s.o.Metrics.read.WithLabelValues("disk").Add(blockSize)
			}
			if e.run >= 2 { // it is read in order: what comes next is on its way when it is wanted
				e.ahead(block + 1)
			}
			return nil
		}
		if e.size >= 0 && block >= int64(len(e.have)) {
			return fmt.Errorf("open object %s: %w: it has %d bytes", e.key, objects.ErrRange, e.size)
		}
		f := e.coming(block)
		if f == nil {
			missed = true
			f = e.fetch(block, want)
		}
		changed := e.changed
		e.mu.Unlock()
		var err error
		select {
		case <-changed:
		case <-ctx.Done():
			err = fmt.Errorf("read object %s: %w", e.key, ctx.Err())
		}
		e.mu.Lock()
		if err = cmp.Or(err, f.err); err != nil && !e.is(block) {
			return err
		}
	}
}

func (e *entry) is(block int64) bool { return block < int64(len(e.have)) && e.have[block] }

// coming is the fetch that brings a block.
func (e *entry) coming(block int64) *fetch {
	for _, f := range e.under {
		if f.from <= block && block < f.to {
			return f
		}
	}
	return nil
}

// ahead begins to read what comes after, unless enough of it is here. e.mu is held.
func (e *entry) ahead(block int64) {
	for at := block; at < min(block+max(e.window, fewest)/2, int64(len(e.have))); at++ {
		if !e.have[at] {
			if e.coming(at) == nil {
				e.fetch(at, 0)
			}
			return
		}
	}
}

// fetch begins to read blocks from one on: as many as are wanted, or as have proved to pay. e.mu is held.
func (e *entry) fetch(block, want int64) *fetch {
	if e.is(block) {
		return nil
	}
	if f := e.coming(block); f != nil {
		return f
	}
	if block == e.next && e.window > 0 {
		e.window = min(2*e.window, most)
	} else {
		e.window = fewest
	}
	n := max(e.window, min(want, most))
	f := &fetch{from: block, to: block + 1}
	for f.to < block+n && !e.is(f.to) && e.coming(f.to) == nil && (e.size < 0 || f.to < int64(len(e.have))) {
		f.to++
	}
	e.next = f.to
	e.under = append(e.under, f)
	s := e.s
	s.mu.Lock()
	e.users++
	s.mu.Unlock()
	s.all.Add(1)
	go func() {
		defer s.all.Done()
		defer s.letGo(e)
		err := e.read(f)
		e.mu.Lock()
		f.err = err
		for i := range e.under {
			if e.under[i] == f {
				e.under = append(e.under[:i:i], e.under[i+1:]...)
				break
			}
		}
		none := e.size < 0
		e.tell()
		e.mu.Unlock()
		if err != nil && none {
			s.forget(e) // so that nobody holds on to what is not there
		}
	}()
	return f
}

// forget removes an entry of which nothing is here.
func (s *Store) forget(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(e)
}

// read does a fetch.
func (e *entry) read(f *fetch) error {
	select {
	case e.s.sem <- struct{}{}:
		defer func() { <-e.s.sem }()
	case <-e.s.ctx.Done():
		return e.s.ctx.Err()
	}
	r, err := e.s.within(e.key, f.from*blockSize, (f.to-f.from)*blockSize)
	if err != nil {
		return err
	}
	defer r.Close()
	size := r.(objects.Sized).Size()
	file, err := e.begin(size)
	if err != nil {
		return err
	}
	buf := make([]byte, blockSize)
	for block := f.from; block < f.to && block*blockSize < size; block++ {
		p := buf[:min(blockSize, size-block*blockSize)]
		if _, err := io.ReadFull(r, p); err != nil {
			return fmt.Errorf("read object %s: %w", e.key, err)
		}
		e.s.o.Metrics.read.WithLabelValues("store").Add(float64(len(p)))
		if _, err := file.WriteAt(p, block*blockSize); err != nil {
			e.s.trouble(err)
			return fmt.Errorf("read object %s: %w", e.key, errNoDisk)
		}
		e.mu.Lock()
		if !e.have[block] {
			e.have[block] = true
			e.missing--
		}
		e.tell()
		e.mu.Unlock()
		e.s.grown(e, int64(len(p)))
	}
	return nil
}

// within opens a range that may end after the object.
func (s *Store) within(key string, offset, length int64) (io.ReadCloser, error) {
	if w, ok := s.Store.(objects.Within); ok {
		return w.OpenWithin(s.ctx, key, offset, length)
	}
	size, err := s.Stat(s.ctx, key)
	if err != nil {
		return nil, err
	}
	r, err := s.Store.Open(s.ctx, key, offset, min(length, max(0, size-offset)))
	if err != nil {
		return nil, err
	}
	return sized{r, size}, nil
}

type sized struct {
	io.ReadCloser
	size int64
}

func (s sized) Size() int64 { return s.size }

// begin learns the object's size, and has a file for it.
func (e *entry) begin(size int64) (*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.size >= 0 && e.size != size {
		return nil, fmt.Errorf("read object %s: it has %d bytes, and had %d", e.key, size, e.size)
	}
	if e.file == nil {
		f, err := e.s.newFile()
		if err != nil {
			e.s.trouble(err)
			return nil, fmt.Errorf("read object %s: %w", e.key, errNoDisk)
		}
		e.file = f
		if !e.named(f.Name()) {
			_ = os.Remove(f.Name()) // it is read to its end, without a name
		}
	}
	if e.size < 0 {
		e.size, e.have, e.missing = size, make([]bool, blocks(size)), blocks(size)
	}
	return e.file, nil
}

// named says what the file is called, and reports whether the entry is still one.
func (e *entry) named(path string) bool {
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	if !e.gone {
		e.path = path
	}
	return !e.gone
}

// wholeReader reads a file that has all of the object. nil: it was removed just now.
func (e *entry) wholeReader(offset, length int64) io.ReadCloser {
	e.s.mu.Lock()
	path := e.path
	e.s.mu.Unlock()
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		_ = f.Close() // it was only read
		return nil
	}
	e.s.o.Metrics.read.WithLabelValues("disk").Add(float64(length))
	return &whole{e: e, file: f, rest: io.LimitedReader{R: f, N: length}}
}

// whole reads an object that is here.
type whole struct {
	e    *entry
	file *os.File
	rest io.LimitedReader
	once sync.Once
}

func (r *whole) Read(p []byte) (int, error) {
	n, err := r.rest.Read(p)
	if err == io.EOF && r.rest.N > 0 {
		err = io.ErrNoProgress
	}
	if err != nil && err != io.EOF {
		r.e.s.drop(r.e.key)
		err = r.broken(err)
	}
	return n, err
}

// broken says that the cache is to blame, and not the object.
func (r *whole) broken(err error) error {
	return &objects.UnavailableError{Op: "read", Key: r.e.key, Reason: fmt.Sprintf("the cache's disk: %v", err)}
}

// WriteTo lets a network connection take the bytes with sendfile(2).
func (r *whole) WriteTo(w io.Writer) (int64, error) {
	n, err := io.Copy(w, &r.rest)
	if err == nil && r.rest.N > 0 {
		err = r.broken(io.ErrNoProgress)
	}
	return n, err
}

// Size implements objects.Sized.
func (r *whole) Size() int64 { return r.e.size } // does not change once it is known

// File implements objects.InFile.
func (r *whole) File() *os.File { return r.file }

func (r *whole) Close() error {
	err := r.file.Close()
	r.once.Do(func() { r.e.s.letGo(r.e) })
	return err
}

// reader reads an object of which some is here.
type reader struct {
	e        *entry
	ctx      context.Context
	size     int64
	pos, end int64
	inner    io.ReadCloser // after the disk has failed
	once     sync.Once
}

// Size implements objects.Sized.
func (r *reader) Size() int64 { return r.size }

func (r *reader) Read(p []byte) (int, error) {
	if r.inner != nil {
		return r.inner.Read(p)
	}
	if r.pos >= r.end {
		return 0, io.EOF
	}
	if err := r.ctx.Err(); err != nil {
		return 0, fmt.Errorf("read object %s: %w", r.e.key, err)
	}
	block := r.pos / blockSize
	err := r.e.need(r.ctx, block, blocks(r.end-block*blockSize))
	if err == nil {
		p = p[:min(int64(len(p)), (block+1)*blockSize-r.pos, r.end-r.pos)]
		r.e.mu.Lock()
		file := r.e.file
		r.e.mu.Unlock()
		var n int
		if n, err = file.ReadAt(p, r.pos); n > 0 {
			r.pos += int64(n)
			return n, nil
		}
		r.e.s.trouble(err)
		r.e.s.drop(r.e.key)
		err = errNoDisk
	}
	if errors.Is(err, errNoDisk) {
		if r.inner, err = r.e.s.Store.Open(r.ctx, r.e.key, r.pos, r.end-r.pos); err == nil {
			return r.inner.Read(p)
		}
	}
	return 0, err
}

func (r *reader) Close() error {
	var err error
	if r.inner != nil {
		err = r.inner.Close()
	}
	r.once.Do(func() { r.e.s.letGo(r.e) })
	r.pos = r.end
	return err
}
