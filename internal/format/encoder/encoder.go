// Package encoder makes compressed blobs again from what they were compressed from, bit for
// bit (Restore), and finds out how (Prove). What it finds is an encoding of package recipe.
//
// # Encoders
//
// An encoder is one library in one range of versions that all make the same bytes. It has
// a name, which an encoding keeps, and which never means other bytes:
//
//	go1.26          compress/flate up to Go 1.26, by package deflate. Levels 1 to 9. Parts of
//	                some MiB, from one restart point to the next.
//	klauspost1.18   klauspost/compress 1.15.11 to 1.18.0
//	klauspost1.20   klauspost/compress 1.18.2 to 1.20.3. Both at levels 1 to 9.
//	zlib1.2.11      zlib at levels 1 to 9
//
// All but the first are programs of their own (package programs): see Program.
//
// # Blocks
//
// An encoding with blocks was made by a tool that compresses these at once. klauspost's
// encoders then do as klauspost/pgzip: each block has the last 16 KiB of the one before as its
// dictionary, and ends with a flush; the last one is closed after its flush. zlib does as pigz: the dictionary
// is 32 KiB; a block ends on a byte, after as many empty blocks with fixed codes (10 bits each) as that takes, or
// after an empty stored block, if an odd number of bits is in the last byte; the last block is finished
// instead.
//
// # Writes
//
// Where a writer of a tar stream ends its writes can change what go1.26 makes (package deflate).
// Of the ends that could, Prove tries those that archive/tar has, and none; which of them
// made a difference is in the restart points.
package encoder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
)

// Names of encoders.
const (
	Go          = "go1.26"
	KlauspostA  = "klauspost1.18"
	KlauspostB  = "klauspost1.20"
	Zlib        = "zlib1.2.11"
	pgzipBlock  = 1 << 20
	pigzBlock   = 128 << 10
	partTarget  = 4 << 20 // bytes of a tar stream from one restart point to the next
	blocksInOne = 1 << 20 // bytes of a tar stream in one part of an encoding with blocks
)

// Names are all, in the order in which the world uses them.
var Names = []string{Go, KlauspostB, KlauspostA, Zlib}

// ErrUnavailable is returned, wrapped, for an encoder that is not in this program, or does not make here what its name
// promises.
var ErrUnavailable = errors.New("encoder is not available")

// ErrMismatch is returned, wrapped, when what was made is not what its sum says.
var ErrMismatch = errors.New("other bytes were made than were proven")

// Plain reads a tar stream from an offset on.
type Plain func(ctx context.Context, at int64) (io.ReadCloser, error)

// Set is the encoders of this program. The zero value has go1.26. Its methods are safe for
// concurrent use.
type Set struct {
	// Programs returns the program of an encoder, as an ELF file, or nil if there is none.
	Programs func(name string) []byte

	mu       sync.Mutex
	programs map[string]*program // guarded by mu
}

// Close ends all programs. Nothing may be under way.
func (s *Set) Close() error {
	s.mu.Lock()
	programs := s.programs
	s.programs = nil
	s.mu.Unlock()
	for _, p := range programs {
		p.close()
	}
	return nil
}

// Check makes the golden vectors of all encoders, and returns for each that cannot be relied on why: ErrUnavailable.
func (s *Set) Check(ctx context.Context) map[string]error {
	bad := map[string]error{}
	for _, name := range Names {
		if err := s.check(ctx, name); err != nil {
			bad[name] = err
		}
	}
	return bad
}

// Usable makes the golden vectors of an encoder, once, and returns why it cannot be relied on. Errors: ErrUnavailable.
func (s *Set) Usable(ctx context.Context, name string) error { return s.check(ctx, name) }

// check makes the golden vectors of an encoder, once.
func (s *Set) check(ctx context.Context, name string) error {
	if name == Go {
		return checkGo()
	}
	p, err := s.program(name)
	if err != nil {
		return err
	}
	return p.check(ctx)
}

func unavailable(name, format string, args ...any) error {
	return fmt.Errorf("encoder %s on %s: %w: %s", name, runtime.GOARCH, ErrUnavailable, fmt.Sprintf(format, args...))
}
