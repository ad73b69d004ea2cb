package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
)

// Range is a part of an arena, in bytes.
type Range struct{ Off, Len int64 }

// Punch gives back to the filesystem what an arena holds outside of keep:
// disjoint ranges, ascending, each beginning at a multiple of BlockSize. It
// returns how many bytes that freed. The file keeps its size.
//
// The arena must not be open, and no mount may refer to what is not kept. The
// maps go first, durably: from then on nothing in the arena is believed to be
// present because of them, and only who remembers what was kept can use it.
func Punch(dir string, keep []Range) (freed int64, err error) {
	path := filepath.Join(dir, FileName)
	what := func(err error) error { return fmt.Errorf("free what is not needed of arena %s: %w", dir, err) }
	_, err = removeMaps(dir)
	if err = errors.Join(err, durable.Sync(dir)); err != nil {
		return 0, what(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, what(err)
	}
	defer f.Close()
	before, err := allocated(f)
	if err != nil {
		return 0, what(err)
	}
	st, err := f.Stat()
	if err != nil {
		return 0, what(err)
	}
	at := int64(0)
	for _, r := range append(keep[:len(keep):len(keep)], Range{Off: st.Size()}) {
		if r.Off < at || r.Off%BlockSize != 0 || r.Off > st.Size() {
			return 0, what(fmt.Errorf("%d bytes to keep at %d, after %d of %d: not disjoint, ascending blocks", r.Len, r.Off, at, st.Size()))
		}
		if r.Off > at {
			if err := punch(f, at, r.Off-at); err != nil {
				return 0, what(fmt.Errorf("punch a hole of %d bytes at %d: %w", r.Off-at, at, err))
			}
		}
		at = (r.Off + r.Len + BlockSize - 1) / BlockSize * BlockSize
	}
	after, err := allocated(f)
	if err != nil {
		return 0, what(err)
	}
	return max(0, before-after), nil
}

func punch(f *os.File, off, n int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// allocated returns how many bytes a file takes on the disk.
func allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return st.Blocks * 512, nil
}
