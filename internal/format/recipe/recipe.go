// Package recipe is how a layer's blob is made again from the contents of its
// files: its tar stream as literal bytes and ranges of contents, and how that
// stream was compressed.
//
// The tar stream is complete to its last byte. Headers, PAX records, maps of
// sparse files, padding, what follows the end of the archive and the odd end of
// one that was cut are literal bytes. So are the bytes of what has no content in
// the layer's entry list (package layer), and of a file that its reader passed
// over. Whatever the recipe says, what comes out of it is to be compared with the
// layer's diff ID.
//
// # Encoded
//
// A recipe is the seven bytes "HFRCP\r\n", the version (1, one byte), blocks, the
// zero byte that ends these, the end, and the compression. Numbers are uvarints and
// a block of text is a uvarint and as many bytes, as in package columns.
//
// A block makes the next bytes of the tar stream. It is its length in bytes, not
// 0 and at most MaxBlock, and as many bytes, which are five columns as package
// columns codes them. The first four have a number for each range of the block, of
// which there are at most MaxRanges:
//
//	before    how many literal bytes come before the range
//	content   the content's number, less that of the range before in this block
//	          (the first: less 0)
//	offset    where the range begins in the content, in bytes; less the end of
//	          the range before, if that is in this block and of this content
//	length    bytes of the range, at least 1
//	literals  the literal bytes of the block, at most MaxLiterals; what the
//	          ranges leave of them comes after the last one
//
// A content's number is its place in the entry list of the layer: the first file
// of the list that is not empty is 0, the next one 1. Each file has a number of
// its own, whatever is in it. Ranges go forward: in numbers, and within one content
// without overlap. So a recipe is played in one pass over the contents, and makes no
// more bytes than these have, and its literals. No block is without literals and
// ranges.
//
// The end is
//
//	size      bytes of the tar stream
//	contents  how many contents the entry list has; every range's number is less
//	diff ID   block of text: the digest of the tar stream, or nothing
//
// The compression says how the blob is made of the tar stream:
//
//	kind      a number, one of the Compression constants
//	payload   any number of chunks, each its length, not 0 and at most MaxChunk,
//	          and as many bytes; then a zero byte
//	begin     8 bytes, little-endian: where in the recipe kind is
//
// So both parts can be read at once, from the start and from begin, by who
// has the whole recipe. Unknown, Plain and Intact have no payload, Reencoded and Patched have
// an encoding. A kind's payload never changes its meaning: what is to be said in another
// way is another kind. A reader takes a kind that it does not know for Unknown.
//
// # Encodings
//
// A blob with an encoding is a header, a DEFLATE stream (RFC 1951) and a trailer. The header of
// a blob in gzip is a member's, the trailer its checksum and size; nothing is believed of either. The
// stream is cut into parts, each made of a part of the tar stream. An encoding is
//
//	sum      the SHA-256 of what follows, of all chunks
//	encoder  block of text, at most 64 bytes: name of the encoder (package encoder)
//	arch     the same: architecture that the encoding was proven on, in Go's words
//	level    number, at most 64
//	block    number: bytes of the tar stream that are compressed by themselves; 0: it is one stream
//	header   block, at most MaxLiteral bytes
//	trailer  the same
//	parts    number of parts, at least 1 and at most 2^20
//	in       column: a number for each part, its bytes of the tar stream; not 0 but in an only part
//	out      column: a number for each part, its bytes of the stream, not 0
//	stored   column: a byte for each part: 1 if its bytes are in the encoding, 0 if the encoder
//	         makes them
//	sums     column: the SHA-256 of the bytes of each part's stream
//	bytes    column: the bytes of the parts that are stored
//	points   column: restart points, in the encoder's own format (package deflate)
//
// Reencoded has no stored parts, Patched has at least one. All of it has at most MaxEncoding
// bytes. It was proven when it was made: the encoder made these bytes then, on that architecture. Who restores
// compares each part with its sum before its last byte counts, and the blob with its digest.
//
// Nothing follows. A recipe may be named by the SHA-256 of its bytes; which bytes
// the compressor makes is not specified.
package recipe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
)

const (
	magic   = "HFRCP\r\n"
	version = 1
)

// MediaType is that of an encoded recipe.
const MediaType = "application/vnd.hydrofoil.recipe.v1"

// Limits of what one block holds, and what a reader allocates at most: some
// three times MaxBlock.
const (
	MaxLiterals = 1 << 20
	MaxRanges   = 1 << 14
	MaxBlock    = MaxLiterals + 4*maxNumbers + 5*columns.MaxHead
	MaxChunk    = 1 << 20 // of the compression's payload

	maxNumbers  = MaxRanges * binary.MaxVarintLen64 // bytes of a column of numbers
	maxContents = 1 << 31
	maxOffset   = 1 << 61 // of a range, and its length: their sums fit
	maxDiffID   = 256
)

// Compression says how a blob was made of its tar stream.
type Compression uint64

const (
	// Unknown: nobody has looked. The blob has to be kept.
	Unknown Compression = 0
	// Plain: not at all. The tar stream is the blob.
	Plain Compression = 1
	// Intact: it was looked into, and no way is known that gives the same bytes,
	// or none that pays. The blob has to be kept.
	Intact Compression = 2
	// Reencoded: by an encoder that makes the same bytes (Encoding).
	Reencoded Compression = 3
	// Patched: the same, but for some parts, which are stored.
	Patched Compression = 4
)

// String is one word.
func (c Compression) String() string {
	if c <= Patched {
		return [...]string{"unknown", "plain", "intact", "reencoded", "patched"}[c]
	}
	return Unknown.String()
}

// End is what a recipe says about all of it.
type End struct {
	Size     int64         // bytes of the tar stream
	Contents int64         // in the entry list of the layer
	DiffID   digest.Digest // of the tar stream; empty: not said
	// Compression of the blob. A reader does not know others than those above, and
	// says Unknown. A Writer writes those that have no Encoding.
	Compression Compression
}

// ErrCorrupt is returned, wrapped, for a recipe that breaks the rules.
var ErrCorrupt = errors.New("corrupt recipe")

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...)
}

// noEOF is for input that ends where it must not.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", ErrCorrupt, io.ErrUnexpectedEOF)
	}
	return err
}
