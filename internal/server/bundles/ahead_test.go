package bundles

import (
	"errors"
	"testing"

	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// What is read ahead may be anywhere, or gone.
func TestReadAhead(t *testing.T) {
	dir, err := objects.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, store := range []objects.Store{dir, objectstest.NewMemory()} {
		w, err := store.Create(t.Context(), "a/b")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
		if err := w.Commit(); err != nil {
			t.Fatal(err)
		}
		for _, last := range []int64{-1, 0, 5000, 1 << 20} {
			if err := readAhead(t.Context(), store, "a/b", last); err != nil {
				t.Errorf("%T, the last %d bytes: %v", store, last, err)
			}
		}
		if err := readAhead(t.Context(), store, "a/c", -1); !errors.Is(err, objects.ErrNotFound) {
			t.Errorf("%T, nothing: %v", store, err)
		}
	}
}
