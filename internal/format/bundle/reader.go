package bundle

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Reader reads a stream and verifies all of it that can be verified without
// decoding TOCs and frames: see Image and Plan for what remains. It is not safe
// for concurrent use.
type Reader struct {
	r     *bufio.Reader
	o     ReaderOptions
	bytes int64
	err   error

	hello bool
	image bool   // its section has been read
	total uint32 // segments of it
	plan  *Plan
	seen  []bool // frames
	left  int    // frames

	startup *Startup
	page    int // the next frame of it
	here    bool
}

// onlyImage is the index of the image wherever the stream has one.
const onlyImage = 0

// ReaderOptions says how to read.
type ReaderOptions struct {
	// Request is what the stream answers.
	Request *Request
	// Buffer returns a buffer of n bytes for a frame (Frame.Data is it, or a
	// part of it), so that the caller can reuse them. Nil allocates.
	Buffer func(n int) []byte
	// Head is called, when not nil, with an image as soon as everything of it but
	// the TOC has arrived, and has been verified: what of Image hangs from the TOC,
	// which is nil, has not. An error ends the reading.
	Head func(*Image) error
}

// NewReader returns a Reader of the stream r.
func NewReader(r io.Reader, o ReaderOptions) *Reader {
	if o.Request == nil {
		o.Request = &Request{}
	}
	if o.Buffer == nil {
		o.Buffer = func(n int) []byte { return make([]byte, n) }
	}
	return &Reader{r: bufio.NewReaderSize(r, 256<<10), o: o}
}

// Bytes returns how many bytes of the stream have been read.
func (r *Reader) Bytes() int64 { return r.bytes }

// Next returns the next section: *Hello, *Image, *Startup (which its Resolve
// completes; it is as said by Filled before the first of its Pages), *Here, *Pages, *Plan or *Frame. Unknown sections are skipped.
//
// Errors: io.EOF after the End section; *Error for an Error section;
// io.ErrUnexpectedEOF, wrapped, for a stream that was cut; ErrCorrupt, wrapped,
// for one that breaks the rules or whose bytes are not those of their digests;
// oci.ErrRefused, wrapped, for an image that is none by its own documents; or the
// underlying reader's.
func (r *Reader) Next() (any, error) {
	for r.err == nil {
		var s any
		if s, r.err = r.next(); s != nil && r.err == nil {
			return s, nil
		}
	}
	return nil, r.err
}

func (r *Reader) next() (any, error) {
	if r.bytes == 0 {
		var m [len(magic)]byte
		if err := r.full(m[:]); err != nil {
			return nil, err
		}
		if string(m[:]) != magic {
			return nil, ErrForeign
		}
	}
	var head [headLength]byte
	if err := r.full(head[:]); err != nil {
		return nil, err
	}
	t, flags, length := Type(head[0]), head[1], binary.LittleEndian.Uint32(head[2:])
	switch t {
	case TypeFrame:
		return r.frame(int(length))
	case TypePages:
		return r.pages(int(length))
	}
	limit, known := limits[t]
	if !known {
		limit = MaxUnknown
	}
	if int64(length) > int64(limit) {
		return nil, fmt.Errorf("%w: section %d of %d bytes, at most %d", ErrCorrupt, t, length, limit)
	}
	if !known {
		if flags&flagMust != 0 {
			return nil, fmt.Errorf("%w: section %d is needed and this program does not know it: update foil", ErrCorrupt, t)
		}
		n, err := r.r.Discard(int(length))
		r.bytes += int64(n)
		return nil, cut(err)
	}
	var s any
	var err error
	if t == TypeImage {
		s, err = r.readImage(int64(length))
	} else {
		var payload []byte
		if payload, err = r.payload(int64(length)); err != nil {
			return nil, err
		}
		s, err = r.section(t, payload)
	}
	if errors.Is(err, columns.ErrCorrupt) {
		err = fmt.Errorf("%w: section %d: %w", ErrCorrupt, t, err)
	}
	return s, err
}

var limits = map[Type]int{
	TypeHello: MaxHello, TypeImage: MaxImage, TypeStartup: MaxStartup, TypeHere: MaxStartup, TypeFilled: 2 * binary.MaxVarintLen64, TypePlan: MaxPlan, TypeError: MaxError, TypeEnd: 0,
}

func (r *Reader) section(t Type, payload []byte) (any, error) {
	if t == TypeError {
		return nil, decodeError(payload)
	}
	if err := r.inOrder(t); err != nil {
		return nil, err
	}
	switch t {
	case TypeHello:
		r.hello = true
		return r.decodeHello(payload)
	case TypeStartup:
		return r.decodeStartup(payload)
	case TypeHere:
		return r.decodeHere(payload)
	case TypeFilled:
		return nil, r.decodeFilled(payload)
	case TypePlan:
		return r.decodePlan(payload)
	}
	return nil, io.EOF // TypeEnd
}

// inOrder checks that a section may come now.
func (r *Reader) inOrder(t Type) error {
	if !r.hello && t != TypeHello || r.hello && t == TypeHello ||
		r.plan != nil && (t == TypePlan || t == TypeStartup || t == TypeHere || t == TypeFilled) ||
		(r.plan != nil || r.startup != nil || r.here) && t == TypeImage ||
		r.pagesLeft() && (t == TypePlan && !r.o.Request.EarlyPlan || t == TypeEnd) ||
		t == TypeEnd && (r.plan == nil || r.left > 0 && !r.o.Request.Choose) { // else who chose knows what it lacks
		return fmt.Errorf("%w: section %d out of order", ErrCorrupt, t)
	}
	return nil
}

func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("bundle was cut: %w", io.ErrUnexpectedEOF)
	}
	return err
}

func (r *Reader) full(b []byte) error {
	n, err := io.ReadFull(r.r, b)
	r.bytes += int64(n)
	return cut(err)
}

// payload reads n bytes and allocates only for those that arrive.
func (r *Reader) payload(n int64) ([]byte, error) {
	const step = 1 << 20
	b := make([]byte, min(n, step))
	for at := 0; ; {
		if err := r.full(b[at:]); err != nil {
			return nil, err
		}
		at = len(b)
		if int64(at) == n {
			return b, nil
		}
		more := min(n-int64(at), int64(at))
		b = append(b, make([]byte, more)...)
	}
}

func decodeError(payload []byte) error {
	c := columns.Reader{B: payload}
	e := &Error{Code: string(c.Block(MaxError)), Message: string(c.Block(MaxError)), Ref: string(c.Block(MaxError))}
	if err := c.End(); err != nil {
		return err
	}
	return e
}

func (r *Reader) decodeHello(payload []byte) (*Hello, error) {
	c := columns.Reader{B: payload}
	h := &Hello{Version: int(c.Uint(1 << 20)), Stream: string(c.Block(MaxHello))}
	if err := c.End(); err != nil {
		return nil, err
	}
	if h.Version < 1 || h.Version > Version {
		return nil, fmt.Errorf("%w: version %d, this program reads up to %d", ErrCorrupt, h.Version, Version)
	}
	return h, nil
}

// readImage reads an Image section of so many bytes. Its column comes long before its
// TOC, of which there may be megabytes.
func (r *Reader) readImage(length int64) (*Image, error) {
	if err := r.inOrder(TypeImage); err != nil {
		return nil, err
	}
	begin, err := r.r.Peek(int(min(length, columns.MaxHead)))
	if err != nil {
		r.bytes += int64(len(begin))
		return nil, cut(err)
	}
	column := int64(min(columns.Size(begin), uint64(length)))
	b, err := r.payload(column)
	if err != nil {
		return nil, err
	}
	m, err := r.decodeImage(b, length-column)
	if err != nil {
		return nil, err
	}
	corrupt := func(err error) error {
		want := r.o.Request.Image
		err = fmt.Errorf("image %s:%s: %w", want.Repository, want.Reference, err)
		if errors.Is(err, oci.ErrRefused) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	if err := m.verify(r.o.Request, length > column); err != nil {
		return nil, corrupt(err)
	}
	if r.o.Head != nil {
		head := *m
		if err := r.o.Head(&head); err != nil {
			return nil, err
		}
	}
	if length == column {
		return m, nil
	}
	if m.TOC, err = r.payload(length - column); err != nil {
		return nil, err
	}
	if got := toc.Digest(m.TOC); got != m.TOCDigest {
		return nil, corrupt(fmt.Errorf("TOC has digest %s, want %s", got, m.TOCDigest))
	}
	m.checked = true
	return m, nil
}

// decodeImage decodes the column, after which so many bytes of TOC come.
func (r *Reader) decodeImage(column []byte, rest int64) (*Image, error) {
	head, _, err := columns.Next(column, 3*MaxManifest+MaxHello)
	if err != nil {
		return nil, err
	}
	c := columns.Reader{B: head}
	m := new(Image)
	index := c.Uint(1 << 20)
	have := c.Uint(1)
	m.Segments = uint32(c.Uint(toc.MaxSegments))
	blob := func() Blob {
		return Blob{digest.Digest(c.Block(256)), string(c.Block(256)), c.Block(MaxManifest)}
	}
	m.Manifest = blob()
	if chosen := blob(); chosen.Digest != "" {
		m.Chosen = &chosen
	}
	m.Config = blob()
	m.ChainID, m.TOCDigest = digest.Digest(c.Block(256)), digest.Digest(c.Block(256))
	if err := c.End(); err != nil {
		return nil, err
	}
	if r.image || index != onlyImage || (have == 1) != (rest == 0) {
		return nil, fmt.Errorf("%w: image %d where one was asked for, or a second one, %d bytes of TOC", ErrCorrupt, index, rest)
	}
	r.image, r.total = true, m.Segments
	return m, nil
}

// verify checks every document from the reference down to the chain ID, that the manifest
// is the one that the worker's own platform takes from the index, and that the TOC is here
// unless it is to come.
//
// Errors: oci.ErrRefused when there is no lazy image by these documents, whoever sends
// them; others when the server has sent something else than they name.
func (m *Image) verify(req *Request, comes bool) error {
	blobs := []*Blob{&m.Manifest, &m.Config}
	named := m.Manifest.Digest // what the reference resolved to
	if m.Chosen != nil {
		blobs = append(blobs, m.Chosen)
		named = m.Chosen.Digest
	}
	for _, b := range blobs {
		if err := b.Digest.Validate(); err != nil {
			return fmt.Errorf("digest %q: %w", b.Digest, err)
		}
		if got := b.Digest.Algorithm().FromBytes(b.Bytes); got != b.Digest {
			return fmt.Errorf("%s has digest %s, want %s", b.MediaType, got, b.Digest)
		}
	}
	if d := digest.Digest(req.Image.Reference); d.Validate() == nil && d != named {
		return fmt.Errorf("got %s, asked for %s", named, d)
	}
	manifest, err := oci.ReadManifest(m.Manifest.MediaType, m.Manifest.Bytes)
	if err != nil {
		return fmt.Errorf("manifest %s: %w", m.Manifest.Digest, err)
	}
	if manifest.Config.Digest != m.Config.Digest {
		return fmt.Errorf("config %s, the manifest says %s", m.Config.Digest, manifest.Config.Digest)
	}
	config, err := oci.ReadConfig(manifest, m.Config.MediaType, m.Config.Bytes)
	if err != nil {
		return err
	}
	if err := m.verifyChosen(req.Image.Platform, config); err != nil {
		return err
	}
	if got := identity.ChainID(config.RootFS.DiffIDs); got != m.ChainID {
		return fmt.Errorf("chain ID %s, the config says %s", m.ChainID, got)
	}
	if err := m.TOCDigest.Validate(); err != nil {
		return fmt.Errorf("TOC digest %q: %w", m.TOCDigest, err)
	}
	if !comes && !slices.ContainsFunc(req.Have, func(h Have) bool { return h.ChainID == m.ChainID && h.TOC == m.TOCDigest }) {
		return fmt.Errorf("TOC %s was left out, and the worker does not have it", m.TOCDigest)
	}
	return nil
}

// verifyChosen checks that the index, if there is one, has this manifest for a platform;
// nil: for this machine's.
func (m *Image) verifyChosen(platform *ocispec.Platform, config *ocispec.Image) error {
	if m.Chosen == nil {
		return nil
	}
	p := oci.Own()
	if platform != nil {
		p = *platform
	}
	index, err := oci.ReadIndex(m.Chosen.MediaType, m.Chosen.Bytes)
	if err != nil {
		return fmt.Errorf("index %s: %w", m.Chosen.Digest, err)
	}
	want, err := oci.Choose(index, p)
	if err != nil {
		return fmt.Errorf("index %s: %w", m.Chosen.Digest, err)
	}
	if want.Digest != m.Manifest.Digest {
		return fmt.Errorf("the server has chosen %s from index %s, which has %s for %s: ask for that, or upgrade the server if it is older than this foil",
			m.Manifest.Digest, m.Chosen.Digest, want.Digest, platforms.Format(p))
	}
	if err := oci.Describes(want, m.Manifest.MediaType, m.Manifest.Bytes); err != nil {
		return fmt.Errorf("index %s: %w", m.Chosen.Digest, err)
	}
	return oci.Fits(want, config, p)
}

func (r *Reader) decodePlan(payload []byte) (*Plan, error) {
	p, err := DecodePlan(payload)
	if err != nil {
		return nil, err
	}
	for _, n := range p.Segments {
		if n >= r.total {
			return nil, fmt.Errorf("%w: plan names segment %d of %d", ErrCorrupt, n, r.total)
		}
	}
	r.plan, r.seen, r.left = p, make([]bool, len(p.Frames)), len(p.Frames)
	return p, nil
}

// DecodePlan reads what AppendPlan wrote. Errors: ErrCorrupt, or that of
// package columns.
func DecodePlan(payload []byte) (*Plan, error) {
	c := columns.Reader{B: payload}
	frames, segments := c.Uint(toc.MaxSegments), c.Uint(toc.MaxSegments*8)
	maxBytes, content := c.Uint(1<<62), c.Uint(1<<62)
	if c.Err != nil {
		return nil, c.Err
	}
	var col [4]columns.Reader
	rest := c.B
	for i := range col {
		var err error
		if col[i].B, rest, err = columns.Next(rest, MaxPlan*2); err != nil {
			return nil, err
		}
	}
	if len(rest) > 0 || columns.Numbers(col[0].B) != int(frames) || columns.Numbers(col[3].B) != int(segments) {
		return nil, fmt.Errorf("%w: plan of %d frames and %d segments, columns of others", ErrCorrupt, frames, segments)
	}
	p := &Plan{
		Frames: make([]PlanFrame, frames), Segments: make([]uint32, segments),
		MaxBytes: int64(maxBytes), ContentBytes: int64(content),
	}
	first, raw, bytes := uint64(0), uint64(0), int64(0)
	for i := range p.Frames {
		f := PlanFrame{
			MaxLength: uint32(col[0].Uint(segment.MaxFrameRaw + 1)),
			RawLength: uint32(col[1].Uint(segment.MaxFrameRaw)),
			First:     uint32(first),
			Segments:  uint32(col[2].Uint(segments - first)),
		}
		if f.MaxLength < 2 || f.RawLength == 0 || f.Segments == 0 {
			return nil, fmt.Errorf("%w: plan: frame %d: %+v", ErrCorrupt, i, f)
		}
		first += uint64(f.Segments)
		raw += uint64(f.RawLength)
		bytes += SectionLength(int(f.MaxLength))
		p.Frames[i] = f
	}
	before := int64(-1)
	for i := range p.Segments {
		before += col[3].Int()
		if before < 0 || before > 1<<32-1 {
			return nil, fmt.Errorf("%w: plan: no segment has number %d", ErrCorrupt, before)
		}
		p.Segments[i] = uint32(before)
	}
	for i := range col {
		if err := col[i].End(); err != nil {
			return nil, err
		}
	}
	if first != segments || raw != content || p.MaxBytes > bytes {
		return nil, fmt.Errorf("%w: plan: the totals are wrong", ErrCorrupt)
	}
	return p, nil
}

func (r *Reader) frame(length int) (*Frame, error) {
	if r.plan == nil {
		return nil, fmt.Errorf("%w: a frame before the plan", ErrCorrupt)
	}
	if length > MaxFrame {
		return nil, fmt.Errorf("%w: frame of %d bytes, at most %d", ErrCorrupt, length, MaxFrame)
	}
	head, err := r.r.Peek(min(length, binary.MaxVarintLen32))
	if err != nil {
		return nil, cut(err)
	}
	c := columns.Reader{B: head}
	index := c.Uint(uint64(len(r.seen)))
	n := len(head) - len(c.B)
	if c.Err != nil || index == uint64(len(r.seen)) || r.seen[index] {
		return nil, fmt.Errorf("%w: frame %d of %d, or a second time", ErrCorrupt, index, len(r.seen))
	}
	if length -= n; length > int(r.plan.Frames[index].MaxLength) || length < 1 {
		return nil, fmt.Errorf("%w: frame %d has %d bytes, planned at most %d", ErrCorrupt, index, length, r.plan.Frames[index].MaxLength)
	}
	if _, err := r.r.Discard(n); err != nil {
		return nil, err
	}
	r.bytes += int64(n)
	f := &Frame{Index: uint32(index), Data: r.o.Buffer(length)[:length]}
	if err := r.full(f.Data); err != nil {
		return nil, err
	}
	r.seen[index] = true
	r.left--
	return f, nil
}

// DecodeRequest reads the JSON of a Request and checks it as far as that needs
// no catalog. Fields that it does not know it leaves out, so that workers can be
// newer than their server.
func DecodeRequest(b []byte) (*Request, error) {
	var req Request
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&req); err != nil {
		return nil, fmt.Errorf("bundle request: %w", err)
	}
	if d.More() {
		return nil, errors.New("bundle request: something follows it")
	}
	if !slices.Contains(req.Versions, Version) {
		return nil, fmt.Errorf("bundle request: versions %v, this server speaks %d", req.Versions, Version)
	}
	if n := len(req.Have); n > MaxHave {
		return nil, fmt.Errorf("bundle request: %d rootfs are here, at most %d", n, MaxHave)
	}
	if req.Hold < 0 || req.Hold > MaxHold {
		return nil, fmt.Errorf("bundle request: hold for %v, at most %v", req.Hold, MaxHold)
	}
	if n := len(req.Damaged); n > MaxDamaged {
		return nil, fmt.Errorf("bundle request: %d segments arrived damaged, at most %d are named", n, MaxDamaged)
	}
	if slices.ContainsFunc(req.Damaged, segment.ID.IsHole) {
		return nil, errors.New("bundle request: a hole arrived damaged, and holes are not sent")
	}
	if req.Image.Repository == "" || req.Image.Reference == "" {
		return nil, errors.New("bundle request: an image without repository or reference")
	}
	if n := len(req.Image.Args); n > trace.MaxArgs {
		return nil, fmt.Errorf("bundle request: %d arguments, at most %d", n, trace.MaxArgs)
	}
	for _, h := range req.Have {
		if h.ChainID.Validate() != nil || h.TOC.Validate() != nil {
			return nil, fmt.Errorf("bundle request: rootfs %q with TOC %q: no digest", h.ChainID, h.TOC)
		}
	}
	return &req, nil
}

// Limits of a Request.
const (
	MaxHave    = 4096
	MaxDamaged = 256
)
