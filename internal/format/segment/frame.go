package segment

import (
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// How segments are put into frames; no part of the format. A segment of
// FrameAlone bytes or more has a frame of its own. Smaller ones come together:
// whoever builds frames closes one when it has FrameTarget raw bytes, so that a
// frame never holds more than MaxFrameRaw. The more a frame holds the smaller
// are all of them together: the files of an image of redis took 0.94 of its
// gzip layers with 128 KiB, 0.92 with 256, 0.91 with 512. What the start of a
// container needs of a frame is sent in frames of its own (package planner).
const (
	FrameTarget = 512 << 10
	FrameAlone  = 128 << 10
	MaxFrameRaw = MaxLength
)

// Encoding says how the bytes of a frame are encoded. It is the first byte of
// every frame, in packs and on the wire.
//
// A frame is its encoding byte and a payload. The payload of Stored is the raw
// bytes of its segments, one after the other; that of Zstd is one or more zstd
// frames (RFC 8878) that decode to them, without checksums: what a frame holds
// is verified segment by segment with SHA-256. The raw length is not in the
// frame; whoever names the frame (a pack's table, a bundle's plan) gives it, and
// a frame that decodes to any other length is corrupt.
type Encoding byte

const (
	Stored Encoding = 0
	Zstd   Encoding = 1
	// ZstdAgainst is kept for zstd with a named content as prefix.
	ZstdAgainst Encoding = 2
)

// ErrCorrupt is returned, wrapped, for a frame that does not decode.
var ErrCorrupt = errors.New("corrupt frame")

// MaxEncoded is the most bytes that a frame of rawLength bytes takes.
func MaxEncoded(rawLength int) int { return 1 + rawLength }

// AppendFrame appends to dst a frame that holds the segments, and returns it.
// With encoding Zstd it falls back to Stored when that is not longer, so a
// frame is never longer than MaxEncoded of its raw length.
func AppendFrame(dst []byte, encoding Encoding, segments ...[]byte) ([]byte, error) {
	raw := 0
	for _, s := range segments {
		raw += len(s)
	}
	if raw == 0 || raw > MaxFrameRaw {
		return dst, fmt.Errorf("encode frame of %d bytes: want 1 to %d", raw, MaxFrameRaw)
	}
	switch encoding {
	case Stored:
		return appendStored(dst, segments), nil
	case Zstd:
		e := encoders.Get().(*encoder)
		defer encoders.Put(e)
		all := segments[0]
		if len(segments) > 1 {
			e.buf = e.buf[:0]
			for _, s := range segments {
				e.buf = append(e.buf, s...)
			}
			all = e.buf
		}
		out := e.z.EncodeAll(all, append(dst, byte(Zstd)))
		if len(out)-len(dst) >= MaxEncoded(raw) {
			return appendStored(dst, segments), nil
		}
		return out, nil
	}
	return dst, fmt.Errorf("encode frame: unknown encoding %d", encoding)
}

func appendStored(dst []byte, segments [][]byte) []byte {
	dst = append(dst, byte(Stored))
	for _, s := range segments {
		dst = append(dst, s...)
	}
	return dst
}

// decodeSlack is how much more room than a frame's bytes take lets the decoder copy
// 16 bytes at a time up to the end: else it copies the last block exactly, which takes 7% longer
// for frames of 256 KiB.
const decodeSlack = 16

// DecodeCap is the capacity of a buffer that DecodeFrame never needs a larger one for.
const DecodeCap = MaxFrameRaw + decodeSlack

// DecodeFrame appends to dst the raw bytes of the frame, which must be exactly
// rawLength, and returns it. It never returns more, whatever the frame says; of
// the capacity of dst it may fill decodeSlack bytes more. The bytes are not
// verified. Errors: ErrCorrupt.
func DecodeFrame(dst, frame []byte, rawLength int) ([]byte, error) {
	if rawLength <= 0 || rawLength > MaxFrameRaw {
		return dst, fmt.Errorf("%w: raw length %d, want 1 to %d", ErrCorrupt, rawLength, MaxFrameRaw)
	}
	if len(frame) == 0 {
		return dst, fmt.Errorf("%w: empty", ErrCorrupt)
	}
	payload := frame[1:]
	switch e := Encoding(frame[0]); e {
	case Stored:
		if len(payload) != rawLength {
			return dst, fmt.Errorf("%w: %d bytes stored, want %d", ErrCorrupt, len(payload), rawLength)
		}
		return append(dst, payload...), nil
	case Zstd:
		n := len(dst)
		if cap(dst)-n < rawLength {
			grown := make([]byte, n, n+rawLength+decodeSlack)
			copy(grown, dst)
			dst = grown
		}
		d := decoders.Get().(*zstd.Decoder)
		defer decoders.Put(d)
		// The decoder stops at the capacity, which is all that it may fill.
		out, err := d.DecodeAll(payload, dst[:n:min(cap(dst), n+rawLength+decodeSlack)])
		if err != nil {
			return dst, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		if len(out)-n != rawLength {
			return dst, fmt.Errorf("%w: decodes to %d bytes, want %d", ErrCorrupt, len(out)-n, rawLength)
		}
		if &out[n] != &dst[:n+1][n] {
			return append(dst, out[n:]...), nil // the decoder moved: it does not today
		}
		return dst[:n+rawLength], nil
	default:
		return dst, fmt.Errorf("%w: unknown encoding %d", ErrCorrupt, e)
	}
}

// encoder is a zstd encoder with room to put the segments of a frame together.
type encoder struct {
	z   *zstd.Encoder
	buf []byte
}

// The pools keep encoders and decoders, which are expensive to set up, between
// calls; they hold no state from one call to the next.
var (
	encoders = sync.Pool{New: func() any {
		z, err := zstd.NewWriter(nil,
			zstd.WithEncoderLevel(frameLevel),
			zstd.WithEncoderConcurrency(1),
			zstd.WithEncoderCRC(false),
			zstd.WithSingleSegment(true), // the window is the frame: decoders need no more
			zstd.WithWindowSize(MaxFrameRaw),
			zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic(err) // the options are constant
		}
		return &encoder{z: z}
	}}
	decoders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil,
			zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true),
			zstd.WithDecodeAllCapLimit(true),
			zstd.WithDecoderMaxWindow(MaxFrameRaw))
		if err != nil {
			panic(err) // the options are constant
		}
		return d
	}}
)

// frameLevel is the zstd level of frames. SpeedBetterCompression would make
// frames 2% smaller in 1.5 times the processor time, which leaves an ingest of
// 60 MB/s no time to inflate and hash; SpeedBestCompression 8% smaller in 8
// times (BenchmarkFrame).
const frameLevel = zstd.SpeedDefault
