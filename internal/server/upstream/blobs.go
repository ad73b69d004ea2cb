package upstream

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// download is one blob on its way here. It goes on as long as somebody uses it;
// what has come stays in its file, and the next download of the blob begins with
// it.
type download struct {
	a      *Accelerator
	digest digest.Digest
	size   int64
	repos  []string // that hold the blob at the upstream
	cancel context.CancelFunc
	ended  chan struct{} // closed when it has left Accelerator.downloads
	users  int           // guarded by Accelerator.mu: those that read it, and itself
	ending bool          // guarded by Accelerator.mu: nobody is to join it any more
	noRoom bool          // guarded by Accelerator.mu: what has come is not kept if it fails

	mu    sync.Mutex
	moved sync.Cond // of mu: what follows has changed, or a reader's context has ended
	file  *os.File  // guarded by mu: nil before the download has begun, and after its last user
	here  int64     // guarded by mu: bytes in file
	begun int       // guarded by mu: how often it was begun anew
	done  bool      // guarded by mu: verified and an object, or failed
	err   error     // guarded by mu: why it failed
}

// errHere says that a blob is an object by now.
var errHere = errors.New("the blob is here")

// join returns the download of a blob, which it begins if there is none. The
// caller leaves it when it has done. Errors: errHere.
func (a *Accelerator) join(ctx context.Context, d digest.Digest, size int64, repos []string) (*download, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		if a.closed {
			return nil, errClosed
		}
		w := a.downloads[d.String()]
		if w == nil {
			break
		}
		if !w.ending {
			w.users++
			return w, nil
		}
		// Two at a time would write to one file.
		a.mu.Unlock()
		select {
		case <-w.ended:
		case <-ctx.Done():
		}
		a.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	// A download leaves the map when it has made its object.
	if _, err := a.o.Objects.Stat(ctx, catalog.BlobKey(d)); err == nil {
		return nil, errHere
	}
	own, cancel := context.WithCancel(a.ctx)
	w := &download{a: a, digest: d, size: size, repos: repos, cancel: cancel, ended: make(chan struct{}), users: 2}
	w.moved.L = &w.mu
	a.downloads[d.String()] = w
	a.wg.Go(func() { w.run(own) })
	return w, nil
}

func (w *download) leave() {
	w.a.mu.Lock()
	defer w.a.mu.Unlock()
	w.users--
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.users == 0: // and it has ended
		if w.file != nil {
			_ = w.file.Close() // only read from here on; synced when it was adopted
			w.file = nil
		}
	case w.users == 1 && !w.done: // nobody but itself
		w.ending = true
		w.cancel()
	}
}

// run downloads the blob and makes it an object.
func (w *download) run(ctx context.Context) {
	defer w.cancel()
	err := w.fetch(ctx)
	w.a.Full(err)
	w.a.mu.Lock()
	if err != nil && w.noRoom {
		err = errors.Join(err, w.a.forget(w.digest))
	}
	delete(w.a.downloads, w.digest.String())
	w.a.mu.Unlock()
	close(w.ended)
	w.mu.Lock()
	w.done, w.err = true, err
	w.moved.Broadcast()
	w.mu.Unlock()
	w.leave()
}

func (w *download) fetch(ctx context.Context) error {
	select {
	case w.a.slots <- struct{}{}:
		defer func() { <-w.a.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	began := time.Now()
	path := w.a.part(w.digest)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.file = f
	w.mu.Unlock()
	hash := w.digest.Algorithm().Hash()
	resumed, err := w.resume(ctx, hash)
	if err != nil {
		return err
	}
	before := w.offset()
	for {
		err = w.body(ctx, hash, &resumed)
		if err != nil {
			return err
		}
		got := digest.NewDigest(w.digest.Algorithm(), hash)
		if got == w.digest {
			break
		}
		if !resumed {
			e := w.a.client.wrong(w.what(), "its bytes have the digest %s", got)
			return errors.Join(e, w.a.forget(w.digest))
		}
		// What was left behind by a crash, or came from another store, may be
		// what is wrong.
		w.a.log.Warn("bytes from upstream that were put together are wrong: beginning again", "blob", w.digest)
		if err := w.restart(hash); err != nil {
			return err
		}
		before, resumed = 0, false
	}
	if err := objects.Adopt(ctx, w.a.o.Objects, catalog.BlobKey(w.digest), path); err != nil {
		return err
	}
	w.a.log.Info("fetched from upstream", "blob", w.digest, "repository", w.repos[0], "bytes", w.size-before,
		"took", time.Since(began).Round(time.Millisecond))
	return nil
}

// part is the file of a blob's download.
func (a *Accelerator) part(d digest.Digest) string {
	return filepath.Join(a.o.Dir, strings.Replace(d.String(), ":", "-", 1))
}

// forget removes what a download has brought.
func (a *Accelerator) forget(d digest.Digest) error {
	if err := os.Remove(a.part(d)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// Full is to be called with the error of whatever reads blobs to write something:
// if that is a full disk, downloads that break off now are not kept for a next
// try, and those that did before are removed. What others write needs the room
// more.
func (a *Accelerator) Full(err error) {
	if !full(err) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	underWay := map[string]bool{}
	for _, w := range a.downloads {
		w.noRoom = true
		underWay[filepath.Base(a.part(w.digest))] = true
	}
	entries, err := os.ReadDir(a.o.Dir)
	for _, e := range entries {
		if !underWay[e.Name()] {
			err = errors.Join(err, os.Remove(filepath.Join(a.o.Dir, e.Name())))
		}
	}
	if err != nil {
		a.log.Error("the disk is full, and what was downloaded in part cannot be removed", "directory", a.o.Dir, "error", err)
	}
}

func (w *download) what() string { return "blob " + nameOf(w.repos[0], w.digest.String()) }

func (w *download) offset() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.here
}

// restart forgets what has come. Readers that got some of it fail.
func (w *download) restart(h hash.Hash) error {
	h.Reset()
	// Before the bytes go: who finds none where some were told of sees why.
	w.mu.Lock()
	w.here = 0
	w.begun++
	w.moved.Broadcast()
	w.mu.Unlock()
	return w.file.Truncate(0)
}

// resume hashes what an earlier download left, and reports whether there was
// something.
func (w *download) resume(ctx context.Context, h hash.Hash) (bool, error) {
	info, err := w.file.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	if info.Size() > w.size {
		return false, w.restart(h)
	}
	buf := make([]byte, 256<<10)
	for at := int64(0); at < info.Size(); {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		n, err := w.file.ReadAt(buf[:min(int64(len(buf)), info.Size()-at)], at)
		if n == 0 && err != nil {
			return false, err
		}
		h.Write(buf[:n])
		at += int64(n)
		w.grow(int64(n))
	}
	return true, nil
}

func (w *download) grow(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.here += n
	w.moved.Broadcast()
}

// body brings the rest of the blob. Each time that it breaks it is asked for
// from there on, until it has broken too often without bringing anything.
func (w *download) body(ctx context.Context, h hash.Hash, resumed *bool) error {
	repos := w.repos
	for n := 1; w.offset() < w.size; {
		before := w.offset()
		err := w.part(ctx, repos[0], h)
		if err == nil {
			continue
		}
		if w.offset() > before {
			n = 1
		}
		if full(err) {
			return err // also when nobody wants it any more
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if e, ok := errors.AsType[*Error](err); ok && (e.Kind == Missing || e.Kind == Denied) && len(repos) > 1 {
			repos = repos[1:] // another one has it as well
			continue
		}
		if n == tries || !again(err) || !w.a.client.wait(ctx, n, err) {
			return err
		}
		n++
		if w.offset() > 0 {
			*resumed = true
			w.a.log.Warn("download from upstream broke, resuming", "blob", w.digest, "at", w.offset(), "of", w.size, "error", err)
		}
	}
	return nil
}

// part asks for the blob once and takes what comes.
func (w *download) part(ctx context.Context, repo string, h hash.Hash) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stalled := time.AfterFunc(w.a.o.Stall, func() { cancel(errStalled) })
	defer stalled.Stop()
	c := w.a.client
	what := "blob " + nameOf(repo, w.digest.String())
	broken := func(err error) error {
		if errors.Is(context.Cause(ctx), errStalled) {
			err = fmt.Errorf("nothing came for %s", w.a.o.Stall)
			return &Error{Upstream: c.String(), What: what, Kind: Down, Err: err}
		}
		return c.failed(ctx, what, err)
	}
	offset := w.offset()
	body, at, err := c.blob(ctx, repo, w.digest, offset, w.size)
	if err != nil {
		return broken(err)
	}
	defer body.Close()
	buf := make([]byte, 128<<10)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			stalled.Reset(w.a.o.Stall)
			b := buf[:n]
			// Where ranges are not known the blob comes from its start.
			skip := min(offset-at, int64(n))
			at += skip
			if b = b[skip:]; len(b) > 0 {
				if at+int64(len(b)) > w.size {
					return c.wrong(what, "more than its %d bytes came", w.size)
				}
				if _, werr := w.file.WriteAt(b, at); werr != nil {
					return werr
				}
				h.Write(b)
				at += int64(len(b))
				offset = at
				w.grow(int64(len(b)))
				w.a.client.metrics.received.Add(float64(len(b)))
			}
		}
		if err == io.EOF {
			if at < w.size {
				err = io.ErrUnexpectedEOF
				return &Error{Upstream: c.String(), What: what, Kind: Down, Detail: fmt.Sprintf("it ended after %d of %d bytes", at, w.size), Err: err}
			}
			return nil
		}
		if err != nil {
			return broken(err)
		}
	}
}

var errStalled = errors.New("stalled")

// reader reads a part of a blob while it is downloaded.
type reader struct {
	w         *download
	ctx       context.Context
	stop      func() bool // of what wakes it when ctx ends
	begun     int         // download.begun when it was given its first byte; -1: none yet
	at, end   int64
	closeOnce sync.Once
}

// reader returns one of the bytes from offset to end. It takes over the caller's
// use of the download.
func (w *download) reader(ctx context.Context, offset, end int64) *reader {
	r := &reader{w: w, ctx: ctx, begun: -1, at: offset, end: end}
	r.stop = context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.moved.Broadcast()
	})
	return r
}

// wait waits until there is something to read from r.at on, and returns how many
// bytes, where they are, and download.begun. At the end it returns io.EOF. The
// last byte, also of a part, waits until the digest of the whole has been found
// right.
func (r *reader) wait() (n int64, f *os.File, begun int, err error) {
	w := r.w
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		limit := min(w.here, r.end)
		if !w.done {
			limit = min(limit, r.end-1)
		}
		switch {
		case r.ctx.Err() != nil:
			return 0, nil, 0, r.ctx.Err()
		case w.err != nil:
			return 0, nil, 0, w.err
		case r.begun >= 0 && r.begun != w.begun:
			return 0, nil, 0, fmt.Errorf("blob %s: what came from the upstream at first was wrong: read it again", w.digest)
		case r.at == r.end && w.done:
			return 0, nil, 0, io.EOF
		case limit > r.at:
			return limit - r.at, w.file, w.begun, nil
		case w.done:
			return 0, nil, 0, io.ErrUnexpectedEOF
		}
		w.moved.Wait()
	}
}

func (r *reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, f, begun, err := r.wait()
		if err != nil {
			return 0, err
		}
		m, err := f.ReadAt(p[:min(int64(len(p)), n)], r.at)
		r.w.mu.Lock()
		again := r.w.begun != begun
		r.w.mu.Unlock()
		if again {
			continue // wait says whether that matters
		}
		if m == 0 {
			return 0, fmt.Errorf("blob %s: what has come cannot be read: %w", r.w.digest, err)
		}
		r.begun = begun
		r.at += int64(m)
		return m, nil
	}
}

func (r *reader) Close() error {
	r.closeOnce.Do(func() {
		r.stop()
		r.w.leave()
	})
	return nil
}

// Want begins to download blobs that are not here and that nobody has ingested,
// so that they come all at once and not one after the other. They go on until
// release is called, or longer if they are read.
func (a *Accelerator) Want(ctx context.Context, blobs []digest.Digest) (release func()) {
	var joined []*download
	for _, d := range blobs {
		if _, err := a.o.Catalog.Layer(ctx, d); err == nil {
			continue
		}
		if _, err := a.o.Objects.Stat(ctx, catalog.BlobKey(d)); err == nil {
			continue
		}
		// What fails here fails again when it is read, and is told then.
		if w, err := a.start(ctx, d); err == nil {
			joined = append(joined, w)
		}
	}
	return func() {
		for _, w := range joined {
			w.leave()
		}
	}
}

// start joins or begins the download of a blob that some repository holds.
// Errors: objects.ErrNotFound, errHere.
func (a *Accelerator) start(ctx context.Context, d digest.Digest) (*download, error) {
	b, err := a.o.Catalog.AnyBlob(ctx, d)
	var repos []string
	if err == nil {
		repos, err = a.o.Catalog.Holders(ctx, d)
	}
	if errors.Is(err, catalog.ErrNotFound) || err == nil && len(repos) == 0 {
		return nil, fmt.Errorf("blob %s: no repository is known to hold it: %w", d, objects.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	return a.join(ctx, d, b.Size, repos)
}

// Store is the object store with all blobs of the upstream that some repository
// is known to hold.
type Store struct {
	objects.Store
	a *Accelerator
}

// Store returns the wrapper of Options.Objects.
func (a *Accelerator) Store() Store { return Store{a.o.Objects, a} }

// Unwrap is for objects.Adopt and objects.ReadAhead.
func (s Store) Unwrap() objects.Store { return s.Store }

// blobOf returns the digest whose bytes are under key.
func blobOf(key string) (digest.Digest, bool) {
	parts := strings.Split(key, "/")
	if len(parts) != 4 {
		return "", false
	}
	d := digest.Digest(parts[1] + ":" + parts[3])
	return d, d.Validate() == nil && catalog.BlobKey(d) == key
}

// Stat implements objects.Store. A blob that can be fetched is there.
func (s Store) Stat(ctx context.Context, key string) (int64, error) {
	size, err := s.Store.Stat(ctx, key)
	d, ok := blobOf(key)
	if !ok || !errors.Is(err, objects.ErrNotFound) {
		return size, err
	}
	b, lerr := s.a.o.Catalog.AnyBlob(ctx, d)
	if errors.Is(lerr, catalog.ErrNotFound) {
		return size, err
	}
	return b.Size, lerr
}

// Open implements objects.Store. A blob that is not here is fetched; Open
// returns when some of what was asked for has come.
func (s Store) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, key, offset, length)
	d, ok := blobOf(key)
	if !ok || !errors.Is(err, objects.ErrNotFound) {
		return r, err
	}
	w, err := s.a.start(ctx, d)
	if errors.Is(err, errHere) {
		return s.Store.Open(ctx, key, offset, length)
	}
	if err != nil {
		return nil, err
	}
	end := offset + length
	if length < 0 {
		end = w.size
	}
	if offset < 0 || offset > end || end > w.size {
		w.leave()
		return nil, fmt.Errorf("open object %s: bytes %d to %d are not in its %d bytes", key, offset, end, w.size)
	}
	f := w.reader(ctx, offset, end)
	if _, _, _, err := f.wait(); err != nil && err != io.EOF {
		_ = f.Close() // never fails
		return nil, err
	}
	return f, nil
}
