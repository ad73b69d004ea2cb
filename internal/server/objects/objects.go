// Package objects is where the server keeps bytes: immutable objects under
// keys, in a directory or an object store.
//
// Implementations: Dir, a local directory; package s3, a bucket. Package near keeps what was read of a bucket lately
// on a local disk. Package objectstest has the suite that each implementation passes, and a store in memory for tests.
package objects

import (
	"context"
	"errors"
	"io"
	"os"
)

// ErrNotFound is returned, wrapped, for a key that names no object.
var ErrNotFound = errors.New("object not found")

// ErrRange is returned, wrapped, for a range that does not lie in its object: more was
// stored than there is now, or the range is wrong.
var ErrRange = errors.New("range outside of the object")

// Store keeps immutable objects. A key is one or more path elements of
// [a-z0-9._-], none starting with '.', joined by '/'; no key continues another
// one with a '/'. Every method is safe for concurrent use.
type Store interface {
	// Create starts a new object. Nothing is visible under key before Commit
	// returns nil.
	Create(ctx context.Context, key string) (Writer, error)
	// Open reads length bytes from offset; length < 0 reads to the end. An
	// offset at the end is an empty read. Errors: ErrNotFound; ErrRange.
	Open(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
	// Stat returns an object's size in bytes. Errors: ErrNotFound.
	Stat(ctx context.Context, key string) (int64, error)
	// Delete removes an object; a missing one is no error. A reader that is
	// open goes on reading what it opened.
	Delete(ctx context.Context, key string) error
	// List calls fn for every object whose key starts with prefix, in key
	// order, until fn returns an error, which List returns.
	List(ctx context.Context, prefix string, fn func(key string, size int64) error) error
}

// InFile is what a reader that Open returned may have: File returns the file of
// the whole object, open as long as the reader is. Its position is the reader's;
// reads at an offset do not disturb it.
type InFile interface {
	File() *os.File
}

// Sized is what a reader that Open returned may have: Size returns how many bytes the whole object has.
type Sized interface {
	Size() int64
}

// Within is a store in which reading some of an object costs a request, whatever else is to be learned of it.
type Within interface {
	// OpenWithin is Open for a range that may end after the object; one that begins after it is ErrRange. The reader is Sized.
	OpenWithin(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error)
}

// Ahead is a store that can read what is going to be wanted.
type Ahead interface {
	// ReadAhead begins to read an object, or its last bytes (last >= 0), and does not wait for it.
	ReadAhead(key string, last int64)
}

// ReadAhead has a store, or one that it unwraps to, read ahead, and reports whether there is one that does.
func ReadAhead(s Store, key string, last int64) bool {
	for {
		if a, ok := s.(Ahead); ok {
			a.ReadAhead(key, last)
			return true
		}
		u, ok := s.(interface{ Unwrap() Store })
		if !ok {
			return false
		}
		s = u.Unwrap()
	}
}

// Writer writes one object. Close without Commit drops what was written;
// after Commit, Close does nothing.
type Writer interface {
	io.Writer
	// Commit makes the object durable (it survives a power cut) and visible
	// under its key. Committing a key that exists replaces it atomically.
	Commit() error
	Close() error
}
