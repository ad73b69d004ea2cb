// Package inflate decompresses gzip (RFC 1952), which is what nearly all layers
// are compressed with. It takes about half of the time of the general packages
// because it decodes from one buffer into another and looks a symbol up once.
// That is a third of what ingest spends on a layer (BenchmarkReader).
//
// What it makes of a stream is what compress/gzip makes of it: any number of
// members, each with the checksum and length of its own; anything after them
// that is no member is an error.
//
// # How
//
// The input buffer is followed by zeros when the input has ended, so that
// decoding needs no check of its end for each symbol: that more was used than
// there is shows afterwards, before anything made from it is given out. The
// output buffer has room for one more match than is asked for. Codes are looked
// up in a table by their first bits, longer ones in a second one (table.go).
package inflate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// ErrCorrupt is returned, wrapped, for what is no valid gzip stream. One that
// ends too early is io.ErrUnexpectedEOF.
var ErrCorrupt = errors.New("damaged gzip stream")

const (
	window   = 32 << 10 // bytes that a match may go back
	inSize   = 64 << 10
	outSize  = 128 << 10
	maxMatch = 258
	maxName  = 511 // as compress/gzip has it
	// A turn of the loop of symbols writes at most three literals and one match,
	// the last eight bytes of which may be written too much.
	slack = 3 + maxMatch + 8
	// reach is how many bytes of input a turn of the loop may load.
	reach = 24
)

// Reader decompresses. It is for one goroutine.
type Reader struct {
	r   io.Reader
	err error // sticky, told when what is left of out is read

	in       []byte // in[pos:end] is not used yet; zeros follow at the end of the input
	pos, end int
	ended    bool   // the input has
	bits     uint64 // taken from in, the next one lowest; above count bits they may be set
	count    uint   // how many of bits are valid

	out         []byte // out[given:made] is for the caller
	given, made int
	start       int // where in out the member starts, or what is left of it
	size, sum   uint32
	summed      int // out[:summed] is in size and sum

	state     state
	last      bool // this block ends the member
	left      int  // bytes of a stored block
	lit, dist table
	lengths   [maxLit + maxDist]uint8
	members   int
}

type state byte

const (
	atHeader state = iota
	atBlock
	inStored
	inCodes
	atTrailer
)

// NewReader returns a Reader of the gzip stream in r. It may read more of r than
// the stream has.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: r, in: make([]byte, inSize+2*reach), out: make([]byte, window+outSize+slack)}
}

// Read implements io.Reader. Errors: io.EOF; io.ErrUnexpectedEOF; ErrCorrupt;
// those of the input, as they are.
func (z *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for z.given == z.made {
		if z.err != nil {
			return 0, z.err
		}
		z.err = z.more()
	}
	n := copy(p, z.out[z.given:z.made])
	z.given += n
	return n, nil
}

// more makes some output, or takes a step towards it.
func (z *Reader) more() error {
	if z.made >= window+outSize {
		z.slide()
	}
	var err error
	coded := z.state == atBlock || z.state == inCodes
	switch z.state {
	case atHeader:
		err = z.header()
	case atBlock:
		err = z.block()
	case inStored:
		err = z.stored()
	case inCodes:
		err = z.codes()
	case atTrailer:
		return z.trailer()
	}
	// Whatever is wrong with codes that lie in the zeros, it is that they are not
	// there. The last two bytes may be looked at as the start of a longer code.
	if coded && z.ended && (z.used() > z.end || err != nil && z.used() > z.end-2) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		z.made = max(z.given, z.summed) // what was made of the zeros after the end
		return err
	}
	z.sum = crc32.Update(z.sum, crc32.IEEETable, z.out[z.summed:z.made])
	z.size += uint32(z.made - z.summed)
	z.summed = z.made
	return nil
}

// slide keeps the window, and makes room.
func (z *Reader) slide() {
	n := z.made - window
	copy(z.out, z.out[n:z.made])
	z.start = max(0, z.start-n)
	z.given, z.made, z.summed = window, window, window
}

// used is the first byte of in of which no bit was used.
func (z *Reader) used() int { return z.pos - int(z.count/8) }

// ensure sees to it that a turn of any loop finds what it may load.
func (z *Reader) ensure() error {
	for z.end-z.pos < reach && !z.ended {
		// Whole bytes go back to in: align may want them.
		z.pos -= int(z.count / 8)
		z.count %= 8
		z.bits &= 1<<z.count - 1
		n := copy(z.in, z.in[z.pos:z.end])
		z.pos, z.end = 0, n
		for empty := 0; ; empty++ {
			n, err := z.r.Read(z.in[z.end:inSize])
			z.end += n
			if err == io.EOF {
				z.ended = true
				clear(z.in[z.end:])
				return nil
			}
			if err != nil {
				return err
			}
			if n > 0 {
				break
			}
			if empty > 100 {
				return io.ErrNoProgress
			}
		}
	}
	if z.used() > z.end {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// take returns the next n bits, at most 32; ensure was called less than reach
// bytes ago.
func (z *Reader) take(n uint) uint32 {
	z.refill()
	v := uint32(z.bits & (1<<n - 1))
	z.bits >>= n
	z.count -= n
	return v
}

// refill leaves at least 56 bits.
func (z *Reader) refill() {
	z.bits |= binary.LittleEndian.Uint64(z.in[z.pos:]) << z.count
	z.pos += int((63 - z.count) >> 3)
	z.count |= 56
}

// align drops the bits up to the next byte and gives whole bytes back to in.
func (z *Reader) align() {
	z.pos -= int(z.count / 8)
	z.bits, z.count = 0, 0
}

func (z *Reader) nextByte() (byte, error) {
	if err := z.ensure(); err != nil {
		return 0, err
	}
	if z.pos >= z.end {
		return 0, io.ErrUnexpectedEOF
	}
	z.pos++
	return z.in[z.pos-1], nil
}

// header reads the header of a member. The stream is at a whole byte.
func (z *Reader) header() error {
	if err := z.ensure(); err != nil {
		return err
	}
	if z.members > 0 && z.pos == z.end {
		return io.EOF
	}
	sum, header := uint32(0), [10]byte{}
	next := func() (byte, error) {
		b, err := z.nextByte()
		sum = crc32.Update(sum, crc32.IEEETable, []byte{b})
		return b, err
	}
	for i := range header {
		var err error
		if header[i], err = next(); err != nil {
			return err
		}
	}
	if header[0] != 0x1f || header[1] != 0x8b || header[2] != 8 {
		return fmt.Errorf("%w: member %d does not start like one", ErrCorrupt, z.members)
	}
	const hasSum, hasExtra, hasName, hasComment = 1 << 1, 1 << 2, 1 << 3, 1 << 4
	flags := header[3]
	if flags&hasExtra != 0 {
		low, err := next()
		if err != nil {
			return err
		}
		high, err := next()
		if err != nil {
			return err
		}
		for range int(low) | int(high)<<8 {
			if _, err := next(); err != nil {
				return err
			}
		}
	}
	for _, flag := range []byte{hasName, hasComment} {
		if flags&flag == 0 {
			continue
		}
		for n := 0; ; n++ {
			b, err := next()
			if err != nil {
				return err
			}
			if b == 0 {
				break
			}
			if n == maxName {
				return fmt.Errorf("%w: member %d has a name or comment of more than %d bytes", ErrCorrupt, z.members, maxName)
			}
		}
	}
	if flags&hasSum != 0 {
		want := uint16(sum)
		low, err := z.nextByte()
		if err != nil {
			return err
		}
		high, err := z.nextByte()
		if err != nil {
			return err
		}
		if want != uint16(low)|uint16(high)<<8 {
			return fmt.Errorf("%w: member %d: wrong checksum of its header", ErrCorrupt, z.members)
		}
	}
	z.members++
	z.start, z.size, z.sum = z.made, 0, 0
	z.state = atBlock
	return nil
}

// trailer compares what the member says of itself.
func (z *Reader) trailer() error {
	z.align()
	var b [8]byte
	for i := range b {
		var err error
		if b[i], err = z.nextByte(); err != nil {
			return err
		}
	}
	if sum, size := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:]); sum != z.sum || size != z.size {
		return fmt.Errorf("%w: member %d: wrong checksum or length", ErrCorrupt, z.members)
	}
	z.state = atHeader
	return nil
}

// endBlock goes to what follows a block.
func (z *Reader) endBlock() {
	z.state = atBlock
	if z.last {
		z.state = atTrailer
	}
}

// block reads the header of a block.
func (z *Reader) block() error {
	if err := z.ensure(); err != nil {
		return err
	}
	z.last = z.take(1) == 1
	switch kind := z.take(2); kind {
	case 0:
		z.align()
		head := z.take(32)
		z.align()
		if uint16(head) != ^uint16(head>>16) {
			return fmt.Errorf("%w: length of a stored block", ErrCorrupt)
		}
		z.left, z.state = int(head&0xffff), inStored
	case 1:
		z.fixed()
		z.state = inCodes
	case 2:
		if err := z.dynamic(); err != nil {
			return err
		}
		z.state = inCodes
	default:
		return fmt.Errorf("%w: block of unknown kind", ErrCorrupt)
	}
	return nil
}

// stored copies some of a stored block.
func (z *Reader) stored() error {
	if z.left > 0 {
		if err := z.ensure(); err != nil {
			return err
		}
		n := min(z.left, z.end-z.pos, window+outSize-z.made)
		if n <= 0 {
			return io.ErrUnexpectedEOF
		}
		z.made += copy(z.out[z.made:], z.in[z.pos:z.pos+n])
		z.pos += n
		z.left -= n
	}
	if z.left == 0 {
		z.endBlock()
	}
	return nil
}

// codes decodes symbols until the block or the room for output ends.
func (z *Reader) codes() error {
	// All of this in registers.
	in, out := z.in, z.out
	pos, bits, count := z.pos, z.bits, z.count
	made := z.made
	lit, dist := &z.lit.entries, &z.dist.entries
	distBits := z.dist.bits
	safe := z.end - reach
	if z.ended {
		safe = z.end + reach // zeros follow
	}
	save := func() { z.pos, z.bits, z.count, z.made = pos, bits, count, made }
	for made < window+outSize {
		if pos > safe {
			save()
			if err := z.ensure(); err != nil {
				return err
			}
			pos, bits, count = z.pos, z.bits, z.count
			if safe = z.end - reach; z.ended {
				safe = z.end + reach
			}
			if pos > safe {
				return io.ErrUnexpectedEOF
			}
		}
		bits |= binary.LittleEndian.Uint64(in[pos:]) << (count & 63)
		pos += int((63 - count) >> 3)
		count |= 56

		e := lit[bits&(1<<litBits-1)]
		if e&literal != 0 { // at most three times 11 bits
			bits >>= e & 63
			count -= uint(e & 63)
			out[made] = byte(e >> 16)
			made++
			e = lit[bits&(1<<litBits-1)]
			if e&literal != 0 {
				bits >>= e & 63
				count -= uint(e & 63)
				out[made] = byte(e >> 16)
				made++
				e = lit[bits&(1<<litBits-1)]
				if e&literal != 0 {
					bits >>= e & 63
					count -= uint(e & 63)
					out[made] = byte(e >> 16)
					made++
					continue
				}
			}
			bits |= binary.LittleEndian.Uint64(in[pos:]) << (count & 63)
			pos += int((63 - count) >> 3)
			count |= 56
		}
		if e&second != 0 {
			bits >>= litBits
			count -= litBits
			e = lit[(e>>16+uint32(bits)&(e>>8&0xf))&(litSize-1)]
			if e&literal != 0 {
				bits >>= e & 63
				count -= uint(e & 63)
				out[made] = byte(e >> 16)
				made++
				continue
			}
		}
		if e&(ends|bad) != 0 {
			bits >>= e & 63
			count -= uint(e & 63)
			save()
			if e&bad != 0 {
				return fmt.Errorf("%w: unknown code", ErrCorrupt)
			}
			z.endBlock()
			return nil
		}
		bits >>= e & 63
		count -= uint(e & 63)
		extra := e >> 8 & 0xf
		length := int(e>>16) + int(bits&(1<<extra-1))
		bits >>= extra
		count -= uint(extra)

		// 56 bits less at most 15 and 5: 36 for a distance of at most 15 and 13.
		e = dist[bits&(1<<distTableBits-1)]
		if e&second != 0 {
			bits >>= distTableBits
			count -= distTableBits
			e = dist[(e>>16+uint32(bits)&(1<<distBits-1))&(distSize-1)]
		}
		if e&bad != 0 {
			save()
			return fmt.Errorf("%w: unknown distance", ErrCorrupt)
		}
		bits >>= e & 63
		count -= uint(e & 63)
		extra = e >> 8 & 0xf
		d := int(e>>16) + int(bits&(1<<extra-1))
		bits >>= extra
		count -= uint(extra)

		from := made - d
		if from < z.start {
			save()
			return fmt.Errorf("%w: a distance of %d, %d bytes after the start", ErrCorrupt, d, made-z.start)
		}
		to := out[made : made+maxMatch+8]
		if d >= 8 {
			src := out[from : from+maxMatch+8]
			for i := 0; i < length; i += 8 {
				binary.LittleEndian.PutUint64(to[i:i+8], binary.LittleEndian.Uint64(src[i:i+8]))
			}
		} else {
			src := out[from : from+length]
			for i := range src {
				to[i] = src[i] // one after the other: they overlap
			}
		}
		made += length
	}
	save()
	return nil
}
