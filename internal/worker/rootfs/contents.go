package rootfs

import (
	"os"

	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
)

// Contents is a rootfs's own arena, for those who have contents of it.
type Contents struct {
	List  *contents.List
	Holds func(off, size int64) bool // whether that is here
	// Verified reports whether all segments of a place are here, each compared with its ID: pages that came before
	// their segments are here already.
	Verified func(off, size int64) bool
	Arena    // reads it
}

// Contents returns nil when it is not known what the arena holds. What it returns may be used while
// the rootfs is.
func (r *Rootfs) Contents() *Contents {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.contents == nil {
		return nil
	}
	src := &Contents{List: r.contents}
	switch {
	case r.rec.Complete || r.state == Lending:
		src.Holds = func(int64, int64) bool { return true }
		src.Verified = src.Holds
	case r.arena != nil:
		src.Holds, src.Verified = r.arena.Present, r.arena.Verified
	default:
		src.Holds = func(int64, int64) bool { return false }
		src.Verified = src.Holds
	}
	// One behind the gate is read through the descriptor that the gate leaves
	// alone; a complete one as any file is.
	switch {
	case r.arena != nil:
		src.file = r.arena.File()
	case r.retired != nil:
		src.file = r.retired.File()
	default:
		src.path = r.Path("arena")
	}
	return src
}

// Arena opens the file of an arena at the first read.
type Arena struct {
	path string   // empty: file is the arena's own
	file *os.File // nil until it is open
}

// File is the arena's, for reading.
func (a *Arena) File() (f *os.File, err error) {
	if a.file == nil {
		if f, err = os.Open(a.path); err != nil {
			return nil, err
		}
		a.file = f
	}
	return a.file, nil
}

// ReadAt implements io.ReaderAt.
func (a *Arena) ReadAt(b []byte, off int64) (int, error) {
	f, err := a.File()
	if err != nil {
		return 0, err
	}
	return f.ReadAt(b, off)
}

// Close closes what was opened.
func (a *Arena) Close() error {
	if a.file == nil || a.path == "" {
		return nil
	}
	return a.file.Close()
}

// CopySegment fills segment i of an arena with what is at off, which is compared with the segment's ID. buf has
// room for it.
func (c *Contents) CopySegment(to *arena.Arena, i int, off int64, buf []byte) error {
	b := buf[:to.Layout().Segment(i).Length]
	if _, err := c.ReadAt(b, off); err != nil {
		return err
	}
	return to.WriteSegment(i, b)
}
