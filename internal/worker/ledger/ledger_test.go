package ledger

import (
	"slices"
	"testing"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

func TestRemains(t *testing.T) {
	const block = arena.BlockSize
	var l Ledger
	base, app, other, lender := new(rootfs.Rootfs), new(rootfs.Rootfs), new(rootfs.Rootfs), new(rootfs.Rootfs)
	type needed = map[*rootfs.Rootfs][]arena.Range
	l.Enter(base, false, Entry{Size: 100 * block, Needed: needed{
		// Two need the same content, and one another; a part of a block is a block.
		app:   {{Off: 0, Len: block}, {Off: 8 * block, Len: 3*block + 1}},
		other: {{Off: 8 * block, Len: 3*block + 1}},
	}})
	l.Enter(app, false, Entry{Size: 10 * block})
	l.Enter(other, false, Entry{Size: 20 * block})
	l.Enter(lender, true, Entry{Size: 50 * block, Needed: needed{app: nil}, Blind: true})
	type gone = map[*rootfs.Rootfs]bool
	for _, tt := range []struct {
		name string
		gone gone
		want int64 // blocks
	}{
		{"all are here", nil, 100 + 10 + 20 + 50},
		{"what others need of it stays", gone{base: true}, 5 + 10 + 20 + 50},
		{"one needs something less", gone{base: true, app: true}, 4 + 20},
		{"nobody needs it", gone{base: true, app: true, other: true}, 0},
		{"whose need is not known, of him all stays", gone{base: true, other: true}, 5 + 10 + 50},
	} {
		if got := l.Remains(tt.gone); got != tt.want*block {
			t.Errorf("%s: %d bytes, want %d blocks", tt.name, got, tt.want)
		}
	}
	if list := l.Borrowers(base, gone{app: true}); !slices.Equal(list, []*rootfs.Rootfs{other}) {
		t.Errorf("borrowers of %p: %v", base, list)
	}
	// Never more than it takes.
	l.Enter(base, false, Entry{Size: block, Needed: needed{app: {{Off: 0, Len: 9 * block}}}})
	if got := l.Lends(base, nil); got != block {
		t.Errorf("it lends %d bytes of its %d", got, block)
	}
}
