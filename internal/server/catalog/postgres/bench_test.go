package postgres_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/postgres/postgrestest"
)

// BenchmarkCatalog is what a push of a manifest with a tag, and a look at a blob, cost on a server on the same machine that does not sync.
func BenchmarkCatalog(b *testing.B) {
	c := open(b, postgrestest.Start(b).Database())
	defer c.Close()
	blob := catalog.Blob{Digest: digest.FromString("b"), Size: 1}
	if err := c.LinkBlob(b.Context(), "r", blob); err != nil {
		b.Fatal(err)
	}
	b.Run("push", func(b *testing.B) {
		n := 0
		for b.Loop() {
			n++
			m := catalog.Manifest{Digest: digest.FromString(fmt.Sprint(n)), Bytes: []byte("{}"), Pushed: time.Unix(1, 0)}
			if err := c.PutManifest(b.Context(), "r", m, fmt.Sprint("t", n%100)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("blob", func(b *testing.B) {
		for b.Loop() {
			if _, err := c.Blob(b.Context(), "r", blob.Digest); err != nil {
				b.Fatal(err)
			}
		}
	})
}
