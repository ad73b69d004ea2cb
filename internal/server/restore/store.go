package restore

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/objects"
)

// Store is an object store in which blobs of layers that are lost are there all the same: they are restored
// while they are read. Whoever reads one has it made an object again, in the background; Close ends that.
type Store struct {
	objects.Store
	blobs *Blobs
	told  func(d digest.Digest, err error) // of one that was made again, or was not

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	mu     sync.Mutex
	heals  map[digest.Digest]bool // guarded by mu: those under way; nil after Close
}

// NewStore returns a Store in front of the one that blobs are restored to.
func NewStore(blobs *Blobs, told func(digest.Digest, error)) *Store {
	ctx, cancel := context.WithCancel(context.Background())
	return &Store{Store: blobs.Store.Objects, blobs: blobs, told: told, ctx: ctx, cancel: cancel, heals: map[digest.Digest]bool{}}
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

// lost returns the blob that an error says is not there.
func lost(key string, err error) (digest.Digest, bool) {
	d := blobOf(key)
	return d, d != "" && errors.Is(err, objects.ErrNotFound)
}

// Stat implements objects.Store.
func (s *Store) Stat(ctx context.Context, key string) (int64, error) {
	n, err := s.Store.Stat(ctx, key)
	d, is := lost(key, err)
	if !is {
		return n, err
	}
	blob, ferr := s.blobs.Find(ctx, d)
	if ferr != nil {
		return 0, err
	}
	return blob.Size, nil
}

// Open implements objects.Store.
func (s *Store) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, key, offset, length)
	d, is := lost(key, err)
	if !is {
		return r, err
	}
	r, rerr := s.blobs.Open(ctx, d, offset, length)
	if rerr != nil {
		return nil, errors.Join(err, rerr)
	}
	s.heal(d)
	return r, nil
}

// heal has a blob made an object again, unless that is under way.
func (s *Store) heal(d digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heals == nil || s.heals[d] {
		return
	}
	s.heals[d] = true
	s.work.Go(func() {
		err := s.blobs.Heal(s.ctx, d)
		s.mu.Lock()
		delete(s.heals, d)
		s.mu.Unlock()
		if s.ctx.Err() == nil {
			s.told(d, err)
		}
	})
}
