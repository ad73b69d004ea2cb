package objects

import (
	"context"
	"fmt"
	"io"
	"os"
)

// An Adopter has a better way to make a local file an object than Create.
type Adopter interface {
	// AdoptFile is Adopt.
	AdoptFile(ctx context.Context, key, path string) error
}

// Adopt turns the local file at path into the object key, durable when Adopt
// returns nil, and removes it from path. A store on the same file system
// renames it; any other one copies; one that has Unwrap and is no Adopter leaves it to the store that this returns. The file must not change any more. If it
// fails the file may be left where it was.
func Adopt(ctx context.Context, s Store, key, path string) error {
	if a, ok := s.(Adopter); ok {
		return a.AdoptFile(ctx, key, path)
	}
	if u, ok := s.(interface{ Unwrap() Store }); ok {
		return Adopt(ctx, u.Unwrap(), key, path)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	defer f.Close()
	w, err := s.Create(ctx, key)
	if err != nil {
		return err
	}
	defer w.Close()
	if _, err := io.Copy(w, f); err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	if err := w.Commit(); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("adopt object %s: %w", key, err)
	}
	return nil
}
