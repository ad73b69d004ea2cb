package segment

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// IDs that begin alike are sorted by what follows.
func TestSort(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := make([]ID, rapid.IntRange(0, 50).Draw(t, "ids"))
		numbers := make([]int32, len(ids))
		for i := range ids {
			for _, at := range []int{0, 1, 7, 8, 31} {
				ids[i][at] = byte(rapid.IntRange(0, 2).Draw(t, "byte"))
			}
			numbers[i] = int32(len(ids) - 1 - i)
		}
		id := func(i int32) *ID { return &ids[i] }
		Sort(numbers, id)
		order := func(a, b int32) int {
			return cmp.Or(bytes.Compare(ids[a][:], ids[b][:]), cmp.Compare(a, b))
		}
		if !slices.IsSortedFunc(numbers, order) {
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

func BenchmarkSort(b *testing.B) {
	ids := make([]ID, 25000)
	for i := range ids {
		ids[i] = sha256.Sum256(binary.LittleEndian.AppendUint32(nil, uint32(i)))
	}
	numbers := make([]int32, len(ids))
	for b.Loop() {
		for i := range numbers {
			numbers[i] = int32(i)
		}
		Sort(numbers, func(i int32) *ID { return &ids[i] })
	}
}
