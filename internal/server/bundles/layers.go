package bundles

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/restore"
	"hydrofoil.dev/foil/internal/server/tcp"
)

// layerAnswer is an answer to a bundle.LayerRequest under way. A layer is reached as
// blobs of a pull are: by an image of a repository.
type layerAnswer struct {
	h     *Handler
	req   *bundle.LayerRequest
	image *Resolved
	about string // the image, in messages
	w     *bundle.Writer
	flush func() error
	// charge takes what was worked for the client.
	charge func(time.Duration)
}

// meanwhile is Handler.meanwhile of an answer, charged to its client.
func (a *layerAnswer) meanwhile(ctx context.Context, work func() error) error {
	return a.h.meanwhile(a.w, a.flush, func() error {
		defer a.h.o.Guard.Place(ctx)()
		began := time.Now()
		defer func() { a.charge(time.Since(began)) }()
		return work()
	})
}

func (h *Handler) recipe(w http.ResponseWriter, r *http.Request) {
	h.layer(w, r, (*layerAnswer).recipe)
}

func (h *Handler) contents(w http.ResponseWriter, r *http.Request) {
	h.layer(w, r, (*layerAnswer).contents)
}

// layer answers a request for something of a layer.
func (h *Handler) layer(w http.ResponseWriter, r *http.Request, send func(*layerAnswer, context.Context) error) {
	ctx := r.Context()
	b, err := h.body(w, r, bundle.MaxLayerRequest)
	if err != nil {
		writeError(w, h.log, err, "")
		return
	}
	req, err := bundle.DecodeLayerRequest(b)
	if err != nil {
		writeError(w, h.log, &bundle.Error{Code: bundle.CodeInvalid, Message: err.Error()}, "")
		return
	}
	end, charge, err := h.begin(ctx)
	if err != nil {
		writeError(w, h.log, err, "")
		return
	}
	defer end()
	image, err := h.resolve(ctx, req.Image)
	if err == nil && req.Layer >= len(image.Layers) {
		err = &bundle.Error{Code: bundle.CodeInvalid, Message: fmt.Sprintf("it has %d layers, there is no layer %d", len(image.Layers), req.Layer)}
	}
	if err != nil {
		writeError(w, h.log, err, ref(req.Image.Repository, req.Image.Reference))
		return
	}

	w.Header().Set("Content-Type", bundle.MediaTypeLayer)
	w.WriteHeader(http.StatusOK)
	slow := tcp.NewPatient(w, h.o.Patience)
	defer slow.End()
	out := bundle.NewWriter(slow)
	a := &layerAnswer{h: h, req: req, image: image, about: ref(image.Repository, image.Reference), w: out, charge: charge}
	a.flush = func() error { return errors.Join(out.Flush(), slow.Flush()) }
	err = out.Hello(bundle.Hello{Version: bundle.Version})
	if err == nil {
		err = send(a, ctx)
	}
	if err == nil {
		err = errors.Join(out.End(), slow.Flush())
	}
	if err == nil || ctx.Err() != nil {
		return
	}
	if _, gone := errors.AsType[writeFailed](err); gone {
		h.log.Debug("answer about a layer was cut off", "image", a.about, "layer", req.Layer, "error", err)
		return
	}
	if isDamage(err) {
		h.suspect(image)
	}
	e := wireError(err, a.about)
	if statuses[e.Code] >= 500 {
		h.log.Error("answer about a layer failed", "image", a.about, "layer", req.Layer, "error", err)
	}
	_ = out.Error(e) // nobody is there if this fails
}

// recipe sends places and recipe of the layer.
func (a *layerAnswer) recipe(ctx context.Context) error {
	var row catalog.Layer
	var places *bundle.Places
	var object io.ReadCloser
	err := a.meanwhile(ctx, func() (err error) {
		r, encoded, err := a.h.described(ctx, a.image)
		if err != nil {
			return err
		}
		if row, object, err = a.openRecipe(ctx); err != nil {
			return err
		}
		t, err := toc.DecodeContents(encoded) // described has verified it
		if err != nil {
			return fmt.Errorf("read TOC of %s: %w: %w", r.ChainID, errDamaged, err)
		}
		places, err = a.places(ctx, row, r.TOC, t)
		return err
	})
	if object != nil {
		defer object.Close()
	}
	if err != nil {
		return err
	}
	if err := a.w.Places(places); err != nil {
		return writeFailed{err}
	}
	hash := sha256.New()
	buf := make([]byte, bundle.MaxChunk)
	for {
		n, err := io.ReadFull(object, buf)
		hash.Write(buf[:n])
		if n > 0 {
			if err := errors.Join(a.w.Recipe(buf[:n]), a.flush()); err != nil {
				return writeFailed{err}
			}
		}
		if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read recipe %s: %w", row.Recipe.Key, err)
		}
	}
	if got := digest.NewDigest(digest.SHA256, hash); got != row.Recipe.Digest {
		// The next request has it made anew.
		err := fmt.Errorf("read recipe %s: %w", row.Recipe.Key, errDamaged)
		return errors.Join(err, a.h.o.Catalog.PutRecipe(context.WithoutCancel(ctx), row.Blob, catalog.Recipe{}))
	}
	return nil
}

// openRecipe opens the recipe of the layer, which is made if there is none, or if it is lost.
func (a *layerAnswer) openRecipe(ctx context.Context) (row catalog.Layer, object io.ReadCloser, err error) {
	if a.h.o.Recipe == nil {
		return row, nil, unsupported("this server makes no recipes")
	}
	if row, err = a.h.o.Recipe(ctx, a.image, a.req.Layer); err != nil {
		return row, nil, err
	}
	object, err = a.h.o.Objects.Open(ctx, row.Recipe.Key, 0, -1)
	if err == nil || !isDamage(err) {
		return row, object, err
	}
	// Another one may have taken its place since it was looked up, and the object is gone.
	now, err := a.h.o.Catalog.Layer(ctx, row.Blob)
	if err == nil && now.Recipe == row.Recipe {
		err = a.h.o.Catalog.PutRecipe(ctx, row.Blob, catalog.Recipe{})
	}
	if err != nil {
		return row, nil, err
	}
	if row, err = a.h.o.Recipe(ctx, a.image, a.req.Layer); err != nil {
		return row, nil, err
	}
	object, err = a.h.o.Objects.Open(ctx, row.Recipe.Key, 0, -1)
	return row, object, err
}

// places finds the contents of the layer in the rootfs: those of upper layers that are
// equal are as good.
func (a *layerAnswer) places(ctx context.Context, row catalog.Layer, d digest.Digest, t *toc.TOC) (*bundle.Places, error) {
	numbers := make(map[segment.ID]int32, len(t.Contents))
	for i := range t.Contents {
		numbers[t.Contents[i].ID] = int32(i)
	}
	object, err := a.h.o.Objects.Open(ctx, row.Entries, 0, -1)
	if err != nil {
		return nil, fmt.Errorf("read entries of layer %s: %w", row.Blob, err)
	}
	defer object.Close()
	list, err := layer.NewListReader(object)
	if err != nil {
		return nil, fmt.Errorf("read entries of layer %s: %w", row.Blob, err)
	}
	defer list.Close()
	p := &bundle.Places{TOC: d}
	for {
		e, err := list.Next()
		if err == io.EOF {
			return p, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read entries of layer %s: %w", row.Blob, err)
		}
		if e.Size == 0 {
			continue
		}
		n, ok := numbers[e.Content]
		if !ok {
			n = -1
		}
		p.Numbers = append(p.Numbers, n)
	}
}

// contents sends those that are wanted.
func (a *layerAnswer) contents(ctx context.Context) error {
	if len(a.req.Contents) == 0 {
		return &bundle.Error{Code: bundle.CodeInvalid, Message: "no contents are wanted"}
	}
	var row catalog.Layer
	err := a.meanwhile(ctx, func() error {
		_, _, err := a.h.described(ctx, a.image) // what is damaged is repaired
		if err == nil {
			row, err = a.h.o.Catalog.Layer(ctx, a.image.Layers[a.req.Layer].Digest)
		}
		return err
	})
	if err != nil {
		return err
	}
	store := a.h.packs
	runs := a.req.Contents
	pieces, err := restore.Open(ctx, store, row, func(n int64) bool {
		for len(runs) > 0 && runs[0].First+runs[0].Count <= n {
			runs = runs[1:]
		}
		return len(runs) > 0 && runs[0].First <= n
	})
	if err != nil {
		return err
	}
	defer pieces.Close()
	s := sections{a: a, store: store, segments: store.NewReader()}
	for {
		p, err := pieces.Next(ctx)
		if err == io.EOF {
			return s.send()
		}
		if err == nil {
			err = s.piece(ctx, p)
		}
		if err != nil {
			return err
		}
	}
}

// sections puts pieces together. Each is compared with its ID: the worker hashes the whole
// layer, and could not tell which piece is wrong.
type sections struct {
	a        *layerAnswer
	store    *dedup.Store
	segments *dedup.Reader
	next     bundle.Contents
	raw      []byte // of next
	alone    []byte // of the last piece that had a frame of its own
	last     int64  // content of the last piece that was sent
}

// piece adds one.
func (s *sections) piece(ctx context.Context, p *restore.Piece) error {
	f := p.Place.Frame
	if f != nil && len(f.Segments) == 1 {
		return s.frame(ctx, p)
	}
	var b []byte
	if f != nil {
		var err error
		if b, err = s.segments.Segment(ctx, p.Place); err != nil {
			return err
		}
		if err := verify(p, b); err != nil {
			return err
		}
	}
	if len(s.next.Pieces) == bundle.MaxPieces || len(s.raw)+len(b) > segment.FrameTarget && len(s.raw) > 0 {
		if err := s.send(); err != nil {
			return err
		}
	}
	s.next.Pieces = append(s.next.Pieces, bundle.ContentPiece{Content: p.Content, Length: p.Length, Hole: f == nil})
	s.raw = append(s.raw, b...)
	return nil
}

// frame sends a piece that has a frame of its own, which goes as it is stored.
func (s *sections) frame(ctx context.Context, p *restore.Piece) error {
	if err := s.send(); err != nil {
		return err
	}
	encoded, err := s.store.ReadFrame(ctx, p.Place.Frame)
	if err != nil {
		return err
	}
	if s.alone, err = segment.DecodeFrame(s.alone[:0], encoded, int(p.Length)); err != nil {
		return err
	}
	if err := verify(p, s.alone); err != nil {
		return err
	}
	return s.write(&bundle.Contents{Pieces: []bundle.ContentPiece{{Content: p.Content, Length: p.Length}}, Frame: encoded})
}

// verify compares a piece with its ID.
func verify(p *restore.Piece, b []byte) error {
	if segment.Sum(b) != p.ID {
		return fmt.Errorf("segment %s in pack %s: %w", p.ID, p.Place.Frame.Pack, errDamaged)
	}
	return nil
}

// send sends what was put together.
func (s *sections) send() error {
	if len(s.next.Pieces) == 0 {
		return nil
	}
	c := s.next
	if len(s.raw) > 0 {
		var err error
		if c.Frame, err = segment.AppendFrame(c.Frame[:0], segment.Zstd, s.raw); err != nil {
			return err
		}
		s.next.Frame = c.Frame // its memory
	} else {
		c.Frame = nil
	}
	err := s.write(&c)
	s.next.Pieces, s.raw = s.next.Pieces[:0], s.raw[:0]
	return err
}

func (s *sections) write(c *bundle.Contents) error {
	if err := errors.Join(s.a.w.Contents(c, s.last), s.a.flush()); err != nil {
		return writeFailed{err}
	}
	s.last = c.Pieces[len(c.Pieces)-1].Content
	return nil
}
