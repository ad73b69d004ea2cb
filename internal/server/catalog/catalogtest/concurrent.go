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
	if _, err := c.Locate(ctx, []segment.ID{ID(1)}); !errors.Is(err, context.Canceled) {
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

// A pack is seen as a whole or not at all.
func testConcurrentPacks(t *testing.T, c catalog.Catalog) {
	ctx := t.Context()
	const packs, per = 10, 600
	var ids []segment.ID
	for i := range packs * per {
		ids = append(ids, ID(i))
	}
	done := make(chan struct{})
	var adders, readers sync.WaitGroup
	for p := range packs {
		for range 2 { // two add the same
			adders.Go(func() {
				if err := c.AddPack(ctx, Pack(fmt.Sprint("packs/", p), p*per, (p+1)*per-1, 5)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	for range 2 {
		readers.Go(func() {
			for {
				locations, err := c.Locate(ctx, ids)
				if err != nil {
					t.Error(err)
					return
				}
				for p := range packs {
					n := 0
					for _, l := range locations[p*per : (p+1)*per] {
						if l.Frame != nil {
							n++
						}
					}
					if n != 0 && n != per {
						t.Errorf("%d of %d segments of pack %d are there", n, per, p)
						return
					}
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	adders.Wait()
	close(done)
	readers.Wait()
	locations, err := c.Locate(ctx, ids)
	check(t, err)
	for i, l := range locations {
		if want := fmt.Sprint("packs/", i/per); l.Frame == nil || l.Frame.Pack != want {
			t.Fatalf("segment %d is in %+v, want %s", i, l.Frame, want)
		}
	}
}
