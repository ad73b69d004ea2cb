// Package stores is the stores of one server as one: that below its root, which has everything, and others, which hold copies.
//
// # What rests where
//
//	everything                   below the root
//	packs, entry lists, recipes  in each other store as well: with them a blob can be made again
//	blobs                        in none, one or many, as their mode wants (package convert)
//
// What is new is written below the root, and copied later. What is read is looked for below the root first, and then in the
// others, also in the midst of it. What is removed is removed everywhere.
//
// # Away
//
// Another store is a directory, with a file store.json that says whose it is, and the objects in objects/ beside it. The root
// remembers its stores in a file of the same name. A directory without its file, as a mount point without its
// disk is one, is away: nothing is written there, and nothing counts as lost, since it may have it (ErrAway). It is looked at
// again from time to time. An empty disk in the place of a lost one is made the store by Renew.
package stores

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"

	"hydrofoil.dev/foil/internal/server/objects"
)

// ErrAway is returned, wrapped, for an object that no store has that is here, while another one is away.
var ErrAway = errors.New("a store is away that may have it")

// Absent reports whether an error says that no store that is here has an object.
func Absent(err error) bool { return errors.Is(err, objects.ErrNotFound) || errors.Is(err, ErrAway) }

// Copied are the prefixes of keys that every store is to have.
var Copied = []string{"packs/", "entries/", "recipes/"}

// blobs is the prefix of keys that any store may have.
const blobs = "blobs/"

// shared reports whether other stores than the root's may have a key.
func shared(key string) bool {
	return strings.HasPrefix(key, blobs) || slices.ContainsFunc(Copied, func(p string) bool { return strings.HasPrefix(key, p) })
}

// Set is the stores of a server, as one. Its methods are safe for concurrent use.
type Set struct {
	root   objects.Store
	others []*Other // fixed
}

// New returns a Set.
func New(root objects.Store, others ...*Other) *Set { return &Set{root: root, others: others} }

// Root is the store below the root.
func (s *Set) Root() objects.Store { return s.root }

// Others are the other stores, in their order.
func (s *Set) Others() []*Other { return s.others }

// Len is how many stores there are, here or away.
func (s *Set) Len() int { return 1 + len(s.others) }

// Unwrap is for objects.Adopt: what is new is the root's.
func (s *Set) Unwrap() objects.Store { return s.root }

// Here returns the stores that are not away, the root's first.
func (s *Set) Here() []objects.Store {
	here := []objects.Store{s.root}
	for _, o := range s.others {
		if store := o.Store(); store != nil {
			here = append(here, store)
		}
	}
	return here
}

// of returns those that may have a key, of which some may be away.
func (s *Set) of(key string) (here []objects.Store, away bool) {
	if len(s.others) == 0 || !shared(key) {
		return []objects.Store{s.root}, false
	}
	here = s.Here()
	return here, len(here) < s.Len()
}

// Create implements objects.Store.
func (s *Set) Create(ctx context.Context, key string) (objects.Writer, error) {
	return s.root.Create(ctx, key)
}

// first calls fn for one store after the other until one has what is wanted. Where none has, its error is that of a store that
// failed, or objects.ErrNotFound, or ErrAway.
func (s *Set) first(ctx context.Context, key string, fn func(objects.Store) error) error {
	here, away := s.of(key)
	var failed error
	for _, store := range here {
		err := fn(store)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if failed == nil || errors.Is(failed, objects.ErrNotFound) {
			failed = err
		}
	}
	if away && errors.Is(failed, objects.ErrNotFound) {
		return fmt.Errorf("object %s: %w: %s", key, ErrAway, s.Away())
	}
	return failed
}

// Away says which stores are away, and why; empty: none is.
func (s *Set) Away() string {
	var list []string
	for _, o := range s.others {
		if err := o.Err(); err != nil {
			list = append(list, err.Error())
		}
	}
	return strings.Join(list, "; ")
}

// Stat implements objects.Store. Errors besides: ErrAway.
func (s *Set) Stat(ctx context.Context, key string) (size int64, err error) {
	err = s.first(ctx, key, func(store objects.Store) (err error) {
		size, err = store.Stat(ctx, key)
		return err
	})
	return size, err
}

// Open implements objects.Store. Errors besides: ErrAway. What one store fails to read comes from the next.
func (s *Set) Open(ctx context.Context, key string, offset, length int64) (r io.ReadCloser, err error) {
	if len(s.others) == 0 || !shared(key) {
		return s.root.Open(ctx, key, offset, length)
	}
	tried := 0
	err = s.first(ctx, key, func(store objects.Store) (err error) {
		tried++
		r, err = store.Open(ctx, key, offset, length)
		return err
	})
	if err != nil {
		return nil, err
	}
	over := &reader{ctx: ctx, set: s, key: key, at: offset, rest: length, r: r, tried: tried}
	if _, ok := r.(objects.InFile); ok {
		return inFile{over}, nil
	}
	return over, nil
}

// Delete implements objects.Store. A store that is away keeps it, and loses it when it is looked through.
func (s *Set) Delete(ctx context.Context, key string) error {
	here, _ := s.of(key)
	var errs []error
	for _, store := range slices.Backward(here) { // the root's last: until it is gone there, it is found, and removed again
		errs = append(errs, store.Delete(ctx, key))
	}
	return errors.Join(errs...)
}

// List implements objects.Store: what any store has, each once, with the size that it has in the first one that has it.
func (s *Set) List(ctx context.Context, prefix string, fn func(key string, size int64) error) error {
	if len(s.others) == 0 {
		return s.root.List(ctx, prefix, fn)
	}
	return merge(ctx, s.Here(), prefix, fn)
}

// listed is an object as a store lists it.
type listed struct {
	key  string
	size int64
}

var errStop = errors.New("stopped")

// keys yields what a store has; an error is the last.
func keys(ctx context.Context, store objects.Store, prefix string) iter.Seq2[listed, error] {
	return func(yield func(listed, error) bool) {
		err := store.List(ctx, prefix, func(key string, size int64) error {
			if !yield(listed{key, size}, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			yield(listed{}, err)
		}
	}
}

// merge lists several stores, of which all but the first have shared keys only.
func merge(ctx context.Context, stores []objects.Store, prefix string, fn func(key string, size int64) error) error {
	type source struct {
		next func() (listed, error, bool)
		head listed
		ok   bool
	}
	all := make([]*source, len(stores))
	for i, store := range stores {
		next, stop := iter.Pull2(keys(ctx, store, prefix))
		defer stop()
		all[i] = &source{next: next}
	}
	step := func(i int) (err error) {
		v := all[i]
		for {
			v.head, err, v.ok = v.next()
			if err != nil || !v.ok || i == 0 || shared(v.head.key) {
				return err
			}
		}
	}
	for i := range all {
		if err := step(i); err != nil {
			return err
		}
	}
	for {
		var least *source
		for _, v := range all {
			if v.ok && (least == nil || cmp.Compare(v.head.key, least.head.key) < 0) {
				least = v
			}
		}
		if least == nil {
			return nil
		}
		now := least.head
		if err := fn(now.key, now.size); err != nil {
			return err
		}
		for i, v := range all {
			if v.ok && v.head.key == now.key {
				if err := step(i); err != nil {
					return err
				}
			}
		}
	}
}

// reader reads an object, and what one store fails to give from the next. It is for one goroutine.
type reader struct {
	ctx   context.Context
	set   *Set
	key   string
	at    int64 // where the next byte is
	rest  int64 // bytes that are wanted still; < 0: to the end
	r     io.ReadCloser
	tried int // stores, among those that are here
}

// Read implements io.Reader.
func (r *reader) Read(b []byte) (int, error) {
	for {
		n, err := r.r.Read(b)
		r.took(int64(n))
		if err == nil || err == io.EOF || !r.next() {
			return n, err
		}
		if n > 0 {
			return n, nil
		}
	}
}

// WriteTo lets a connection take the bytes with sendfile(2), if the store can.
func (r *reader) WriteTo(w io.Writer) (total int64, err error) {
	for {
		out := &told{w: w}
		n, err := io.Copy(out.writer(), r.r)
		r.took(n)
		total += n
		// What the writer refuses no other store mends.
		if err == nil || out.failed || r.ctx.Err() != nil || !r.next() {
			return total, err
		}
	}
}

// told knows whether it was the writer that failed. Where the writer can read from a file itself it is left to, and nothing
// tells.
type told struct {
	w      io.Writer
	failed bool
}

func (t *told) writer() io.Writer {
	if _, ok := t.w.(io.ReaderFrom); ok {
		return t.w
	}
	return t
}

func (t *told) Write(b []byte) (int, error) {
	n, err := t.w.Write(b)
	t.failed = err != nil
	return n, err
}

func (r *reader) took(n int64) {
	r.at += n
	if r.rest >= 0 {
		r.rest -= n
	}
}

// next goes on with another store, if one has the rest.
func (r *reader) next() bool {
	if r.ctx.Err() != nil {
		return false
	}
	here := r.set.Here()
	for ; r.tried < len(here); r.tried++ {
		other, err := here[r.tried].Open(r.ctx, r.key, r.at, r.rest)
		if err != nil {
			continue
		}
		r.tried++
		r.r.Close()
		r.r = other
		return true
	}
	return false
}

// Close implements io.Closer.
func (r *reader) Close() error { return r.r.Close() }

// inFile is a reader whose bytes are in a file.
type inFile struct{ *reader }

// File implements objects.InFile.
func (r inFile) File() *os.File {
	if in, ok := r.r.(objects.InFile); ok {
		return in.File()
	}
	return nil
}
