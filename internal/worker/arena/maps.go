package arena

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
)

const (
	presenceMagic = "HFPRESNC"
	durableMagic  = "HFDURABL"
	mapsVersion   = 2
	oldVersion    = 1 // the same without runs

	presenceHeader = 4096 // bytes before the maps
	presenceUsed   = 92   // bytes of it before its checksum
	durableHeader  = 72   // bytes before the maps
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// words is how many 64-bit words hold n bits.
func words(n int) int { return (n + 63) / 64 }

// maps is the presence map in memory: one bit a segment, two bits a block. Words
// are only touched atomically.
type maps struct {
	segments []uint64
	blocks   []uint64 // present
	runs     []uint64 // present because a page run wrote it
}

// held is what is believed to be in an arena: segments, and blocks written by
// page runs. Without words it is nothing.
type held struct {
	segments []uint64
	runs     []uint64
}

func (h held) equal(o held) bool {
	return slices.Equal(h.segments, o.segments) && slices.Equal(h.runs, o.runs)
}

// held returns what the maps hold now. Segments are read first: who completes
// one from runs marks them before it.
func (m maps) held() held {
	h := held{make([]uint64, len(m.segments)), make([]uint64, len(m.runs))}
	for i := range h.segments {
		h.segments[i] = atomic.LoadUint64(&m.segments[i])
	}
	for i := range h.runs {
		h.runs[i] = atomic.LoadUint64(&m.runs[i])
	}
	return h
}

func bit(w []uint64, i int) bool { return atomic.LoadUint64(&w[i/64])>>(i%64)&1 != 0 }

// setBit sets bit i and reports whether it was clear before.
func setBit(w []uint64, i int) bool {
	m := uint64(1) << (i % 64)
	return atomic.OrUint64(&w[i/64], m)&m == 0
}

// setBits sets the bits [from, to).
func setBits(w []uint64, from, to int) {
	for from < to {
		n := min(64-from%64, to-from)
		atomic.OrUint64(&w[from/64], ^uint64(0)>>(64-n)<<(from%64))
		from += n
	}
}

// nextClear returns the first clear bit in [from, to), or to.
func nextClear(w []uint64, from, to int) int {
	for from < to {
		v := ^atomic.LoadUint64(&w[from/64]) >> (from % 64)
		if v != 0 {
			return min(from+bits.TrailingZeros64(v), to)
		}
		from += 64 - from%64
	}
	return to
}

// nextSet returns the first set bit in [from, to), or to.
func nextSet(w []uint64, from, to int) int {
	for from < to {
		v := atomic.LoadUint64(&w[from/64]) >> (from % 64)
		if v != 0 {
			return min(from+bits.TrailingZeros64(v), to)
		}
		from += 64 - from%64
	}
	return to
}

// mark sets the bit of segment i, then those of the blocks that it completes:
// [from, to), perhaps none. Two calls for the two segments that share a block
// may run at once: each sets its own bit before it looks at the other's, so at
// least one of them sees both.
func (m maps) mark(l *Layout, i int) (fresh bool, from, to int) {
	fresh = setBit(m.segments, i)
	off, end := l.offsets[i], l.end(i)
	from, to = int(off/BlockSize), int((end+int64(l.padding(i)))/BlockSize)
	if off%BlockSize != 0 && !m.blockHere(l, i, from) {
		from++
	}
	// The block in which this segment ends and another begins.
	if rest := (end + int64(l.padding(i))) % BlockSize; rest != 0 && to >= from && m.blockHere(l, i, to) {
		to++
	}
	if from >= to {
		return fresh, 0, 0
	}
	setBits(m.blocks, from, to)
	return fresh, from, to
}

// blockHere reports whether every segment with bytes in block is present; i is
// one of them.
func (m maps) blockHere(l *Layout, i, block int) bool {
	lo, hi := int64(block)*BlockSize, int64(block+1)*BlockSize
	for k := i; k >= 0 && l.end(k) > lo; k-- {
		if !bit(m.segments, k) {
			return false
		}
	}
	for k := i + 1; k < len(l.offsets) && l.offsets[k] < hi; k++ {
		if !bit(m.segments, k) {
			return false
		}
	}
	return true
}

// inRuns returns how many bytes of segment i lie in blocks that page runs wrote.
func (m maps) inRuns(l *Layout, i int) (n int64) {
	off, end := l.offsets[i], l.end(i)
	from, to := int(off/BlockSize), int((end-1)/BlockSize)+1
	for b := nextSet(m.runs, from, to); b < to; b = nextSet(m.runs, b, to) {
		e := nextClear(m.runs, b, to)
		n += min(end, int64(e)*BlockSize) - max(off, int64(b)*BlockSize)
		b = e
	}
	return n
}

// absentIn returns how many bytes of block belong to absent segments.
func (m maps) absentIn(l *Layout, block int) (n int64) {
	lo, hi := int64(block)*BlockSize, int64(block+1)*BlockSize
	first, end := l.SegmentsIn(lo, BlockSize)
	for i := first; i < end; i++ {
		if !bit(m.segments, i) {
			n += min(hi, l.end(i)) - max(lo, l.offsets[i])
		}
	}
	return n
}

// fill makes m the maps of exactly what have says (little-endian words) and of
// all holes, and returns how many segments are present, and how many bytes of
// contents.
func (m maps) fill(l *Layout, have held) (segments int, bytes int64) {
	clear(m.segments)
	clear(m.blocks)
	clear(m.runs)
	for i := range l.ids {
		if l.ids[i].IsHole() || have.segments != nil && have.segments[i/64]>>(i%64)&1 != 0 {
			m.mark(l, i)
			segments++
			bytes += int64(l.lengths[i])
		}
	}
	for k, w := range have.runs {
		// What segments hold needs no run any more.
		for w &^= m.blocks[k]; w != 0; w &= w - 1 {
			b := k*64 + bits.TrailingZeros64(w)
			bytes += m.absentIn(l, b)
			setBit(m.runs, b)
			setBit(m.blocks, b)
		}
	}
	return segments, bytes
}

// check compares maps found in a file with what marking could have left there,
// and returns what to believe in. When a process dies in the middle of
// marking, a segment's bit is set and bits of its blocks are not, or a block's bit of the runs
// is set and it is not marked present: these are not believed. Anything else that does not fit is
// corruption.
func (m maps) check(l *Layout) (held, error) {
	have := m.held()
	if n := l.Segments(); n%64 != 0 && have.segments[n/64]>>(n%64) != 0 {
		return held{}, errors.New("bits are set after the last segment")
	}
	for i := range l.ids {
		if l.ids[i].IsHole() {
			if !bit(have.segments, i) {
				return held{}, fmt.Errorf("segment %d, a hole, is marked absent", i)
			}
		}
	}
	want := maps{segments: have.segments, blocks: make([]uint64, len(m.blocks))}
	for i := range l.ids {
		if bit(have.segments, i) {
			want.mark(l, i)
		}
	}
	for k := range m.blocks {
		have.runs[k] &= m.blocks[k]
		if extra := m.blocks[k] &^ (want.blocks[k] | have.runs[k]); extra != 0 {
			return held{}, fmt.Errorf("block %d is marked present, no page run wrote it and a segment in it is not", k*64+bits.TrailingZeros64(extra))
		}
	}
	if n := int(l.Blocks()); n%64 != 0 && have.runs[n/64]>>(n%64) != 0 {
		return held{}, errors.New("bits are set after the last block")
	}
	torn := make([]uint64, len(have.segments))
	for i := range l.ids {
		if !bit(have.segments, i) || l.ids[i].IsHole() {
			continue
		}
		from, to := int(l.offsets[i]/BlockSize), int((l.end(i)-1)/BlockSize)+1
		for b := nextClear(m.blocks, from, to); b < to; b = nextClear(m.blocks, b+1, to) {
			if want.blocks[b/64]>>(b%64)&1 != 0 {
				setBit(torn, i)
				break
			}
		}
	}
	for k := range have.segments {
		have.segments[k] &^= torn[k]
	}
	return have, nil
}

// presence is the file presence, mapped.
type presence struct {
	maps
	mem []byte
}

func presenceSize(l *Layout) int64 {
	return presenceHeader + 8*int64(words(l.Segments())) + 16*int64(words(int(l.Blocks())))
}

// oldPresenceSize is that of version 1.
func oldPresenceSize(l *Layout) int64 { return presenceSize(l) - 8*int64(words(int(l.Blocks()))) }

// presenceHead writes the header of l's presence file for a boot.
func presenceHead(version uint32, l *Layout, boot kernel.BootID) []byte {
	b := make([]byte, presenceUsed+4)
	copy(b, presenceMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[12:], BlockSize)
	digest := l.Digest()
	copy(b[16:], digest[:])
	copy(b[48:], boot[:])
	binary.LittleEndian.PutUint64(b[64:], uint64(l.size))
	binary.LittleEndian.PutUint64(b[72:], uint64(l.Segments()))
	binary.LittleEndian.PutUint64(b[80:], uint64(l.Blocks()))
	binary.LittleEndian.PutUint32(b[88:], presenceHeader)
	binary.LittleEndian.PutUint32(b[presenceUsed:], crc32.Checksum(b[:presenceUsed], crcTable))
	return b
}

// errOtherBoot says that a presence file is sound, and of an earlier boot.
var errOtherBoot = errors.New("of an earlier boot")

// checkPresence says why the bytes of a presence file cannot be believed, or
// returns what they mark.
func checkPresence(b []byte, l *Layout, boot kernel.BootID) (held, error) {
	if int64(len(b)) != presenceSize(l) {
		return held{}, fmt.Errorf("%d bytes long, want %d", len(b), presenceSize(l))
	}
	if string(b[:8]) != presenceMagic {
		return held{}, errors.New("not a presence map, or one that was being made")
	}
	if binary.LittleEndian.Uint32(b[presenceUsed:]) != crc32.Checksum(b[:presenceUsed], crcTable) {
		return held{}, errors.New("its header's checksum is wrong")
	}
	version := binary.LittleEndian.Uint32(b[8:])
	if version != mapsVersion && version != oldVersion {
		return held{}, fmt.Errorf("version %d, want %d", version, mapsVersion)
	}
	var found kernel.BootID
	copy(found[:], b[48:])
	if want := presenceHead(version, l, found); string(want) != string(b[:len(want)]) {
		return held{}, errors.New("of another layout")
	}
	if found != boot {
		return held{}, errOtherBoot
	}
	m := presenceMaps(b, l)
	if version == oldVersion {
		m.runs = make([]uint64, len(m.blocks))
	}
	return m.check(l)
}

// presenceMaps returns the maps in the bytes of a presence file, in place when
// b is aligned, as a mapping is.
func presenceMaps(b []byte, l *Layout) maps {
	b = b[presenceHeader:]
	n, k := words(l.Segments()), words(int(l.Blocks()))
	if n+k == 0 {
		return maps{}
	}
	w := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), n+2*k)
	return maps{segments: w[:n:n], blocks: w[n : n+k : n+k], runs: w[n+k:]}
}

// openPresence maps dir's presence file, creating it when it is missing, with a
// size that fits l. What is in it remains to be checked.
func openPresence(dir string, l *Layout) (*presence, error) {
	path := filepath.Join(dir, presenceName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := presenceSize(l)
	if st, err := f.Stat(); err != nil {
		return nil, err
	} else if st.Size() != size && st.Size() != oldPresenceSize(l) {
		// Whatever this was, it is not this arena's.
		if err := f.Truncate(0); err != nil {
			return nil, err
		}
	}
	// Storing to a mapped page that the disk has no room for would kill the
	// process with SIGBUS: have all of it allocated.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return nil, fmt.Errorf("allocate %d bytes for %s: %w", size, path, err)
		}
		if err := writeZeros(f, size); err != nil {
			return nil, err
		}
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	return &presence{maps: presenceMaps(mem, l), mem: mem}, nil
}

// writeZeros makes f at least size bytes long without keeping a hole before
// what it appends.
func writeZeros(f *os.File, size int64) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if _, err := f.Seek(st.Size(), io.SeekStart); err != nil {
		return err
	}
	_, err = io.CopyN(f, zeroReader{}, max(0, size-st.Size()))
	return err
}

type zeroReader struct{}

func (zeroReader) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// distrust makes a process that opens the file believe nothing in it.
func (p *presence) distrust() { clear(p.mem[:presenceUsed+4]) }

// trust makes the maps count for a boot.
func (p *presence) trust(l *Layout, boot kernel.BootID) {
	head := presenceHead(mapsVersion, l, boot)
	// The magic comes last: until then the file is not a presence map.
	copy(p.mem[8:], head[8:])
	magic := (*uint64)(unsafe.Pointer(unsafe.SliceData(p.mem)))
	atomic.StoreUint64(magic, binary.NativeEndian.Uint64(head))
}

func (p *presence) close() error {
	mem := p.mem
	p.mem, p.maps = nil, maps{}
	return unix.Munmap(mem)
}

// encodeDurable writes the durable file's bytes.
func encodeDurable(l *Layout, have held) []byte { return encodeDurableAs(mapsVersion, l, have) }

func encodeDurableAs(version uint32, l *Layout, have held) []byte {
	b := make([]byte, durableHeader, durableHeader+8*(len(have.segments)+len(have.runs))+sha256.Size)
	copy(b, durableMagic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[12:], BlockSize)
	digest := l.Digest()
	copy(b[16:], digest[:])
	binary.LittleEndian.PutUint64(b[48:], uint64(l.size))
	binary.LittleEndian.PutUint64(b[56:], uint64(l.Segments()))
	binary.LittleEndian.PutUint64(b[64:], uint64(l.Blocks()))
	for _, w := range have.segments {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	if version != oldVersion {
		for _, w := range have.runs {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// decodeDurable reads what encodeDurable wrote for l, of either version.
func decodeDurable(b []byte, l *Layout) (held, error) {
	if len(b) < durableHeader+sha256.Size {
		return held{}, fmt.Errorf("%d bytes long", len(b))
	}
	if string(b[:8]) != durableMagic {
		return held{}, errors.New("not a durable map")
	}
	end := len(b) - sha256.Size
	if sha256.Sum256(b[:end]) != [sha256.Size]byte(b[end:]) {
		return held{}, errors.New("its checksum is wrong")
	}
	version := binary.LittleEndian.Uint32(b[8:])
	n, k := words(l.Segments()), words(int(l.Blocks()))
	want := durableHeader + 8*n + sha256.Size
	switch version {
	case oldVersion:
	case mapsVersion:
		want += 8 * k
	default:
		return held{}, fmt.Errorf("version %d, want %d", version, mapsVersion)
	}
	if len(b) != want {
		return held{}, fmt.Errorf("%d bytes long, want %d", len(b), want)
	}
	have := held{make([]uint64, n), make([]uint64, k)}
	at := durableHeader
	for i := range have.segments {
		have.segments[i] = binary.LittleEndian.Uint64(b[at:])
		at += 8
	}
	if version != oldVersion {
		for i := range have.runs {
			have.runs[i] = binary.LittleEndian.Uint64(b[at:])
			at += 8
		}
	}
	if string(encodeDurableAs(version, l, have)) != string(b) {
		return held{}, errors.New("of another layout")
	}
	if i := l.Segments(); i%64 != 0 && have.segments[i/64]>>(i%64) != 0 {
		return held{}, errors.New("bits are set after the last segment")
	}
	if i := int(l.Blocks()); i%64 != 0 && have.runs[i/64]>>(i%64) != 0 {
		return held{}, errors.New("bits are set after the last block")
	}
	return have, nil
}
