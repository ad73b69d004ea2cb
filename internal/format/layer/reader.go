package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/recipe"
)

// Descriptor says which layer is read.
//
// If Digest is DiffID, the blob is the tar stream itself: it is taken as it is, and
// hashed once.
type Descriptor struct {
	Digest digest.Digest // of the blob
	Size   int64         // of the blob, bytes; 0: not known
	DiffID digest.Digest // of the tar stream; empty: not known
}

// Reader reads the entries of a layer blob, and the files in it. It is for one
// goroutine, and must be closed.
type Reader struct {
	desc    Descriptor
	opts    Options
	stream  *stream
	below   io.Reader // of tar: stream, or what records it
	tar     *tar.Reader
	recipe  *recipe.Writer // nil: nobody records
	entry   string         // the name of the entry at hand, as the layer has it
	entries int64
	files   int64
	content int64 // bytes of all files so far, as their headers say
	read    int64 // bytes of files read so far
	done    bool  // the stream was read to its end
	err     error // sticky
}

// NewReader returns a Reader of the blob that r reads, from its first byte to
// its last. The digest of d must be valid; its algorithm that of a known hash.
func NewReader(ctx context.Context, r io.Reader, d Descriptor, o Options) (*Reader, error) {
	if err := d.Digest.Validate(); err != nil {
		return nil, fmt.Errorf("read layer %q: %w", d.Digest, err)
	}
	diff := digest.SHA256
	if d.DiffID != "" {
		if err := d.DiffID.Validate(); err != nil {
			return nil, fmt.Errorf("read layer %s: diff ID %q: %w", d.Digest, d.DiffID, err)
		}
		diff = d.DiffID.Algorithm()
	}
	o = o.withDefaults()
	s := newStream(ctx, r, d.Digest.Algorithm(), diff, d.Digest == d.DiffID, o)
	return &Reader{desc: d, opts: o, stream: s, below: s, tar: tar.NewReader(s)}, nil
}

// Record has w make the recipe of the tar stream; contents are numbered as in the
// entry list of what Next returns. It is called before Next. The caller closes w
// when Next returned io.EOF; what else it returns makes the recipe worthless.
func (r *Reader) Record(w *recipe.Writer) {
	r.recipe, r.below = w, w.Tap(r.stream)
	r.tar = tar.NewReader(r.below)
}

// Close ends reading. It does not close the blob's own reader.
func (r *Reader) Close() error {
	r.stream.Close()
	if r.err == nil {
		r.err = fmt.Errorf("read layer %s: closed", r.desc.Digest)
	}
	return nil
}

// Next returns the next entry; a regular file's bytes then come from Read. After
// the last entry it reads the blob to its end, compares size and digests, and
// returns io.EOF.
//
// Errors: *RefusedError, once the rest of the blob has been read and its digest
// found right; *DigestError; anything else is a failure to read the blob.
func (r *Reader) Next() (*Entry, error) {
	for r.err == nil {
		e, err := r.next()
		if err != nil {
			r.err = r.fail(err)
			break
		}
		if e != nil {
			if e.Size > 0 && r.recipe != nil {
				r.recipe.Next()
			}
			return e, nil
		}
	}
	return nil, r.err
}

// Read reads the regular file at hand, like io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	var n int
	var err error
	if r.recipe != nil {
		n, err = r.recipe.Read(r.tar, p)
	} else {
		n, err = r.tar.Read(p)
	}
	r.read += int64(n)
	if err == nil && r.read > r.opts.Expansion+r.opts.MaxRatio*r.stream.source.n.Load() {
		err = refusal{reason: fmt.Sprintf("the first %d bytes of the blob hold files of more than %d, the limit",
			r.stream.source.n.Load(), r.read)}
	}
	if err != nil && err != io.EOF {
		r.err = r.fail(err)
		return n, r.err
	}
	return n, err
}

// DiffID returns the digest of the tar stream, after Next returned io.EOF or a
// *DigestError about it.
func (r *Reader) DiffID() digest.Digest {
	if !r.done {
		return ""
	}
	algorithm := digest.SHA256
	if r.desc.DiffID != "" {
		algorithm = r.desc.DiffID.Algorithm()
	}
	if r.stream.plain {
		return digest.NewDigest(algorithm, r.stream.source.hash)
	}
	return digest.NewDigest(algorithm, r.stream.diff)
}

// Size returns the bytes of the tar stream, when DiffID is known.
func (r *Reader) Size() int64 { return r.stream.total }

// Files returns how many regular files there were so far.
func (r *Reader) Files() int64 { return r.files }

// refusal is what becomes a RefusedError.
type refusal struct {
	reason string
	err    error
}

func (f refusal) Error() string { return f.reason }
func (f refusal) Unwrap() error { return f.err }

func (r *Reader) next() (*Entry, error) {
	h, err := r.tar.Next()
	if err == io.EOF {
		return nil, r.finish()
	}
	if err != nil {
		return nil, err
	}
	r.entry = h.Name
	if r.entries++; r.entries > r.opts.MaxEntries {
		return nil, refusal{reason: fmt.Sprintf("more than %d entries, the limit", r.opts.MaxEntries)}
	}
	e, err := r.header(h)
	if err != nil {
		return nil, refusal{reason: err.Error()}
	}
	if e == nil {
		return nil, nil
	}
	if e.Type == Regular {
		r.files++
		if e.Size > r.opts.MaxFile {
			return nil, refusal{reason: fmt.Sprintf("file of %d bytes, the limit is %d", e.Size, r.opts.MaxFile)}
		}
		if r.content += e.Size; r.content > r.opts.MaxContent {
			return nil, refusal{reason: fmt.Sprintf("files of more than %d bytes in all, the limit", r.opts.MaxContent)}
		}
	}
	return e, nil
}

// header makes an entry of a tar header; nil when it names the root.
func (r *Reader) header(h *tar.Header) (*Entry, error) {
	e := &Entry{
		Mode: uint32(h.Mode) & 0o7777,
		// chown(2) takes 32 bits, and so does containerd.
		UID: uint32(h.Uid), GID: uint32(h.Gid),
		Mtime: h.ModTime.Unix(), MtimeNsec: uint32(h.ModTime.Nanosecond()),
	}
	var err error
	if h.Typeflag == tar.TypeXGlobalHeader {
		name, err := cleanGlobal(h.Name)
		if name == "." || err != nil {
			return nil, err
		}
		return &Entry{Type: Global, Name: name}, nil
	}
	if e.Name, err = cleanName(h.Name); err != nil || e.Name == "." {
		return nil, err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		e.Type, e.Size = Regular, h.Size
	case tar.TypeDir:
		e.Type = Directory
	case tar.TypeLink:
		e.Type = HardLink
		if e.Link, err = cleanLink(h.Linkname); err != nil {
			return nil, err
		}
	case tar.TypeSymlink:
		e.Type, e.Link = Symlink, h.Linkname
		if len(h.Linkname) == 0 || len(h.Linkname) > maxPath {
			return nil, fmt.Errorf("symlink target of %d bytes, want 1 to %d", len(h.Linkname), maxPath)
		}
	case tar.TypeChar, tar.TypeBlock:
		e.Type = CharDevice
		if h.Typeflag == tar.TypeBlock {
			e.Type = BlockDevice
		}
		if h.Devmajor < 0 || h.Devmajor > maxMajor || h.Devminor < 0 || h.Devminor > maxMinor {
			return nil, fmt.Errorf("device number %d:%d, Linux has those up to %d:%d", h.Devmajor, h.Devminor, maxMajor, maxMinor)
		}
		e.Major, e.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	case tar.TypeFifo:
		e.Type = Fifo
	default:
		return nil, fmt.Errorf("entry of unknown type %q", h.Typeflag)
	}
	e.Xattrs, err = xattrs(h.PAXRecords, r.opts)
	return e, err
}

// Device numbers of Linux have 12 and 20 bits.
const (
	maxMajor = 1<<12 - 1
	maxMinor = 1<<20 - 1
)

// finish reads what follows the tar stream. It returns io.EOF when all is well.
func (r *Reader) finish() error {
	if err := drain(r.below); err != nil {
		return err
	}
	r.done = true
	if err := r.checkBlob(); err != nil {
		return err
	}
	if got := r.DiffID(); r.desc.DiffID != "" && got != r.desc.DiffID {
		return &DigestError{Layer: r.desc.Digest, What: "diff ID", Got: got, Want: r.desc.DiffID}
	}
	return io.EOF
}

func (r *Reader) checkBlob() error {
	src := r.stream.source
	if got := digest.NewDigest(r.desc.Digest.Algorithm(), src.hash); got != r.desc.Digest {
		return &DigestError{Layer: r.desc.Digest, What: "blob", Got: got, Want: r.desc.Digest}
	}
	if n := src.n.Load(); r.desc.Size != 0 && n != r.desc.Size {
		return fmt.Errorf("read layer %s: the blob has %d bytes, its descriptor says %d", r.desc.Digest, n, r.desc.Size)
	}
	return nil
}

// fail finds out whose fault an error is. What the blob holds is the layer's
// only if the blob is the one that was asked for.
func (r *Reader) fail(err error) error {
	var wrong *DigestError
	if err == io.EOF || errors.As(err, &wrong) {
		return err
	}
	if !r.done {
		if failed := r.stream.abandon(); failed != nil {
			return fmt.Errorf("read layer %s: %w", r.desc.Digest, failed)
		}
		if err := r.checkBlob(); err != nil {
			return err
		}
	} else {
		return err // of checkBlob
	}
	refused := &RefusedError{Layer: r.desc.Digest, Entry: r.entry}
	var f refusal
	switch where := "after this entry"; {
	case errors.As(err, &f):
		refused.Reason, refused.Err = f.reason, f.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		refused.Reason, refused.Err = "the layer is truncated in or after it", err
	case errors.Is(err, tar.ErrHeader):
		if r.entry == "" {
			where = "at the start"
		}
		refused.Reason, refused.Err = "no valid tar header "+where, err
	default:
		refused.Reason, refused.Err = "the layer is damaged in or after it", err
	}
	return refused
}
