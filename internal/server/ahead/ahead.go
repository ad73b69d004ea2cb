// Package ahead has layers ready before clients ask for them (DupHunter, ATC '20, 4.4).
//
// When a client gets a manifest the Predictor says which of its layers the client is going to pull. Those that have an intact copy
// are read by the kernel, so that the disk need not be waited for. Those that have none are made from packs, to files in a directory
// that is bounded, and kept there as package arc says. One restore serves all who wait for it: they read the file as it grows,
// whose last byte comes when the digest of all was compared.
//
// What is in the directory is of this process alone: it is emptied at the start.
package ahead

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/arc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/predict"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Options of an Ahead.
type Options struct {
	// Dir is the directory of restored blobs, which is emptied. Required.
	Dir string
	// Limit bounds what is in it, bytes; 0: nothing is kept, and nothing restored ahead.
	Limit int64
	// Store has the intact copies. Blobs makes blobs that have none. Required.
	Store objects.Store
	Blobs *restore.Blobs
	// Workers is how many blobs are restored at once that nobody waits for yet; 0 means 1.
	Workers int
	Log     *slog.Logger // nil: slog.Default
}

const (
	// maxQueue is how many blobs wait to be restored ahead.
	maxQueue = 512
	// maxRead is how much of intact copies is read for one manifest, bytes.
	maxRead = 256 << 20
)

// Ahead is what is ready. Its methods are safe for concurrent use.
type Ahead struct {
	predict.Predictor

	o       Options
	metrics *Metrics
	ctx     context.Context // of what is in the background
	stop    context.CancelFunc
	work    sync.WaitGroup
	queue   chan digest.Digest
	reads   chan struct{} // taken by who has the kernel read

	mu      sync.Mutex
	cache   *arc.Cache                   // guarded by mu: names are digests
	files   map[digest.Digest]string     // guarded by mu: paths of those that the cache keeps
	flights map[digest.Digest]*restoring // guarded by mu
	flying  int64                        // guarded by mu: bytes of those, when they are whole
	number  int64                        // guarded by mu: of the next file
}

// New returns an Ahead.
func New(o Options) (*Ahead, error) {
	if err := os.RemoveAll(o.Dir); err != nil {
		return nil, fmt.Errorf("empty the directory of restored blobs: %w", err)
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	a := &Ahead{o: o, queue: make(chan digest.Digest, maxQueue), reads: make(chan struct{}, 4), cache: arc.New(o.Limit - o.Limit/4),
		files: map[digest.Digest]string{}, flights: map[digest.Digest]*restoring{}}
	a.metrics = newMetrics(a)
	a.cache.Evicted = a.evicted
	a.ctx, a.stop = context.WithCancel(context.Background())
	for range max(1, o.Workers) {
		a.work.Go(a.run)
	}
	return a, nil
}

// Close ends what is under way and waits for it.
func (a *Ahead) Close() error {
	a.stop()
	a.work.Wait()
	return nil
}

// evicted is called with mu held. Who reads the file goes on.
func (a *Ahead) evicted(name string) {
	d := digest.Digest(name)
	if err := os.Remove(a.files[d]); err != nil {
		a.o.Log.Warn("a restored blob is not removed", "error", err)
	}
	delete(a.files, d)
}

// Manifest says that a client gets the manifest of an image with these layers.
func (a *Ahead) Manifest(client string, layers []digest.Digest) {
	soon := a.Predict(client, layers)
	if len(soon) == 0 {
		return
	}
	a.metrics.predicted.Add(float64(len(soon)))
	select {
	case a.reads <- struct{}{}:
	default:
		return // others are being predicted for: this client waits for the disk
	}
	a.work.Go(func() {
		defer func() { <-a.reads }()
		left := int64(maxRead)
		for _, d := range soon {
			n, err := a.touch(d, left)
			if left -= n; !stores.Absent(err) {
				continue
			}
			select {
			case a.queue <- d:
			case <-a.ctx.Done():
				return
			default:
				a.metrics.skipped.Inc()
			}
		}
	})
}

// touch has the kernel read an intact copy, at most so many bytes. Errors: those of stores.Absent, when there is none.
func (a *Ahead) touch(d digest.Digest, most int64) (int64, error) {
	r, err := a.o.Store.Open(a.ctx, catalog.BlobKey(d), 0, -1)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	in, ok := r.(objects.InFile)
	if !ok || most <= 0 {
		return 0, nil
	}
	info, err := in.File().Stat()
	if err != nil {
		return 0, err
	}
	raw, err := in.File().SyscallConn()
	if err != nil {
		return 0, err
	}
	n := min(info.Size(), most)
	return n, raw.Control(func(fd uintptr) { _ = unix.Fadvise(int(fd), 0, n, unix.FADV_WILLNEED) })
}

// run restores what is predicted.
func (a *Ahead) run() {
	for {
		select {
		case <-a.ctx.Done():
			return
		case d := <-a.queue:
			f, err := a.join(d, true)
			if err != nil {
				a.metrics.skipped.Inc()
			} else if f != nil {
				<-f.done
			}
		}
	}
}

// Results of a request for a blob that has no intact copy.
const (
	hit    = "hit"    // it was ready
	waited = "wait"   // it was being made
	missed = "miss"   // it had to be made
	direct = "direct" // it was made for this request alone: a range, or too large to be kept
)

// Open returns a range of a blob that has no intact copy. Errors: those of restore.Blobs.
func (a *Ahead) Open(ctx context.Context, d digest.Digest, offset, length int64) (io.ReadCloser, error) {
	a.mu.Lock()
	path, flight := a.files[d], a.flights[d]
	if path != "" {
		a.cache.Get(d.String())
	}
	a.mu.Unlock()
	if path != "" {
		if r, err := openFile(path, offset, length); err == nil {
			a.metrics.requests.WithLabelValues(hit).Inc()
			return r, nil
		}
	}
	result := waited
	if flight == nil {
		blob, err := a.o.Blobs.Find(ctx, d)
		if err != nil {
			return nil, err
		}
		if length, err = objects.CheckRange(offset, length, blob.Size); err != nil {
			return nil, fmt.Errorf("restore blob %s: %w", d, err)
		}
		if err := a.o.Blobs.Usable(ctx, blob); err != nil {
			return nil, fmt.Errorf("restore blob %s: %w", d, err)
		}
		result = missed
		if offset > 0 || length < blob.Size {
			return a.alone(ctx, d, offset, length)
		}
	}
	f, err := a.join(d, false)
	if err != nil {
		return nil, err
	}
	if f == nil {
		return a.alone(ctx, d, offset, length)
	}
	if length, err = objects.CheckRange(offset, length, f.size); err != nil {
		f.leave()
		return nil, fmt.Errorf("restore blob %s: %w", d, err)
	}
	a.metrics.requests.WithLabelValues(result).Inc()
	return &follower{ctx: ctx, a: a, f: f, at: offset, end: offset + length}, nil
}

func (a *Ahead) alone(ctx context.Context, d digest.Digest, offset, length int64) (io.ReadCloser, error) {
	a.metrics.requests.WithLabelValues(direct).Inc()
	return a.o.Blobs.Open(ctx, d, offset, length)
}

// join joins the restore of a blob, or begins it. It returns nil if it is ready, or there is no room for it. Who joined leaves, unless it is ahead.
// Errors: those of restore.Blobs.
func (a *Ahead) join(d digest.Digest, ahead bool) (*restoring, error) {
	a.mu.Lock()
	f := a.flights[d]
	if f != nil {
		if ahead {
			f.ahead = true
		} else {
			f.readers++
		}
	}
	_, ready := a.files[d]
	a.mu.Unlock()
	if f != nil || ready {
		return f, nil
	}
	blob, err := a.o.Blobs.Find(a.ctx, d)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.flights[d]; f != nil {
		if f.ahead = f.ahead || ahead; !ahead {
			f.readers++
		}
		return f, nil
	}
	if _, ready := a.files[d]; ready || !a.cache.Fits(blob.Size) || a.flying+blob.Size > a.o.Limit/4 || a.ctx.Err() != nil {
		return nil, nil
	}
	a.number++
	f = &restoring{a: a, d: d, size: blob.Size, ahead: ahead, path: filepath.Join(a.o.Dir, fmt.Sprint(a.number)), done: make(chan struct{}), more: make(chan struct{})}
	if !ahead {
		f.readers = 1
	}
	file, err := os.OpenFile(f.path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		a.o.Log.Warn("blobs are not kept that are made from packs", "error", err)
		return nil, nil
	}
	f.file = file
	f.ctx, f.cancel = context.WithCancel(a.ctx)
	a.flights[d] = f
	a.flying += f.size
	a.work.Go(f.run)
	return f, nil
}

// restoring is a blob that is being made.
type restoring struct {
	a      *Ahead
	d      digest.Digest
	size   int64
	path   string
	file   *os.File
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed when it has ended, and err is set
	err    error

	// guarded by Ahead.mu:
	ahead   bool // it goes on though nobody reads
	readers int
	closed  bool // the file is
	ended   bool

	mu      sync.Mutex
	written int64         // guarded by mu
	more    chan struct{} // guarded by mu: closed when written grows
}

func (f *restoring) run() {
	began := time.Now()
	f.err = f.make()
	f.cancel()
	a := f.a
	a.mu.Lock()
	delete(a.flights, f.d)
	a.flying -= f.size
	if f.err == nil && a.cache.Add(f.d.String(), f.size) {
		a.files[f.d] = f.path
	} else if err := os.Remove(f.path); err != nil {
		a.o.Log.Warn("a restored blob is not removed", "error", err)
	}
	f.ended = true
	f.close()
	a.mu.Unlock()
	if f.err == nil {
		a.metrics.seconds.Observe(time.Since(began).Seconds())
	}
	close(f.done)
}

// close is called with Ahead.mu held.
func (f *restoring) close() {
	if f.ended && f.readers == 0 && !f.closed {
		f.closed = true
		f.file.Close()
	}
}

func (f *restoring) make() error {
	r, err := f.a.o.Blobs.Open(f.ctx, f.d, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	buf := make([]byte, 256<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, werr := f.file.Write(buf[:n]); werr != nil {
				return fmt.Errorf("keep a restored blob: %w", werr)
			}
			f.mu.Lock()
			f.written += int64(n)
			close(f.more)
			f.more = make(chan struct{})
			f.mu.Unlock()
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// leave says that somebody does not read any more. What nobody reads and nobody predicted ends.
func (f *restoring) leave() {
	f.a.mu.Lock()
	defer f.a.mu.Unlock()
	if f.readers--; f.readers == 0 && !f.ahead {
		f.cancel()
	}
	f.close()
}

// follower reads a blob while it is made. It is for one goroutine.
type follower struct {
	ctx     context.Context
	a       *Ahead
	f       *restoring    // nil: it was left
	at, end int64         // in the blob
	alone   io.ReadCloser // what is read instead, when the restore has failed
}

// Read implements io.Reader. Of a restore that failed, as on a full disk, the rest is made for this reader alone.
func (r *follower) Read(b []byte) (int, error) {
	if r.at == r.end {
		return 0, io.EOF
	}
	if r.alone == nil {
		n, err := r.follow(b[:min(int64(len(b)), r.end-r.at)])
		if err == nil || r.ctx.Err() != nil {
			return n, err
		}
		if r.alone, err = r.a.alone(r.ctx, r.f.d, r.at, r.end-r.at); err != nil {
			return 0, err
		}
	}
	n, err := r.alone.Read(b)
	r.at += int64(n)
	return n, err
}

func (r *follower) follow(b []byte) (int, error) {
	for {
		r.f.mu.Lock()
		written, more := r.f.written, r.f.more
		r.f.mu.Unlock()
		if written > r.at {
			n, err := r.f.file.ReadAt(b[:min(int64(len(b)), written-r.at)], r.at)
			r.at += int64(n)
			return n, err
		}
		select {
		case <-more:
		case <-r.f.done:
			r.f.mu.Lock()
			stuck := r.f.written <= r.at
			r.f.mu.Unlock()
			if stuck {
				return 0, fmt.Errorf("restore blob %s: %w", r.f.d, cmpErr(r.f.err))
			}
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
	}
}

// cmpErr is what ended a restore.
func cmpErr(err error) error {
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Close implements io.Closer.
func (r *follower) Close() error {
	var err error
	if r.alone != nil {
		err = r.alone.Close()
	}
	if r.f != nil {
		r.f.leave()
		r.f = nil
	}
	return err
}

// openFile reads a range of a file, with sendfile(2) where the reader can.
func openFile(path string, offset, length int64) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		length, err = objects.CheckRange(offset, length, info.Size())
	}
	if err == nil {
		_, err = f.Seek(offset, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &section{f, io.LimitedReader{R: f, N: length}}, nil
}

type section struct {
	file *os.File
	rest io.LimitedReader
}

func (s *section) Read(b []byte) (int, error) { return s.rest.Read(b) }

func (s *section) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, &s.rest) }

func (s *section) Close() error { return s.file.Close() }
