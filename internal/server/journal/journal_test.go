package journal_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/journal"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

var update = flag.Bool("update", false, "write the golden file")

func samples() []catalog.Change {
	d := digest.FromString("d")
	at := time.Unix(1_800_000_000, 123)
	return []catalog.Change{
		{Version: 9, Time: at, Kind: catalog.ChangesWhole},
		{Version: 1, Time: at, Kind: catalog.ChangedRepository, Repo: "team/app"},
		{Version: 2, Time: at, Kind: catalog.ChangedBlob, Repo: "team/app", Name: d.String(), Blob: catalog.Blob{Digest: d, Size: 7, MediaType: "a/b"}},
		{Version: 3, Time: at, Kind: catalog.ChangedManifest, Repo: "team/app", Name: d.String(), Manifest: catalog.Manifest{
			Digest: d, MediaType: "m/t", ArtifactType: "a/t", Subject: d, Annotations: map[string]string{"b": "1", "a": "2"},
			Bytes: []byte(`{"schemaVersion":2}`), Pushed: at}},
		{Version: 4, Time: at, Kind: catalog.ChangedTag, Repo: "team/app", Name: "latest", Target: d},
		{Version: 5, Time: at, Kind: catalog.ChangedTag, Repo: "team/app", Name: "latest", Gone: true},
		{Version: 6, Time: at, Kind: catalog.ChangedLayer, Name: d.String(), Layer: catalog.Layer{Blob: d, DiffID: d, Entries: "entries/x",
			Size: 10, Files: 3, Recipe: catalog.Recipe{Key: "recipes/x", Digest: d, Size: 8}}},
		{Version: 7, Time: at, Kind: catalog.ChangedRootfs, Name: d.String(), Rootfs: catalog.Rootfs{ChainID: d, TOC: d, Key: "tocs/x"}},
	}
}

// deletedSamples are what version 1 of the format had not.
func deletedSamples() []catalog.Change {
	d := digest.FromString("d")
	at := time.Unix(1_800_000_000, 123)
	return []catalog.Change{
		{Version: 10, Time: at, Kind: catalog.ChangedDeletedManifest, Repo: "team/app", Name: d.String(), Deleted: at.Add(-time.Second), Manifest: catalog.Manifest{
			Digest: d, MediaType: "m/t", Bytes: []byte(`{"schemaVersion":2}`), Pushed: at}},
		{Version: 11, Time: at, Kind: catalog.ChangedDeletedTag, Repo: "team/app", Name: "latest", Target: d, Deleted: at.Add(-time.Second)},
		{Version: 12, Time: at, Kind: catalog.ChangedDeletedTag, Repo: "team/app", Name: "latest", Gone: true},
	}
}

func sorted(changes []catalog.Change) []catalog.Change {
	changes = slices.Clone(changes)
	slices.SortFunc(changes, func(a, b catalog.Change) int { return cmp.Compare(a.Version, b.Version) })
	return changes
}

// The format does not change by accident, and version 1 of it is read.
func TestGolden(t *testing.T) {
	golden := filepath.Join("testdata", "object2")
	all := append(samples(), deletedSamples()...)
	if *update {
		if err := os.WriteFile(golden, journal.Encode(slices.Clone(all)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string][]catalog.Change{filepath.Join("testdata", "object"): samples(), golden: all} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := journal.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := gocmp.Diff(sorted(want), sorted(got), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if name == golden && !bytes.Equal(journal.Encode(slices.Clone(all)), b) {
			t.Error("it is written otherwise")
		}
	}
}

// Whatever byte changes, or is missing, is noticed.
func TestDamage(t *testing.T) {
	b := journal.Encode(samples())
	for i := range b {
		bad := slices.Clone(b)
		bad[i] ^= 0x10
		if _, err := journal.Decode(bad); err == nil {
			t.Errorf("byte %d: it was changed, and nobody noticed", i)
		}
		if _, err := journal.Decode(b[:i]); !errors.Is(err, journal.ErrCorrupt) {
			t.Errorf("%d bytes: %v, want ErrCorrupt", i, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(journal.Encode(samples()))
	f.Add(journal.Encode(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, journal.Seal(b)} {
			changes, err := journal.Decode(b)
			if err != nil {
				continue
			}
			again, err := journal.Decode(journal.Encode(slices.Clone(changes)))
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(changes, again, cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
		}
	})
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func open(t testing.TB, store *objectstest.Memory, o journal.Options) *journal.Journal {
	o.Log = quiet()
	j := journal.New(store, o)
	t.Cleanup(func() { j.Close() })
	return j
}

// state is what a journal says: of each register the latest change, unless it is gone.
func state(t testing.TB, j *journal.Journal) map[string]string {
	t.Helper()
	for {
		latest := map[string]catalog.Change{}
		damaged, err := j.Read(t.Context(), func(_ string, changes []catalog.Change) error {
			for _, c := range changes {
				key := fmt.Sprint(c.Repo, c.Kind, c.Name)
				if c.Version > latest[key].Version {
					latest[key] = c
				}
			}
			return nil
		})
		if err != nil { // compaction has replaced an object
			continue
		}
		if len(damaged) > 0 {
			t.Fatal(damaged)
		}
		live := map[string]string{}
		for key, c := range latest {
			if !c.Gone {
				live[key] = c.Target.String()
			}
		}
		return live
	}
}

// A journal that is compacted all the time, and whose compaction is cut short at any operation, says what was
// appended, and stays small.
func TestCompaction(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := objectstest.NewMemory()
		want := map[string]string{}
		version := uint64(0)
		j := open(t, store, journal.Options{Fan: rapid.IntRange(2, 4).Draw(rt, "fan"), KeepDeletions: time.Nanosecond})
		j.Close() // only this test compacts
		for range rapid.IntRange(1, 60).Draw(rt, "appends") {
			var changes []catalog.Change
			used := map[string]bool{}
			for range rapid.IntRange(1, 3).Draw(rt, "changes") {
				version++
				c := catalog.Change{
					Version: version, Time: time.Unix(1, 0), Kind: catalog.ChangedTag, Repo: "r",
					Name: fmt.Sprint("t", rapid.IntRange(0, 12).Draw(rt, "tag")), Gone: rapid.Bool().Draw(rt, "gone"),
				}
				if used[c.Name] {
					continue
				}
				used[c.Name] = true
				key := fmt.Sprint(c.Repo, c.Kind, c.Name)
				if delete(want, key); !c.Gone {
					c.Target = digest.FromString(fmt.Sprint(version))
					want[key] = c.Target.String()
				}
				changes = append(changes, c)
			}
			if err := j.Append(t.Context(), changes); err != nil {
				rt.Fatal(err)
			}
			if rapid.Bool().Draw(rt, "cut short") {
				store.Inject(objectstest.FailNth(rapid.IntRange(1, 12).Draw(rt, "operation"), errors.New("killed")))
				_ = j.Compact(t.Context()) // it may have had nothing to do
				store.Inject(nil)
			} else if err := j.Compact(t.Context()); err != nil {
				rt.Fatal(err)
			}
			if diff := gocmp.Diff(want, state(t, j)); diff != "" {
				rt.Fatalf("after version %d (-want +got):\n%s", version, diff)
			}
		}
		if err := j.Compact(t.Context()); err != nil {
			rt.Fatal(err)
		}
		s, err := j.Summary(t.Context())
		if err != nil || s.Objects > 4*7 {
			rt.Fatalf("%d objects, %v", s.Objects, err)
		}
	})
}

// What outweighs everything older is merged with it: what is outdated does not pile up.
func TestBounded(t *testing.T) {
	store := objectstest.NewMemory()
	j := open(t, store, journal.Options{Fan: 8, KeepDeletions: time.Nanosecond})
	j.Close()
	const n = 2000
	for i := range uint64(n) {
		c := catalog.Change{Version: i + 1, Time: time.Unix(1, 0), Kind: catalog.ChangedTag, Repo: "r", Name: "t", Target: digest.FromString(fmt.Sprint(i))}
		if i%2 == 1 {
			c.Name, c.Gone = fmt.Sprint("deleted", i), true
		}
		if err := errors.Join(j.Append(t.Context(), []catalog.Change{c}), j.Compact(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	s, err := j.Summary(t.Context())
	if err != nil || s.Objects > 8*4 {
		t.Errorf("%d objects after %d appends, %v", s.Objects, n, err)
	}
	changes := 0
	if _, err := j.Read(t.Context(), func(_ string, c []catalog.Change) error { changes += len(c); return nil }); err != nil || changes > n/4 {
		t.Errorf("%d changes of %d are left, %v", changes, n, err)
	}
}

// A commit that failed, and has happened all the same, leaves no change.
func TestDoubt(t *testing.T) {
	store := objectstest.NewMemory()
	liar := &lyingStore{Memory: store}
	j := journal.New(liar, journal.Options{Log: quiet()})
	defer j.Close()
	change := func(v uint64) []catalog.Change {
		return []catalog.Change{{Version: v, Kind: catalog.ChangedTag, Repo: "r", Name: "t", Target: digest.FromString(fmt.Sprint(v))}}
	}
	liar.lie, liar.stuck = true, true
	if err := j.Append(t.Context(), change(1)); err == nil {
		t.Fatal("a commit failed, and Append did not")
	}
	if got := state(t, j); len(got) != 0 {
		t.Errorf("what failed is read: %v", got)
	}
	liar.lie = false
	if err := j.Append(t.Context(), change(2)); err == nil {
		t.Fatal("appended while an object is in doubt")
	}
	liar.stuck = false
	if err := j.Append(t.Context(), change(3)); err != nil {
		t.Fatal(err)
	}
	var versions []uint64
	_, err := j.Read(t.Context(), func(_ string, changes []catalog.Change) error {
		for _, c := range changes {
			versions = append(versions, c.Version)
		}
		return nil
	})
	if err != nil || !slices.Equal(versions, []uint64{3}) {
		t.Errorf("versions %v, %v, want 3 alone", versions, err)
	}
}

// A damaged object is left alone and told; the others are merged.
func TestDamagedObjectStays(t *testing.T) {
	store := objectstest.NewMemory()
	j := open(t, store, journal.Options{Fan: 4})
	j.Close()
	add := func(v uint64) {
		t.Helper()
		err := j.Append(t.Context(), []catalog.Change{{Version: v, Time: time.Now(), Kind: catalog.ChangedTag, Repo: "r", Name: fmt.Sprint(v), Target: "d"}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for v := range uint64(3) {
		add(v + 1)
	}
	var bad string
	if err := store.List(t.Context(), journal.Prefix, func(key string, _ int64) error { bad = cmp.Or(bad, key); return nil }); err != nil {
		t.Fatal(err)
	}
	w, err := store.Create(t.Context(), bad)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(bytes.Repeat([]byte("x"), 300))
	if err := errors.Join(err, w.Commit()); err != nil {
		t.Fatal(err)
	}
	add(4)
	if err := j.Compact(t.Context()); !errors.Is(err, journal.ErrCorrupt) {
		t.Errorf("compaction of a damaged object: %v", err)
	}
	for v := range uint64(8) {
		add(v + 5)
	}
	if err := j.Compact(t.Context()); err != nil {
		t.Error(err)
	}
	got := map[string]bool{}
	damaged, err := j.Read(t.Context(), func(_ string, changes []catalog.Change) error {
		for _, c := range changes {
			got[c.Name] = true
		}
		return nil
	})
	if err != nil || len(damaged) != 1 || damaged[0].Key != bad || len(got) != 11 {
		t.Errorf("damaged %v, read %v, %v", damaged, slices.Collect(maps.Keys(got)), err)
	}
}

// lyingStore commits journal objects and says that it failed.
type lyingStore struct {
	*objectstest.Memory
	lie, stuck bool
}

func (s *lyingStore) Delete(ctx context.Context, key string) error {
	if s.stuck {
		return errors.New("no answer")
	}
	return s.Memory.Delete(ctx, key)
}

func (s *lyingStore) Create(ctx context.Context, key string) (objects.Writer, error) {
	w, err := s.Memory.Create(ctx, key)
	return &lyingWriter{w, s}, err
}

type lyingWriter struct {
	objects.Writer
	store *lyingStore
}

func (w *lyingWriter) Commit() error {
	err := w.Writer.Commit()
	if err == nil && w.store.lie {
		err = errors.New("the answer was lost")
	}
	return err
}
