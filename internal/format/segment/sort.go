package segment

import (
	"bytes"
	"cmp"
	"slices"
)

// Sort sorts numbers by the ID that id gives for each, and those of equal IDs by themselves.
func Sort[N ~int32 | ~uint32](numbers []N, id func(N) *ID) {
	slices.SortFunc(numbers, func(x, y N) int {
		return cmp.Or(bytes.Compare(id(x)[:], id(y)[:]), cmp.Compare(x, y))
	})
}
