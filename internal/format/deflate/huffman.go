package deflate

import (
	"math/bits"
	"slices"
)

// code is a Huffman code, its first bit lowest, as it goes into the stream.
type code struct {
	bits uint16
	n    uint8 // bits; 0: the symbol does not occur
}

// codeMaker makes codes from frequencies. It holds memory that is used again.
type codeMaker struct {
	order []uint64 // symbols that occur: frequency<<16 | symbol, ascending
	// leaves[k][j] is how many of the first j items of row k are symbols.
	leaves     [maxCodeBits][2*literalCodes - 1]uint16
	row, above []uint32 // weights of a row, and of the next one
}

// codes sets codes[s] for each symbol s by how often it occurs. No code is longer than
// limit bits. See "Codes" in the package's documentation.
func (m *codeMaker) codes(codes []code, freq []uint32, limit int) {
	m.order = m.order[:0]
	for s, f := range freq {
		codes[s] = code{}
		if f != 0 {
			m.order = append(m.order, uint64(f)<<16|uint64(s))
		}
	}
	if len(m.order) <= 2 {
		for i, o := range m.order {
			codes[o&0xffff] = code{bits: uint16(i), n: 1}
		}
		return
	}
	slices.Sort(m.order)

	// Symbols of least weight have the longest codes.
	counts := m.lengths(min(limit, len(m.order)-1))
	next := m.order
	for n := limit; n > 0; n-- {
		for _, o := range next[:counts[n]] {
			codes[o&0xffff].n = uint8(n)
		}
		next = next[counts[n]:]
	}
	canonical(codes, counts)
}

// canonical numbers codes whose lengths are known: by length, then by symbol.
func canonical(codes []code, counts [maxCodeBits + 1]int) {
	var next [maxCodeBits + 1]uint16
	for n := 1; n < maxCodeBits; n++ {
		next[n+1] = (next[n] + uint16(counts[n])) << 1
	}
	for s := range codes {
		if n := codes[s].n; n != 0 {
			codes[s].bits = bits.Reverse16(next[n]) >> (16 - n)
			next[n]++
		}
	}
}

// lengths says how many of the symbols in m.order, of which there are at least 3,
// have a code of n bits, for each n up to limit.
func (m *codeMaker) lengths(limit int) [maxCodeBits + 1]int {
	n := len(m.order)
	items := 2*n - 2
	row, above := m.row[:0], m.above[:0]
	for i, o := range m.order {
		row = append(row, uint32(o>>16))
		m.leaves[0][i+1] = uint16(i + 1)
	}
	// From the row that does not differ from the one below it, none differs.
	top := limit - 1
	for k := 1; k < limit; k++ {
		above = m.merge(above[:0], row, k, items)
		if slices.Equal(row, above) {
			top = k
			break
		}
		row, above = above, row
	}
	m.row, m.above = row, above

	// So many symbols have at least b bits.
	var counts [maxCodeBits + 1]int
	longer := func(k, items int) int { return int(m.leaves[min(k, top)][items]) }
	at := longer(limit-1, items)
	for b := 1; b <= limit; b++ {
		items = 2 * (items - at)
		below := 0
		if b < limit {
			below = longer(limit-1-b, items)
		}
		counts[b] = at - below
		at = below
	}
	return counts
}

// merge makes row k, of at most items items, from the symbols and pairs of the row
// below. Of equal weights the pair comes first.
func (m *codeMaker) merge(row, below []uint32, k, items int) []uint32 {
	leaves := &m.leaves[k]
	symbols, pairs := m.order, below
	for taken := uint16(0); len(row) < items; {
		pair, symbol := ^uint64(0), ^uint64(0)
		if len(pairs) > 1 {
			pair = uint64(pairs[0]) + uint64(pairs[1])
		}
		if len(symbols) > 0 {
			symbol = symbols[0] >> 16
		}
		switch {
		case symbol < pair:
			row = append(row, uint32(symbol))
			symbols = symbols[1:]
			taken++
		case len(pairs) > 1:
			row = append(row, uint32(pair))
			pairs = pairs[2:]
		default:
			return row
		}
		leaves[len(row)] = taken
	}
	return row
}
