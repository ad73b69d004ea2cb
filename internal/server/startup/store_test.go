package startup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/planner"
)

func keys(t *testing.T, w *world) []string {
	t.Helper()
	var keys []string
	if err := w.memory.List(t.Context(), "startup/", func(key string, _ int64) error {
		keys = append(keys, key)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return keys
}

// A server that dies after it took a trace builds the sets when it comes back,
// and what a build left that it did not finish is removed.
func TestRestart(t *testing.T) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 0, 5)}, nil))
	w.Put(t, keyPrefix(m.Image)+"77", []byte("of a build that was killed"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// The trace is durable; nothing is built any more.
	err := w.Add(t.Context(), m.Image, m.TOC, "b", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 5, 5)}, nil).Encode())
	if err == nil {
		t.Error("Add waited for a build after Close, and got one")
	}
	got, _ := m.pages(t)
	wantPages(t, "the old one is still served", got, m.run(t, "/usr/bin/app", 0, 5))
	w.start(t)
	m.built(t)
	got, _ = m.pages(t)
	wantPages(t, "after the restart", got, m.run(t, "/usr/bin/app", 0, 10))
	if k := keys(t, w); len(k) != 2 || slices.ContainsFunc(k, func(k string) bool { return strings.HasSuffix(k, "77") }) {
		t.Errorf("objects %v: want this generation and the one before", k)
	}
	before := keys(t, w)
	m.add(t, "c", m.trace(trace.Recorded, []string{}, []trace.Run{m.run(t, "/usr/bin/app", 0, 10)}, nil))
	if d := cmp.Diff(before, keys(t, w)); d != "" {
		t.Errorf("a trace that changed nothing wrote an object:\n%s", d)
	}
}

// Streams go on that read a store which was damaged, lost, or is of long ago.
func TestDamagedStore(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, w *world, m *image, key string){
		"a byte of a frame": func(t *testing.T, w *world, m *image, key string) {
			o, err := w.memory.Open(t.Context(), key, 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(o)
			b = bytes.Clone(b)
			b[len(magic)+1000] ^= 1
			w.Put(t, key, b)
		},
		"cut": func(t *testing.T, w *world, m *image, key string) {
			w.Put(t, key, []byte(magic))
		},
		"gone": func(t *testing.T, w *world, m *image, key string) {
			if err := w.memory.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		},
		"two generations later": func(t *testing.T, w *world, m *image, key string) {
			for i := range uint32(2) {
				m.add(t, fmt.Sprint(i), m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/lib/libx.so.1.2", 10*i, 5)}, nil))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := w.image(t, "r", "1", someFiles(1))
			touched := []trace.Run{m.run(t, "/usr/lib/libc.so.6", 0, 0), m.run(t, "/usr/bin/app", 0, 0)}
			m.add(t, "a", m.trace(trace.Recorded, nil, touched, nil))
			set := m.find(t)
			damage(t, w, m, set.row.Key)
			odd := func(r trace.Run) bool { return r.Content%2 == 1 }
			for _, wanted := range []func(trace.Run) bool{everything, odd} {
				m.deliver(t, set.Select(m.x.Table(), wanted))
			}
			m.built(t)
			if set := m.find(t); set == nil {
				t.Error("no set after it was built anew")
			} else {
				m.deliver(t, set.Select(m.x.Table(), everything))
			}
		})
	}
	t.Run("its index", func(t *testing.T) {
		w := newWorld(t)
		m := w.image(t, "r", "1", someFiles(1))
		m.add(t, "a", m.trace(trace.Recorded, nil, []trace.Run{m.run(t, "/usr/bin/app", 0, 0)}, nil))
		row, err := w.World.Catalog.StartupImage(t.Context(), "r", m.Image.ChainID)
		if err != nil {
			t.Fatal(err)
		}
		w.Put(t, row.Key, []byte("nothing of the kind, and long enough to have had a trailer at its end"))
		w.start(t) // forgets what it has in memory
		if set, err := w.Find(t.Context(), m.Image, nil, m.x.Table()); set != nil || !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v, %v", set, err)
		}
		m.built(t)
		if m.find(t) == nil {
			t.Error("no set after it was built anew")
		}
	})
}

// fatalError is a test for goroutines.
type fatalError struct{ *testing.T }

func (f fatalError) Fatal(args ...any) { f.Error(args...) }

func (f fatalError) Fatalf(format string, args ...any) { f.Errorf(format, args...) }

// Whatever services touch: their sets are what they touched, each page is stored
// once, and what is delivered has what is wanted, with the right bytes.
func TestStoreProperty(t *testing.T) {
	w := newWorld(t)
	files := someFiles(1)
	delete(files, "/usr/share/large")
	files["/usr/lib/libc.so.6"] = text(2, 300_000) // quick
	m := w.image(t, "r", "1", files)
	rapid.Check(t, func(rt *rapid.T) {
		run := rapid.Custom(func(t *rapid.T) trace.Run {
			c := rapid.IntRange(0, len(m.Contents)-1).Draw(t, "content")
			pages := trace.Pages(m.Contents[c].Size)
			first := rapid.Uint32Range(0, pages-1).Draw(t, "first")
			return trace.Run{Content: uint32(c), First: first, Blocks: rapid.Uint32Range(1, pages-first).Draw(t, "blocks")}
		})
		var services []planned
		for i := range rapid.IntRange(1, 5).Draw(rt, "services") {
			var v evidence
			runs := trace.Merge(rapid.SliceOfN(run, 0, 6).Draw(rt, "touched"))
			shuffled := rapid.Permutation(runs).Draw(rt, "order")
			v.recorded = voters([]*trace.Trace{m.trace(trace.Recorded, nil, shuffled, nil)}, []string{"x"})
			set, late := v.choose(m.TOC)
			if len(late) > 0 {
				rt.Fatalf("late %v", late)
			}
			services = append(services, planned{Service: Service{Args: []string{fmt.Sprint(i)}, Origin: bundle.OriginTraced}, set: set})
		}
		s := lay(services, m.TOC)
		s.TOC = m.Image.TOC
		key := "startup/property"
		if err := s.write(context.Background(), w.World.Objects, key, m.TOC, &planner.Contents{TOC: m.TOC, Index: m.x, Objects: w.World.Objects}); err != nil {
			rt.Fatal(err)
		}
		read, err := open(context.Background(), w.World.Objects, key, m.x.Table(), m.Image.TOC)
		if err != nil {
			rt.Fatal(err)
		}
		if d := cmp.Diff(read.Frames, s.Frames); d != "" {
			rt.Fatalf("frames:\n%s", d)
		}
		if !sameSets(read, s) || !slices.Equal(read.Digests, s.Digests) || !slices.Equal(read.Common, s.Common) {
			rt.Fatal("another store was read than was written")
		}
		stored, distinct := int64(0), int64(0)
		for _, r := range read.Runs {
			stored += int64(r.Blocks)
		}
		for _, r := range trace.Merge(read.Runs) {
			distinct += int64(r.Blocks)
		}
		if stored != distinct {
			rt.Fatalf("%d pages are stored, %d different ones", stored, distinct)
		}
		for i, v := range services {
			set := &Set{sets: w.Sets, store: read, frames: read.Services[i].Frames, Origin: v.Origin}
			set.row.Key = key
			if d := cmp.Diff(trace.Merge(bare(v.set)), trace.Merge(set.Runs()), cmpopts.EquateEmpty()); d != "" {
				rt.Fatalf("service %d (want, got):\n%s", i, d)
			}
			modulus := rapid.Uint32Range(1, 4).Draw(rt, "modulus")
			wanted := func(r trace.Run) bool { return (r.Content+r.First)%modulus == 0 }
			d := set.Select(m.x.Table(), wanted)
			got := trace.Merge(d.Wire.Runs)
			for _, r := range set.Runs() {
				if wanted(r) && !trace.Contains(got, r) {
					rt.Fatalf("run %v is wanted and not delivered", r)
				}
			}
			for _, f := range d.Wire.Frames {
				useful := int64(0)
				for _, r := range d.Wire.Runs[f.First : f.First+f.Count] {
					if wanted(r) {
						_, n := r.Range(m.Contents[r.Content].Size)
						useful += n
					}
				}
				if 4*useful < 3*int64(f.RawLength) {
					rt.Fatalf("%d of %d bytes of a frame are wanted", useful, f.RawLength)
				}
			}
			m.deliver(rt, d)
		}
	})
}

// golden is a small store with fixed bytes.
func golden(t testing.TB) (*image, *Store) {
	w := newWorld(t)
	m := w.image(t, "r", "1", someFiles(1))
	services := []planned{
		{Service: Service{Args: []string{"app", "-v"}, Origin: bundle.OriginTraced, Late: []trace.Run{m.run(t, "/usr/lib/libc.so.6", 400, 3)}},
			set: []ranked{{m.run(t, "/usr/bin/app", 0, 0), 0}, {m.run(t, "/usr/lib/libc.so.6", 7, 90), 60}}},
		{Service: Service{Origin: bundle.OriginInherited}, set: []ranked{{m.run(t, "/usr/lib/libc.so.6", 50, 20), 0}, {m.run(t, "/etc/passwd", 0, 0), 20}}},
	}
	s := lay(services, m.TOC)
	s.Services[0].Filled = 1
	s.TOC = m.Image.TOC
	s.Digests = make([]segment.ID, len(s.Runs))
	for i, r := range s.Runs {
		s.Digests[i] = segment.Sum(fmt.Append(nil, r))
		if c := &m.Contents[r.Content]; r.Whole(c.Size) {
			s.Digests[i] = c.ID
		}
	}
	offset := int64(len(magic))
	for i := range s.Frames {
		f := &s.Frames[i]
		f.Offset, f.Length, f.Sum = offset, uint32(100+i), uint32(7777*i)
		offset += int64(f.Length)
	}
	return m, s
}

func (s *Store) end() int64 {
	last := s.Frames[len(s.Frames)-1]
	return last.Offset + int64(last.Length)
}

func TestGolden(t *testing.T) {
	m, s := golden(t)
	b := s.encode(m.TOC)
	file := filepath.Join("testdata", "index-2.golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, old) {
		t.Error("the format has changed: it needs another version")
	}
	index := old[:len(old)-trailerSize]
	got, err := decode(index, s.end(), m.x.Table(), m.Image.TOC)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s, got, cmpopts.IgnoreUnexported(Store{})); d != "" {
		t.Errorf("got:\n%s", d)
	}
	before, err := os.ReadFile(filepath.Join("testdata", "index-1.golden"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err = decode(before[:len(before)-trailerSize], s.end(), m.x.Table(), m.Image.TOC); err != nil {
		t.Fatal(err)
	}
	s.Services[0].Filled = 0
	if d := cmp.Diff(s, got, cmpopts.IgnoreUnexported(Store{})); d != "" {
		t.Errorf("of the version before, got:\n%s", d)
	}
	for n := range index {
		if _, err := decode(index[:n], s.end(), m.x.Table(), m.Image.TOC); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut after %d bytes: %v", n, err)
		}
	}
	if _, err := decode(index, s.end()+1, m.x.Table(), m.Image.TOC); !errors.Is(err, ErrCorrupt) {
		t.Errorf("frames of another length: %v", err)
	}
	if _, err := decode(index, s.end(), m.x.Table(), m.Image.ChainID); !errors.Is(err, ErrCorrupt) {
		t.Errorf("another TOC: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	m, s := golden(f)
	b := s.encode(m.TOC)
	f.Add(b[:len(b)-trailerSize])
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decode(b, s.end(), m.x.Table(), m.Image.TOC)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		again := got.encode(m.x.Table())
		same, err := decode(again[:len(again)-trailerSize], s.end(), m.x.Table(), m.Image.TOC)
		if err != nil || !sameSets(got, same) {
			t.Fatalf("written again: %v", err)
		}
		for i := range got.Services {
			set := &Set{store: got, frames: got.Services[i].Frames}
			set.Select(m.x.Table(), everything)
		}
	})
}
