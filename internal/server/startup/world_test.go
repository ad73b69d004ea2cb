package startup

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

var update = flag.Bool("update", false, "write golden files anew")

// world is Sets over stores in memory and a catalog on disk.
type world struct {
	*plannertest.World
	*Sets
	memory *objectstest.Memory
	max    Limit
	// retireAfter is Options.Retire.
	retireAfter time.Duration
}

func newWorld(t testing.TB) *world {
	t.Helper()
	memory := objectstest.NewMemory()
	w := &world{World: plannertest.New(t, memory), memory: memory}
	w.start(t)
	return w
}

// start opens Sets, or opens them anew, as a server does that comes back.
func (w *world) start(t testing.TB) {
	t.Helper()
	if w.Sets != nil {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	w.Sets = New(Options{
		Catalog: w.World.Catalog, Objects: w.World.Objects, Load: w.load, Max: w.max,
		Settle: time.Hour, // the tests ask for what they wait for
		Retire: w.retireAfter,
		Log:    slog.New(slog.DiscardHandler),
	})
	sets := w.Sets
	t.Cleanup(func() { sets.Close() })
}

func (w *world) load(ctx context.Context, chain digest.Digest) (*toc.TOC, *planner.Index, error) {
	r, err := w.World.Catalog.Rootfs(ctx, chain)
	if err != nil {
		return nil, nil, err
	}
	o, err := w.World.Objects.Open(ctx, r.Key, 0, -1)
	if err != nil {
		return nil, nil, err
	}
	defer o.Close()
	b, err := io.ReadAll(o)
	if err != nil {
		return nil, nil, err
	}
	t, err := toc.Decode(b)
	if err != nil {
		return nil, nil, err
	}
	x, err := planner.Build(ctx, t, r.TOC, w.World.Places)
	return t, x, err
}

// image is an image of a world, with what it was made from.
type image struct {
	Image
	*toc.TOC
	files plannertest.Files
	x     *planner.Index
	w     *world
}

func (w *world) image(t testing.TB, repo, name string, files plannertest.Files) *image {
	t.Helper()
	_, r := w.Rootfs(t, digest.FromString(name), files)
	x, ix, err := w.load(context.Background(), r.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	return &image{Image{repo, r.ChainID, r.TOC, "linux/amd64"}, x, files, ix, w}
}

// run returns pages of a file; 0 blocks are all from first on.
func (m *image) run(t testing.TB, path string, first, blocks uint32) trace.Run {
	t.Helper()
	i, ok := m.Lookup(path)
	if !ok || m.Inodes[i].Content < 0 {
		t.Fatalf("no file %s", path)
	}
	if blocks == 0 {
		blocks = trace.Pages(m.Inodes[i].Size) - first
	}
	return trace.Run{Content: uint32(m.Inodes[i].Content), First: first, Blocks: blocks}
}

func (m *image) trace(kind trace.Kind, args []string, touched, unused []trace.Run) *trace.Trace {
	v := &trace.Trace{Kind: kind, ChainID: m.Image.ChainID, TOC: m.Image.TOC, Args: args, Unused: unused}
	for _, r := range touched {
		v.Touched = append(v.Touched, trace.Touch{Run: r, Waited: kind == trace.Reported})
	}
	return v
}

// add sends a trace and waits until the sets are built.
func (m *image) add(t testing.TB, client string, v *trace.Trace) {
	t.Helper()
	m.send(t, client, v)
	m.built(t)
}

func (m *image) send(t testing.TB, client string, v *trace.Trace) {
	t.Helper()
	if err := m.w.Add(context.Background(), m.Image, m.TOC, client, v.Encode()); err != nil {
		t.Fatal(err)
	}
}

func (m *image) built(t testing.TB) {
	t.Helper()
	if err := m.w.wait(context.Background(), m.w.build(m.Image, true)); err != nil {
		t.Fatal(err)
	}
	row, err := m.w.World.Catalog.StartupImage(context.Background(), m.Repository, m.Image.ChainID)
	if err != nil || row.Built != row.Wanted {
		t.Fatalf("not built: %+v, %v", row, err)
	}
}

// find returns the set of a service; nil if there is none.
func (m *image) find(t testing.TB, args ...string) *Set {
	t.Helper()
	set, err := m.w.Find(context.Background(), m.Image, args, m.x.Table())
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// pages returns the pages of a service's set, merged, and where it is from.
func (m *image) pages(t testing.TB, args ...string) ([]trace.Run, string) {
	t.Helper()
	set := m.find(t, args...)
	if set == nil {
		return nil, ""
	}
	return trace.Merge(set.Runs()), set.Origin
}

type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// deliver sends a delivery and checks every byte against the files.
func (m *image) deliver(t fataler, d *Delivery) {
	t.Helper()
	bodies := map[segment.ID]string{}
	for _, b := range m.files {
		bodies[segment.Sum([]byte(b))] = b
	}
	n := 0
	frame := func(i uint32, data []byte) error {
		f := &d.Wire.Frames[i]
		if int(i) != n || len(data) > int(f.MaxLength) {
			return fmt.Errorf("frame %d after %d, %d bytes, announced at most %d", i, n, len(data), f.MaxLength)
		}
		n++
		raw, err := segment.DecodeFrame(nil, data, int(f.RawLength))
		if err != nil {
			return err
		}
		for _, r := range d.Wire.Runs[f.First : f.First+f.Count] {
			c := &m.Contents[r.Content]
			off, length := r.Range(c.Size)
			if got := string(raw[:length]); got != bodies[c.ID][off:off+length] {
				return fmt.Errorf("run %+v has other bytes", r)
			}
			raw = raw[length:]
		}
		if len(raw) > 0 {
			return fmt.Errorf("frame %d has %d bytes too many", i, len(raw))
		}
		return nil
	}
	err := d.Send(context.Background(), &planner.Contents{TOC: m.x.Table(), Index: m.x, Objects: m.w.World.Objects}, func(sections []byte) error {
		for len(sections) > 0 {
			i := uint32(n)
			head := len(bundle.AppendPagesHead(nil, i, 0))
			length := int(binary.LittleEndian.Uint32(sections[2:])) + 6 - head
			if want := bundle.AppendPagesHead(nil, i, length); !bytes.Equal(sections[:head], want) {
				return fmt.Errorf("section %x, want %x", sections[:head], want)
			}
			if err := frame(i, sections[head:head+length]); err != nil {
				return err
			}
			sections = sections[head+length:]
		}
		return nil
	})
	if err == nil && n != len(d.Wire.Frames) {
		err = fmt.Errorf("%d of %d frames", n, len(d.Wire.Frames))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func everything(trace.Run) bool { return true }

// text returns n bytes that compress a little and repeat nowhere.
func text(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = "abcdefghijklmnopqrstuvwxyz .,;\n0"[r.IntN(32)]
	}
	return string(b)
}

func someFiles(version uint64) plannertest.Files {
	hole := make([]byte, 300<<10)
	return plannertest.Files{
		"/usr/bin/app":         text(1, 200_000),
		"/usr/lib/libc.so.6":   text(2, 2<<20),
		"/usr/lib/libx.so.1.2": text(3, 500_000),
		"/usr/lib/libx.so.1":   "-> libx.so.1.2",
		"/var/data":            text(4, 1_100_000) + string(hole) + text(5, 100_001),
		"/etc/version":         fmt.Sprint("version ", version),
		"/etc/passwd":          "root",
		"/usr/share/large":     text(6+version, 3<<20),
	}
}

var _ catalog.Startup = catalog.Catalog(nil)
