package objectstest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"

	"hydrofoil.dev/foil/internal/server/objects"
)

// Op is an operation on a store, where Memory can be made to fail.
type Op string

// The operations, by what is about to be done.
const (
	OpCreate Op = "create"
	OpWrite  Op = "write"
	OpCommit Op = "commit"
	OpOpen   Op = "open"
	OpRead   Op = "read"
	OpStat   Op = "stat"
	OpDelete Op = "delete"
	OpList   Op = "list" // its key is the prefix
)

// Memory is an objects.Store in memory that fails when it is told to. Its zero
// value is an empty store that works.
type Memory struct {
	mu     sync.Mutex
	bodies map[string][]byte                    // guarded by mu; values do not change
	used   int64                                // guarded by mu: bytes committed and being written
	limit  int64                                // guarded by mu; 0: none
	inject func(n int, op Op, key string) error // guarded by mu
	n      int                                  // guarded by mu: operations so far
}

// NewMemory returns an empty store.
func NewMemory() *Memory { return &Memory{} }

// Inject makes every later operation call fn first, with its number, counted
// from 1 since Inject; the operation fails with fn's error unless it is nil. A
// slow store is one whose fn sleeps. fn may be called concurrently. A nil fn
// ends it.
func (m *Memory) Inject(fn func(n int, op Op, key string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inject, m.n = fn, 0
}

// FailNth is for Inject: the nth operation fails with err.
func FailNth(nth int, err error) func(int, Op, string) error {
	return func(n int, _ Op, _ string) error {
		if n == nth {
			return err
		}
		return nil
	}
}

// SetLimit makes writes fail with ENOSPC when the store would hold more than
// limit bytes; 0 is no limit.
func (m *Memory) SetLimit(limit int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.limit = limit
}

// Ops returns how many operations there were since Inject.
func (m *Memory) Ops() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.n
}

// Used returns the bytes of all objects and of those being written.
func (m *Memory) Used() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// begin checks the key and fails when it is time to.
func (m *Memory) begin(ctx context.Context, op Op, key string) error {
	if op != OpList {
		if err := objects.CheckKey(key); err != nil {
			return err
		}
	}
	m.mu.Lock()
	m.n++
	n, inject := m.n, m.inject
	m.mu.Unlock()
	var err error
	if inject != nil {
		err = inject(n, op, key)
	}
	if err := cmp.Or(err, ctx.Err()); err != nil {
		return fmt.Errorf("%s object %s: %w", op, key, err)
	}
	return nil
}

// Create implements objects.Store.
func (m *Memory) Create(ctx context.Context, key string) (objects.Writer, error) {
	if err := m.begin(ctx, OpCreate, key); err != nil {
		return nil, err
	}
	return &memoryWriter{ctx: ctx, m: m, key: key}, nil
}

type memoryWriter struct {
	ctx    context.Context
	m      *Memory
	key    string
	buf    []byte
	failed error
	done   bool
}

func (w *memoryWriter) Write(p []byte) (int, error) {
	if w.done {
		return 0, fmt.Errorf("write object %s: %w", w.key, fs.ErrClosed)
	}
	if err := w.m.begin(w.ctx, OpWrite, w.key); err != nil {
		w.failed = err
		return 0, err
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.m.limit > 0 && w.m.used+int64(len(p)) > w.m.limit {
		w.failed = fmt.Errorf("write object %s: %w", w.key, syscall.ENOSPC)
		return 0, w.failed
	}
	w.m.used += int64(len(p))
	w.buf = append(w.buf, p...)
	return len(p), nil
}

func (w *memoryWriter) Commit() error {
	if w.done {
		return fmt.Errorf("commit object %s: %w", w.key, fs.ErrClosed)
	}
	defer w.Close()
	if w.failed != nil {
		return fmt.Errorf("commit object %s: a write failed: %w", w.key, w.failed)
	}
	if err := w.m.begin(w.ctx, OpCommit, w.key); err != nil {
		return err
	}
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.m.bodies == nil {
		w.m.bodies = make(map[string][]byte)
	}
	w.m.used -= int64(len(w.m.bodies[w.key]))
	w.m.bodies[w.key] = w.buf
	w.done = true
	return nil
}

func (w *memoryWriter) Close() error {
	if w.done {
		return nil
	}
	w.done = true
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.m.used -= int64(len(w.buf))
	return nil
}

func (m *Memory) get(key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.bodies[key]
	if !ok {
		return nil, objects.ErrNotFound
	}
	return b, nil
}

// Open implements objects.Store.
func (m *Memory) Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	if err := m.begin(ctx, OpOpen, key); err != nil {
		return nil, err
	}
	b, err := m.get(key)
	if err == nil {
		length, err = objects.CheckRange(offset, length, int64(len(b)))
	}
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	return &memoryReader{ctx: ctx, m: m, key: key, size: int64(len(b)), r: bytes.NewReader(b[offset : offset+length])}, nil
}

type memoryReader struct {
	ctx  context.Context
	m    *Memory
	key  string
	size int64
	r    *bytes.Reader
}

// Size implements objects.Sized.
func (r *memoryReader) Size() int64 { return r.size }

func (r *memoryReader) Read(p []byte) (int, error) {
	if err := r.m.begin(r.ctx, OpRead, r.key); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

func (r *memoryReader) Close() error { return nil }

// Stat implements objects.Store.
func (m *Memory) Stat(ctx context.Context, key string) (int64, error) {
	if err := m.begin(ctx, OpStat, key); err != nil {
		return 0, err
	}
	b, err := m.get(key)
	if err != nil {
		return 0, fmt.Errorf("stat object %s: %w", key, err)
	}
	return int64(len(b)), nil
}

// Delete implements objects.Store.
func (m *Memory) Delete(ctx context.Context, key string) error {
	if err := m.begin(ctx, OpDelete, key); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.used -= int64(len(m.bodies[key]))
	delete(m.bodies, key)
	return nil
}

// List implements objects.Store.
func (m *Memory) List(ctx context.Context, prefix string, fn func(key string, size int64) error) error {
	if err := m.begin(ctx, OpList, prefix); err != nil {
		return err
	}
	m.mu.Lock()
	keys := slices.Sorted(maps.Keys(m.bodies))
	m.mu.Unlock()
	for _, key := range keys {
		if !strings.HasPrefix(key, prefix) {
			continue
		}
		b, err := m.get(key)
		if err != nil {
			continue // deleted meanwhile
		}
		if err := fn(key, int64(len(b))); err != nil {
			return err
		}
	}
	return nil
}
