package layer

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// The entry list of a layer is an object of its own, written while the layer is
// read and read once for every rootfs that is flattened from it.
//
// It is the eight bytes listMagic, then one zstd frame with records, then
// nothing. Numbers are unsigned varints unless said otherwise. A record is its
// length in bytes, not 0, and:
//
//	type           1 byte (Type)
//	shared, rest   the name: so many bytes of the previous record's name, and
//	               then a length and that many bytes
//	Global         nothing more; every other type:
//	mode, uid, gid
//	mtime          signed varint, seconds; then nanoseconds, unsigned
//	xattrs         how many; each: length, name, length, value; sorted by name
//	Symlink, HardLink       length, link
//	CharDevice, BlockDevice major, minor
//	Regular        size; when that is not 0: the content's ID (32 bytes), how
//	               many segments, and of each length<<1, +1 for a hole, and then
//	               its ID (32 bytes) if it is neither a hole nor the only one
//
// The last record has length 0. After it come the number of records before it
// (8 bytes, little-endian) and the SHA-256 of everything in the zstd frame up to
// and with that number.
const listMagic = "hfentry\x01"

// maxRecord bounds a record: names and link, 64 KiB of attributes by default,
// and the segments of the largest file (256 GiB in pieces of 128 KiB and up is
// 80 MiB; what Options allows by default, most of it holes, is far less).
const maxRecord = 128 << 20

// ListWriter writes an entry list. It holds one record at a time, so what it
// needs is bounded by the segments of one file: 36 bytes for each.
type ListWriter struct {
	z     *zstd.Encoder
	w     *bufio.Writer
	sum   hash.Hash
	count uint64
	last  string
	buf   []byte
}

// NewListWriter starts a list on w.
func NewListWriter(w io.Writer) (*ListWriter, error) {
	if _, err := io.WriteString(w, listMagic); err != nil {
		return nil, fmt.Errorf("write entry list: %w", err)
	}
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(listWindow), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("write entry list: %w", err)
	}
	l := &ListWriter{z: z, sum: sha256.New()}
	l.w = bufio.NewWriterSize(io.MultiWriter(z, l.sum), 64<<10)
	return l, nil
}

const listWindow = 1 << 20

// Write adds an entry, which it does not check.
func (l *ListWriter) Write(e *Entry) error {
	b := l.buf[:0]
	b = append(b, byte(e.Type))
	shared := 0
	for shared < len(e.Name) && shared < len(l.last) && e.Name[shared] == l.last[shared] {
		shared++
	}
	l.last = e.Name
	b = binary.AppendUvarint(b, uint64(shared))
	b = appendString(b, e.Name[shared:])
	if e.Type != Global {
		b = binary.AppendUvarint(b, uint64(e.Mode))
		b = binary.AppendUvarint(b, uint64(e.UID))
		b = binary.AppendUvarint(b, uint64(e.GID))
		b = binary.AppendVarint(b, e.Mtime)
		b = binary.AppendUvarint(b, uint64(e.MtimeNsec))
		b = binary.AppendUvarint(b, uint64(len(e.Xattrs)))
		for _, x := range e.Xattrs {
			b = appendString(b, x.Name)
			b = binary.AppendUvarint(b, uint64(len(x.Value)))
			b = append(b, x.Value...)
		}
	}
	switch e.Type {
	case Symlink, HardLink:
		b = appendString(b, e.Link)
	case CharDevice, BlockDevice:
		b = binary.AppendUvarint(b, uint64(e.Major))
		b = binary.AppendUvarint(b, uint64(e.Minor))
	case Regular:
		b = binary.AppendUvarint(b, uint64(e.Size))
		if e.Size == 0 {
			break
		}
		b = append(b, e.Content[:]...)
		b = binary.AppendUvarint(b, uint64(len(e.Segments)))
		for _, s := range e.Segments {
			n := uint64(s.Length) << 1
			if s.ID.IsHole() {
				n |= 1
			}
			b = binary.AppendUvarint(b, n)
			if !s.ID.IsHole() && len(e.Segments) > 1 {
				b = append(b, s.ID[:]...)
			}
		}
	}
	l.buf = b
	if len(b) > maxRecord {
		return fmt.Errorf("write entry list: entry %q: record of %d bytes, at most %d are possible", shorten(e.Name), len(b), maxRecord)
	}
	var n [binary.MaxVarintLen64]byte
	l.count++
	if _, err := l.w.Write(n[:binary.PutUvarint(n[:], uint64(len(b)))]); err != nil {
		return fmt.Errorf("write entry list: %w", err)
	}
	if _, err := l.w.Write(b); err != nil {
		return fmt.Errorf("write entry list: %w", err)
	}
	return nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// Close ends the list. It does not close the writer below.
func (l *ListWriter) Close() error {
	end := binary.LittleEndian.AppendUint64([]byte{0}, l.count)
	l.w.Write(end) //nolint:errcheck // Flush returns it
	if err := l.w.Flush(); err != nil {
		return fmt.Errorf("write entry list: %w", err)
	}
	if _, err := l.z.Write(l.sum.Sum(nil)); err != nil {
		return fmt.Errorf("write entry list: %w", err)
	}
	if err := l.z.Close(); err != nil {
		return fmt.Errorf("write entry list: %w", err)
	}
	return nil
}

// ErrBadList is returned, wrapped, for an entry list that is damaged.
var ErrBadList = errors.New("damaged entry list")

// ListReader reads an entry list.
type ListReader struct {
	z     *zstd.Decoder
	r     *bufio.Reader
	sum   hash.Hash
	count uint64
	last  string
	buf   []byte
	err   error
}

// NewListReader starts to read a list from r. The reader must be closed.
func NewListReader(r io.Reader) (*ListReader, error) {
	magic := make([]byte, len(listMagic))
	if _, err := io.ReadFull(r, magic); err != nil {
		return nil, fmt.Errorf("read entry list: %w", err)
	}
	if string(magic) != listMagic {
		return nil, fmt.Errorf("read entry list: %w: it starts with %q", ErrBadList, magic)
	}
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(listWindow))
	if err != nil {
		return nil, fmt.Errorf("read entry list: %w", err)
	}
	return &ListReader{z: z, r: bufio.NewReaderSize(z, 64<<10), sum: sha256.New()}, nil
}

// Close frees what the reader holds. It does not close the reader below.
func (l *ListReader) Close() { l.z.Close() }

// Next returns the next entry, which is the caller's, or io.EOF after the last
// one, when the list's checksum was found right. Errors: ErrBadList, and those
// of the reader below.
func (l *ListReader) Next() (*Entry, error) {
	if l.err != nil {
		return nil, l.err
	}
	e, err := l.next()
	if err != nil {
		if err != io.EOF {
			err = fmt.Errorf("read entry list: record %d: %w", l.count, err)
		}
		l.err = err
		return nil, err
	}
	return e, nil
}

func (l *ListReader) next() (*Entry, error) {
	n, err := binary.ReadUvarint(l.r)
	if err != nil {
		return nil, noEOF(err)
	}
	var prefix [binary.MaxVarintLen64]byte
	l.sum.Write(prefix[:binary.PutUvarint(prefix[:], n)])
	if n == 0 {
		return nil, l.end()
	}
	if n > maxRecord {
		return nil, fmt.Errorf("%w: record of %d bytes", ErrBadList, n)
	}
	if l.buf, err = readN(l.r, l.buf[:0], int(n)); err != nil {
		return nil, err
	}
	l.sum.Write(l.buf)
	l.count++
	e, err := l.parse(l.buf)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadList, err)
	}
	l.last = e.Name
	return e, nil
}

func (l *ListReader) end() error {
	var end [8 + sha256.Size]byte
	if _, err := io.ReadFull(l.r, end[:]); err != nil {
		return noEOF(err)
	}
	l.sum.Write(end[:8])
	if n := binary.LittleEndian.Uint64(end[:]); n != l.count {
		return fmt.Errorf("%w: it has %d records and says %d", ErrBadList, l.count, n)
	}
	if !bytes.Equal(l.sum.Sum(nil), end[8:]) {
		return fmt.Errorf("%w: wrong checksum", ErrBadList)
	}
	if _, err := l.r.ReadByte(); err != io.EOF {
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: something follows its end", ErrBadList)
	}
	return io.EOF
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readN appends n bytes to b without believing n before they are there.
func readN(r io.Reader, b []byte, n int) ([]byte, error) {
	for n > 0 {
		m := min(n, 64<<10)
		at := len(b)
		b = append(b, make([]byte, m)...)
		if _, err := io.ReadFull(r, b[at:]); err != nil {
			return b, noEOF(err)
		}
		n -= m
	}
	return b, nil
}

var errShort = errors.New("record ends early")

// fields takes a record apart; the first failure sticks.
type fields struct {
	b   []byte
	err error
}

func (f *fields) uvarint(most uint64) uint64 {
	v, n := binary.Uvarint(f.b)
	if n <= 0 || v > most {
		f.fail()
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) varint() int64 {
	v, n := binary.Varint(f.b)
	if n <= 0 {
		f.fail()
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) bytes(n uint64) []byte {
	if n > uint64(len(f.b)) {
		f.fail()
		return nil
	}
	b := f.b[:n]
	f.b = f.b[n:]
	return b
}

func (f *fields) string() string { return string(f.bytes(f.uvarint(maxRecord))) }

func (f *fields) id() (id segment.ID) {
	copy(id[:], f.bytes(uint64(len(id))))
	return id
}

func (f *fields) fail() {
	if f.err == nil {
		f.err = errShort
	}
	f.b = nil
}

func (l *ListReader) parse(record []byte) (*Entry, error) {
	f := &fields{b: record}
	e := &Entry{}
	if t := f.bytes(1); t != nil {
		e.Type = Type(t[0])
	}
	if e.Type < Regular || e.Type > Global {
		return nil, fmt.Errorf("entry of %v", e.Type)
	}
	shared := f.uvarint(uint64(len(l.last)))
	e.Name = l.last[:shared] + f.string()
	if e.Type != Global {
		e.Mode = uint32(f.uvarint(0o7777))
		e.UID = uint32(f.uvarint(1<<32 - 1))
		e.GID = uint32(f.uvarint(1<<32 - 1))
		e.Mtime = f.varint()
		e.MtimeNsec = uint32(f.uvarint(999_999_999))
		for range f.uvarint(uint64(len(f.b))) {
			x := toc.Xattr{Name: f.string()}
			x.Value = append([]byte{}, f.bytes(f.uvarint(maxXattrValue))...)
			if f.err != nil {
				return nil, f.err
			}
			if n := len(e.Xattrs); n > 0 && e.Xattrs[n-1].Name >= x.Name {
				return nil, fmt.Errorf("extended attributes out of order at %q", shorten(x.Name))
			}
			if keep, err := CheckXattr(x.Name, x.Value); err != nil {
				return nil, err
			} else if !keep {
				return nil, fmt.Errorf("extended attribute %q, which no list keeps", shorten(x.Name))
			}
			e.Xattrs = append(e.Xattrs, x)
		}
	}
	switch e.Type {
	case Symlink:
		e.Link = f.string()
		if f.err == nil && (len(e.Link) == 0 || len(e.Link) > maxPath || bytes.IndexByte([]byte(e.Link), 0) >= 0) {
			return nil, fmt.Errorf("symlink target %q", shorten(e.Link))
		}
	case HardLink:
		e.Link = f.string()
		if f.err == nil {
			if err := checkClean(e.Link); err != nil {
				return nil, err
			}
		}
	case CharDevice, BlockDevice:
		e.Major = uint32(f.uvarint(maxMajor))
		e.Minor = uint32(f.uvarint(maxMinor))
	case Regular:
		if e.Size = int64(f.uvarint(1<<63 - 1)); e.Size > 0 {
			if err := e.parseContent(f); err != nil {
				return nil, err
			}
		}
	}
	if f.err != nil {
		return nil, f.err
	}
	if len(f.b) > 0 {
		return nil, fmt.Errorf("%d bytes more than the record needs", len(f.b))
	}
	return e, checkClean(e.Name)
}

func (e *Entry) parseContent(f *fields) error {
	e.Content = f.id()
	n := f.uvarint(uint64(len(f.b))) // each takes a byte at least
	e.Segments = make([]Segment, 0, n)
	total := int64(0)
	for range n {
		v := f.uvarint(segment.MaxLength<<1 | 1)
		s := Segment{Length: uint32(v >> 1)}
		if v&1 == 0 {
			if s.ID = e.Content; n > 1 {
				s.ID = f.id()
			}
			if f.err == nil && s.ID.IsHole() {
				return errors.New("segment with the ID of a hole")
			}
		}
		if f.err == nil && s.Length == 0 {
			return errors.New("empty segment")
		}
		total += int64(s.Length)
		e.Segments = append(e.Segments, s)
	}
	if f.err == nil && total != e.Size {
		return fmt.Errorf("segments of %d bytes in a file of %d", total, e.Size)
	}
	if f.err == nil && e.Content.IsHole() {
		return errors.New("content with the ID of a hole")
	}
	return f.err
}
