package layer

import (
	"bufio"
	"bytes"
	"context"
	_ "crypto/sha512" // of the digests that go-digest knows
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

const (
	chunkSize  = 128 << 10
	chunkCount = 8 // in flight between the stages of a stream
	maxWindow  = 128 << 20
)

// stream decompresses a blob. Three goroutines share the work: one reads the
// blob, hashes it and decompresses, one hashes the tar stream, and the caller
// reads. Chunks pass from one to the next and back through free.
type stream struct {
	source *source
	opts   Options
	plain  bool        // the blob is the tar stream: source alone hashes it
	raw    chan []byte // decompressed, not hashed yet
	out    chan []byte // hashed
	free   chan []byte
	skip   chan struct{} // closed by abandon
	stop   chan struct{} // closed by Close
	wg     sync.WaitGroup

	inflate error     // set before raw is closed; nil at the end of the blob
	diff    hash.Hash // complete when out is closed
	total   int64     // bytes of the tar stream; complete when out is closed

	chunk, rest []byte // what the caller is reading
}

// source reads the blob, hashes it, and remembers its own failure, to tell it
// from what the blob holds.
type source struct {
	r    io.Reader
	hash hash.Hash
	n    atomic.Int64
	err  error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.hash.Write(p[:n])
	s.n.Add(int64(n))
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func newStream(ctx context.Context, blob io.Reader, blobAlgorithm, diffAlgorithm digest.Algorithm, plain bool, o Options) *stream {
	s := &stream{
		source: &source{r: ctxReader{ctx, blob}, hash: blobAlgorithm.Hash()},
		opts:   o,
		plain:  plain,
		raw:    make(chan []byte, chunkCount),
		out:    make(chan []byte, chunkCount),
		free:   make(chan []byte, chunkCount),
		skip:   make(chan struct{}),
		stop:   make(chan struct{}),
		diff:   diffAlgorithm.Hash(),
	}
	for range chunkCount {
		s.free <- nil
	}
	s.wg.Go(func() {
		defer close(s.raw)
		s.inflate = s.decompress()
	})
	s.wg.Go(func() {
		defer close(s.out)
		for b := range s.raw {
			if !s.plain {
				s.diff.Write(b)
			}
			s.total += int64(len(b))
			s.out <- b // never blocks: it has room for all chunks there are
		}
	})
	return s
}

// ctxReader ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// decompress feeds raw until the blob ends, and reads all of the blob even
// when it is broken, so that its digest is known.
func (s *stream) decompress() error {
	blob := bufio.NewReaderSize(s.source, chunkSize)
	err := s.decompressAs(blob)
	if err != nil && s.source.err == nil && !errors.Is(err, errStopped) {
		io.Copy(io.Discard, s.source) //nolint:errcheck // source remembers it
	}
	if s.source.err != nil {
		return s.source.err
	}
	return err
}

var (
	errStopped   = errors.New("closed")
	errAbandoned = errors.New("abandoned")
)

func (s *stream) decompressAs(blob *bufio.Reader) error {
	if s.plain {
		return s.copy(blob, "")
	}
	magic, err := blob.Peek(4)
	if err != nil && err != io.EOF {
		return err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b, 0x08}):
		z, err := gzip.NewReader(blob)
		if err != nil {
			return fmt.Errorf("gzip: %w", err)
		}
		if err := s.copy(z, "gzip"); err != nil {
			return err
		}
		return z.Close()
	case isZstd(magic):
		z, err := zstd.NewReader(blob,
			zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return fmt.Errorf("zstd: %w", err)
		}
		defer z.Close()
		return s.copy(z, "zstd")
	default:
		return s.copy(blob, "")
	}
}

func isZstd(magic []byte) bool {
	if len(magic) < 4 {
		return false
	}
	m := binary.LittleEndian.Uint32(magic)
	return m == 0xfd2fb528 || m&^0xf == 0x184d2a50
}

func (s *stream) copy(r io.Reader, format string) error {
	var total int64
	for {
		var chunk []byte
		select {
		case chunk = <-s.free:
		case <-s.skip:
			return errAbandoned
		case <-s.stop:
			return errStopped
		}
		if chunk == nil {
			chunk = make([]byte, chunkSize)
		}
		n, err := fill(r, chunk[:chunkSize])
		total += int64(n)
		if n > 0 {
			s.raw <- chunk[:n] // never blocks, like out
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			if format == "" || s.source.err != nil {
				return err
			}
			return fmt.Errorf("%s: %w", format, err)
		}
		if limit := s.opts.Expansion + s.opts.MaxRatio*s.source.n.Load(); total > limit {
			return refusal{reason: fmt.Sprintf("the first %d bytes of the blob decompress to more than %d, the limit",
				s.source.n.Load(), limit)}
		}
	}
}

// fill reads until p is full. Unlike io.ReadFull it returns r's own error,
// which tells a stream that ended from one that was cut.
func fill(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// Read returns io.EOF at the end of the tar stream, and whatever broke it.
func (s *stream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		if s.chunk != nil {
			s.free <- s.chunk
			s.chunk = nil
		}
		b, ok := <-s.out
		if !ok {
			if s.inflate != nil {
				return 0, s.inflate
			}
			return 0, io.EOF
		}
		s.chunk, s.rest = b[:cap(b)], b
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// drain reads the rest of the tar stream, which must be zeros, and of the blob.
func drain(stream io.Reader) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := stream.Read(buf)
		for _, b := range buf[:n] {
			if b != 0 {
				return refusal{reason: "data after the end of the tar stream"}
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// abandon stops decompressing and waits until all of the blob has been read.
// It returns what kept the blob from being read, if anything.
func (s *stream) abandon() error {
	close(s.skip)
	for range s.out {
	}
	return s.source.err
}

// Close ends the goroutines and waits for them.
func (s *stream) Close() {
	close(s.stop)
	for range s.out {
	}
	s.wg.Wait()
}
