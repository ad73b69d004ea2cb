package arena

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
)

var update = flag.Bool("update", false, "write the golden files")

// goldenArena has its segments 0, 3 and 9 and one page of 6 present and durable, and 1 and
// another page of 6 present.
func goldenArena(t *testing.T) (*Arena, kernel.BootID) {
	c, data := example()
	boot := kernel.BootID([]byte("one boot's ID..."))
	a, err := create(t.TempDir(), layout(t, c, nil), boot)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	for _, i := range []int{0, 3, 9} {
		if err := a.WriteSegment(i, data[i]); err != nil {
			t.Fatal(err)
		}
	}
	all := contents(a.layout, data)
	page := func(first uint32) {
		off, _ := a.layout.Offset(2)
		b := all[off+int64(first)*BlockSize:][:min(BlockSize, 14200-int(first)*BlockSize)]
		if _, err := a.WriteRun(trace.Run{Content: 2, First: first, Blocks: 1}, segment.Sum(b), b); err != nil {
			t.Fatal(err)
		}
	}
	page(2)
	if err := a.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := a.WriteSegment(1, data[1]); err != nil {
		t.Fatal(err)
	}
	page(3)
	return a, boot
}

// TestVersion1 takes over the files of a daemon that knew no page runs, within
// one boot and after it, and of one that died while it did so.
func TestVersion1(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the golden presence map is of a little-endian host")
	}
	for _, tc := range []struct {
		name     string
		boot     string
		grow     bool
		segments int
	}{
		{"same boot", "one boot's ID...", false, 4},
		{"grown already", "one boot's ID...", true, 4},
		{"next boot", "another boot's..", false, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, data := example()
			l := layout(t, c, nil)
			dir := t.TempDir()
			for _, name := range []string{presenceName, durableName} {
				b, err := os.ReadFile(filepath.Join("testdata", name+"-v1.golden"))
				if err != nil {
					t.Fatal(err)
				}
				if name == presenceName && tc.grow {
					b = append(b, make([]byte, presenceSize(l)-int64(len(b)))...)
				}
				if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt(contents(l, data), 0); err != nil {
				t.Fatal(err)
			}
			a, err := open(dir, f, l, kernel.BootID([]byte(tc.boot)))
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if n := l.Segments() - 2 - a.Missing(); n != tc.segments || a.Doubt() != "" {
				t.Errorf("%d segments are believed, want %d, doubt %q", n, tc.segments, a.Doubt())
			}
			// From here on it is as if it had always been of this version.
			off, _ := l.Offset(2)
			b := contents(l, data)[off+2*BlockSize:][:BlockSize]
			if _, err := a.WriteRun(trace.Run{Content: 2, First: 2, Blocks: 1}, segment.Sum(b), b); err != nil {
				t.Fatal(err)
			}
			if err := a.Sync(context.Background()); err != nil {
				t.Fatal(err)
			}
			for _, boot := range []kernel.BootID{kernel.BootID([]byte(tc.boot)), {1}} {
				a.Close()
				f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_RDWR, 0)
				if err != nil {
					t.Fatal(err)
				}
				if a, err = open(dir, f, l, boot); err != nil {
					t.Fatal(err)
				}
				if n := l.Segments() - 2 - a.Missing(); n != tc.segments || !a.Present(off+2*BlockSize, 1) || a.Doubt() != "" {
					t.Errorf("reopened: %d segments, page present %v, doubt %q", n, a.Present(off+2*BlockSize, 1), a.Doubt())
				}
			}
		})
	}
}

func TestGolden(t *testing.T) {
	a, _ := goldenArena(t)
	for _, name := range []string{presenceName, durableName} {
		got, err := os.ReadFile(filepath.Join(a.Dir(), name))
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name+".golden")
		if *update {
			if err := os.MkdirAll("testdata", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if name == presenceName && binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
			t.Skip("the golden presence map is of a little-endian host")
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from %s", name, golden)
		}
	}
}

// TestDistrust damages the maps and checks what is believed.
func TestDistrust(t *testing.T) {
	const all, durable, nothing = 4, 3, 0 // segments believed
	flip := func(name string, off int64, mask byte) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, name)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if off < 0 {
				off += int64(len(b))
			}
			b[off] ^= mask
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	cut := func(name string, n int64) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, name), n); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tc := range []struct {
		name     string
		damage   func(*testing.T, string)
		same     int // believed in the same boot
		reboot   int // in the next one
		doubt    string
		silently bool // no doubt in the same boot
	}{
		{name: "none", damage: func(*testing.T, string) {}, same: all, reboot: durable, silently: true},
		{name: "magic", damage: flip(presenceName, 0, 1), same: durable, reboot: durable, doubt: "not a presence map"},
		{name: "header", damage: flip(presenceName, 20, 1), same: durable, reboot: durable, doubt: "checksum"},
		{name: "short presence", damage: cut(presenceName, 4100), same: durable, reboot: durable, doubt: "not a presence map"},
		{name: "segment bit set", damage: flip(presenceName, 4096, 1<<2), same: all, reboot: durable, silently: true},
		{name: "segment bit lost", damage: flip(presenceName, 4096, 1<<1), same: durable, reboot: durable, doubt: "block 1"},
		{name: "hole bit lost", damage: flip(presenceName, 4096, 1<<7), same: durable, reboot: durable, doubt: "a hole"},
		{name: "block bit set", damage: flip(presenceName, 4104, 1<<2), same: durable, reboot: durable, doubt: "block 2"},
		{name: "run bit lost", damage: flip(presenceName, 4112, 1<<5), same: durable, reboot: durable, doubt: "block 5"},
		{name: "run bit set", damage: flip(presenceName, 4112, 1<<6), same: all, reboot: durable, silently: true},
		{name: "run's block bit lost", damage: flip(presenceName, 4104, 1<<5), same: all, reboot: durable, silently: true},
		{name: "run bit after the last", damage: func(t *testing.T, dir string) {
			flip(presenceName, 4119, 1<<7)(t, dir)
			flip(presenceName, 4111, 1<<7)(t, dir)
		}, same: durable, reboot: durable, doubt: "after the last"},
		{name: "block bit lost", damage: flip(presenceName, 4104, 1<<1), same: durable, reboot: durable, silently: true},
		{name: "bit after the last", damage: flip(presenceName, 4103, 1<<7), same: durable, reboot: durable, doubt: "after the last"},
		{name: "durable", damage: flip(durableName, 73, 1), same: all, reboot: nothing, doubt: "durable map is not believed"},
		{name: "durable sum", damage: flip(durableName, -1, 1), same: all, reboot: nothing, doubt: "durable map is not believed"},
		{name: "durable cut", damage: cut(durableName, 10), same: all, reboot: nothing, doubt: "10 bytes long"},
		{name: "arena cut", damage: cut(FileName, 4096), same: nothing, reboot: nothing, doubt: "the arena file is 4096 bytes long"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, reboot := range []bool{false, true} {
				a, boot := goldenArena(t)
				want := tc.same
				if reboot {
					boot[0]++
					want = tc.reboot
				}
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
				tc.damage(t, a.Dir())
				f, err := os.OpenFile(filepath.Join(a.Dir(), FileName), os.O_RDWR, 0)
				if err != nil {
					t.Fatal(err)
				}
				b, err := open(a.Dir(), f, a.layout, boot)
				if err != nil {
					t.Fatal(err)
				}
				defer b.Close()
				got := b.layout.Segments() - 2 - b.Missing()
				if got != want {
					t.Errorf("reboot %v: %d segments are believed, want %d (%s)", reboot, got, want, b.Doubt())
				}
				if !reboot && (tc.silently != (b.Doubt() == "") || !strings.Contains(b.Doubt(), tc.doubt)) {
					t.Errorf("doubt %q, want %q", b.Doubt(), tc.doubt)
				}
				// Whatever it was, the maps are sound now.
				again, err := Open(b.Dir(), b.layout)
				if err != nil {
					t.Fatal(err)
				}
				again.Close()
			}
		})
	}
}

func TestOtherLayout(t *testing.T) {
	a, boot := goldenArena(t)
	a.Close()
	c, _ := example()
	c.Segments[0].ID[0]++ // equal sizes, other bytes
	f, err := os.OpenFile(filepath.Join(a.Dir(), FileName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, err := open(a.Dir(), f, layout(t, c, nil), boot)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if b.Missing() != 11 || !strings.Contains(b.Doubt(), "another layout") {
		t.Errorf("missing %d, doubt %q", b.Missing(), b.Doubt())
	}
}

// fuzzLayout has few segments, so that random bytes hit what matters.
func fuzzLayout(t testing.TB) *Layout {
	c, _ := makeTOC([]piece{{1, 10}}, []piece{{3, 5000}, {4, 100}, {0, 100}, {6, 9000}}, []piece{{0, 9000}})
	return layout(t, c, nil)
}

func FuzzPresence(f *testing.F) {
	l := fuzzLayout(f)
	boot := kernel.BootID{7}
	seed := make([]byte, presenceSize(l))
	m := presenceMaps(seed, l)
	m.fill(l, held{})
	f.Add(seed[:96], seed[4096:], true)
	m.mark(l, 1)
	m.mark(l, 2)
	f.Add(presenceHead(mapsVersion, l, boot), seed[4096:], false)
	f.Add(presenceHead(oldVersion, l, boot), seed[4096:], false)
	f.Fuzz(func(t *testing.T, head, tail []byte, fix bool) {
		// A header that is right most of the time lets the maps be read.
		b := make([]byte, presenceSize(l))
		copy(b, head)
		if fix {
			copy(b, presenceHead(mapsVersion, l, boot))
		}
		copy(b[presenceHeader:], tail)
		have, err := checkPresence(b, l, boot)
		if err != nil {
			return
		}
		believed := newMaps(l)
		believed.fill(l, have)
		found := presenceMaps(b, l)
		for i := range l.Segments() {
			if bit(believed.segments, i) && !bit(found.segments, i) {
				t.Errorf("segment %d is believed, and was not marked", i)
			}
		}
		for k := range int(l.Blocks()) {
			if bit(believed.runs, k) && !(bit(found.runs, k) && bit(found.blocks, k)) {
				t.Errorf("block %d is believed to be of a page run, and was not marked", k)
			}
		}
		for k := range int(l.Blocks()) {
			if bit(believed.blocks, k) && !bit(found.blocks, k) && !shared(l, k) {
				t.Errorf("block %d is believed, and was not marked", k)
			}
		}
		checkPresence(append(head, tail...), l, boot) // of any length
	})
}

// shared reports whether block k is a hole's alone.
func shared(l *Layout, k int) bool {
	first, end := l.SegmentsIn(int64(k)*BlockSize, BlockSize)
	for i := first; i < end; i++ {
		if !l.ids[i].IsHole() {
			return false
		}
	}
	return true
}

func FuzzDurable(f *testing.F) {
	l := fuzzLayout(f)
	f.Add(encodeDurable(l, held{[]uint64{0b101}, []uint64{0b10}}), false)
	f.Add(encodeDurable(l, held{[]uint64{1 << 63}, []uint64{0}}), true)
	f.Add(encodeDurableAs(oldVersion, l, held{[]uint64{1}, nil}), true)
	f.Fuzz(func(t *testing.T, b []byte, _ bool) {
		have, err := decodeDurable(b, l)
		if err != nil {
			return
		}
		if !bytes.Equal(encodeDurableAs(binary.LittleEndian.Uint32(b[8:]), l, have), b) {
			t.Error("decoded bytes differ from encoded ones")
		}
	})
}

func BenchmarkNewLayout(b *testing.B) {
	c := &toc.TOC{ChainID: "sha256:aa"}
	for i := range 84000 {
		id := segment.Sum([]byte{byte(i), byte(i >> 8), byte(i >> 16)})
		c.Contents = append(c.Contents, toc.Content{ID: id, Size: 5000, First: uint32(i), Segments: 1})
		c.Segments = append(c.Segments, toc.Segment{ID: id, Length: 5000})
	}
	b.ReportAllocs()
	for b.Loop() {
		l, err := NewLayout(c, nil)
		if err != nil {
			b.Fatal(err)
		}
		l.Repeated(0)
	}
}

func newMaps(l *Layout) maps {
	k := words(int(l.Blocks()))
	return maps{segments: make([]uint64, words(l.Segments())), blocks: make([]uint64, k), runs: make([]uint64, k)}
}
