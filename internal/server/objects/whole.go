package objects

import (
	"context"
	"fmt"
	"io"
)

// Put stores an object.
func Put(ctx context.Context, s Store, key string, b []byte) error {
	w, err := s.Create(ctx, key)
	if err != nil {
		return err
	}
	defer w.Close()
	if _, err := w.Write(b); err != nil {
		return err
	}
	return w.Commit()
}

// Read returns a whole object of at most limit bytes. Errors: ErrNotFound; io.ErrUnexpectedEOF; ErrRange.
func Read(ctx context.Context, s Store, key string, limit int64) ([]byte, error) {
	r, err := s.Open(ctx, key, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	size := int64(-1)
	if sized, ok := r.(Sized); ok {
		size = sized.Size()
	} else if size, err = s.Stat(ctx, key); err != nil {
		return nil, err
	}
	if size > limit {
		return nil, fmt.Errorf("object %s has %d bytes, at most %d: %w", key, size, limit, ErrRange)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, fmt.Errorf("object %s: %w", key, err)
	}
	return b, nil
}
