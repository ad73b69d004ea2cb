// Package proof proves one rootfs: that what is mounted is what the layers of an OCI image make.
//
// A layer is known by its diff ID, the digest of its tar stream. The stream is made again here, from the layer's
// recipe and from contents as the mount reads them, or taken from the layer's blob. Its entry list is what parsing
// that very stream gives, and is kept only if the digest was right. So a recipe, and what a server says about
// places, can be wrong without harm: the digest is then another one, and the blob decides.
//
// When the entry lists of all layers are known, they are flattened, and the TOC that they make is compared with the
// one that is mounted. Then each content is hashed where the mount reads it, unless that was done on the way; and the
// metadata image is compared with one that is made anew.
//
// An entry list is kept beside the rootfs, named by its diff ID. So a proof that was interrupted goes on with the
// layer at which it was.
//
// Memory: that of the TOC, twice, and some MiB.
package proof

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
)

// Server is asked for what is not here. Nothing that it says is believed.
type Server interface {
	// Recipe asks for the recipe of a layer of the manifest, Contents for contents of it.
	Recipe(ctx context.Context, layer int) (Sections, error)
	Contents(ctx context.Context, layer int, runs []bundle.ContentRun) (Sections, error)
	// Blob opens the layer's blob.
	Blob(ctx context.Context, layer int) (io.ReadCloser, error)
}

// Sections are those of bundle.LayerReader.
type Sections interface {
	Next() (any, error)
	Close() error
}

// Options say what is proven, and by what. All but Known, Pace and Step are required.
type Options struct {
	// DiffIDs are those of the image's config, and Layers the blobs of its manifest, the lowest first.
	DiffIDs []digest.Digest
	Layers  []ocispec.Descriptor
	// TOC is the one that is mounted, and TOCDigest that of its encoded form.
	TOC       *toc.TOC
	TOCDigest digest.Digest
	Server    Server
	// ReadAt reads bytes of a content, by its number in the TOC, where the mount reads them.
	ReadAt func(content int, b []byte, off int64) error
	// Meta reports whether the metadata image that is mounted is the one that the TOC makes.
	Meta func(ctx context.Context) (bool, error)
	// Dir keeps the entry lists of proven layers; Known finds that of another rootfs, or returns "".
	Dir   string
	Known func(diffID digest.Digest) string
	// Pace is called for all bytes that are read, before they are used, and may wait.
	Pace func(ctx context.Context, bytes int) error
	// Step is told how far the proof is.
	Step func(Step)
}

// Step is how far a proof is.
type Step struct {
	Done, All     int64 // bytes of contents, hashed where they are
	Layer, Layers int   // the layer that is being hashed, the lowest is 1; 0: all are
}

// Failed says that a rootfs is not what its image's layers make.
type Failed struct {
	Why string
	// Documents says that it is the image's manifest and config that do not fit each other: another image of the same
	// rootfs may be right.
	Documents bool
}

func (f *Failed) Error() string { return f.Why }

func failed(format string, args ...any) error { return &Failed{Why: fmt.Sprintf(format, args...)} }

// ErrNoDiffIDs is returned, wrapped, for an image whose config does not name its layers' diff IDs: nobody can prove it.
var ErrNoDiffIDs = errors.New("its config names no diff IDs that could be compared")

// Run proves a rootfs.
//
// Errors: *Failed; ErrNoDiffIDs; ctx's; any other says why nothing is known yet, and another try may end otherwise.
func Run(ctx context.Context, o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return err
	}
	clearLeft(o.Dir)
	p := &prover{Options: o, verified: make([]bool, len(o.TOC.Contents))}
	for i := range o.TOC.Contents {
		p.all += o.TOC.Contents[i].Size
	}
	for i := range o.DiffIDs {
		p.at = i + 1
		p.step()
		if err := p.layer(ctx, i); err != nil {
			return err
		}
	}
	p.at = 0
	p.step()
	if err := p.tree(ctx); err != nil {
		return err
	}
	if err := p.contents(ctx); err != nil {
		return err
	}
	same, err := o.Meta(ctx)
	if err == nil && !same {
		err = failed("its metadata image is not the one that its table of contents makes")
	}
	return err
}

func (o *Options) check() error {
	if len(o.DiffIDs) == 0 || len(o.DiffIDs) != len(o.Layers) {
		return fmt.Errorf("%w: %d for %d layers", ErrNoDiffIDs, len(o.DiffIDs), len(o.Layers))
	}
	for i, d := range o.DiffIDs {
		if err := errors.Join(d.Validate(), o.Layers[i].Digest.Validate()); err != nil {
			return fmt.Errorf("%w: that of layer %d is %q: %w", ErrNoDiffIDs, i+1, d, err)
		}
	}
	if o.TOC.Rules > flatten.Version {
		return fmt.Errorf("its server flattens layers by rules of version %d, which this program does not have: update foil here (%w)", o.TOC.Rules, flatten.ErrRules)
	}
	return nil
}

type prover struct {
	Options
	verified []bool // contents of the TOC that were hashed where they are
	done     int64  // bytes of these
	all      int64
	at       int // Step.Layer
	hashing  struct {
		content int
		off     int64 // up to here
		sum     hash.Hash
	}
}

// read reads a content's bytes at its place, and hashes them if they follow those that were read before.
func (p *prover) read(ctx context.Context, content int, b []byte, off int64) error {
	if err := p.pace(ctx, len(b)); err != nil {
		return err
	}
	if err := p.ReadAt(content, b, off); err != nil {
		return err
	}
	h, c := &p.hashing, &p.TOC.Contents[content]
	switch {
	case p.verified[content]:
		return nil
	case off == 0:
		if h.sum == nil {
			h.sum = sha256.New()
		}
		h.sum.Reset()
		h.content, h.off = content, 0
	case h.sum == nil || h.content != content || h.off != off:
		return nil
	}
	h.sum.Write(b)
	h.off += int64(len(b))
	if h.off == c.Size && segment.ID(h.sum.Sum(nil)) == c.ID {
		p.verified[content] = true
		p.done += c.Size
		p.step()
	}
	return nil
}

func (p *prover) step() {
	if p.Step != nil {
		p.Step(Step{Done: p.done, All: p.all, Layer: p.at, Layers: len(p.DiffIDs)})
	}
}

func (p *prover) pace(ctx context.Context, n int) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if p.Pace == nil {
		return nil
	}
	return p.Pace(ctx, n)
}

// contents hashes those that were not hashed on the way.
func (p *prover) contents(ctx context.Context) error {
	b := make([]byte, chunk)
	for i := range p.TOC.Contents {
		for off, size := int64(0), p.TOC.Contents[i].Size; off < size && !p.verified[i]; {
			n := min(size-off, int64(len(b)))
			if err := p.read(ctx, i, b[:n], off); err != nil {
				return fmt.Errorf("read what is here of %s: %w", p.path(i), err)
			}
			off += n
		}
		if !p.verified[i] {
			return failed("%s has other bytes here than in its layer", p.path(i))
		}
	}
	return nil
}

func (p *prover) path(content int) string {
	path, _ := toc.NamesOf(p.TOC).Path(int32(content))
	return path
}

// tree compares what the layers make with what is mounted.
func (p *prover) tree(ctx context.Context) error {
	layers := make([]flatten.Layer, len(p.DiffIDs))
	for i, d := range p.DiffIDs {
		l := &list{path: p.listPath(d)}
		defer l.close()
		layers[i] = flatten.Layer{Digest: p.Layers[i].Digest, DiffID: d, Entries: l}
	}
	made, err := flatten.By(ctx, p.TOC.Rules, layers)
	if err != nil {
		if errors.Is(err, layer.ErrBadList) {
			return errors.Join(err, os.RemoveAll(p.Dir))
		}
		if _, ok := errors.AsType[*layer.RefusedError](err); ok {
			return failed("its layers make no rootfs: %v", err)
		}
		return err
	}
	got, err := toc.Encode(p.TOC)
	if err != nil {
		return err
	}
	want, err := toc.Encode(made)
	if err != nil {
		return failed("its layers make no rootfs: %v", err)
	}
	if bytes.Equal(got, want) {
		return nil
	}
	if path, what := difference(p.TOC, made); what != "" {
		return failed("%s is not as in the layers: %s", path, what)
	}
	return failed("what it says about its files is not what its layers make")
}

// list is an entry list, open while it is read.
type list struct {
	path string
	f    *os.File
	r    *layer.ListReader
}

// Next implements flatten.Entries.
func (l *list) Next() (*layer.Entry, error) {
	if l.r == nil {
		var err error
		if l.f, err = os.Open(l.path); err != nil {
			return nil, err
		}
		if l.r, err = layer.NewListReader(l.f); err != nil {
			l.close()
			return nil, fmt.Errorf("%w: %w", layer.ErrBadList, err)
		}
	}
	e, err := l.r.Next()
	if err != nil {
		l.close()
	}
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", layer.ErrBadList, err)
	}
	return e, err
}

func (l *list) close() {
	if l.r != nil {
		l.r.Close()
	}
	if l.f != nil {
		_ = l.f.Close()
	}
	l.f, l.r = nil, nil
}

// ListPath is where the entry list of a layer is kept below a rootfs's Dir.
func ListPath(dir string, diffID digest.Digest) string {
	return filepath.Join(dir, diffID.Algorithm().String()+"-"+diffID.Encoded())
}

func (p *prover) listPath(d digest.Digest) string { return ListPath(p.Dir, d) }
