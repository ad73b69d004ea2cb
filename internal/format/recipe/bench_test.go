package recipe_test

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
)

// benchStream is a tree of small files: most of what a recipe holds is headers.
func benchStream(b *testing.B) []byte {
	var l lt.Layer
	for i := range 20_000 {
		l = append(l, lt.File(fmt.Sprintf("usr/lib/python3/package%d/module%d.py", i/50, i%50), 0o644, fmt.Sprintf("%*d", i%9000+1, i)))
	}
	return l.TarBytes(b)
}

func BenchmarkWriter(b *testing.B) {
	stream := benchStream(b)
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		encoded, _, err := record(bytes.NewReader(stream), recipe.End{})
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(encoded))/20_000, "recipe-B/file")
	}
}

func BenchmarkReader(b *testing.B) {
	stream := benchStream(b)
	encoded, contents, err := record(bytes.NewReader(stream), recipe.End{})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		r := recipe.NewReader(bytes.NewReader(encoded), from(contents), recipe.Limits{})
		if _, err := io.Copy(io.Discard, r); err != nil {
			b.Fatal(err)
		}
	}
}
