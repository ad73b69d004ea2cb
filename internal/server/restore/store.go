package restore

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/stores"
)

// Store is an object store in which blobs of layers that are lost, or whose mode wants no intact copy, are there all the
// same: they are restored while they are read. What of it is to be an object is made one again, in the background; Close ends that.
type Store struct {
	objects.Store
	blobs *Blobs
	o     StoreOptions

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	mu     sync.Mutex
	heals  map[digest.Digest]bool // guarded by mu: those under way; nil after Close
	gone   map[digest.Digest]bool // guarded by mu: those that cannot be made again, twice tried
}

// maxGone bounds gone.
const maxGone = 10_000

// StoreOptions configure a Store.
type StoreOptions struct {
	// Healed is told of a blob that was made an object again, or could not be.
	Healed func(d digest.Digest, err error)
	// Failed is told of a blob that did not come out right, and whether it was mended from another store (nil).
	Failed func(d digest.Digest, why, mended error)
	// Open makes a range of a blob that has no intact copy; nil: Blobs does.
	Open func(ctx context.Context, d digest.Digest, offset, length int64) (io.ReadCloser, error)
	// Wanted says whether a blob is to have an intact copy; nil: all are.
	Wanted func(ctx context.Context, d digest.Digest) bool
}

// NewStore returns a Store in front of the one that blobs are restored to.
func NewStore(blobs *Blobs, o StoreOptions) *Store {
	ctx, cancel := context.WithCancel(context.Background())
	if o.Wanted == nil {
		o.Wanted = func(context.Context, digest.Digest) bool { return true }
	}
	if o.Open == nil {
		o.Open = blobs.Open
	}
	return &Store{Store: blobs.Store.Objects, blobs: blobs, o: o, ctx: ctx, cancel: cancel,
		heals: map[digest.Digest]bool{}, gone: map[digest.Digest]bool{}}
}

// Close waits for what is in the background.
func (s *Store) Close() error {
	s.mu.Lock()
	s.heals = nil
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()
	return nil
}

// Unwrap is for objects.Adopt.
func (s *Store) Unwrap() objects.Store { return s.Store }

// blobOf is the digest of a blob's key, or nothing.
func blobOf(key string) digest.Digest {
	parts := strings.Split(key, "/")
	if len(parts) != 4 || parts[0] != "blobs" {
		return ""
	}
	return digest.Digest(parts[1] + ":" + parts[3])
}

// lost returns the blob that an error says is not here.
func lost(key string, err error) (digest.Digest, bool) {
	d := blobOf(key)
	return d, d != "" && stores.Absent(err)
}

// Stat implements objects.Store. A blob of which somebody has proven how it comes out again is there, though it
// may be that this does not work now: only one that never comes back is not found.
func (s *Store) Stat(ctx context.Context, key string) (int64, error) {
	n, err := s.Store.Stat(ctx, key)
	d, is := lost(key, err)
	if !is {
		return n, err
	}
	if s.isGone(d) {
		return 0, err // who pushes it asks before
	}
	blob, ferr := s.blobs.Find(ctx, d)
	switch {
	case ferr == nil:
		return blob.Size, nil
	case errors.Is(ferr, ErrUnproven), Damage(ferr):
		return 0, err
	}
	return 0, ferr
}

// Open implements objects.Store.
func (s *Store) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, key, offset, length)
	d, is := lost(key, err)
	if !is {
		if err == nil && blobOf(key) != "" {
			s.came(blobOf(key))
		}
		return r, err
	}
	r, rerr := s.o.Open(ctx, d, offset, length)
	if rerr != nil {
		if Damage(rerr) {
			s.mend(d, rerr)
		}
		if errors.Is(rerr, ErrUnproven) || Damage(rerr) {
			rerr = errors.Join(err, rerr)
		}
		return nil, rerr
	}
	if s.o.Wanted(ctx, d) {
		s.background(d, func(ctx context.Context) { s.heal(ctx, d) })
	}
	return &watched{ReadCloser: r, store: s, d: d}, nil
}

// watched has a blob mended that does not come out right.
type watched struct {
	io.ReadCloser
	store *Store
	d     digest.Digest
}

// WriteTo lets a connection take the bytes with sendfile(2), if they are in a file.
func (w *watched) WriteTo(to io.Writer) (int64, error) {
	n, err := io.Copy(to, w.ReadCloser)
	if Damage(err) {
		w.store.mend(w.d, err)
	}
	return n, err
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.ReadCloser.Read(b)
	if err != nil && err != io.EOF && Damage(err) {
		w.store.mend(w.d, err)
	}
	return n, err
}

// background does something for a blob, unless something is being done for it.
func (s *Store) background(d digest.Digest, do func(ctx context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heals == nil || s.heals[d] {
		return
	}
	s.heals[d] = true
	s.work.Go(func() {
		do(s.ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.heals, d)
	})
}

// heal has a blob made an object again.
func (s *Store) heal(ctx context.Context, d digest.Digest) {
	if err := s.blobs.Heal(ctx, d); ctx.Err() == nil {
		s.o.Healed(d, err)
	}
}

// mend has what a blob is made from mended. One that comes out wrong a second time, and of which no other store has what it is made from, is
// lost.
func (s *Store) mend(d digest.Digest, why error) {
	s.background(d, func(ctx context.Context) {
		err := s.blobs.Repair(ctx, d)
		if ctx.Err() != nil {
			return
		}
		if err != nil && s.away() == "" {
			if _, again := s.blobs.Verify(ctx, d); lostFor(again) && ctx.Err() == nil {
				s.mu.Lock()
				if len(s.gone) < maxGone {
					s.gone[d] = true
				}
				s.mu.Unlock()
			}
		}
		s.o.Failed(d, why, err)
	})
}

// away says which stores are away; empty: none is.
func (s *Store) away() string {
	if set, ok := s.Store.(*stores.Set); ok {
		return set.Away()
	}
	return ""
}

// lostFor reports whether an error is one of a damage that no second look mends, as it may one that the disk tells.
func lostFor(err error) bool {
	return Damage(err) && !errors.Is(err, unix.EIO)
}

// came says that a blob is an object, as one that was pushed again.
func (s *Store) came(d digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.gone, d)
}

func (s *Store) isGone(d digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone[d]
}
