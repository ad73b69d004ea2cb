package deflate

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// Decode reads an index that Append made. It takes memory for what b has, and not more
// than some times that. The error is ErrCorrupt.
func Decode(b []byte) (*Index, error) {
	d := decoder{rest: b}
	if !bytes.HasPrefix(b, []byte(magic)) {
		return nil, corrupt("these are others")
	}
	d.rest = b[len(magic):]
	if v := d.byte(); v != version {
		return nil, corrupt("version %d; this program knows %d", v, version)
	}
	x := &Index{Level: int(d.byte()), In: d.number(maxIn), Out: d.number(maxIn)}
	if x.Level < MinLevel || x.Level > MaxLevel {
		return nil, corrupt("level %d", x.Level)
	}
	var before Point
	for n := d.number(maxIn); n > 0 && !d.bad; n-- {
		p := d.point(x.Level, before)
		if d.bad {
			break
		}
		if err := p.check(x.Level); err != nil {
			return nil, err
		}
		if p.In <= before.In || p.Out <= before.Out || p.In >= x.In || p.Out >= x.Out {
			return nil, corrupt("a point at %d of %d, %d of %d", p.In, x.In, p.Out, x.Out)
		}
		x.Points = append(x.Points, p)
		before = p
	}
	last := int64(0)
	for n := d.number(maxIn); n > 0 && !d.bad; n-- {
		more := d.number(maxIn)
		if more <= 0 || more >= x.In-last || x.Level == 1 {
			return nil, corrupt("a Write that ends %d after %d of %d at level %d", more, last, x.In, x.Level)
		}
		last += more
		x.Between = append(x.Between, last)
	}
	if d.bad || len(d.rest) > 0 {
		return nil, corrupt("%d bytes at the end", len(d.rest))
	}
	return x, nil
}

// decoder takes numbers from bytes. When something is wrong with them it becomes bad.
type decoder struct {
	rest []byte
	bad  bool
}

func (d *decoder) bytes(n int) []byte {
	if d.bad || n > len(d.rest) {
		d.bad = true
		return nil
	}
	b := d.rest[:n:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) byte() byte {
	if b := d.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// number reads a uvarint in its shortest form, at most limit.
func (d *decoder) number(limit int64) int64 {
	v, n := binary.Uvarint(d.rest)
	if d.bad || n <= 0 || n > 1 && d.rest[n-1] == 0 || v > uint64(limit) {
		d.bad = true
		return 0
	}
	d.rest = d.rest[n:]
	return int64(v)
}

func (d *decoder) point(level int, before Point) Point {
	p := Point{In: before.In + d.number(maxIn), Out: before.Out + d.number(maxIn)}
	started := d.byte()
	if started == 0 {
		d.bad = true
		return p
	}
	p.nbits = uint8(bits.Len8(started)) - 1
	p.bits = started &^ (1 << p.nbits)
	if level > 1 {
		p.reach = int(d.number(slideAt))
	}
	if p.In <= 0 || p.In > maxIn {
		d.bad = true
		return p
	}
	if hasMarks(level) {
		p.marks = d.bytes((p.History() + 7) / 8)
		if n := p.History() % 8; !d.bad && n != 0 && p.marks[len(p.marks)-1]>>n != 0 {
			d.bad = true // bits that mean nothing
		}
	} else if p.length = int(d.number(longest)); p.length != 0 {
		p.pending, p.distance = true, int(d.number(maxDistance))
	}
	return p
}
