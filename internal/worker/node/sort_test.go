package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/segment"
)

// IDs that begin alike are sorted by what follows.
func TestSortByID(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := make([]segment.ID, rapid.IntRange(0, 50).Draw(t, "ids"))
		numbers := make([]int32, len(ids))
		for i := range ids {
			for _, at := range []int{0, 7, 8, 31} {
				ids[i][at] = byte(rapid.IntRange(0, 2).Draw(t, "byte"))
			}
			numbers[i] = int32(i)
		}
		id := func(i int32) *segment.ID { return &ids[i] }
		sortByID(numbers, id)
		if !slices.IsSortedFunc(numbers, func(a, b int32) int { return bytes.Compare(ids[a][:], ids[b][:]) }) {
			t.Fatalf("not sorted: %v", numbers)
		}
		slices.Sort(numbers)
		for i, n := range numbers {
			if n != int32(i) {
				t.Fatalf("lost or doubled: %v", numbers)
			}
		}
	})
}

func BenchmarkSortByID(b *testing.B) {
	ids := make([]segment.ID, 4000)
	for i := range ids {
		ids[i] = sha256.Sum256(binary.LittleEndian.AppendUint32(nil, uint32(i)))
	}
	numbers := make([]int32, len(ids))
	for b.Loop() {
		for i := range numbers {
			numbers[i] = int32(i)
		}
		sortByID(numbers, func(i int32) *segment.ID { return &ids[i] })
	}
}
