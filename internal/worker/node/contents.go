package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
)

// The contents file of a rootfs lists what its own arena holds, sorted, so that
// another image's pull finds in one merge what it can use in place. It is
// derived from the TOC and the placement file, and is mapped, not read: a worker
// with many images keeps none of this in its heap.
//
//	 8 bytes  magic "FOILCNT1"
//	32 bytes  SHA-256 of all records
//	40 bytes  each record: ID (32), offset in the arena (8, little-endian)
//
// A record is a whole content or, with bit 63 of its offset set, one segment of
// a content that has several. Records are sorted by ID, and a content before a
// segment of the same ID. A file with another length, magic or digest is made
// again: a wrong offset would be a wrong byte in another image.
const contentsMagic = "FOILCNT1"

const (
	contentsRecord = 40
	contentsHeader = len(contentsMagic) + sha256.Size
)

// contents is a mapped contents file.
type contents struct{ data []byte }

// pieceBit marks the record of a segment that is not a whole content.
const pieceBit = 1 << 63

// writeContents lists what lies in the rootfs's own arena, laid out by l.
func writeContents(path string, t *toc.TOC, l *arena.Layout) error {
	type record struct {
		id  *segment.ID
		off uint64
	}
	// Contents before pieces, both in the order of their places: it decides between equal IDs.
	recs := make([]record, 0, l.Segments())
	for i := range t.Contents {
		if off, ok := l.Offset(i); ok {
			recs = append(recs, record{&t.Contents[i].ID, uint64(off)})
		}
	}
	for i := range t.Contents {
		c := &t.Contents[i]
		off, ok := l.Offset(i)
		if !ok || c.Segments == 1 {
			continue
		}
		for k := c.First; k < c.First+c.Segments; k++ {
			if s := &t.Segments[k]; !s.ID.IsHole() {
				recs = append(recs, record{&s.ID, uint64(off+s.Offset) | pieceBit})
			}
		}
	}
	order := make([]uint32, len(recs))
	for i := range order {
		order[i] = uint32(i)
	}
	segment.Sort(order, func(i uint32) *segment.ID { return recs[i].id })
	b := make([]byte, contentsHeader, contentsHeader+len(recs)*contentsRecord)
	for _, i := range order {
		b = append(b, recs[i].id[:]...)
		b = binary.LittleEndian.AppendUint64(b, recs[i].off)
	}
	digest := sha256.Sum256(b[contentsHeader:])
	copy(b, contentsMagic)
	copy(b[len(contentsMagic):], digest[:])
	return os.WriteFile(path, b, 0o600)
}

// openContents maps a contents file, and believes it or says why not.
func openContents(path string) (*contents, error) {
	c, err := mapContents(path)
	if err != nil {
		return nil, err
	}
	if err := checkContents(c.data); err != nil {
		c.close()
		return nil, fmt.Errorf("contents file %s: %w", path, err)
	}
	return c, nil
}

// mapContents maps a contents file that was just written.
func mapContents(path string) (*contents, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	n := fi.Size()
	if n < int64(contentsHeader) || (n-int64(contentsHeader))%contentsRecord != 0 {
		return nil, fmt.Errorf("contents file %s: %d bytes is no length it can have", path, n)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(n), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map contents file %s: %w", path, err)
	}
	return &contents{data}, nil
}

// checkContents believes a contents file or says why not.
func checkContents(data []byte) error {
	if len(data) < contentsHeader || (len(data)-contentsHeader)%contentsRecord != 0 {
		return fmt.Errorf("%d bytes is no length it can have", len(data))
	}
	if string(data[:len(contentsMagic)]) != contentsMagic {
		return errors.New("not one of ours")
	}
	if sha256.Sum256(data[contentsHeader:]) != [sha256.Size]byte(data[len(contentsMagic):]) {
		return errors.New("damaged: its digest is another")
	}
	return nil
}

func (c *contents) close() {
	if c != nil && c.data != nil {
		_ = unix.Munmap(c.data)
		c.data = nil
	}
}

func (c *contents) len() int { return (len(c.data) - contentsHeader) / contentsRecord }

func (c *contents) id(i int) []byte {
	at := contentsHeader + i*contentsRecord
	return c.data[at : at+len(segment.ID{})]
}

func (c *contents) offset(i int) (off int64, piece bool) {
	at := contentsHeader + i*contentsRecord + len(segment.ID{})
	v := binary.LittleEndian.Uint64(c.data[at:])
	return int64(v &^ pieceBit), v&pieceBit != 0
}

// only returns the bytes of a contents file that lists what lies in keep: whole
// contents, in the order of their places.
func (c *contents) only(keep []arena.Range) ([]byte, error) {
	b := make([]byte, contentsHeader)
	for i := range c.len() {
		off, _ := c.offset(i)
		k := sort.Search(len(keep), func(k int) bool { return keep[k].Off > off }) - 1
		if k >= 0 && off < keep[k].Off+keep[k].Len {
			at := contentsHeader + i*contentsRecord
			b = append(b, c.data[at:at+contentsRecord]...)
		}
	}
	digest := sha256.Sum256(b[contentsHeader:])
	copy(b, contentsMagic)
	copy(b[len(contentsMagic):], digest[:])
	return b, checkContents(b)
}

// join calls fn for every ID wanted that this arena holds, once for each place
// that holds it. want lists numbers sorted by the ID that id gives for them.
func (c *contents) join(want []int32, id func(int32) *segment.ID, fn func(want int32, offset int64, piece bool)) {
	at, n := 0, c.len()
	for _, w := range want {
		wid := id(w)
		for at < n && bytes.Compare(c.id(at), wid[:]) < 0 {
			at++
		}
		for k := at; k < n && bytes.Equal(c.id(k), wid[:]); k++ {
			off, piece := c.offset(k)
			fn(w, off, piece)
		}
	}
}

// writeFileAtomic makes path hold data, or what it held before, after a crash
// at any instant.
func writeFileAtomic(path string, data []byte) error {
	f, err := stage(path, data)
	if err == nil {
		err = f.put()
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// staged is a file that is on the disk under a name of its own, until put gives
// it its place, or drop removes it.
type staged struct{ path, tmp string }

func stage(path string, data []byte) (s staged, err error) {
	if s, err = stageFast(path, data); err != nil {
		return s, err
	}
	if err := syncFile(s.tmp); err != nil {
		s.drop()
		return s, err
	}
	return s, nil
}

func stageFast(path string, data []byte) (s staged, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return s, err
	}
	s = staged{path, f.Name()}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		s.drop()
		return s, fmt.Errorf("write %s: %w", path, err)
	}
	return s, nil
}

func (s staged) put() error {
	err := os.Rename(s.tmp, s.path)
	if err != nil {
		s.drop()
	}
	return err
}

func (s staged) drop() { _ = os.Remove(s.tmp) }

// replaceFile makes path hold data, or what it held before, whenever the daemon
// is killed. A power cut may leave an empty file, until the file and its directory
// are synced.
func replaceFile(path string, data []byte) error {
	f, err := stageFast(path, data)
	if err != nil {
		return err
	}
	return f.put()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync directory %s: %w", dir, err), d.Close())
	}
	return d.Close()
}
