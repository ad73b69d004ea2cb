package stores

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/objects"
)

// ErrNoCopy is returned, wrapped, where no other store has what is wanted.
var ErrNoCopy = errors.New("no other store has a whole copy")

// Mend makes an object below the root again of the first other store's whose bytes have the digest. Errors: ErrNoCopy, with why.
func (s *Set) Mend(ctx context.Context, key string, d digest.Digest) error {
	errs := []error{fmt.Errorf("object %s: %w", key, ErrNoCopy)}
	for _, store := range s.Here()[1:] {
		err := CopyDigest(ctx, s.root, store, key, d)
		if err == nil || ctx.Err() != nil {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// CopyDigest copies an object from one store to another, where it is only if it has the digest.
func CopyDigest(ctx context.Context, to, from objects.Store, key string, d digest.Digest) error {
	v := d.Verifier()
	return Copy(ctx, to, from, key, v, func() error {
		if !v.Verified() {
			return fmt.Errorf("object %s: its digest is another than %s", key, d)
		}
		return nil
	})
}

// Copy copies an object from one store to another. seen, unless it is nil, gets the bytes, and whole says, before the copy is an
// object, whether they are right.
func Copy(ctx context.Context, to, from objects.Store, key string, seen io.Writer, whole func() error) error {
	r, err := from.Open(ctx, key, 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := to.Create(ctx, key)
	if err != nil {
		return err
	}
	defer w.Close()
	out := io.Writer(w)
	if seen != nil {
		out = io.MultiWriter(w, seen)
	}
	if _, err := io.CopyBuffer(out, struct{ io.Reader }{r}, make([]byte, 256<<10)); err != nil {
		return err
	}
	if whole != nil {
		if err := whole(); err != nil {
			return err
		}
	}
	return w.Commit()
}
