// Package layertest makes layer blobs from lists that read like the files they
// hold.
//
//	blob := layertest.Layer{
//		layertest.Dir("etc", 0o755),
//		layertest.File("etc/motd", 0o644, "hello\n").Owner(0, 5),
//		layertest.Link("etc/motd2", "etc/motd"),
//		layertest.Whiteout("etc/old"),
//	}.Gzip(t)
package layertest

import (
	"archive/tar"
	"bytes"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Mtime is the time of every entry that sets none.
var Mtime = time.Unix(1_700_000_000, 0).UTC()

// Entry is one entry of a layer. The methods return a changed copy.
type Entry struct {
	Header tar.Header
	Data   string
}

// Layer is the entries of one layer, in tar order.
type Layer []Entry

// Blob is a layer as a client would push it.
type Blob struct {
	Bytes     []byte
	Digest    digest.Digest // of Bytes
	DiffID    digest.Digest // of the tar stream
	MediaType string
}

// Descriptor returns the descriptor that a manifest would hold.
func (b Blob) Descriptor() ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: b.MediaType, Digest: b.Digest, Size: int64(len(b.Bytes))}
}

func entry(typ byte, name string, mode int64) Entry {
	return Entry{Header: tar.Header{
		Typeflag: typ, Name: name, Mode: mode, ModTime: Mtime, Format: tar.FormatPAX,
	}}
}

// Dir is a directory.
func Dir(name string, mode int64) Entry {
	return entry(tar.TypeDir, strings.TrimSuffix(name, "/")+"/", mode)
}

// File is a regular file.
func File(name string, mode int64, data string) Entry {
	e := entry(tar.TypeReg, name, mode)
	e.Header.Size = int64(len(data))
	e.Data = data
	return e
}

// Symlink is a symbolic link to target.
func Symlink(name, target string) Entry {
	e := entry(tar.TypeSymlink, name, 0o777)
	e.Header.Linkname = target
	return e
}

// Link is a hard link to target, a path from the root of the layer. Its mode
// is 0644: containerd gives a link entry's metadata to the inode it names.
func Link(name, target string) Entry {
	e := entry(tar.TypeLink, name, 0o644)
	e.Header.Linkname = target
	return e
}

// Fifo is a named pipe.
func Fifo(name string, mode int64) Entry { return entry(tar.TypeFifo, name, mode) }

// Char is a character device.
func Char(name string, mode, major, minor int64) Entry {
	e := entry(tar.TypeChar, name, mode)
	e.Header.Devmajor, e.Header.Devminor = major, minor
	return e
}

// Block is a block device.
func Block(name string, mode, major, minor int64) Entry {
	e := Char(name, mode, major, minor)
	e.Header.Typeflag = tar.TypeBlock
	return e
}

// Whiteout removes name, which lies in a lower layer.
func Whiteout(name string) Entry {
	return File(path.Join(path.Dir(name), ".wh."+path.Base(name)), 0, "")
}

// Opaque hides what lower layers have in dir.
func Opaque(dir string) Entry { return File(path.Join(dir, ".wh..wh..opq"), 0, "") }

// Owner sets the user and group IDs.
func (e Entry) Owner(uid, gid int) Entry {
	e.Header.Uid, e.Header.Gid = uid, gid
	return e
}

// Mtime sets the modification time.
func (e Entry) Mtime(t time.Time) Entry {
	e.Header.ModTime = t
	return e
}

// Mode sets the permissions.
func (e Entry) Mode(mode int64) Entry {
	e.Header.Mode = mode
	return e
}

// Xattr adds an extended attribute, given with its full name.
func (e Entry) Xattr(name, value string) Entry {
	records := map[string]string{"SCHILY.xattr." + name: value}
	for k, v := range e.Header.PAXRecords {
		if _, ok := records[k]; !ok {
			records[k] = v
		}
	}
	e.Header.PAXRecords = records
	return e
}

// Format chooses the tar dialect; PAX when it is not called.
func (e Entry) Format(f tar.Format) Entry {
	e.Header.Format = f
	return e
}

// TarBytes returns the tar stream.
func (l Layer) TarBytes(t testing.TB) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range l {
		h := e.Header
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("write header of %q: %v", h.Name, err)
		}
		if _, err := w.Write([]byte(e.Data)); err != nil {
			t.Fatalf("write %q: %v", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// Tar is the layer without compression.
func (l Layer) Tar(t testing.TB) Blob {
	t.Helper()
	return TarBlob(l.TarBytes(t))
}

// Gzip is the layer in one gzip member.
func (l Layer) Gzip(t testing.TB) Blob {
	t.Helper()
	return GzipBlob(t, l.TarBytes(t))
}

// Zstd is the layer in one zstd frame.
func (l Layer) Zstd(t testing.TB) Blob {
	t.Helper()
	return ZstdBlob(t, l.TarBytes(t))
}

// TarBlob is a blob of a tar stream that was made elsewhere.
func TarBlob(tarball []byte) Blob {
	d := digest.FromBytes(tarball)
	return Blob{Bytes: tarball, Digest: d, DiffID: d, MediaType: ocispec.MediaTypeImageLayer}
}

// GzipBlob compresses a tar stream: one gzip member, or, when cuts are given,
// one more after each of these offsets.
func GzipBlob(t testing.TB, tarball []byte, cuts ...int) Blob {
	t.Helper()
	var buf bytes.Buffer
	for _, part := range split(tarball, cuts) {
		w := gzip.NewWriter(&buf)
		if _, err := w.Write(part); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return compressed(buf.Bytes(), tarball, ocispec.MediaTypeImageLayerGzip)
}

// ZstdBlob compresses a tar stream: one zstd frame, or, when cuts are given,
// one more after each of these offsets.
func ZstdBlob(t testing.TB, tarball []byte, cuts ...int) Blob {
	t.Helper()
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	var out []byte
	for _, part := range split(tarball, cuts) {
		out = enc.EncodeAll(part, out)
	}
	return compressed(out, tarball, ocispec.MediaTypeImageLayerZstd)
}

func split(b []byte, cuts []int) [][]byte {
	var parts [][]byte
	at := 0
	for _, c := range cuts {
		parts = append(parts, b[at:c])
		at = c
	}
	return append(parts, b[at:])
}

func compressed(blob, tarball []byte, mediaType string) Blob {
	return Blob{
		Bytes: blob, Digest: digest.FromBytes(blob), DiffID: digest.FromBytes(tarball),
		MediaType: mediaType,
	}
}
