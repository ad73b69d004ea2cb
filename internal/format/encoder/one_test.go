package encoder

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/encoder/programs"
)

// TestLayer looks at one layer, FOIL_TEST_LAYER: how it was compressed, what its recipe takes for that, and how long it
// takes to make it again.
func TestLayer(t *testing.T) {
	name := os.Getenv("FOIL_TEST_LAYER")
	if name == "" {
		t.Skip("FOIL_TEST_LAYER names no layer")
	}
	blob, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(blob))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	s := &Set{Programs: programs.Program}
	defer s.Close()
	e, skipped, err := s.Prove(t.Context(), input(blob, plain))
	if err != nil || e == nil {
		t.Fatalf("%d bytes from %d: nothing was proven; skipped %v, %v", len(blob), len(plain), skipped, err)
	}
	t.Logf("%s level %d, blocks of %d: %d bytes from %d, %d parts, %d stored, recipe %d bytes", e.Encoder, e.Level, e.Block,
		len(blob), len(plain), len(e.Parts), e.StoredBytes(), size(t, e))
	for _, workers := range []int{1, 2} {
		began := time.Now()
		f := &firstByte{began: began}
		if err := s.Restore(t.Context(), f, e, open(plain), e.Out()/2, e.Out(), workers); err != nil {
			t.Fatal(err)
		}
		t.Logf("half of it, %d workers: %v, first byte %v", workers, time.Since(began).Round(time.Millisecond), f.took.Round(time.Millisecond))
	}
	checkRestore(t, s, e, blob, plain)
}

type firstByte struct {
	began time.Time
	took  time.Duration
}

func (f *firstByte) Write(b []byte) (int, error) {
	if f.took == 0 {
		f.took = time.Since(f.began)
	}
	return len(b), nil
}
