// Package trace is what is said about the pages that a service touches: page
// runs, and traces, which workers record and send to the server.
//
// # Runs
//
// A page run names pages of one content of a TOC. A list of runs is coded as one
// column (package columns) of, for each run in its order,
//
//	content  varint: its index in TOC.Contents less that of the run before (0
//	         before the first)
//	first    varint: its first page, less the page after the end of the run
//	         before if that is of the same content
//	blocks   uvarint: its pages less one
//
// # Traces
//
// An encoded trace is the eight bytes "HFTRACE\n", the version (1, a uvarint) and
// one column that holds
//
//	kind     uvarint: 0 recorded, 1 reported
//	ready    uvarint: microseconds from the start of the process to ready
//	blocks   chain ID; digest of the TOC
//	args     uvarint count, and as many blocks
//
// then the list of runs touched, a column of, for each of them, two uvarints:
// microseconds since the first one before (0 for the first) times two plus 1 if the read had to wait, and
// last the list of runs unused.
package trace

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/toc"
)

// BlockSize is the size of a page, bytes: the unit of presence maps as well.
const BlockSize = 4096

// MaxRuns bounds a list of runs. The limits of a trace, for who takes and for who
// accepts it, are MaxPieces, of Touched and Unused together, MaxEncoded, bytes, and
// MaxArgs: Fit keeps them. 131,072 pieces are 512 MiB that are read page by page.
const (
	MaxRuns    = 1 << 20
	MaxArgs    = 1 << 10
	MaxPieces  = 1 << 17
	MaxEncoded = 1 << 20
)

const (
	magic   = "HFTRACE\n"
	version = 1
	maxText = 128 << 10 // an argument
)

// ErrCorrupt is returned, wrapped, for bytes that are no trace, or runs that do not fit their TOC.
var ErrCorrupt = errors.New("corrupt trace")

// Run is some pages of a content, one after the other.
type Run struct {
	Content uint32 // index into TOC.Contents
	First   uint32 // its first page
	Blocks  uint32 // pages, at least 1
}

// End is the page after the last one.
func (r Run) End() uint32 { return r.First + r.Blocks }

// Range returns where its bytes lie in a content of size bytes: the last page of a content
// may be short.
func (r Run) Range(size int64) (off, n int64) {
	off = int64(r.First) * BlockSize
	return off, min(int64(r.Blocks)*BlockSize, size-off)
}

// Pages returns how many pages a content of size bytes has.
func Pages(size int64) uint32 { return uint32((size + BlockSize - 1) / BlockSize) }

// Whole reports whether the run is all of a content of size bytes.
func (r Run) Whole(size int64) bool { return r.First == 0 && r.Blocks == Pages(size) }

// Check fails unless each run lies in a content of t. Errors: ErrCorrupt.
func Check(runs []Run, t *toc.TOC) error {
	for _, r := range runs {
		if int(r.Content) >= len(t.Contents) {
			return fmt.Errorf("%w: run in content %d of %d", ErrCorrupt, r.Content, len(t.Contents))
		}
		if pages := Pages(t.Contents[r.Content].Size); r.Blocks == 0 || uint64(r.First)+uint64(r.Blocks) > uint64(pages) {
			return fmt.Errorf("%w: run of pages %d to %d of %d", ErrCorrupt, r.First, uint64(r.First)+uint64(r.Blocks), pages)
		}
	}
	return nil
}

// AppendRuns appends a list of runs to dst.
func AppendRuns(dst []byte, runs []Run) []byte {
	var raw []byte
	var before Run
	for _, r := range runs {
		raw = binary.AppendVarint(raw, int64(r.Content)-int64(before.Content))
		base := int64(0)
		if r.Content == before.Content {
			base = int64(before.End())
		}
		raw = binary.AppendVarint(raw, int64(r.First)-base)
		raw = binary.AppendUvarint(raw, uint64(r.Blocks)-1)
		before = r
	}
	return columns.AppendQuick(dst, raw)
}

// NextRuns splits a list of runs off b. Whether they lie in any content is for
// Check to say. Errors: ErrCorrupt, or that of package columns.
func NextRuns(b []byte) (runs []Run, rest []byte, err error) {
	raw, rest, err := columns.Next(b, 3*10*MaxRuns)
	if err != nil {
		return nil, nil, err
	}
	n := columns.Numbers(raw)
	if n%3 != 0 || n/3 > MaxRuns {
		return nil, nil, fmt.Errorf("%w: %d numbers of runs", ErrCorrupt, n)
	}
	c := columns.Reader{B: raw}
	runs = make([]Run, 0, n/3)
	var before Run
	for range n / 3 {
		content := int64(before.Content) + c.Int()
		base := int64(0)
		if content == int64(before.Content) {
			base = int64(before.End())
		}
		first := base + c.Int()
		blocks := int64(c.Uint(math.MaxUint32-1)) + 1
		if c.Err == nil && (content < 0 || content > math.MaxInt32 || first < 0 || first+blocks > math.MaxUint32) {
			return nil, nil, fmt.Errorf("%w: run of content %d, pages %d and %d more", ErrCorrupt, content, first, blocks)
		}
		before = Run{uint32(content), uint32(first), uint32(blocks)}
		runs = append(runs, before)
	}
	if err := c.End(); err != nil {
		return nil, nil, err
	}
	return runs, rest, nil
}

// Kind says where a trace comes from.
type Kind byte

const (
	// Recorded is a trace that somebody asked for.
	Recorded Kind = 0
	// Reported is what a worker noticed of a start.
	Reported Kind = 1
)

// Trace is what one run of a service touched of the contents of its rootfs
// until its probe said ready.
type Trace struct {
	Kind    Kind
	ChainID digest.Digest // of the rootfs
	TOC     digest.Digest // of the encoded TOC that contents are numbered by
	// Args are the service's: entrypoint and command, as they ran.
	Args  []string
	Ready time.Duration // from the start of the process
	// Touched lists first touches in their order. No page is in it twice.
	Touched []Touch
	// Unused are pages that were delivered early and were not touched.
	Unused []Run
}

// Touch is the first read of some pages.
type Touch struct {
	Run
	At     time.Duration // since the start of the process; never less than of the touch before
	Waited bool          // they were absent
}

// Service names a service of an image by what it runs: 16 hexadecimal digits.
func Service(args []string) string {
	h := sha256.New()
	for _, a := range args {
		fmt.Fprintf(h, "%d:%s,", len(a), a)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Encode encodes a trace. Times are cut to microseconds.
func (t *Trace) Encode() []byte {
	head := binary.AppendUvarint(nil, uint64(t.Kind))
	head = binary.AppendUvarint(head, uint64(t.Ready.Microseconds()))
	head = columns.AppendBlock(head, t.ChainID)
	head = columns.AppendBlock(head, t.TOC)
	head = binary.AppendUvarint(head, uint64(len(t.Args)))
	for _, a := range t.Args {
		head = columns.AppendBlock(head, a)
	}
	runs := make([]Run, len(t.Touched))
	var times []byte
	before := int64(0)
	for i, touch := range t.Touched {
		runs[i] = touch.Run
		at := touch.At.Microseconds()
		v := uint64(max(at-before, 0)) << 1
		if touch.Waited {
			v |= 1
		}
		times = binary.AppendUvarint(times, v)
		before = max(at, before)
	}
	b := binary.AppendUvarint([]byte(magic), version)
	b = columns.Append(b, head, true)
	b = AppendRuns(b, runs)
	b = columns.Append(b, times, true)
	return AppendRuns(b, t.Unused)
}

// Runs are those that were touched, in their order.
func (t *Trace) Runs() []Run {
	runs := make([]Run, len(t.Touched))
	for i := range t.Touched {
		runs[i] = t.Touched[i].Run
	}
	return runs
}

// After makes t, a trace of a start for which the pages of before were there already, the trace of both: what t has
// besides goes between what before has, where it would have been touched if that start had taken
// as long. Ready is that of before.
func (t *Trace) After(before *Trace) {
	merged := Merge(before.Runs())
	scale := 1.0
	if t.Ready > 0 {
		scale = float64(before.Ready) / float64(t.Ready)
	}
	all := slices.Clone(before.Touched)
	for _, touch := range t.Touched {
		at := time.Duration(float64(touch.At) * scale)
		for page := touch.First; page < touch.End(); page++ {
			if !Contains(merged, Run{touch.Content, page, 1}) {
				all = append(all, Touch{Run: Run{touch.Content, page, 1}, At: at, Waited: touch.Waited})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b Touch) int { return cmp.Compare(a.At, b.At) })
	t.Touched, t.Ready = all, before.Ready
}

// Fit encodes a trace within the limits, and makes t what the encoded one is. One that
// is too large has what was read on from its place put together first; then
// what was delivered and not touched is left out, and then what was touched
// last. It returns how many pages that were touched are left out. Only Args can make the
// result larger than MaxEncoded.
func (t *Trace) Fit() (encoded []byte, left int64) {
	if len(t.Touched)+len(t.Unused) > MaxPieces {
		t.join()
	}
	cut := func(n int) {
		for _, r := range t.Touched[n:] {
			left += int64(r.Blocks)
		}
		t.Touched = t.Touched[:n]
	}
	cut(min(len(t.Touched), MaxPieces))
	t.Unused = t.Unused[:min(len(t.Unused), MaxPieces-len(t.Touched))]
	for {
		encoded = t.Encode()
		switch {
		case len(encoded) <= MaxEncoded || len(t.Touched) == 0 && len(t.Unused) == 0:
			return encoded, left
		case len(t.Unused) > 0:
			t.Unused = nil
		default:
			cut(int(float64(len(t.Touched)) * 0.95 * MaxEncoded / float64(len(encoded))))
		}
	}
}

// join puts together touches of pages that follow each other in a content, and
// in time.
func (t *Trace) join() {
	joined := t.Touched[:0]
	for _, r := range t.Touched {
		if n := len(joined); n > 0 {
			if b := &joined[n-1]; b.Content == r.Content && b.End() == r.First && b.Waited == r.Waited {
				b.Blocks += r.Blocks
				continue
			}
		}
		joined = append(joined, r)
	}
	t.Touched = joined
}

// Decode reads what Encode wrote. Errors: ErrCorrupt, or that of package
// columns.
func Decode(b []byte) (*Trace, error) {
	if len(b) > MaxEncoded || len(b) < len(magic) || string(b[:len(magic)]) != magic {
		return nil, fmt.Errorf("%w: %d bytes that do not start like one", ErrCorrupt, len(b))
	}
	c := columns.Reader{B: b[len(magic):]}
	if v := c.Uint(math.MaxUint32); c.Err != nil || v != version {
		return nil, fmt.Errorf("%w: version %d, this program reads %d", ErrCorrupt, v, version)
	}
	head, rest, err := columns.Next(c.B, MaxEncoded)
	if err != nil {
		return nil, err
	}
	c = columns.Reader{B: head}
	const longest = uint64(24 * time.Hour / time.Microsecond)
	t := &Trace{Kind: Kind(c.Uint(1)), Ready: time.Duration(c.Uint(longest)) * time.Microsecond}
	t.ChainID, t.TOC = digest.Digest(c.Block(256)), digest.Digest(c.Block(256))
	n := c.Uint(MaxArgs)
	for range n {
		if c.Err != nil {
			break
		}
		t.Args = append(t.Args, string(c.Block(maxText)))
	}
	if err := c.End(); err != nil {
		return nil, err
	}
	for _, d := range []digest.Digest{t.ChainID, t.TOC} {
		if err := d.Validate(); err != nil {
			return nil, fmt.Errorf("%w: digest %q: %w", ErrCorrupt, d, err)
		}
	}
	runs, rest, err := NextRuns(rest)
	if err != nil {
		return nil, err
	}
	times, rest, err := columns.Next(rest, 10*MaxRuns)
	if err != nil {
		return nil, err
	}
	c = columns.Reader{B: times}
	at := uint64(0)
	for _, r := range runs {
		v := c.Uint(longest << 1)
		at = min(at+v>>1, longest)
		t.Touched = append(t.Touched, Touch{r, time.Duration(at) * time.Microsecond, v&1 != 0})
	}
	if err := c.End(); err != nil {
		return nil, err
	}
	if t.Unused, rest, err = NextRuns(rest); err != nil {
		return nil, err
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%w: %d bytes after its end", ErrCorrupt, len(rest))
	}
	if len(t.Unused) == 0 {
		t.Unused = nil
	}
	return t, nil
}
