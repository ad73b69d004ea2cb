package deflate

import (
	"encoding/binary"
	"math/bits"
)

const (
	minLength   = 3   // that the format has
	shortest    = 4   // that is looked for
	longest     = 258 // bytes of a match
	maxDistance = 1 << 15
	nearShort   = 4096 // the farthest match of the shortest length

	chainBits   = 17
	chainTokens = 1 << 14 // of one block

	multiplier = 0x1e35a7bd

	// none is how far away a position is that is none.
	none = maxDistance + 1
	// rebaseAt is when positions in tables are made small again.
	rebaseAt = 1 << 31
)

// effort is what a level spends.
type effort struct {
	// lazy: a match shorter than that is given up for a longer one that begins a byte
	// later. 0: the first match is taken.
	lazy int
	// nice: a match of that length is not improved.
	nice int
	// depth is how many earlier positions are tried.
	depth int
	// insert: what lies within a longer match is not entered. Of greedy levels only.
	insert int
}

var efforts = [10]effort{
	2: {nice: 16, depth: 8, insert: 5},
	3: {nice: 32, depth: 32, insert: 6},
	4: {lazy: 4, nice: 16, depth: 16},
	5: {lazy: 16, nice: 32, depth: 32},
	6: {lazy: 16, nice: 128, depth: 128},
	7: {lazy: 32, nice: 128, depth: 256},
	8: {lazy: 128, nice: 258, depth: 1024},
	9: {lazy: 258, nice: 258, depth: 4096},
}

// chains finds matches at levels 2 to 9: all positions whose next four bytes have
// the same hash are a chain, the latest first. See "Levels 2 to 9".
type chains struct {
	effort
	// head is the latest position of each hash, and shift more than its place in the buffer.
	head  [1 << chainBits]uint32
	shift uint32
	// back[p&(maxDistance-1)] is how far before p the next position of its chain is; far,
	// if it is out of reach, and 0, if p is in no chain.
	back [maxDistance]uint16

	// What was found at the position before the next one, which is to be a literal
	// unless it begins that match. Of lazy levels only.
	pending          bool
	length, distance int
}

const far = 1<<16 - 1

func newChains(level int) *chains {
	return &chains{effort: efforts[level], shift: none, length: shortest - 1}
}

// hash4 takes the first byte as the highest.
func hash4(b []byte) uint32 {
	return binary.BigEndian.Uint32(b) * multiplier >> (32 - chainBits)
}

// enter puts position p into its chain, and says how far before p the next one
// of it is.
func (c *chains) enter(buf []byte, p int) uint32 {
	h := &c.head[hash4(buf[p:])]
	at := uint32(p) + c.shift
	d := at - *h
	*h = at
	if d > maxDistance {
		c.back[p&(maxDistance-1)] = far
	} else {
		c.back[p&(maxDistance-1)] = uint16(d)
	}
	return d
}

// has says whether position p, one of the last maxDistance ones, is in a chain.
func (c *chains) has(p int) bool { return c.back[p&(maxDistance-1)] != 0 }

// moved says that what was at n in the buffer is at its start now. N is a multiple
// of maxDistance.
func (c *chains) moved(n int) {
	c.shift += uint32(n)
	if c.shift < rebaseAt {
		return
	}
	by := c.shift - none
	for i, v := range c.head {
		c.head[i] = v - min(v, by)
	}
	c.shift = none
}

// longestAt looks for the longest match of position p, the first candidate being d
// before it. It begins no earlier than first, and has at most look bytes. The length
// is shortest-1 if there is none.
func (c *chains) longestAt(buf []byte, p int, d uint32, first, look int) (length, distance int) {
	most := min(longest, look)
	nice := min(c.nice, most)
	length = shortest - 1
	first = max(first, p-maxDistance)
	end := binary.LittleEndian.Uint32(buf[p:])
	for i, tries := p-int(d), c.depth; i >= first; tries-- {
		// What is longer has the same last four bytes.
		if binary.LittleEndian.Uint32(buf[i+length-3:]) == end {
			n := common(buf, i, p, most)
			if n > length && (n > shortest || p-i <= nearShort) {
				length, distance = n, p-i
				if n >= nice {
					break
				}
				end = binary.LittleEndian.Uint32(buf[p+length-3:])
			}
		}
		if tries == 1 {
			break
		}
		b := c.back[i&(maxDistance-1)]
		if b == far {
			break
		}
		i -= int(b)
	}
	return length, distance
}

// common is how many bytes from i and from p on are equal, at most most. The buffer has
// 8 bytes more than that.
func common(buf []byte, i, p, most int) int {
	a, b := buf[i:i+most+8], buf[p:p+most+8]
	for n := 0; n < most; n += 8 {
		x := binary.LittleEndian.Uint64(a[n:]) ^ binary.LittleEndian.Uint64(b[n:])
		if x != 0 {
			return min(n+bits.TrailingZeros64(x)/8, most)
		}
	}
	return most
}

// matches turns bytes from p on into tokens, until a block is full, or until there are
// fewer than margin bytes before end. If end is the end of all, it goes to there. It
// returns where it stopped.
func (c *chains) matches(tokens []token, buf []byte, p, first, end int, last bool) ([]token, int) {
	if c.lazy == 0 {
		return c.greedily(tokens, buf, p, first, end, last)
	}
	return c.lazily(tokens, buf, p, first, end, last)
}

// margin is how many bytes have to be known from a position on, so that those that
// follow do not matter to it.
const margin = shortest + longest

func (c *chains) greedily(tokens []token, buf []byte, p, first, end int, last bool) ([]token, int) {
	for len(tokens) < chainTokens {
		look := end - p
		if look < margin && (!last || look == 0) {
			break
		}
		length, distance := 0, 0
		if look >= shortest {
			if d := c.enter(buf, p); d <= maxDistance && p-int(d) >= first {
				length, distance = c.longestAt(buf, p, d, first, look)
			}
		}
		if length < shortest {
			tokens = append(tokens, token(buf[p]))
			p++
			continue
		}
		tokens = append(tokens, match(length, distance))
		if length <= c.insert {
			for q := p + 1; q < min(p+length, end-shortest+1); q++ {
				c.enter(buf, q)
			}
		} else {
			for q := p + 1; q < p+length; q++ {
				c.back[q&(maxDistance-1)] = 0
			}
		}
		p += length
	}
	return tokens, p
}

func (c *chains) lazily(tokens []token, buf []byte, p, first, end int, last bool) ([]token, int) {
	for len(tokens) < chainTokens {
		look := end - p
		if look < margin {
			if !last {
				break
			}
			if look == 0 {
				if c.pending {
					tokens = append(tokens, token(buf[p-1]))
					c.pending = false
				}
				break
			}
		}
		length, distance := shortest-1, 0
		if look >= shortest {
			d := c.enter(buf, p)
			if d <= maxDistance && p-int(d) >= first && look > c.length && c.length < c.lazy {
				length, distance = c.longestAt(buf, p, d, first, look)
			}
		}
		if c.length >= shortest && length <= c.length {
			// The match that begins a byte earlier is no worse.
			tokens = append(tokens, match(c.length, c.distance))
			next := p - 1 + c.length
			for q := p + 1; q < min(next, end-shortest+1); q++ {
				c.enter(buf, q)
			}
			p = next
			c.pending, c.length, c.distance = false, shortest-1, 0
			continue
		}
		if c.pending {
			tokens = append(tokens, token(buf[p-1]))
		}
		c.pending, c.length, c.distance = true, length, distance
		p++
	}
	return tokens, p
}
