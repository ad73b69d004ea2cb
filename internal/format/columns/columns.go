// Package columns codes what the formats have in common: columns of numbers and
// bytes, each compressed by itself, and the reading of them with every bound
// checked.
//
// A column is
//
//	encoding  one byte: 0 stored, 1 zstd
//	raw       uvarint: bytes of the column
//	length    uvarint: bytes of the payload, equal to raw when stored
//	payload
//
// A uvarint is that of encoding/binary, 64 bits at most, in its shortest form.
package columns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

const (
	stored     = 0
	compressed = 1
)

// ErrCorrupt is returned, wrapped, for bytes that are not what they should be.
var ErrCorrupt = errors.New("corrupt column")

// Append appends a column to dst; compress is false for bytes that are known
// not to compress. It is for what is coded once and kept.
func Append(dst, raw []byte, compress bool) []byte {
	if !compress {
		return appendColumn(dst, raw, nil)
	}
	return appendColumn(dst, raw, &encoders)
}

// AppendQuick appends a column to dst. It is for what is coded anew for everybody who asks,
// while they wait: the columns are somewhat larger than those of Append, whose encoder has
// tables of 4 MiB, each page of which a process first has to get from the kernel.
func AppendQuick(dst, raw []byte) []byte { return appendColumn(dst, raw, &quick) }

// appendColumn compresses a column with an encoder of pool, if there is one.
func appendColumn(dst, raw []byte, pool *sync.Pool) []byte {
	payload, encoding := raw, byte(stored)
	if pool != nil && len(raw) > 0 {
		z := pool.Get().(*zstd.Encoder)
		if p := z.EncodeAll(raw, nil); len(p) < len(raw) {
			payload, encoding = p, compressed
		}
		pool.Put(z)
	}
	dst = append(dst, encoding)
	dst = binary.AppendUvarint(dst, uint64(len(raw)))
	dst = binary.AppendUvarint(dst, uint64(len(payload)))
	return append(dst, payload...)
}

// MaxHead is the most bytes that a column has before its payload.
const MaxHead = 1 + 2*binary.MaxVarintLen64

// Size returns how many bytes the column takes that begins like b, of which
// MaxHead bytes are enough, or 0 if none does.
func Size(b []byte) uint64 {
	if len(b) == 0 {
		return 0
	}
	r := Reader{B: b[1:]}
	r.Uint(1<<63 - 1)
	length := r.Uint(1<<63 - 1 - MaxHead)
	if r.Err != nil {
		return 0
	}
	return uint64(len(b)-len(r.B)) + length
}

// Next splits the first column off b. A column of more than limit bytes is
// corrupt. The column may share b's memory. Errors: ErrCorrupt.
func Next(b []byte, limit uint64) (column, rest []byte, err error) {
	if len(b) == 0 {
		return nil, nil, fmt.Errorf("%w: missing", ErrCorrupt)
	}
	r := Reader{B: b[1:]}
	raw := r.Uint(limit)
	payload := r.Bytes(r.Uint(limit))
	switch {
	case r.Err != nil:
		return nil, nil, r.Err
	case b[0] == stored:
		if uint64(len(payload)) != raw {
			return nil, nil, fmt.Errorf("%w: %d bytes stored, want %d", ErrCorrupt, len(payload), raw)
		}
		return payload, r.B, nil
	case b[0] == compressed:
		z := decoders.Get().(*zstd.Decoder)
		defer decoders.Put(z)
		// The decoder stops at the capacity.
		column, err = z.DecodeAll(payload, make([]byte, 0, raw))
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if uint64(len(column)) != raw {
			return nil, nil, fmt.Errorf("%w: decodes to %d bytes, want %d", ErrCorrupt, len(column), raw)
		}
		return column, r.B, nil
	}
	return nil, nil, fmt.Errorf("%w: unknown encoding %d", ErrCorrupt, b[0])
}

// Reader takes numbers and bytes off the front of B. After the first error,
// which stays in Err, it gives zeros.
type Reader struct {
	B   []byte
	Err error
}

// Uint takes a uvarint of at most limit.
func (r *Reader) Uint(limit uint64) uint64 {
	if len(r.B) > 0 && r.B[0] < 0x80 && uint64(r.B[0]) <= limit && r.Err == nil {
		v := r.B[0]
		r.B = r.B[1:]
		return uint64(v)
	}
	return r.slowUint(limit)
}

func (r *Reader) slowUint(limit uint64) uint64 {
	if r.Err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.B)
	if n <= 0 || v > limit || n > 1 && r.B[n-1] == 0 {
		r.Err = fmt.Errorf("%w: no number of at most %d where %d bytes are left", ErrCorrupt, limit, len(r.B))
		r.B = nil
		return 0
	}
	r.B = r.B[n:]
	return v
}

// Int takes a zigzag varint.
func (r *Reader) Int() int64 {
	u := r.Uint(1<<64 - 1)
	return int64(u>>1) ^ -int64(u&1)
}

// Bytes takes n bytes, which share B's memory.
func (r *Reader) Bytes(n uint64) []byte {
	if r.Err == nil && n > uint64(len(r.B)) {
		r.Err = fmt.Errorf("%w: want %d bytes where %d are left", ErrCorrupt, n, len(r.B))
	}
	if r.Err != nil {
		r.B = nil
		return nil
	}
	b := r.B[:n:n]
	r.B = r.B[n:]
	return b
}

// Block takes a uvarint of at most limit and as many bytes.
func (r *Reader) Block(limit uint64) []byte { return r.Bytes(r.Uint(limit)) }

// AppendBlock appends what Block takes.
func AppendBlock[T ~string | ~[]byte](dst []byte, block T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(block))), block...)
}

// End returns Err, or an error if anything is left.
func (r *Reader) End() error {
	if r.Err == nil && len(r.B) > 0 {
		r.Err = fmt.Errorf("%w: %d bytes too many", ErrCorrupt, len(r.B))
	}
	return r.Err
}

// Numbers counts the uvarints in b.
func Numbers(b []byte) int {
	n := 0
	for _, c := range b {
		n += int(1 - c>>7)
	}
	return n
}

// The pools keep what is expensive to set up; no state passes through them.
var (
	encoders = sync.Pool{New: func() any {
		z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBetterCompression),
			zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithWindowSize(4<<20))
		if err != nil {
			panic(err) // the options are constant
		}
		return z
	}}
	quick = sync.Pool{New: func() any {
		z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithWindowSize(1<<20), zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic(err) // the options are constant
		}
		return z
	}}
	decoders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderMaxWindow(8<<20))
		if err != nil {
			panic(err) // the options are constant
		}
		return d
	}}
)
