package segment

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"
)

// Sort sorts numbers by the ID that id gives for each, and those of equal IDs by
// themselves. IDs are digests, so their first bits spread them over as many buckets as there
// are numbers, nearly evenly, and little is left to compare; whoever makes IDs that begin
// alike is served like any sort.
func Sort[N ~int32 | ~uint32](numbers []N, id func(N) *ID) {
	if len(numbers) < 2 {
		return
	}
	type keyed struct {
		first  uint64 // bytes of the ID
		number N
	}
	width := bits.Len(uint(len(numbers) - 1))
	bucket := func(first uint64) int { return int(first >> (64 - width)) }
	given := make([]keyed, len(numbers))
	ends := make([]int, 1<<width)
	for i, n := range numbers {
		given[i] = keyed{binary.BigEndian.Uint64(id(n)[:]), n}
		ends[bucket(given[i].first)]++
	}
	for b := 1; b < len(ends); b++ {
		ends[b] += ends[b-1]
	}
	sorted := make([]keyed, len(numbers))
	for i := len(given) - 1; i >= 0; i-- {
		b := bucket(given[i].first)
		ends[b]-- // from now on where it begins
		sorted[ends[b]] = given[i]
	}
	for b, begin := range ends {
		end := len(sorted)
		if b+1 < len(ends) {
			end = ends[b+1]
		}
		if end-begin > 1 {
			slices.SortFunc(sorted[begin:end], func(x, y keyed) int {
				if c := cmp.Compare(x.first, y.first); c != 0 {
					return c
				}
				if c := bytes.Compare(id(x.number)[:], id(y.number)[:]); c != 0 {
					return c
				}
				return cmp.Compare(x.number, y.number)
			})
		}
	}
	for i, k := range sorted {
		numbers[i] = k.number
	}
}
