package proof

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
)

const (
	chunk = 128 << 10
	// A layer's tar stream may have expansion bytes whatever its blob is, and from there ratio times those of
	// the blob, and at most maxStream: as where it was ingested. A recipe that is larger than the blob, and
	// leastRecipe, brings nothing.
	expansion   = 2 << 30
	ratio       = 250
	maxStream   = 1 << 40
	leastRecipe = 16 << 20
)

// layer makes the entry list of a layer, unless it is here.
func (p *prover) layer(ctx context.Context, i int) error {
	d := p.DiffIDs[i]
	if _, err := os.Stat(p.listPath(d)); err == nil {
		return nil
	}
	if p.Known != nil && p.link(d) {
		return nil
	}
	recipeErr := p.fromRecipe(ctx, i)
	if recipeErr == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// A recipe that makes another stream says nothing about the layer: only its blob does.
	err := p.fromBlob(ctx, i)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if wrong, ok := errors.AsType[*layer.DigestError](err); ok && wrong.What == "diff ID" {
		return &Failed{fmt.Sprintf("layer %d has another diff ID: its blob makes %s, its config says %s", i+1, wrong.Got, wrong.Want), true}
	}
	if refused, ok := errors.AsType[*layer.RefusedError](err); ok {
		return &Failed{fmt.Sprintf("layer %d cannot be unpacked: %s", i+1, refused.Detail()), true}
	}
	return fmt.Errorf("layer %d: by its recipe: %w; by its blob: %w", i+1, recipeErr, err)
}

// link takes the entry list of a layer that another rootfs has, if that can be read to its end.
func (p *prover) link(d digest.Digest) bool {
	path := p.Known(d)
	if path == "" {
		return false
	}
	l := &list{path: path}
	defer l.close()
	for {
		if _, err := l.Next(); err == io.EOF {
			return os.Link(path, p.listPath(d)) == nil
		} else if err != nil {
			return false
		}
	}
}

// fromBlob makes the entry list of a layer from its blob.
func (p *prover) fromBlob(ctx context.Context, i int) error {
	desc := p.Layers[i]
	blob, err := p.Server.Blob(ctx, i)
	if err != nil {
		return err
	}
	defer blob.Close()
	var r io.Reader = &paced{ctx, blob, p}
	if desc.Size > 0 {
		r = io.LimitReader(r, desc.Size+1)
	}
	return p.parse(ctx, r, layer.Descriptor{Digest: desc.Digest, Size: desc.Size, DiffID: p.DiffIDs[i]})
}

type paced struct {
	ctx context.Context
	r   io.Reader
	p   *prover
}

func (r *paced) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	if n > 0 {
		if err := r.p.pace(r.ctx, n); err != nil {
			return n, err
		}
	}
	return n, err
}

// parse reads a layer, and keeps its entry list if all its digests are right.
func (p *prover) parse(ctx context.Context, blob io.Reader, desc layer.Descriptor) (err error) {
	r, err := layer.NewReader(ctx, blob, desc, layer.Options{})
	if err != nil {
		return err
	}
	defer r.Close()
	f, err := os.CreateTemp(p.Dir, ".entries-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	w, err := layer.NewListWriter(f)
	if err != nil {
		return err
	}
	splitter := segment.NewSplitter(nil)
	for {
		e, err := r.Next()
		if err == io.EOF {
			break
		}
		if err == nil && e.Size > 0 {
			err = e.Split(splitter, r, func(segment.ID, []byte) error { return nil })
		}
		if err != nil {
			return err
		}
		if err := w.Write(e); err != nil {
			return err
		}
	}
	if err := errors.Join(w.Close(), f.Sync()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), p.listPath(desc.DiffID)); err != nil {
		return err
	}
	return f.Close()
}

// fromRecipe makes the entry list of a layer from its recipe.
func (p *prover) fromRecipe(ctx context.Context, i int) error {
	places, spool, err := p.recipe(ctx, i)
	if err != nil {
		return err
	}
	defer spool.Close()
	from := &source{ctx: ctx, p: p, layer: i, numbers: places.Numbers}
	defer from.hidden.close()
	size := int64(maxStream)
	if blob := p.Layers[i].Size; blob < (maxStream-expansion)/ratio {
		size = expansion + ratio*max(blob, 0)
	}
	d := p.DiffIDs[i]
	r := recipe.NewReader(spool, from.open, recipe.Limits{Size: size, Contents: int64(len(places.Numbers))})
	return p.parse(ctx, r, layer.Descriptor{Digest: d, DiffID: d})
}

// recipe fetches a recipe into a file that has no name.
func (p *prover) recipe(ctx context.Context, i int) (places *bundle.Places, spool *os.File, err error) {
	answer, err := p.Server.Recipe(ctx, i)
	if err != nil {
		return nil, nil, err
	}
	defer answer.Close()
	if spool, err = os.CreateTemp(p.Dir, ".recipe-"); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, spool.Close())
		}
	}()
	if err := os.Remove(spool.Name()); err != nil {
		return nil, nil, err
	}
	left := leastRecipe + max(0, p.Layers[i].Size)
	for {
		s, err := answer.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, err
		}
		switch s := s.(type) {
		case *bundle.Places:
			places = s
		case []byte:
			if left -= int64(len(s)); left < 0 {
				return nil, nil, errors.New("the recipe is larger than the layer")
			}
			if err := p.pace(ctx, len(s)); err != nil {
				return nil, nil, err
			}
			if _, err := spool.Write(s); err != nil {
				return nil, nil, err
			}
		}
	}
	switch {
	case places == nil:
		return nil, nil, errors.New("the server sent no recipe")
	case places.TOC != p.TOCDigest:
		// Its numbers are those of another TOC: all contents would have to come.
		return nil, nil, fmt.Errorf("the server's table of contents is %s now, not %s", places.TOC, p.TOCDigest)
	}
	for k, n := range places.Numbers {
		if int(n) >= len(p.TOC.Contents) {
			return nil, nil, fmt.Errorf("content %d of the layer is number %d of %d", k, n, len(p.TOC.Contents))
		}
	}
	_, err = spool.Seek(0, io.SeekStart)
	return places, spool, err
}

// source has the contents of a layer: those of the rootfs where the mount reads them, and hidden ones from the server.
type source struct {
	ctx     context.Context
	p       *prover
	layer   int
	numbers []int32
	hidden  hidden
	asked   int // how often, for hidden contents
}

// open is a recipe.Source.
func (s *source) open(content, offset, length int64) (io.Reader, error) {
	n := s.numbers[content]
	if n < 0 {
		return s.openHidden(content, offset)
	}
	if size := s.p.TOC.Contents[n].Size; offset > size || length > size-offset {
		return nil, fmt.Errorf("%d bytes from %d on of one of %d", length, offset, size)
	}
	return &placed{s, int(n), offset}, nil
}

// placed reads a content of the rootfs.
type placed struct {
	s   *source
	n   int
	off int64
}

func (r *placed) Read(b []byte) (int, error) {
	n := min(int64(len(b)), r.s.p.TOC.Contents[r.n].Size-r.off)
	if n == 0 {
		return 0, io.EOF
	}
	err := r.s.p.read(r.s.ctx, r.n, b[:n], r.off)
	if err != nil {
		return 0, err
	}
	r.off += n
	return int(n), nil
}

// hidden is a stream of contents that upper layers hide, in the order of the recipe.
type hidden struct {
	answer  Sections
	content int64 // at hand
	off     int64 // of what is next
	pieces  []bundle.ContentPiece
	raw     []byte // of these, but for what was read
	used    int64  // of the first one
}

func (h *hidden) close() {
	if h.answer != nil {
		_ = h.answer.Close()
		h.answer = nil
	}
}

// Contents are asked for again when their stream breaks: tries times without any byte coming, and mostAsked times for
// one layer, of which those with very many hidden contents need several.
const (
	tries     = 3
	mostAsked = 16 + bundle.MaxLayerContents/bundle.MaxRuns
)

// openHidden returns a reader of a hidden content, from an offset on.
func (s *source) openHidden(content, offset int64) (io.Reader, error) {
	return &hiddenReader{s, content, offset}, nil
}

type hiddenReader struct {
	s            *source
	content, off int64
}

// Read implements io.Reader. Ranges come forward only, so that what is before them is passed over.
func (r *hiddenReader) Read(b []byte) (int, error) {
	h := &r.s.hidden
	for failures := 0; ; {
		n, err := r.s.next(b, r.content, r.off)
		if err == nil && n > 0 {
			r.off += int64(n)
			return n, nil
		}
		if err == nil {
			continue
		}
		h.close()
		if failures++; failures == tries || r.s.ctx.Err() != nil || errors.As(err, new(*bundle.Error)) {
			return 0, fmt.Errorf("contents that upper layers hide: %w", err)
		}
	}
}

// next takes a step towards the bytes of a content from off on: it asks, reads a section, passes over bytes, or
// returns some.
func (s *source) next(b []byte, content, off int64) (int, error) {
	h := &s.hidden
	if h.answer == nil {
		if s.asked++; s.asked > mostAsked {
			return 0, fmt.Errorf("they broke off %d times", mostAsked)
		}
		answer, err := s.p.Server.Contents(s.ctx, s.layer, s.runs(content))
		if err != nil {
			return 0, err
		}
		*h = hidden{answer: answer, content: content}
	}
	if len(h.pieces) == 0 {
		return 0, s.section()
	}
	piece := h.pieces[0]
	if piece.Content != h.content {
		h.content, h.off = piece.Content, 0
	}
	switch {
	case piece.Content > content:
		// The runs that were asked for have ended before this one, or it is shorter than the recipe says.
		return 0, fmt.Errorf("content %d has %d bytes, byte %d is wanted", content, h.off, off)
	case piece.Content == content && h.off > off:
		return 0, fmt.Errorf("content %d is at byte %d, %d is wanted", content, h.off, off)
	}
	left := int64(piece.Length) - h.used
	skip := left
	if piece.Content == content {
		skip = min(left, off-h.off)
	}
	n := 0
	if skip == 0 {
		n = int(min(left, int64(len(b))))
		if piece.Hole {
			clear(b[:n])
		} else {
			copy(b[:n], h.raw)
		}
		skip = int64(n)
	}
	if !piece.Hole {
		h.raw = h.raw[skip:]
	}
	h.used, h.off = h.used+skip, h.off+skip
	if h.used == int64(piece.Length) {
		h.pieces, h.used = h.pieces[1:], 0
	}
	return n, nil
}

// section reads the next one of hidden contents.
func (s *source) section() error {
	h := &s.hidden
	got, err := h.answer.Next()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	c, ok := got.(*bundle.Contents)
	if !ok {
		return fmt.Errorf("the server sent %T for contents", got)
	}
	if err := s.p.pace(s.ctx, c.RawLength); err != nil {
		return err
	}
	h.pieces, h.raw = c.Pieces, h.raw[:0]
	if c.Frame != nil {
		h.raw, err = segment.DecodeFrame(nil, c.Frame, c.RawLength)
	}
	return err
}

// runs lists the hidden contents from one on, as many as fit into a request.
func (s *source) runs(from int64) (runs []bundle.ContentRun) {
	for k := from; k < int64(len(s.numbers)); k++ {
		if s.numbers[k] >= 0 {
			continue
		}
		if n := len(runs); n > 0 && runs[n-1].First+runs[n-1].Count == k {
			runs[n-1].Count++
			continue
		}
		if len(runs) == bundle.MaxRuns {
			break
		}
		runs = append(runs, bundle.ContentRun{First: k, Count: 1})
	}
	return runs
}

// clearLeft removes what an interrupted proof left in dir besides entry lists.
func clearLeft(dir string) {
	left, _ := filepath.Glob(filepath.Join(dir, ".*-*"))
	for _, path := range left {
		_ = os.Remove(path)
	}
}
