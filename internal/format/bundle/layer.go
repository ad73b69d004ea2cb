package bundle

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// What a worker that makes the tar stream of a layer again asks for: the layer's recipe
// (package recipe), and contents that it does not hold, since upper layers hide them.
//
// Both are answered by a stream of its own kind, with the magic and the sections of a
// bundle: Hello; then
//
//	13 Places    once, first: of a recipe
//	14 Recipe    any number: the next bytes of the recipe, at most MaxChunk
//	15 Contents  any number: of contents
//	11 Alive     anywhere after Hello; may be skipped
//
// and Error or End. Numbers and columns are as in a bundle. Numbers of contents are
// those of the recipe.
//
// Places says where in the rootfs the contents of the layer are. It is a hint: only
// the digest of the tar stream says whether they are right. Its payload is
//
//	toc      block: the digest of the encoded TOC
//	count    uvarint: how many contents the layer has
//	absent   column: per content that the TOC does not have, uvarint: its number
//	         less that of the absent one before (the first: less -1)
//	numbers  column: per content that it has, varint: its number in the TOC less that
//	         of the one before (the first: less -1)
//
// Contents holds segments of contents that were asked for, each once, in ascending order
// of contents and offsets. The payload is a column and a frame as package segment
// codes it, of the segments that are no holes; no frame if there is none of these. The
// column has two uvarints a segment: the number of its content less that of the
// segment before, in this section or the last (the first: less 0); and 2*length + hole,
// where hole is 1 for a hole and else 0.
const (
	// RecipePath and ContentsPath take a POST of a LayerRequest.
	RecipePath   = "/hydrofoil/v1/recipe"
	ContentsPath = "/hydrofoil/v1/contents"

	MediaTypeLayer = "application/vnd.hydrofoil.layer.v1"

	TypePlaces   Type = 13
	TypeRecipe   Type = 14
	TypeContents Type = 15
)

// Limits of requests and sections of layers.
const (
	MaxLayerRequest  = 4 << 20 // bytes
	MaxRuns          = 1 << 17 // of LayerRequest.Contents
	MaxLayerContents = 1 << 22 // contents of a layer
	MaxChunk         = 1 << 20
	MaxPlaces        = 2*5*MaxLayerContents + 1024
	MaxPieces        = 1 << 12 // of a Contents section
	MaxContents      = MaxFrame + MaxPieces*2*binary.MaxVarintLen64 + columns.MaxHead
)

// LayerRequest asks for the recipe or for contents of one layer. It is JSON on the wire, with
// Versions as in Request. Who may pull the image may have them.
type LayerRequest struct {
	Versions []int `json:"versions"`
	// Image reaches the layer; what else it says than its name and platform is
	// ignored.
	Image ImageRequest `json:"image"`
	// Layer is its place in the manifest; 0 is the lowest.
	Layer int `json:"layer"`
	// Contents, at most MaxRuns, are those that are wanted, of a request for them: in ascending
	// order, without overlap.
	Contents []ContentRun `json:"contents,omitempty"`
}

// ContentRun is some contents of a layer: Count from number First on. On the wire it is a
// list of these two.
type ContentRun struct{ First, Count int64 }

// MarshalJSON makes a list.
func (r ContentRun) MarshalJSON() ([]byte, error) { return json.Marshal([2]int64{r.First, r.Count}) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (r *ContentRun) UnmarshalJSON(b []byte) error {
	var list []int64
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	if len(list) != 2 {
		return fmt.Errorf("run of contents of %d numbers, want the first one and how many", len(list))
	}
	*r = ContentRun{list[0], list[1]}
	return nil
}

// DecodeLayerRequest reads the JSON of a LayerRequest and checks what needs no catalog.
func DecodeLayerRequest(b []byte) (*LayerRequest, error) {
	var req LayerRequest
	if err := json.Unmarshal(b, &req); err != nil {
		return nil, fmt.Errorf("layer request: %w", err)
	}
	switch {
	case !slices.Contains(req.Versions, Version):
		return nil, fmt.Errorf("layer request: versions %v, this server speaks %d", req.Versions, Version)
	case req.Image.Repository == "" || req.Image.Reference == "":
		return nil, errors.New("layer request: an image without repository or reference")
	case req.Layer < 0:
		return nil, fmt.Errorf("layer request: layer %d", req.Layer)
	case len(req.Contents) > MaxRuns:
		return nil, fmt.Errorf("layer request: %d runs of contents, at most %d: ask for some at a time", len(req.Contents), MaxRuns)
	}
	end := int64(0)
	for _, run := range req.Contents {
		if run.First < end || run.First > MaxLayerContents || run.Count < 1 || run.Count > MaxLayerContents {
			return nil, fmt.Errorf("layer request: %d contents from %d on, after those up to %d", run.Count, run.First, end)
		}
		end = run.First + run.Count
	}
	return &req, nil
}

// Places says where the contents of a layer are.
type Places struct {
	TOC digest.Digest // of the encoded one
	// Numbers has for each content of the layer its number in the TOC; -1: the rootfs does
	// not have it.
	Numbers []int32
}

// Contents is some segments.
type Contents struct {
	Pieces []ContentPiece
	// Frame is for segment.DecodeFrame: the bytes of the pieces that are no holes, RawLength
	// in all; nil if there are none.
	Frame     []byte
	RawLength int
}

// ContentPiece is one segment of a content.
type ContentPiece struct {
	Content int64
	Length  uint32
	Hole    bool
}

// Places writes the section.
func (w *Writer) Places(p *Places) error {
	var absent, numbers []byte
	lastAbsent, last := -1, int32(-1)
	for i, n := range p.Numbers {
		if n < 0 {
			absent = binary.AppendUvarint(absent, uint64(i-lastAbsent))
			lastAbsent = i
			continue
		}
		numbers = binary.AppendVarint(numbers, int64(n)-int64(last))
		last = n
	}
	b := columns.AppendBlock(nil, p.TOC)
	b = binary.AppendUvarint(b, uint64(len(p.Numbers)))
	return w.section(TypePlaces, flagMust, b, columns.AppendQuick(nil, absent), columns.AppendQuick(nil, numbers))
}

// Recipe writes a section.
func (w *Writer) Recipe(b []byte) error { return w.section(TypeRecipe, flagMust, b) }

// Contents writes a section. Last is the content of the last piece of the section before, or 0.
func (w *Writer) Contents(c *Contents, last int64) error {
	var b []byte
	for _, p := range c.Pieces {
		b = binary.AppendUvarint(b, uint64(p.Content-last))
		v := uint64(p.Length) << 1
		if p.Hole {
			v |= 1
		}
		b = binary.AppendUvarint(b, v)
		last = p.Content
	}
	return w.section(TypeContents, flagMust, columns.AppendQuick(nil, b), c.Frame)
}

// LayerReader reads the answer to a LayerRequest. Like Reader it verifies nothing that
// needs frames to be decoded. It is not safe for concurrent use.
type LayerReader struct {
	in     Reader
	wanted []ContentRun // that are left
	last   int64        // content of the last piece
	kind   Type         // of the sections so far
	err    error
}

// NewLayerReader returns a LayerReader of the stream r, which answers req.
func NewLayerReader(r io.Reader, req *LayerRequest) *LayerReader {
	return &LayerReader{in: Reader{r: bufio.NewReaderSize(r, 256<<10)}, wanted: slices.Clone(req.Contents)}
}

// Bytes returns how many bytes of the stream have been read.
func (r *LayerReader) Bytes() int64 { return r.in.bytes }

// Next returns the next section: *Places, []byte (of a recipe) or *Contents. Errors are those
// of Reader.Next.
func (r *LayerReader) Next() (any, error) {
	for r.err == nil {
		var s any
		if s, r.err = r.next(); s != nil && r.err == nil {
			return s, nil
		}
	}
	return nil, r.err
}

var layerLimits = map[Type]int64{TypeHello: MaxHello, TypePlaces: MaxPlaces, TypeRecipe: MaxChunk, TypeContents: MaxContents, TypeError: MaxError, TypeEnd: 0}

func (r *LayerReader) next() (any, error) {
	if r.in.bytes == 0 {
		var m [len(magic)]byte
		if err := r.in.full(m[:]); err != nil {
			return nil, err
		}
		if string(m[:]) != magic {
			return nil, ErrForeign
		}
	}
	var head [headLength]byte
	if err := r.in.full(head[:]); err != nil {
		return nil, err
	}
	t, flags, length := Type(head[0]), head[1], int64(binary.LittleEndian.Uint32(head[2:]))
	limit, known := layerLimits[t]
	switch {
	case !known && flags&flagMust != 0:
		return nil, fmt.Errorf("%w: section %d is needed and this program does not know it: update foil", ErrCorrupt, t)
	case !known:
		limit = MaxUnknown
	case t != TypeError && (t == TypeHello) != (r.kind == 0), t == TypePlaces && r.kind != TypeHello, t == TypeRecipe && r.kind != TypePlaces,
		t == TypeContents && r.kind != TypeHello && r.kind != TypeContents, t == TypeEnd && r.kind == TypeHello && len(r.wanted) == 0:
		return nil, fmt.Errorf("%w: section %d out of order", ErrCorrupt, t)
	}
	if length > limit {
		return nil, fmt.Errorf("%w: section %d of %d bytes, at most %d", ErrCorrupt, t, length, limit)
	}
	if !known {
		n, err := r.in.r.Discard(int(length))
		r.in.bytes += int64(n)
		return nil, cut(err)
	}
	payload, err := r.in.payload(length)
	if err != nil {
		return nil, err
	}
	s, err := r.section(t, payload)
	if errors.Is(err, columns.ErrCorrupt) {
		err = fmt.Errorf("%w: section %d: %w", ErrCorrupt, t, err)
	}
	return s, err
}

func (r *LayerReader) section(t Type, payload []byte) (any, error) {
	switch t {
	case TypeError:
		return nil, decodeError(payload)
	case TypeHello:
		r.kind = TypeHello
		_, err := r.in.decodeHello(payload)
		return nil, err
	case TypePlaces:
		r.kind = TypePlaces
		return decodePlaces(payload)
	case TypeRecipe:
		return payload, nil
	case TypeContents:
		r.kind = TypeContents
		return r.contents(payload)
	}
	return nil, io.EOF // TypeEnd
}

func decodePlaces(payload []byte) (*Places, error) {
	c := columns.Reader{B: payload}
	p := &Places{TOC: digest.Digest(c.Block(256))}
	count := int(c.Uint(MaxLayerContents))
	if c.Err != nil {
		return nil, c.Err
	}
	absent, rest, err := columns.Next(c.B, 5*MaxLayerContents)
	if err != nil {
		return nil, err
	}
	numbers, rest, err := columns.Next(rest, 5*MaxLayerContents)
	if err != nil {
		return nil, err
	}
	a, n := columns.Reader{B: absent}, columns.Reader{B: numbers}
	if err := p.TOC.Validate(); err != nil || len(rest) > 0 || columns.Numbers(absent)+columns.Numbers(numbers) != count {
		return nil, fmt.Errorf("%w: places of %d contents, %d and %d of them, of TOC %q, %d bytes too many",
			ErrCorrupt, count, columns.Numbers(absent), columns.Numbers(numbers), p.TOC, len(rest))
	}
	p.Numbers = make([]int32, count)
	at := -1
	for len(a.B) > 0 {
		at += int(a.Uint(MaxLayerContents))
		if a.Err != nil || at < 0 || at >= count || p.Numbers[at] < 0 {
			return nil, fmt.Errorf("%w: places: content %d of %d is absent, or is so twice", ErrCorrupt, at, count)
		}
		p.Numbers[at] = -1
	}
	last := int64(-1)
	for i := range p.Numbers {
		if p.Numbers[i] < 0 {
			continue
		}
		if last += n.Int(); n.Err != nil || last < 0 || last >= toc.MaxSegments {
			return nil, fmt.Errorf("%w: places: content %d is number %d of the TOC", ErrCorrupt, i, last)
		}
		p.Numbers[i] = int32(last)
	}
	return p, errors.Join(a.End(), n.End())
}

// contents decodes a section, and takes its contents from those that are wanted.
func (r *LayerReader) contents(payload []byte) (*Contents, error) {
	column, frame, err := columns.Next(payload, MaxPieces*2*binary.MaxVarintLen64)
	if err != nil {
		return nil, err
	}
	c := &Contents{Frame: frame}
	in := columns.Reader{B: column}
	for len(in.B) > 0 && len(c.Pieces) < MaxPieces {
		r.last += int64(in.Uint(MaxLayerContents))
		v := in.Uint(segment.MaxLength<<1 | 1)
		p := ContentPiece{Content: r.last, Length: uint32(v >> 1), Hole: v&1 == 1}
		if in.Err != nil {
			return nil, in.Err
		}
		for len(r.wanted) > 0 && r.wanted[0].First+r.wanted[0].Count <= p.Content {
			r.wanted = r.wanted[1:]
		}
		if len(r.wanted) == 0 || p.Content < r.wanted[0].First || p.Length == 0 {
			return nil, fmt.Errorf("%w: %d bytes of content %d, which nobody asked for", ErrCorrupt, p.Length, p.Content)
		}
		if !p.Hole {
			c.RawLength += int(p.Length)
		}
		c.Pieces = append(c.Pieces, p)
	}
	if err := in.End(); err != nil {
		return nil, err
	}
	if len(c.Pieces) == 0 || c.RawLength > segment.MaxFrameRaw || (c.RawLength == 0) != (len(frame) == 0) {
		return nil, fmt.Errorf("%w: %d pieces of %d bytes in a frame of %d", ErrCorrupt, len(c.Pieces), c.RawLength, len(frame))
	}
	if c.RawLength == 0 {
		c.Frame = nil
	}
	return c, nil
}
