package restore

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"runtime"
	"sync"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/encoder"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/readers"
	"hydrofoil.dev/foil/internal/server/stores"
)

// ErrUnproven is returned, wrapped, for a blob that cannot be restored: it is no layer's, or no way is proven.
var ErrUnproven = errors.New("nothing is proven that makes the blob again")

// Blobs restores the blobs of layers from packs and recipes. Its methods are safe for concurrent use.
type Blobs struct {
	Store    *dedup.Store
	Encoders *encoder.Set
	// Workers is how many parts of a blob are made at once. Default: one a processor.
	Workers int
	// Metrics counts what is restored; nil: nobody counts.
	Metrics *Metrics
	// Readers are told who reads packs and recipes; nil: nobody is.
	Readers *readers.Readers
}

// Blob is a blob that can be restored.
type Blob struct {
	Size     int64
	Layer    catalog.Layer
	encoding *recipe.Encoding // nil: the tar stream is the blob
}

// Compression returns how the recipe of a layer says that the blob is made of the tar stream, and where in the recipe it
// says so.
func Compression(ctx context.Context, store objects.Store, r catalog.Recipe) (c recipe.Compression, e *recipe.Encoding, begin int64, err error) {
	fail := func(err error) (recipe.Compression, *recipe.Encoding, int64, error) {
		return recipe.Unknown, nil, 0, fmt.Errorf("recipe %s: %w", r.Key, err)
	}
	if r.Size < recipe.BeginLen {
		return fail(fmt.Errorf("%w: %d bytes", recipe.ErrCorrupt, r.Size))
	}
	end, err := store.Open(ctx, r.Key, r.Size-recipe.BeginLen, recipe.BeginLen)
	if err != nil {
		return fail(err)
	}
	last, err := io.ReadAll(end)
	end.Close()
	if err != nil {
		return fail(err)
	}
	if begin, err = recipe.Begin(last, r.Size); err != nil {
		return fail(err)
	}
	object, err := store.Open(ctx, r.Key, begin, r.Size-begin)
	if err != nil {
		return fail(err)
	}
	defer object.Close()
	if c, e, err = recipe.ReadCompression(object); err != nil {
		return fail(err)
	}
	return c, e, begin, nil
}

// From returns the same with packs, entry lists and recipes from another object store.
func (b *Blobs) From(store objects.Store) *Blobs {
	return &Blobs{Store: &dedup.Store{Objects: store, Catalog: b.Store.Catalog}, Encoders: b.Encoders, Workers: b.Workers, Readers: b.Readers}
}

// Usable says why the encoder of a blob makes nothing here; nil: it does. Errors: encoder.ErrUnavailable.
func (b *Blobs) Usable(ctx context.Context, blob *Blob) error {
	if blob.encoding == nil {
		return nil
	}
	return b.Encoders.Usable(ctx, blob.encoding.Encoder)
}

// Promised says why a blob cannot be relied on to come out again on this machine; nil: it can. Errors: encoder.ErrUnavailable.
func (b *Blobs) Promised(ctx context.Context, blob *Blob) error {
	if err := b.Usable(ctx, blob); err != nil || blob.encoding == nil {
		return err
	}
	if blob.encoding.Arch != runtime.GOARCH {
		return fmt.Errorf("encoder %s: %w: it was proven on %s, and this is %s", blob.encoding.Encoder, encoder.ErrUnavailable, blob.encoding.Arch, runtime.GOARCH)
	}
	return nil
}

// Verify restores a blob, and compares its digest; nothing is kept. Errors: those of Open.
func (b *Blobs) Verify(ctx context.Context, d digest.Digest) (int64, error) {
	r, err := b.Open(ctx, d, 0, -1)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	return io.Copy(io.Discard, r)
}

// Find returns a blob. Errors: ErrUnproven; recipe.ErrCorrupt; those of catalog and object store.
func (b *Blobs) Find(ctx context.Context, d digest.Digest) (*Blob, error) {
	row, err := b.Store.Catalog.Layer(ctx, d)
	if errors.Is(err, catalog.ErrNotFound) {
		err = ErrUnproven
	}
	plain := row.Recipe.Key != "" && row.DiffID == row.Blob // the blob is the tar stream: there is nothing to prove
	if err == nil && !row.Recipe.Proven() && !plain {
		err = ErrUnproven
	}
	if err != nil {
		return nil, fmt.Errorf("restore blob %s: %w", d, err)
	}
	c, e, _, err := Compression(ctx, b.Store.Objects, row.Recipe)
	switch {
	case err != nil:
		return nil, fmt.Errorf("restore blob %s: %w", d, err)
	case e != nil:
		return &Blob{Size: e.Out(), Layer: row, encoding: e}, nil
	case c == recipe.Plain || plain:
		return &Blob{Size: row.Size, Layer: row}, nil
	}
	return nil, fmt.Errorf("restore blob %s: %w", d, ErrUnproven)
}

// Open restores length bytes of a blob from an offset on; a length < 0 means to the end. The reader returns the last
// byte only when all that was made for it was compared: the whole blob with its digest, a range with the sums of the parts
// that it lies in. Errors of Open are those of Find; of reading besides: encoder.ErrMismatch, encoder.ErrUnavailable,
// ErrMissing, and those of the object store.
func (b *Blobs) Open(ctx context.Context, d digest.Digest, offset, length int64) (io.ReadCloser, error) {
	end := b.Readers.Begin()
	blob, err := b.Find(ctx, d)
	if err != nil {
		end()
		return nil, err
	}
	if length, err = objects.CheckRange(offset, length, blob.Size); err != nil {
		end()
		return nil, fmt.Errorf("restore blob %s: %w", d, err)
	}
	if err := b.Usable(ctx, blob); err != nil {
		end()
		return nil, fmt.Errorf("restore blob %s: %w", d, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	s := &restored{PipeReader: r, cancel: cancel}
	s.work.Go(func() {
		defer end()
		err := b.write(ctx, w, blob, offset, offset+length)
		if err != nil {
			err = fmt.Errorf("restore blob %s: %w", d, err)
		}
		b.Metrics.ended(err, ctx.Err() != nil)
		w.CloseWithError(err) // nil is io.EOF
	})
	return s, nil
}

// restored is a blob on its way.
type restored struct {
	*io.PipeReader
	cancel context.CancelFunc
	work   sync.WaitGroup
}

func (s *restored) Close() error {
	s.cancel()
	err := s.PipeReader.Close()
	s.work.Wait()
	return err
}

// write restores bytes from (included) to (excluded).
func (b *Blobs) write(ctx context.Context, w io.Writer, blob *Blob, from, to int64) error {
	plain := func(ctx context.Context, at int64) (io.ReadCloser, error) {
		return OpenTarAt(ctx, b.Store, blob.Layer, at)
	}
	workers := b.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	d := blob.Layer.Blob
	counted := &counted{w: w, m: b.Metrics}
	if blob.encoding != nil && (from > 0 || to < blob.Size) {
		return b.Encoders.Restore(ctx, counted, blob.encoding, plain, from, to, workers)
	}
	// All of it is made, and hashed; what is not wanted goes nowhere.
	g := &guarded{w: counted, hash: d.Algorithm().Hash(), from: from, to: to}
	var err error
	if blob.encoding != nil {
		err = b.Encoders.Restore(ctx, g, blob.encoding, plain, 0, blob.Size, workers)
	} else {
		var t io.ReadCloser
		if t, err = plain(ctx, 0); err == nil {
			_, err = io.CopyBuffer(g, struct{ io.Reader }{t}, make([]byte, 256<<10))
			t.Close()
		}
	}
	if err != nil {
		return err
	}
	return g.end(d)
}

// guarded passes on a range of what is written, but for its last byte until the digest of all was found right.
type guarded struct {
	w        io.Writer
	hash     hash.Hash
	at       int64
	from, to int64
	held     []byte
}

func (g *guarded) Write(b []byte) (int, error) {
	n := len(b)
	g.hash.Write(b)
	begin := g.at
	g.at += int64(n)
	lo, hi := max(g.from-begin, 0), min(g.to-begin, int64(n))
	if lo >= hi {
		return n, nil
	}
	b = b[lo:hi]
	if begin+hi == g.to {
		g.held, b = []byte{b[len(b)-1]}, b[:len(b)-1]
	}
	if len(b) == 0 {
		return n, nil
	}
	if _, err := g.w.Write(b); err != nil {
		return 0, err
	}
	return n, nil
}

func (g *guarded) end(want digest.Digest) error {
	if got := digest.NewDigest(want.Algorithm(), g.hash); got != want {
		return fmt.Errorf("%w: its digest is %s", encoder.ErrMismatch, got)
	}
	if len(g.held) == 0 {
		return nil // an empty range
	}
	_, err := g.w.Write(g.held)
	return err
}

// Heal makes a blob an object again, durably, whose object is lost or damaged: from a copy in another store, or from packs and
// recipe. Errors: those of Open.
func (b *Blobs) Heal(ctx context.Context, d digest.Digest) error {
	key := catalog.BlobKey(d)
	if set, ok := b.Store.Objects.(*stores.Set); ok && set.Mend(ctx, key, d) == nil {
		b.Metrics.healed()
		return nil
	}
	if err := b.Make(ctx, d, b.Store.Objects); err != nil {
		return err
	}
	b.Metrics.healed()
	return nil
}

// Make restores a blob to an object of a store, durably. Errors: those of Open; of the store.
func (b *Blobs) Make(ctx context.Context, d digest.Digest, to objects.Store) error {
	r, err := b.Open(ctx, d, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := to.Create(ctx, catalog.BlobKey(d))
	if err != nil {
		return err
	}
	defer w.Close()
	if _, err := io.Copy(w, r); err != nil {
		return err
	}
	return w.Commit()
}
