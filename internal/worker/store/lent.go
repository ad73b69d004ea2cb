package store

import (
	"os"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Extent is where a content lies in another arena.
type Extent struct {
	Arena int // index in what Lent returns
	Off   int64
}

// LentArena is an arena of another rootfs. It is open from the first use on.
type LentArena struct {
	reader rootfs.Arena
	// Alone: nobody else reads by way of its page cache.
	Alone bool
}

// File is the arena's, for reading.
func (l *LentArena) File() (*os.File, error) { return l.reader.File() }

// Close closes it.
func (l *LentArena) Close() error { return l.reader.Close() }

// Lent finds contents of r that lie in the arenas of others. Those in its own are
// left out. The caller keeps the arenas' rootfs.
func (s *Store) Lent(r *Rootfs, t *toc.TOC, place Placement, numbers []uint32) (at map[uint32]Extent, arenas []*LentArena) {
	own := r.Own()
	wanted := make([][]int32, len(r.Arenas())) // contents, by arena
	at = make(map[uint32]Extent)
	seen := make(map[uint32]bool)
	for _, c := range numbers {
		if seen[c] || int(place[c]) == own {
			continue
		}
		seen[c] = true
		wanted[place[c]] = append(wanted[place[c]], int32(c))
	}
	id, size := contents.Of(t)
	for i, list := range wanted {
		if len(list) == 0 {
			continue
		}
		other := s.owner(r.Arenas()[i])
		if other == nil {
			continue
		}
		src := other.Contents()
		if src == nil {
			continue
		}
		segment.Sort(list, id)
		src.List.Join(list, id, size, func(c int32, off int64, kind contents.Kind) {
			if kind != contents.Piece {
				at[uint32(c)] = Extent{len(arenas), off}
			}
		})
		alone := other.State() == rootfs.Lending || other.Mount().Direct()
		arenas = append(arenas, &LentArena{src.Arena, alone})
	}
	return at, arenas
}
