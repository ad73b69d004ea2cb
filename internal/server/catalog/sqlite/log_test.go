package sqlite_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/objects"
)

// journaled opens the catalog and the journal below dir, and attaches one to the other.
func journaled(t testing.TB, dir string, at func(string)) (*sqlite.Opened, *journal.Journal, error) {
	t.Helper()
	store, err := objects.OpenDir(filepath.Join(dir, "objects"))
	if err != nil {
		t.Fatal(err)
	}
	j := journal.New(store, journal.Options{Fan: 1000, At: at, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	c, err := sqlite.OpenConnections(t.Context(), filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), j.Close()); err != nil {
			t.Error(err)
		}
	})
	return c, j, j.Attach(t.Context(), c)
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func manifestOf(s string) catalog.Manifest {
	return catalog.Manifest{Digest: digest.FromString(s), MediaType: "m", Bytes: []byte(s), Pushed: time.Unix(1, 2), Subject: digest.FromString("subject")}
}

// all is what a catalog holds of one repository, and of the layers.
func all(t testing.TB, c *sqlite.Opened, repo string) map[string]string {
	t.Helper()
	got := map[string]string{}
	tags, err := c.Tags(t.Context(), repo, "", -1)
	must(t, err)
	for _, tag := range tags {
		d, err := c.Tag(t.Context(), repo, tag)
		must(t, err)
		got["tag "+tag] = d.String()
	}
	for r, err := range c.Referrers(t.Context(), repo, digest.FromString("subject"), "", "") {
		must(t, err)
		m, err := c.Manifest(t.Context(), repo, r.Digest)
		must(t, err)
		got["manifest "+r.Digest.String()] = fmt.Sprintf("%s %v", m.Bytes, m.Pushed.UnixNano())
	}
	must(t, c.EachLayer(t.Context(), func(l catalog.Layer) error { got["layer "+l.Blob.String()] = fmt.Sprint(l); return nil }))
	for i := range 100 {
		if b, err := c.Blob(t.Context(), repo, digest.FromString(fmt.Sprint("blob", i))); err == nil {
			got[fmt.Sprint("blob ", i)] = fmt.Sprint(b)
		}
	}
	names, err := c.ListRepositories(t.Context(), "", -1)
	must(t, err)
	got["repositories"] = fmt.Sprint(names)
	return got
}

// rebuilt is what the journal below dir makes of an empty catalog.
func rebuilt(t testing.TB, dir string) (c *sqlite.Opened, whole bool) {
	t.Helper()
	store, err := objects.OpenDir(filepath.Join(dir, "objects"))
	must(t, err)
	j := journal.New(store, journal.Options{})
	defer j.Close()
	c = open(t, filepath.Join(t.TempDir(), "db"))
	t.Cleanup(func() { c.Close() })
	var last uint64
	_, err = j.Read(t.Context(), func(_ string, changes []catalog.Change) error {
		for _, change := range changes {
			if change.Kind == catalog.ChangesWhole && change.Version > last {
				last, whole = change.Version, !change.Gone
			}
		}
		return c.Replay(t.Context(), changes)
	})
	must(t, err)
	return c, whole
}

// A crash after the journal has a change, and before the catalog has it: the next start makes it.
func TestCrashBeforeCommit(t *testing.T) {
	dir, after := t.TempDir(), t.TempDir()
	take := false
	c, _, err := journaled(t, dir, func(point string) {
		if point == "appended" && take {
			must(t, os.CopyFS(after, os.DirFS(dir)))
			take = false
		}
	})
	must(t, err)
	must(t, c.PutManifest(t.Context(), "r", manifestOf("one"), "a", "b"))
	take = true
	must(t, c.DeleteManifest(t.Context(), "r", manifestOf("one").Digest))
	crashed := open(t, filepath.Join(after, "db"))
	if d, err := crashed.Tag(t.Context(), "r", "a"); err != nil || d != manifestOf("one").Digest {
		t.Errorf("the copy is no crash before the commit: %s, %v", d, err)
	}
	must(t, crashed.Close())
	again, _, err := journaled(t, after, nil)
	must(t, err)
	if diff := cmp.Diff(all(t, c, "r"), all(t, again, "r")); diff != "" {
		t.Errorf("acknowledged, and after the crash:\n%s", diff)
	}
	must(t, again.PutManifest(t.Context(), "r", manifestOf("two"), "a"))
	other, _ := rebuilt(t, after)
	if diff := cmp.Diff(all(t, again, "r"), all(t, other, "r")); diff != "" {
		t.Errorf("after the crash, and rebuilt:\n%s", diff)
	}
}

// A catalog that is not of this journal is refused.
func TestStale(t *testing.T) {
	dir := t.TempDir()
	c, j, err := journaled(t, dir, nil)
	must(t, err)
	must(t, c.PutManifest(t.Context(), "r", manifestOf("one"), "a"))
	empty := open(t, filepath.Join(t.TempDir(), "db"))
	defer empty.Close()
	if err := j.Attach(t.Context(), empty); !errors.Is(err, journal.ErrStale) {
		t.Errorf("%v, want ErrStale", err)
	}
}

// Changes that wait together are one object and one transaction; those that fail leave the others alone.
func TestChangesTogether(t *testing.T) {
	var first sync.Once
	begun, hold := make(chan struct{}), make(chan struct{})
	objects := 0
	c, _, err := journaled(t, t.TempDir(), func(point string) {
		if point == "appended" {
			objects++
			first.Do(func() { close(begun); <-hold })
		}
	})
	must(t, err)
	var wg sync.WaitGroup
	link := func(i int) {
		if err := c.LinkBlob(t.Context(), "r", catalog.Blob{Digest: digest.FromString(fmt.Sprint("blob", i)), Size: int64(i)}); err != nil {
			t.Error(err)
		}
	}
	wg.Go(func() { link(0) })
	<-begun
	waiting := make(chan struct{}, 200)
	for i := range 60 {
		wg.Go(func() { waiting <- struct{}{}; link(i) })
		wg.Go(func() {
			waiting <- struct{}{}
			if err := c.DeleteTag(t.Context(), "r", "none"); !errors.Is(err, catalog.ErrNotFound) {
				t.Errorf("delete of no tag: %v", err)
			}
		})
	}
	for range 120 {
		<-waiting
	}
	close(hold)
	wg.Wait()
	if got := all(t, c, "r"); len(got) != 61 {
		t.Errorf("%d things, want 60 blobs and the repository", len(got))
	}
	if objects > 60 {
		t.Errorf("%d objects of the journal for 60 changes at once", objects)
	}
}

// What an older version left is written to the journal while changes go on, though the process dies after each step.
func TestLogMore(t *testing.T) {
	dir := t.TempDir()
	c := open(t, filepath.Join(dir, "db"))
	for i := range 600 { // more than one step
		must(t, c.LinkBlob(t.Context(), "other", catalog.Blob{Digest: digest.FromString(fmt.Sprint("many", i))}))
	}
	for i := range 40 {
		must(t, c.LinkBlob(t.Context(), "r", catalog.Blob{Digest: digest.FromString(fmt.Sprint("blob", i)), Size: int64(i)}),
			c.PutManifest(t.Context(), "r", manifestOf(fmt.Sprint(i)), fmt.Sprint("tag", i)),
			c.PutLayer(t.Context(), catalog.Layer{Blob: digest.FromString(fmt.Sprint(i)), Entries: "e"}))
	}
	must(t, c.Close())
	for step := 0; ; step++ {
		if step > 50 {
			t.Fatal("it does not come to its end")
		}
		// Dies between journal and catalog: the copy is what the next process finds.
		next := t.TempDir()
		copied := false
		c, _, err := journaled(t, dir, func(point string) {
			if point == "appended" && !copied && step%2 == 1 {
				must(t, os.CopyFS(next, os.DirFS(dir)))
				copied = true
			}
		})
		must(t, err)
		whole, err := c.LogMore(t.Context())
		must(t, err)
		if whole {
			must(t, c.DeleteTag(t.Context(), "r", "tag39"))
			other, said := rebuilt(t, dir)
			if diff := cmp.Diff(all(t, c, "r"), all(t, other, "r"), cmpopts.EquateEmpty()); diff != "" || !said {
				t.Errorf("whole %v; the catalog, and rebuilt:\n%s", said, diff)
			}
			return
		}
		if _, said := rebuilt(t, dir); said {
			t.Error("the journal says that it is whole, and it is not")
		}
		if !copied {
			must(t, c.DeleteTag(t.Context(), "r", fmt.Sprint("tag", step)),
				c.PutManifest(t.Context(), "r", manifestOf(fmt.Sprint("new", step)), fmt.Sprint("tag", step+10)))
			must(t, os.CopyFS(next, os.DirFS(dir)))
		}
		dir = next
	}
}

// BenchmarkPush is what a push of a manifest with a tag costs, with and without a journal.
func BenchmarkPush(b *testing.B) {
	for _, with := range []bool{false, true} {
		for _, clients := range []int{1, 16} {
			b.Run(fmt.Sprintf("journal=%v/clients=%d", with, clients), func(b *testing.B) {
				dir := b.TempDir()
				var c *sqlite.Opened
				if with {
					var err error
					if c, _, err = journaled(b, dir, nil); err != nil {
						b.Fatal(err)
					}
				} else {
					c = open(b, filepath.Join(dir, "db"))
					defer c.Close()
				}
				b.ResetTimer()
				var mu sync.Mutex
				n := 0
				var wg sync.WaitGroup
				for range clients {
					wg.Go(func() {
						for {
							mu.Lock()
							i := n
							n++
							mu.Unlock()
							if i >= b.N {
								return
							}
							if err := c.PutManifest(b.Context(), "r", manifestOf(fmt.Sprint(i)), fmt.Sprint("t", i%100)); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pushes/s")
			})
		}
	}
}
