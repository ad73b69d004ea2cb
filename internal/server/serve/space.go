package serve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// A full disk is a trap if deleting needs room: a deletion writes to the journal and to the catalog, and compaction
// writes a pack before it removes others. So a reserve is kept: what brings bytes (uploads, ingest) is refused when less
// is free, and a file of half of that size is there to be removed when others have filled the disk all the same.

// DefaultReserve is the reserve, bytes; of a small disk it is a fiftieth.
const DefaultReserve = 128 << 20

// space watches the disk of the root.
type space struct {
	root    string
	reserve int64
	free    func() (free, total int64, err error) // bytes, for whom the server runs as

	mu sync.Mutex // orders what is done with the file, is held over I/O
}

func newSpace(root string, reserve int64) *space {
	s := &space{root: root, reserve: max(0, reserve)}
	s.free = func() (int64, int64, error) {
		var f unix.Statfs_t
		if err := unix.Statfs(root, &f); err != nil {
			return 0, 0, fmt.Errorf("ask for the free space of %s: %w", root, err)
		}
		return int64(f.Bavail) * f.Bsize, int64(f.Blocks) * f.Bsize, nil
	}
	if reserve == 0 || reserve == DefaultReserve {
		s.reserve = DefaultReserve
		if _, total, err := s.free(); err == nil {
			s.reserve = min(s.reserve, total/50)
		}
	}
	return s
}

func (s *space) file() string { return filepath.Join(s.root, "reserve") }

// refill makes the file, if there is room enough.
func (s *space) refill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.reserve / 2
	info, err := os.Stat(s.file())
	if err == nil && info.Size() == size {
		return nil
	}
	if size == 0 {
		if err := os.Remove(s.file()); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	if free, _, err := s.free(); err != nil || free < 3*s.reserve {
		return err
	}
	f, err := os.OpenFile(s.file(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err = f.Truncate(size); err == nil {
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSPC) {
		err = os.Remove(s.file()) // a file that holds no room is none
	}
	return err
}

// spend removes the file when less than half of the reserve is free: what is done now frees something.
func (s *space) spend() error {
	free, _, err := s.free()
	if err != nil || free >= s.reserve/2 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Remove(s.file()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// full is nil while there is more than the reserve.
func (s *space) full() error {
	free, _, err := s.free()
	if err == nil && free < s.reserve {
		err = fmt.Errorf("%w: %d bytes are free, and the last %d are for deleting and collecting (--reserve)", unix.ENOSPC, free, s.reserve)
	}
	return err
}

// room makes room for a request: one that adds bytes leaves the reserve, one that frees some may use it.
func (s *space) room(adds bool) error {
	if adds {
		return s.full()
	}
	return s.spend()
}

// low says what is wrong before pushes are refused; empty: nothing is.
func (s *space) low() string {
	free, total, err := s.free()
	switch {
	case err != nil:
		return err.Error()
	case free < s.reserve:
		return fmt.Sprintf("disk full: %d bytes are free; pushes are refused: delete images (foil server delete, then foil server gc now --purge), or make the disk larger", free)
	case free < 4*s.reserve || free < total/20:
		return fmt.Sprintf("disk low: %d of %d bytes are free; pushes are refused below %d: delete images, or make the disk larger", free, total, s.reserve)
	}
	return ""
}

func (s *space) metrics() []prometheus.Collector {
	gauge := func(name, help string, value func(free, total int64) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			free, total, err := s.free()
			if err != nil {
				return 0
			}
			return value(free, total)
		})
	}
	return []prometheus.Collector{
		gauge("foil_serve_disk_free_bytes", "Bytes that the server can still write to the disk of its root.", func(free, _ int64) float64 { return float64(free) }),
		gauge("foil_serve_disk_bytes", "Size of the disk of the server's root.", func(_, total int64) float64 { return float64(total) }),
		gauge("foil_serve_disk_low", "1 while little is free, so that pushes are refused soon, or are by now.", func(int64, int64) float64 {
			if s.low() != "" {
				return 1
			}
			return 0
		}),
	}
}
