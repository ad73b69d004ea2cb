// Package bundle is the protocol between a worker and a server: the request,
// and the bundle, which is the stream that answers it.
//
// # The stream
//
// A stream starts with the eight bytes "HFBNDL\r\n" and is a sequence of
// sections. A section is
//
//	type    one byte
//	flags   one byte; bit 0: a reader that does not know the type must give up,
//	        else it skips the section; the other bits are 0
//	length  four bytes, little-endian: bytes of the payload
//	payload
//
// Numbers in payloads are uvarints as in package columns; a block is a uvarint
// and as many bytes; a column is what package columns codes. Sections come in
// this order, and every number but those of frames is checked by the reader:
//
//	1 Hello   once, first
//	2 Image   once, before Plan
//	10 Here   at most once, after Image and before Plan; may be skipped
//	7 Startup at most once, if it was asked for, after Image and before Plan
//	12 Filled at most once, after Startup and before Pages; may be skipped
//	9 Pages   once for each frame of Startup, in their order, before Plan
//	3 Plan    once; between Pages, if Request.EarlyPlan says so
//	4 Frame   once for each frame of the plan but those that were skipped, after it
//	5 Error   ends the stream, at any place
//	6 End     ends the stream when everything has been sent
//	11 Alive  anywhere after Hello, any number; may be skipped
//
// A stream that ends in any other way was cut. Number 8 is kept for a TOC as a
// delta against another.
//
// A stream is of one image. Sections that have an index of the image in the request have it at
// 0, and a reader refuses another.
//
// Hello is the version of the stream (1) and a block, the stream ID, which
// Promotion names.
//
// Image is one column and, after it, the encoded TOC up to the end of the
// payload, or nothing if the worker has it. The column holds:
//
//	index     uvarint: 0
//	have      uvarint: 1 if the TOC is left out because the worker has it, else 0
//	segments  uvarint: the number of segments in the TOC
//	blocks    manifest: digest, media type, bytes; the index it was chosen from:
//	          the same, three empty blocks if none; config: the same; chain ID;
//	          digest of the TOC
//
// Manifest, index and config are the exact bytes that their digests name. The index is there when
// the reference names one, and the manifest is the one that package oci chooses from it for the
// platform of the request: a reader refuses another.
//
// Startup is the startup set of an image, or what the worker lacks of it: page
// runs of contents, in frames. The payload is
//
//	index     uvarint: 0
//	origin    block: what the set was made from, one of the Origin constants
//	max       column: per frame, uvarint, the most bytes it takes
//	counts    column: per frame, uvarint, its runs
//	runs      list of runs as in package trace, frame by frame
//	digests   32 bytes a run that is not all of its content, in their order
//
// A run that is all of its content has the content's own digest, which the TOC
// gives: only who has the TOC can complete what the Reader decodes (see
// Startup.Resolve). The raw bytes of a frame are those of its runs one after the
// other, the last page of a content as short as it is.
//
// Here is a uvarint, 0, and a list of runs as in package trace: the pages of
// the startup set that do not come, in the order of need, since the request says that the worker
// has them. They are likely to be on its disk, and in no memory.
//
// Filled is two uvarints, 0 and how many of the last frames of Startup hold filled pages
// (Startup.Filled).
//
// Pages is two uvarints, 0 and the index of the frame in Startup, and the frame as package segment codes it.
//
// What is in a startup set is in segments, too. The plan leaves out a segment
// when all of its pages are in the set, or in Have.Pages, unless it goes in one
// frame with others that are wanted; every other segment is sent whole. So pages
// may arrive twice: they must then be equal.
//
// Plan names segments by their numbers in the TOC. Of segments with equal
// IDs the lowest number is meant. Holes are never planned. The payload is
//
//	totals    four uvarints: frames, segments planned, bytes that all Frame
//	          sections take at most, bytes of the contents in them
//	lengths   column: per frame, uvarint, the most bytes its frame takes
//	raw       column: per frame, uvarint, its bytes decoded
//	counts    column: per frame, uvarint, its segments
//	segments  column: per segment, in order, varint: its number less the one
//	          before it (before the first: less -1)
//
// Frame is a uvarint, the index of the frame in the plan, and the frame as
// package segment codes it. Frames come in the order of the plan, but for those that a
// promotion named: so the lowest frame that has not arrived is where the stream is, and before a
// frame come those below it that have not arrived, and what was promoted. (Older servers
// send frames behind a promoted one along with it.) Frames that Promotion.Skip names do not come. See
// also Request.Hold and Request.Choose. A frame encoded against a content would come with an
// encoding of its own (see segment.Encoding).
//
// Error is three blocks: a code (one of the Code constants), a message for
// people, and the repository and reference it is about, or nothing.
//
// End has no payload.
//
// Alive has no payload, and none that readers of this version would look at: the server is
// working on what comes next, as when it ingests an image. While it works, and for an hour at
// most, it sends one every 15 seconds, so that a stream that brings nothing for longer can be
// taken for one that brings nothing more. Older servers send none.
package bundle

import (
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

const magic = "HFBNDL\r\n"

// Type is the type of a section.
type Type byte

const (
	TypeHello Type = 1
	TypeImage Type = 2
	TypePlan  Type = 3
	TypeFrame Type = 4
	TypeError Type = 5
	TypeEnd   Type = 6

	TypeStartup Type = 7
	TypePages   Type = 9
	TypeHere    Type = 10
	TypeAlive   Type = 11
	TypeFilled  Type = 12
)

const (
	flagMust   = 1
	headLength = 6
)

// Limits on what a reader takes, in bytes.
const (
	MaxHello    = 4 << 10
	MaxManifest = oci.MaxDocument // a manifest, an index or a config
	MaxImage    = 256 << 20
	MaxPlan     = 64 << 20
	MaxStartup  = 64 << 20
	MaxFrame    = segment.MaxFrameRaw + 1 + 5
	MaxPages    = MaxFrame + 5
	MaxError    = 64 << 10
	MaxRequest  = 16 << 20 // the JSON of a Request
	MaxUnknown  = 64 << 20 // a section that is skipped
)

// ErrCorrupt is returned, wrapped, for a stream that breaks the rules.
var ErrCorrupt = errors.New("corrupt bundle")

// ErrForeign is an ErrCorrupt: something else answers than a server of bundles.
var ErrForeign = fmt.Errorf("%w: it does not start like one", ErrCorrupt)

// Hello starts a stream.
type Hello struct {
	Version int
	Stream  string // names it in a Promotion
}

// Blob is a manifest, index or config with its exact bytes.
type Blob struct {
	Digest    digest.Digest
	MediaType string
	Bytes     []byte
}

// Image is the image of the request: all that is needed to mount it but the
// bytes of its files.
type Image struct {
	Manifest Blob
	// Chosen is the index (image list) from which Manifest was chosen; nil if
	// the reference named the manifest itself.
	Chosen *Blob
	Config Blob
	// ChainID names the rootfs.
	ChainID digest.Digest
	// TOCDigest names the encoded TOC; TOC is nil if the worker has it.
	TOCDigest digest.Digest
	TOC       []byte
	// Segments is len(toc.TOC.Segments).
	Segments uint32

	checked bool // TOC has that digest
}

// DecodeTOC decodes the TOC (given encoded, if the worker had it: else nil) and
// checks that it is the one that the image names.
func (m *Image) DecodeTOC(encoded []byte) (*toc.TOC, error) {
	if m.TOC != nil {
		encoded = m.TOC
	}
	if m.TOC != nil && m.checked {
		// By Reader.
	} else if got := toc.Digest(encoded); got != m.TOCDigest {
		return nil, fmt.Errorf("%w: TOC of %s has digest %s, want %s", ErrCorrupt, m.ChainID, got, m.TOCDigest)
	}
	t, err := toc.Decode(encoded)
	if err != nil {
		return nil, fmt.Errorf("%w: TOC %s: %w", ErrCorrupt, m.TOCDigest, err)
	}
	if t.ChainID != m.ChainID || len(t.Segments) != int(m.Segments) {
		return nil, fmt.Errorf("%w: TOC %s is of %s with %d segments, want %s with %d",
			ErrCorrupt, m.TOCDigest, t.ChainID, len(t.Segments), m.ChainID, m.Segments)
	}
	return t, nil
}

// Plan says which frames the stream has, in which order.
type Plan struct {
	Frames []PlanFrame
	// Segments are the numbers in the TOC of all frames' segments, frame by frame.
	Segments []uint32
	// MaxBytes is the most that all Frame sections take in the stream.
	MaxBytes int64
	// ContentBytes is the sum of the frames' raw lengths.
	ContentBytes int64
}

// PlanFrame is one frame of a plan.
type PlanFrame struct {
	MaxLength uint32 // bytes of the frame, at most
	RawLength uint32 // bytes, decoded
	First     uint32 // its segments are Plan.Segments[First:First+Segments]
	Segments  uint32
}

// Frame is one frame of the plan.
type Frame struct {
	Index uint32 // in Plan.Frames
	Data  []byte // for segment.DecodeFrame
}

// Codes of errors, in streams and in the bodies of HTTP errors.
const (
	CodeNotFound     = "not_found"    // no such image, or nothing for the platform
	CodeInvalid      = "invalid"      // the request breaks the rules
	CodeUnauthorized = "unauthorized" // may not pull
	CodeUnsupported  = "unsupported"  // the image cannot be had as a bundle; a plain pull may work
	CodeUnavailable  = "unavailable"  // try again later
	CodeCorrupt      = "corrupt"      // the server's own bytes are damaged
	CodeInternal     = "internal"
)

// Error is what the server has to say instead of the rest of the stream; before
// a stream it is the JSON body of an HTTP error.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Ref     string `json:"ref,omitempty"` // the image it is about
}

func (e *Error) Error() string {
	if e.Ref == "" {
		return fmt.Sprintf("server: %s (%s)", e.Message, e.Code)
	}
	return fmt.Sprintf("server: %s: %s (%s)", e.Ref, e.Message, e.Code)
}

// Check compares the plan with the image's TOC: every number names a segment that is no hole,
// none is named twice, of equal IDs the lowest, and lengths add up. Whoever writes what
// frames hold to where the plan says must call it first.
func (p *Plan) Check(t *toc.TOC) error {
	planned := make(map[segment.ID]uint32, len(p.Segments))
	for i, f := range p.Frames {
		raw := uint64(0)
		for _, n := range p.Segments[f.First : f.First+f.Segments] {
			if int(n) >= len(t.Segments) || t.Segments[n].ID.IsHole() {
				return fmt.Errorf("%w: plan: frame %d names segment %d of %d, or it is a hole", ErrCorrupt, i, n, len(t.Segments))
			}
			if before, ok := planned[t.Segments[n].ID]; ok {
				return fmt.Errorf("%w: plan: frame %d names segment %d, which is %d", ErrCorrupt, i, n, before)
			}
			planned[t.Segments[n].ID] = n
			raw += uint64(t.Segments[n].Length)
		}
		if raw != uint64(f.RawLength) {
			return fmt.Errorf("%w: plan: frame %d has %d bytes, its segments %d", ErrCorrupt, i, f.RawLength, raw)
		}
	}
	for n, s := range t.Segments {
		if lowest, ok := planned[s.ID]; ok && uint32(n) < lowest {
			return fmt.Errorf("%w: plan: segment %d is named by number %d", ErrCorrupt, n, lowest)
		}
	}
	return nil
}
