// Package restore gives back what ingest took apart: the contents of a layer from
// packs, and with its recipe the tar stream.
package restore

import (
	"context"
	"errors"
	"fmt"
	"io"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
)

// ErrMissing is returned, wrapped, when a segment of a layer rests nowhere.
var ErrMissing = errors.New("segment is not stored")

// Piece is one segment of a content of a layer.
type Piece struct {
	Content int64 // number, as in the layer's recipe
	Offset  int64 // in the content, bytes
	Length  uint32
	ID      segment.ID
	Place   catalog.Location // of no frame: a hole
}

// lookAhead is how many segments are located at once.
const lookAhead = 512

// Contents goes through the contents of a layer in their order. It is for one
// goroutine, and must be closed.
type Contents struct {
	store  *dedup.Store
	layer  catalog.Layer
	wanted func(content int64) bool
	object io.Closer
	list   *layer.ListReader
	number int64 // of the next content
	ended  bool  // the list has
	ready  []Piece
	next   []Piece // those of ready that were not returned
}

// Open returns the contents of a layer that was ingested, of those that are wanted.
func Open(ctx context.Context, store *dedup.Store, l catalog.Layer, wanted func(content int64) bool) (*Contents, error) {
	object, err := store.Objects.Open(ctx, l.Entries, 0, -1)
	if err != nil {
		return nil, fmt.Errorf("read entries of layer %s: %w", l.Blob, err)
	}
	list, err := layer.NewListReader(object)
	if err != nil {
		object.Close()
		return nil, fmt.Errorf("read entries of layer %s: %w", l.Blob, err)
	}
	return &Contents{store: store, layer: l, wanted: wanted, object: object, list: list}, nil
}

// Close ends it.
func (c *Contents) Close() {
	c.list.Close()
	c.object.Close()
}

// Next returns the next segment, valid until the next call, and io.EOF after the last
// one. Errors: ErrMissing; layer.ErrBadList; those of the catalog and the object store.
func (c *Contents) Next(ctx context.Context) (*Piece, error) {
	for len(c.next) == 0 {
		if c.ended {
			return nil, io.EOF
		}
		if err := c.more(ctx); err != nil {
			return nil, fmt.Errorf("read contents of layer %s: %w", c.layer.Blob, err)
		}
	}
	p := &c.next[0]
	c.next = c.next[1:]
	return p, nil
}

// more reads entries until there are pieces enough, and locates those.
func (c *Contents) more(ctx context.Context) error {
	c.ready = c.ready[:0]
	for len(c.ready) < lookAhead {
		e, err := c.list.Next()
		if err == io.EOF {
			c.ended = true
			break
		}
		if err != nil {
			return err
		}
		if e.Size == 0 {
			continue
		}
		n := c.number
		if c.number++; !c.wanted(n) {
			continue
		}
		at := int64(0)
		for _, s := range e.Segments {
			c.ready = append(c.ready, Piece{Content: n, Offset: at, Length: s.Length, ID: s.ID})
			at += int64(s.Length)
		}
	}
	c.next = c.ready
	var ids []segment.ID
	for i := range c.ready {
		if !c.ready[i].ID.IsHole() {
			ids = append(ids, c.ready[i].ID)
		}
	}
	places, err := c.store.Catalog.Locate(ctx, ids)
	if err != nil {
		return err
	}
	for i := range c.ready {
		if p := &c.ready[i]; !p.ID.IsHole() {
			if p.Place = places[0]; p.Place.Frame == nil {
				return fmt.Errorf("segment %s: %w", p.ID, ErrMissing)
			}
			places = places[1:]
		}
	}
	return nil
}

// Tar is the tar stream of a layer, made of its recipe and its contents.
type Tar struct {
	*recipe.Reader
	contents *Contents
	recipe   io.Closer
}

// OpenTar returns the tar stream of a layer that has a recipe. Who reads it has to
// compare the digest of what it read with the layer's diff ID. It must be closed. Besides
// the errors of Contents, reading it gives recipe.ErrCorrupt.
func OpenTar(ctx context.Context, store *dedup.Store, l catalog.Layer) (*Tar, error) {
	object, err := store.Objects.Open(ctx, l.Recipe.Key, 0, -1)
	if err != nil {
		return nil, fmt.Errorf("read recipe of layer %s: %w", l.Blob, err)
	}
	contents, err := Open(ctx, store, l, func(int64) bool { return true })
	if err != nil {
		object.Close()
		return nil, err
	}
	s := &source{ctx: ctx, contents: contents, segments: store.NewReader()}
	return &Tar{recipe.NewReader(object, s.open, recipe.Limits{Size: l.Size}), contents, object}, nil
}

// OpenTarAt is OpenTar from a byte of the stream on. Contents before it are not read.
func OpenTarAt(ctx context.Context, store *dedup.Store, l catalog.Layer, at int64) (*Tar, error) {
	t, err := OpenTar(ctx, store, l)
	if err != nil {
		return nil, err
	}
	if err := t.Skip(at); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Close ends it. It returns nil.
func (t *Tar) Close() error {
	t.contents.Close()
	t.recipe.Close()
	return nil
}

// source is the recipe.Source of a layer.
type source struct {
	ctx      context.Context
	contents *Contents
	segments *dedup.Reader
	piece    *Piece // at hand; nil: none

	content, at int64  // where the next byte is wanted
	bytes       []byte // of the piece, once they were read
	loaded      bool   // they were
}

// open returns itself, at the place that is wanted. Pieces go forward, and so do ranges.
func (s *source) open(content, offset, _ int64) (io.Reader, error) {
	s.content, s.at = content, offset
	return s, nil
}

// Read returns bytes of one piece. Holes need no bytes.
func (s *source) Read(p []byte) (int, error) {
	for s.piece == nil || s.piece.Content < s.content || s.piece.Content == s.content && s.piece.Offset+int64(s.piece.Length) <= s.at {
		var err error
		s.loaded = false
		if s.piece, err = s.contents.Next(s.ctx); err != nil {
			s.piece = nil
			return 0, err
		}
	}
	if s.piece.Content > s.content {
		return 0, io.EOF // the content is shorter than the range
	}
	inside := s.at - s.piece.Offset
	n := int(min(int64(len(p)), int64(s.piece.Length)-inside))
	if s.piece.Place.Frame == nil {
		clear(p[:n])
	} else {
		if !s.loaded {
			var err error
			if s.bytes, err = s.segments.Segment(s.ctx, s.piece.Place); err != nil {
				return 0, err
			}
			if len(s.bytes) != int(s.piece.Length) {
				return 0, fmt.Errorf("%w: segment %s has %d bytes, its entry list says %d", segment.ErrCorrupt, s.piece.ID, len(s.bytes), s.piece.Length)
			}
			s.loaded = true
		}
		copy(p[:n], s.bytes[inside:])
	}
	s.at += int64(n)
	return n, nil
}
