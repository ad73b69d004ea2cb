package bundle

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// Origins of a startup set.
const (
	OriginTraced    = "traced"    // from traces of this service that somebody recorded
	OriginLearned   = "learned"   // from what workers reported of this service
	OriginInherited = "inherited" // from this service of another version of the image
	OriginCommon    = "common"    // from other services of the image
)

// Startup is what a worker lacks of the startup set of an image.
type Startup struct {
	Origin string
	Frames []StartupFrame
	// Runs are the frames' page runs, frame by frame.
	Runs []trace.Run
	// Digests are the SHA-256 of the bytes of Runs; a run that is all of its
	// content has the content's ID. The Reader leaves them to Resolve.
	Digests []segment.ID
	// Filled is how many of the last frames hold filled pages: pages among those that starts
	// touch, of which a start touches a few, nobody knows which. A worker need not write
	// them before somebody asks. The Writer puts it into a section of its own.
	Filled int

	packed []byte // digests on the wire
}

// Held reports whether what follows the set may be held back: see Request.Hold. A
// set of other services lacks more, and what follows it is likely to have that.
func (s *Startup) Held() bool { return s.Origin != OriginCommon }

// StartupFrame is one frame of page runs.
type StartupFrame struct {
	MaxLength uint32 // bytes of the frame, at most
	RawLength uint32 // bytes, decoded; Resolve knows
	First     uint32 // its runs are Startup.Runs[First:First+Count]
	Count     uint32
}

// MaxBytes is the most that the Pages sections take in the stream.
func (s *Startup) MaxBytes() (n int64) {
	for _, f := range s.Frames {
		n += SectionLength(int(f.MaxLength)) + binary.MaxVarintLen32
	}
	return n
}

// ContentBytes is the sum of the frames' raw lengths, once they are known.
func (s *Startup) ContentBytes() (n int64) {
	for _, f := range s.Frames {
		n += int64(f.RawLength)
	}
	return n
}

// Resolve checks what the Reader read against the TOC of its image, and fills in the digests and
// raw lengths. Errors: ErrCorrupt.
func (s *Startup) Resolve(t *toc.TOC) error {
	if err := trace.Check(s.Runs, t); err != nil {
		return fmt.Errorf("%w: startup set: %w", ErrCorrupt, err)
	}
	s.Digests = make([]segment.ID, len(s.Runs))
	packed := s.packed
	for k := range s.Frames {
		f := &s.Frames[k]
		raw := int64(0)
		for i := f.First; i < f.First+f.Count; i++ {
			content := &t.Contents[s.Runs[i].Content]
			_, n := s.Runs[i].Range(content.Size)
			raw += n
			if s.Runs[i].Whole(content.Size) {
				s.Digests[i] = content.ID
				continue
			}
			if len(packed) < segment.IDLength {
				return fmt.Errorf("%w: startup set of %d runs with %d bytes of digests", ErrCorrupt, len(s.Runs), len(s.packed))
			}
			packed = packed[copy(s.Digests[i][:], packed):]
		}
		if raw > segment.MaxFrameRaw {
			return fmt.Errorf("%w: startup set: frame %d of %d bytes, at most %d", ErrCorrupt, k, raw, segment.MaxFrameRaw)
		}
		f.RawLength = uint32(raw)
	}
	if len(packed) > 0 {
		return fmt.Errorf("%w: startup set of %d runs with %d bytes of digests", ErrCorrupt, len(s.Runs), len(s.packed))
	}
	return nil
}

// Here are the pages of a startup set that do not come, since the worker has them.
type Here struct {
	// Runs may lie in no content: trace.Check says.
	Runs []trace.Run
}

// Pages is one frame of a startup set.
type Pages struct {
	Frame uint32 // in Startup.Frames
	Data  []byte // for segment.DecodeFrame
}

// Startup writes the section, and Filled after it. t is the image's TOC.
func (w *Writer) Startup(s *Startup, t *toc.TOC) error {
	var most, counts, packed []byte
	for _, f := range s.Frames {
		most = binary.AppendUvarint(most, uint64(f.MaxLength))
		counts = binary.AppendUvarint(counts, uint64(f.Count))
	}
	for i, r := range s.Runs {
		if !r.Whole(t.Contents[r.Content].Size) {
			packed = append(packed, s.Digests[i][:]...)
		}
	}
	b := binary.AppendUvarint(nil, onlyImage)
	b = columns.AppendBlock(b, s.Origin)
	b = columns.AppendQuick(b, most)
	b = columns.AppendQuick(b, counts)
	if err := w.section(TypeStartup, flagMust, trace.AppendRuns(b, s.Runs), packed); err != nil || s.Filled == 0 {
		return err
	}
	b = binary.AppendUvarint(nil, onlyImage)
	return w.section(TypeFilled, 0, binary.AppendUvarint(b, uint64(s.Filled)))
}

// Here writes the section.
func (w *Writer) Here(h *Here) error {
	return w.section(TypeHere, 0, trace.AppendRuns(binary.AppendUvarint(nil, onlyImage), h.Runs))
}

// Pages writes the section of one frame; its bytes are the parts, one after the
// other.
func (w *Writer) Pages(frame uint32, parts ...[]byte) error {
	w.scratch = binary.AppendUvarint(w.scratch[:0], onlyImage)
	w.scratch = binary.AppendUvarint(w.scratch, uint64(frame))
	all := [3][]byte{w.scratch}
	return w.section(TypePages, flagMust, append(all[:1], parts...)...)
}

// AppendPagesHead appends what a Pages section has before its frame, which has length bytes
// and is to follow. Heads that differ in length only take as many bytes.
func AppendPagesHead(dst []byte, frame uint32, length int) []byte {
	var numbers [2 * binary.MaxVarintLen64]byte
	n := binary.PutUvarint(numbers[:], onlyImage)
	n += binary.PutUvarint(numbers[n:], uint64(frame))
	dst = append(dst, byte(TypePages), flagMust)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(n+length))
	return append(dst, numbers[:n]...)
}

func (r *Reader) decodeStartup(payload []byte) (*Startup, error) {
	c := columns.Reader{B: payload}
	index := c.Uint(1 << 20)
	s := &Startup{Origin: string(c.Block(64))}
	if c.Err != nil {
		return nil, c.Err
	}
	most, rest, err := columns.Next(c.B, 5*trace.MaxRuns)
	if err != nil {
		return nil, err
	}
	counts, rest, err := columns.Next(rest, 5*trace.MaxRuns)
	if err != nil {
		return nil, err
	}
	if s.Runs, s.packed, err = trace.NextRuns(rest); err != nil {
		return nil, err
	}
	if n := columns.Numbers(most); n != columns.Numbers(counts) || n > len(s.Runs) {
		return nil, fmt.Errorf("%w: startup set of %d frames and %d runs", ErrCorrupt, n, len(s.Runs))
	}
	first := uint64(0)
	cm, cc := columns.Reader{B: most}, columns.Reader{B: counts}
	for len(cm.B) > 0 && cm.Err == nil && cc.Err == nil {
		f := StartupFrame{
			MaxLength: uint32(cm.Uint(segment.MaxFrameRaw + 1)), First: uint32(first),
			Count: uint32(cc.Uint(uint64(len(s.Runs)) - first)),
		}
		if f.MaxLength < 2 || f.Count == 0 {
			return nil, fmt.Errorf("%w: startup set: frame %d: %+v", ErrCorrupt, len(s.Frames), f)
		}
		first += uint64(f.Count)
		s.Frames = append(s.Frames, f)
	}
	if err := cm.End(); err != nil {
		return nil, err
	}
	if err := cc.End(); err != nil {
		return nil, err
	}
	if first != uint64(len(s.Runs)) {
		return nil, fmt.Errorf("%w: startup set of %d runs, %d of them in frames", ErrCorrupt, len(s.Runs), first)
	}
	if index != onlyImage || !r.image || !r.o.Request.Image.Startup || r.startup != nil {
		return nil, fmt.Errorf("%w: a startup set of image %d that was not asked for, or a second one", ErrCorrupt, index)
	}
	r.startup = s
	return s, nil
}

// decodeFilled adds what the section says to its Startup.
func (r *Reader) decodeFilled(payload []byte) error {
	c := columns.Reader{B: payload}
	index := c.Uint(1 << 20)
	n := c.Uint(trace.MaxRuns)
	if err := c.End(); err != nil {
		return err
	}
	s := r.startup
	if index != onlyImage || s == nil || s.Filled > 0 || n == 0 || n > uint64(len(s.Frames)) || r.page > 0 {
		return fmt.Errorf("%w: %d filled frames of a startup set of image %d that is not there, has begun, is smaller, or for the second time", ErrCorrupt, n, index)
	}
	s.Filled = int(n)
	return nil
}

func (r *Reader) decodeHere(payload []byte) (*Here, error) {
	c := columns.Reader{B: payload}
	h := new(Here)
	index := c.Uint(1 << 20)
	if c.Err != nil {
		return nil, c.Err
	}
	var rest []byte
	var err error
	if h.Runs, rest, err = trace.NextRuns(c.B); err != nil {
		return nil, err
	}
	if len(rest) > 0 || index != onlyImage || !r.image || !r.o.Request.Image.Startup || r.here {
		return nil, fmt.Errorf("%w: pages that are here of image %d, which did not ask for a startup set, for the second time, or with %d bytes after them", ErrCorrupt, index, len(rest))
	}
	r.here = true
	return h, nil
}

// pages reads the section: frames come in their order.
func (r *Reader) pages(length int) (*Pages, error) {
	if !r.pagesLeft() {
		return nil, fmt.Errorf("%w: pages of no startup set", ErrCorrupt)
	}
	s := r.startup
	if length > MaxPages {
		return nil, fmt.Errorf("%w: pages of %d bytes, at most %d", ErrCorrupt, length, MaxPages)
	}
	head, err := r.r.Peek(min(length, 2*binary.MaxVarintLen32))
	if err != nil {
		return nil, cut(err)
	}
	c := columns.Reader{B: head}
	image, frame := c.Uint(1<<20), c.Uint(trace.MaxRuns)
	n := len(head) - len(c.B)
	if c.Err != nil || image != onlyImage || int(frame) != r.page {
		return nil, fmt.Errorf("%w: pages %d of image %d, want %d of image %d", ErrCorrupt, frame, image, r.page, onlyImage)
	}
	if length -= n; length > int(s.Frames[frame].MaxLength) || length < 1 {
		return nil, fmt.Errorf("%w: pages %d have %d bytes, planned at most %d", ErrCorrupt, frame, length, s.Frames[frame].MaxLength)
	}
	if _, err := r.r.Discard(n); err != nil {
		return nil, err
	}
	r.bytes += int64(n)
	p := &Pages{Frame: uint32(frame), Data: r.o.Buffer(length)[:length]}
	if err := r.full(p.Data); err != nil {
		return nil, err
	}
	r.page++
	return p, nil
}

// pagesLeft reports whether frames of the startup set are still to come.
func (r *Reader) pagesLeft() bool { return r.startup != nil && r.page < len(r.startup.Frames) }

// Paths and media types of what is said about startup sets. Repository and
// reference are query parameters named so, as in a pull: who may pull an image
// may see, teach and reset its startup sets.
const (
	// TracePath takes a POST of an encoded trace (package trace) and answers 204.
	// It must be of the image's rootfs, in its present TOC.
	TracePath = "/hydrofoil/v1/trace"
	// StartupPath answers GET with StartupReport, or, with the parameter service (its ID), with
	// ServiceReport; DELETE with service forgets one service and what it learned,
	// without it all of the image's, and answers 204.
	StartupPath = "/hydrofoil/v1/startup"

	MediaTypeTrace = "application/vnd.hydrofoil.trace.v1"
)

// StartupReport is what the server has of the startup sets of one rootfs.
type StartupReport struct {
	ChainID digest.Digest `json:"chain_id"`
	TOC     digest.Digest `json:"toc"`
	// ImageBytes are those of all contents, StoreBytes what startup pages take in
	// the object store, StoreRawBytes these pages decoded, each once.
	ImageBytes    int64     `json:"image_bytes"`
	StoreBytes    int64     `json:"store_bytes"`
	StoreRawBytes int64     `json:"store_raw_bytes"`
	Services      []Service `json:"services"`
}

// Service is one service and its startup set.
type Service struct {
	ID      string    `json:"id"`
	Args    []string  `json:"args"`
	Origin  string    `json:"origin"`
	Traces  int       `json:"traces"`  // recorded
	Reports int       `json:"reports"` // of workers
	Updated time.Time `json:"updated"`
	Pages   int64     `json:"pages"`
	Bytes   int64     `json:"bytes"` // of the pages
	// Shared are the bytes that other services of the image have as well.
	Shared int64 `json:"shared_bytes"`
	// Stored is what its frames take, compressed.
	Stored int64 `json:"stored_bytes"`
}

// ServiceReport is a service with its pages, in the order in which they are
// sent.
type ServiceReport struct {
	Service
	TOC digest.Digest `json:"toc"`
	// Runs is a list of runs as in package trace.
	Runs []byte `json:"runs"`
}
