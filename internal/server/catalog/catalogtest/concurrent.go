package catalogtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
)

func testCancelled(t *testing.T, c catalog.Catalog) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.LinkBlob(ctx, "r", catalog.Blob{Digest: digestOf("b")}); !errors.Is(err, context.Canceled) {
		t.Errorf("LinkBlob: %v, want Canceled", err)
	}
	if err := c.AddPack(ctx, Pack("packs/p", 1, 10, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("AddPack: %v, want Canceled", err)
	}
	if _, err := c.Keep().Find(ctx, []segment.ID{ID(1)}); !errors.Is(err, context.Canceled) {
		t.Errorf("Locate: %v, want Canceled", err)
	}
	names, err := c.ListRepositories(t.Context(), "", -1)
	check(t, err)
	wantEqual(t, "repositories", []string(nil), names)
}

func testConcurrent(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	const pushers, images = 8, 12
	var wg sync.WaitGroup
	for p := range pushers {
		wg.Go(func() {
			repo := fmt.Sprintf("r%d", p%3)
			for i := range images {
				b := catalog.Blob{Digest: digestOf(fmt.Sprint("blob", i)), Size: int64(i)}
				m := manifest(fmt.Sprint("manifest", i))
				if err := errors.Join(c.LinkBlob(ctx, repo, b), c.PutManifest(ctx, repo, m, fmt.Sprint(i))); err != nil {
					t.Error(err)
					return
				}
				// What was acknowledged is there at once, for everybody.
				if got, err := c.Blob(ctx, repo, b.Digest); err != nil || got != b {
					t.Errorf("blob %d: %+v, %v", i, got, err)
				}
				if got, err := c.Tag(ctx, repo, fmt.Sprint(i)); err != nil || got != m.Digest {
					t.Errorf("tag %d: %s, %v", i, got, err)
				}
			}
		})
	}
	wg.Wait()
	for r := range 3 {
		tags, err := c.Tags(ctx, fmt.Sprintf("r%d", r), "", -1)
		check(t, err)
		if len(tags) != images {
			t.Errorf("repository %d has %d tags, want %d", r, len(tags), images)
		}
	}
}

// Packs that are added at once, each twice, are all found.
func testConcurrentPacks(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	const packs, per = 10, 600
	var adders sync.WaitGroup
	for p := range packs {
		for range 2 {
			adders.Go(func() {
				if err := c.AddPack(ctx, Pack(fmt.Sprint("packs/", p), p*per, (p+1)*per-1, 5)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	adders.Wait()
	for p := range packs {
		var ids []segment.ID
		for i := range per {
			ids = append(ids, ID(p*per+i))
		}
		wantFound(t, c, ids, fmt.Sprint("packs/", p))
	}
}
