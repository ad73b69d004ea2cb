package deflate

import "encoding/binary"

const (
	quickBits  = 14
	quickBlock = 65535 // bytes of a block
	quickTail  = 15    // bytes at a block's end where no match begins
)

// quick finds matches at level 1: of the positions whose next four bytes have the same
// hash it knows one. See "Level 1".
type quick struct {
	// table is the latest position of each hash, and shift more than its place in the buffer.
	table [1 << quickBits]uint32
	shift uint32
}

func newQuick() *quick { return &quick{shift: none} }

func quickHash(v uint32) uint32 { return v * multiplier >> (32 - quickBits) }

// moved says that what was at n in the buffer is at its start now.
func (q *quick) moved(n int) {
	q.shift += uint32(n)
	if q.shift < rebaseAt {
		return
	}
	by := q.shift - none
	for i, v := range q.table {
		q.table[i] = v - min(v, by)
	}
	q.shift = none
}

// enter puts position p, where the four bytes v are, into the table, and says how far
// before p the one is that was there.
func (q *quick) enter(p int, v uint32) uint32 {
	h := &q.table[quickHash(v)]
	at := uint32(p) + q.shift
	d := at - *h
	*h = at
	return d
}

// has says whether position p, where the four bytes v are, is in the table.
func (q *quick) has(p int, v uint32) bool { return q.table[quickHash(v)] == uint32(p)+q.shift }

// at enters position p and says how far before p the same four bytes are, if the table
// had them within reach.
func (q *quick) at(buf []byte, p int) (d int, ok bool) {
	v := binary.LittleEndian.Uint32(buf[p:])
	d = int(q.enter(p, v))
	return d, d <= maxDistance && binary.LittleEndian.Uint32(buf[p-d:]) == v
}

// next looks for a match from p on, in steps that grow while there is none.
func (q *quick) next(buf []byte, p, limit int) (at, d int, ok bool) {
	for steps := 32; ; {
		step := steps >> 5
		if p+step > limit {
			return 0, 0, false
		}
		if d, ok := q.at(buf, p); ok {
			return p, d, true
		}
		p += step
		steps += step
	}
}

// matches turns a block into tokens.
func (q *quick) matches(tokens []token, buf []byte, from, to int) []token {
	limit := to - quickTail
	covered := from // by tokens
	for p := from; p < limit; {
		at, d, ok := q.next(buf, p, limit)
		if !ok {
			break
		}
		tokens = literals(tokens, buf[covered:at])
		for p = at; ok; d, ok = q.at(buf, p) {
			n := 4 + common(buf, p+4-d, p+4, min(longest-4, to-p-4))
			tokens = append(tokens, match(n, d))
			p += n
			covered = p
			if p >= limit {
				return literals(tokens, buf[covered:to])
			}
			q.enter(p-1, binary.LittleEndian.Uint32(buf[p-1:]))
		}
		p++
	}
	return literals(tokens, buf[covered:to])
}

func literals(tokens []token, plain []byte) []token {
	for _, b := range plain {
		tokens = append(tokens, token(b))
	}
	return tokens
}
