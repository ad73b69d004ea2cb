package ingest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	lt "hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/ingest"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// server is an Ingester over a memory that counts.
type server struct {
	*ingest.Ingester
	memory *objectstest.Memory
}

func newServer(t testing.TB) *server {
	t.Helper()
	c, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "catalog"))
	if err != nil {
		t.Fatal(err)
	}
	memory := objectstest.NewMemory()
	s := &server{&ingest.Ingester{Objects: memory, Catalog: c}, memory}
	t.Cleanup(func() {
		s.Close()
		c.Close()
	})
	return s
}

func put(t testing.TB, s objects.Store, key string, b []byte) {
	t.Helper()
	w, err := s.Create(context.Background(), key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Commit(); err != nil {
		t.Fatal(err)
	}
}

// push stores a blob as the registry does.
func push(t testing.TB, s objects.Store, b lt.Blob) ingest.Descriptor {
	t.Helper()
	put(t, s, catalog.BlobKey(b.Digest), b.Bytes)
	return ingest.Descriptor{Digest: b.Digest, MediaType: b.MediaType, Size: int64(len(b.Bytes)), DiffID: b.DiffID}
}

func get(t testing.TB, s objects.Store, key string) []byte {
	t.Helper()
	r, err := s.Open(context.Background(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// added lists the objects that are no blobs.
func added(t testing.TB, s objects.Store) []string {
	t.Helper()
	var keys []string
	err := s.List(context.Background(), "", func(key string, _ int64) error {
		if !strings.HasPrefix(key, "blobs/") {
			keys = append(keys, key)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// readBack returns the TOC of a rootfs and reads every content from the packs.
func readBack(t testing.TB, g *ingest.Ingester, r catalog.Rootfs) (*toc.TOC, map[segment.ID][]byte) {
	t.Helper()
	encoded := get(t, g.Objects, r.Key)
	if toc.Digest(encoded) != r.TOC {
		t.Fatal("the TOC has another digest than its row")
	}
	x, err := toc.Decode(encoded)
	if err != nil {
		t.Fatal(err)
	}
	if x.ChainID != r.ChainID {
		t.Fatalf("chain ID %s, want %s", x.ChainID, r.ChainID)
	}
	contents := map[segment.ID][]byte{}
	for _, c := range x.Contents {
		b := make([]byte, 0, c.Size)
		for _, s := range x.Segments[c.First : c.First+c.Segments] {
			if s.ID.IsHole() {
				b = append(b, make([]byte, s.Length)...)
				continue
			}
			b = append(b, readSegment(t, g, s.ID)...)
		}
		if segment.ID(sha256.Sum256(b)) != c.ID || int64(len(b)) != c.Size {
			t.Fatalf("content %s: other bytes", c.ID)
		}
		contents[c.ID] = b
	}
	return x, contents
}

// locate returns where segments are, of all packs.
func locate(t testing.TB, g *ingest.Ingester, ids []segment.ID) []catalog.Location {
	t.Helper()
	keep := g.Catalog.Keep()
	defer keep.Release()
	places, err := (&dedup.Store{Objects: g.Objects, Catalog: g.Catalog}).NewFinder(keep).Locate(context.Background(), ids)
	if err != nil {
		t.Fatal(err)
	}
	return places
}

// readSegment returns the bytes of a segment, which must be stored and whole.
func readSegment(t testing.TB, g *ingest.Ingester, id segment.ID) []byte {
	t.Helper()
	locations := locate(t, g, []segment.ID{id})
	if locations[0].Frame == nil {
		t.Fatalf("segment %s is not stored", id)
	}
	l := locations[0]
	frame, err := (&dedup.Store{Objects: g.Objects, Catalog: g.Catalog}).ReadFrame(context.Background(), l.Frame)
	if err != nil {
		t.Fatal(err)
	}
	b, err := segment.DecodeFrame(nil, frame, int(l.Frame.RawLength))
	if err != nil {
		t.Fatal(err)
	}
	for _, before := range l.Frame.Segments[:l.Index] {
		b = b[before.Length:]
	}
	b = b[:l.Frame.Segments[l.Index].Length]
	if segment.Sum(b) != id {
		t.Fatalf("segment %s has other bytes", id)
	}
	return b
}

func wantFile(t testing.TB, x *toc.TOC, contents map[segment.ID][]byte, path, data string) {
	t.Helper()
	at, ok := x.Lookup(path)
	if !ok {
		t.Fatalf("%s is missing", path)
	}
	got := ""
	if c := x.Inodes[at].Content; c >= 0 {
		got = string(contents[x.Contents[c].ID])
	}
	if got != data {
		t.Errorf("%s has %d bytes that differ from the %d pushed", path, len(got), len(data))
	}
}

func noise(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

func TestWhatIsPushedComesBack(t *testing.T) {
	s := newServer(t)
	zeros := string(make([]byte, 3<<20))
	large := noise(1, 5<<20) + zeros + noise(2, 100_000)
	base := lt.Layer{
		lt.Dir("etc", 0o755), lt.File("etc/a", 0o644, "one"), lt.File("etc/gone", 0o644, "two"), lt.File("large", 0o644, large),
		lt.File("zeros", 0o644, zeros), lt.File("few zeros", 0o644, zeros[:5]), lt.File("empty", 0o644, ""), lt.Link("etc/b", "etc/a"),
	}
	top := lt.Layer{lt.Whiteout("etc/gone"), lt.File("etc/new", 0o644, "three"), lt.File("copy", 0o644, large)}
	layers := []ingest.Descriptor{push(t, s.memory, base.Gzip(t)), push(t, s.memory, top.Zstd(t)), push(t, s.memory, lt.Layer{}.Tar(t))}
	r, err := s.Rootfs(context.Background(), layers)
	if err != nil {
		t.Fatal(err)
	}
	x, contents := readBack(t, s.Ingester, r)
	for path, data := range map[string]string{
		"etc/a": "one", "etc/b": "one", "etc/new": "three", "large": large, "copy": large, "zeros": zeros, "few zeros": zeros[:5], "empty": "",
	} {
		wantFile(t, x, contents, path, data)
	}
	if _, ok := x.Lookup("etc/gone"); ok {
		t.Error("etc/gone is still there")
	}

	row, err := s.Catalog.Layer(context.Background(), layers[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if row.DiffID != layers[0].DiffID || row.Files != 6 || row.Size != int64(len(base.TarBytes(t))) {
		t.Errorf("row %+v", row)
	}
	// Again: nothing is read and nothing written.
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error { return fmt.Errorf("%s of %s", op, key) })
	again, err := s.Rootfs(context.Background(), layers)
	if err != nil || again != r {
		t.Errorf("again: %+v, %v", again, err)
	}
	s.memory.Inject(nil)
	// A prefix of the layers is a rootfs of its own.
	below, err := s.Rootfs(context.Background(), layers[:1])
	if err != nil {
		t.Fatal(err)
	}
	x, contents = readBack(t, s.Ingester, below)
	wantFile(t, x, contents, "etc/gone", "two")
}

func TestWhatIsPushedComesBackProperty(t *testing.T) {
	s := newServer(t)
	rapid.Check(t, func(rt *rapid.T) {
		want := map[string]string{}
		var layers []ingest.Descriptor
		for range rapid.IntRange(1, 3).Draw(rt, "layers") {
			var l lt.Layer
			for range rapid.IntRange(0, 5).Draw(rt, "files") {
				name := rapid.SampledFrom([]string{"a", "b", "d/a", "d/b", "e/f/g"}).Draw(rt, "name")
				var data string
				for range rapid.IntRange(0, 3).Draw(rt, "parts") {
					size := rapid.SampledFrom([]int{1, 1000, segment.HoleLength, segment.MinLength, segment.FrameTarget, segment.MaxLength, 3_000_000}).Draw(rt, "size") + rapid.IntRange(-1, 1).Draw(rt, "more")
					if rapid.Bool().Draw(rt, "zeros") {
						data += string(make([]byte, size))
					} else {
						data += noise(rapid.Uint64Range(0, 5).Draw(rt, "seed"), size)
					}
				}
				l = append(l, lt.File(name, 0o644, data))
				want[name] = data
			}
			blob := []func(testing.TB) lt.Blob{l.Tar, l.Gzip, l.Zstd}[rapid.IntRange(0, 2).Draw(rt, "format")](t)
			layers = append(layers, push(t, s.memory, blob))
		}
		r, err := s.Rootfs(context.Background(), layers)
		if err != nil {
			rt.Fatal(err)
		}
		x, contents := readBack(t, s.Ingester, r)
		for path, data := range want {
			wantFile(t, x, contents, path, data)
		}
	})
}

func TestConcurrentPushesIngestOnce(t *testing.T) {
	s := newServer(t)
	layers := []ingest.Descriptor{
		push(t, s.memory, lt.Layer{lt.File("a", 0o644, noise(1, 1<<20))}.Gzip(t)),
		push(t, s.memory, lt.Layer{lt.File("b", 0o644, noise(2, 1<<20))}.Gzip(t)),
	}
	var blobs, tocs atomic.Int32
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		switch {
		case op == objectstest.OpOpen && strings.HasPrefix(key, "blobs/"):
			blobs.Add(1)
			time.Sleep(20 * time.Millisecond) // let the others come
		case op == objectstest.OpCreate && strings.HasPrefix(key, "tocs/"):
			tocs.Add(1)
		}
		return nil
	})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := s.Layer(context.Background(), layers[0]); err != nil {
				t.Error(err)
			}
			if _, err := s.Rootfs(context.Background(), layers); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if blobs.Load() != 2 || tocs.Load() != 1 {
		t.Errorf("%d blobs read, %d TOCs written, want 2 and 1", blobs.Load(), tocs.Load())
	}
}

func TestHostileLayersAreRefusedOnceAndLeaveNothing(t *testing.T) {
	s := newServer(t)
	s.Options.Packs.PackSize = 64 << 10 // so that packs are committed before the end
	l := lt.Layer{lt.File("large", 0o644, noise(3, 4<<20)), lt.File("../escape", 0o644, "x")}
	d := push(t, s.memory, l.Gzip(t))
	var committed atomic.Bool
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpCommit && strings.HasPrefix(key, "packs/") {
			committed.Store(true)
		}
		return nil
	})
	for try := range 2 {
		_, err := s.Rootfs(context.Background(), []ingest.Descriptor{d})
		var refused *layer.RefusedError
		if !errors.As(err, &refused) || refused.Layer != d.Digest || !strings.Contains(err.Error(), `entry "../escape": ".." in its name`) {
			t.Fatalf("try %d: %v", try, err)
		}
		if keys := added(t, s.memory); len(keys) != 0 {
			t.Errorf("left: %v", keys)
		}
		if try == 0 {
			if !committed.Load() {
				t.Fatal("no pack was committed: the test shows nothing")
			}
			s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
				if op == objectstest.OpOpen {
					t.Errorf("refused already, and %s is read again", key)
				}
				return nil
			})
		}
	}
	row, err := s.Catalog.Layer(context.Background(), d.Digest)
	if err != nil || row.Refused == "" || row.Entries != "" {
		t.Errorf("row %+v, %v", row, err)
	}
}

func TestLayersThatDoNotGoTogether(t *testing.T) {
	s := newServer(t)
	layers := []ingest.Descriptor{
		push(t, s.memory, lt.Layer{lt.File("a", 0o644, "1")}.Gzip(t)),
		push(t, s.memory, lt.Layer{lt.Link("l", "missing")}.Gzip(t)),
	}
	_, err := s.Rootfs(context.Background(), layers)
	var refused *layer.RefusedError
	if !errors.As(err, &refused) || refused.Layer != layers[1].Digest || refused.Entry != "l" {
		t.Errorf("%v", err)
	}
	if _, err := s.Rootfs(context.Background(), nil); !errors.Is(err, flatten.ErrNoLayers) {
		t.Errorf("no layers: %v", err)
	}
	if _, err := s.Rootfs(context.Background(), layers[:1]); err != nil {
		t.Errorf("the layer alone: %v", err)
	}
}

func TestWrongDigestsAreNotTheLayersFault(t *testing.T) {
	s := newServer(t)
	good := push(t, s.memory, lt.Layer{lt.File("a", 0o644, "1")}.Gzip(t))
	other := push(t, s.memory, lt.Layer{lt.File("b", 0o644, "1")}.Gzip(t))
	bad := good
	bad.DiffID = other.DiffID
	var wrong *layer.DigestError
	if _, err := s.Layer(context.Background(), bad); !errors.As(err, &wrong) || wrong.What != "diff ID" {
		t.Errorf("wrong diff ID: %v", err)
	}
	if row, err := s.Layer(context.Background(), good); err != nil || row.DiffID != good.DiffID {
		t.Errorf("then with the right one: %v", err)
	}
	if _, err := s.Rootfs(context.Background(), []ingest.Descriptor{bad}); !errors.As(err, &wrong) {
		t.Errorf("wrong diff ID of an ingested layer: %v", err)
	}

	// A blob that rotted.
	b := get(t, s.memory, catalog.BlobKey(other.Digest))
	rotten := bytes.Clone(b)
	rotten[len(b)/2] ^= 1
	put(t, s.memory, catalog.BlobKey(other.Digest), rotten)
	before := added(t, s.memory)
	if _, err := s.Layer(context.Background(), other); !errors.As(err, &wrong) || wrong.What != "blob" {
		t.Errorf("rotten blob: %v", err)
	}
	if after := added(t, s.memory); !slices.Equal(before, after) {
		t.Errorf("left: %v, before %v", after, before)
	}
	put(t, s.memory, catalog.BlobKey(other.Digest), b)
	if _, err := s.Layer(context.Background(), other); err != nil {
		t.Errorf("after it was mended: %v", err)
	}
	missing := good
	missing.Digest = digest.FromString("missing")
	if _, err := s.Layer(context.Background(), missing); !errors.Is(err, objects.ErrNotFound) {
		t.Errorf("no such blob: %v", err)
	}
}

func TestEveryFailureIsTransient(t *testing.T) {
	l := lt.Layer{lt.File("a", 0o644, noise(4, 300_000)), lt.File("b", 0o644, "small")}
	blob := l.Gzip(t)
	for n := 1; ; n++ {
		s := newServer(t)
		s.Options.Packs.PackSize = 64 << 10
		d := push(t, s.memory, blob)
		var hit atomic.Bool
		s.memory.Inject(func(at int, op objectstest.Op, _ string) error {
			if at == n {
				hit.Store(true)
				return syscall.ENOSPC
			}
			return nil
		})
		_, err := s.Rootfs(context.Background(), []ingest.Descriptor{d})
		if hit.Load() != errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("operation %d failed, and the error was %v", n, err)
		}
		if !hit.Load() {
			return
		}
		s.memory.Inject(nil)
		r, err := s.Rootfs(context.Background(), []ingest.Descriptor{d})
		if err != nil {
			t.Fatalf("after operation %d failed: %v", n, err)
		}
		x, contents := readBack(t, s.Ingester, r)
		wantFile(t, x, contents, "a", l[0].Data)
		s.Close()
	}
}

func TestDiskFullLeavesNothing(t *testing.T) {
	s := newServer(t)
	s.Options.Packs.PackSize = 64 << 10
	d := push(t, s.memory, lt.Layer{lt.File("a", 0o644, noise(5, 4<<20))}.Gzip(t))
	s.memory.SetLimit(s.memory.Used() + 1<<20)
	if _, err := s.Layer(context.Background(), d); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("disk full: %v", err)
	}
	if keys := added(t, s.memory); len(keys) != 0 {
		t.Errorf("left: %v", keys)
	}
	if _, err := s.Catalog.Layer(context.Background(), d.Digest); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("recorded: %v", err)
	}
	s.memory.SetLimit(0)
	if _, err := s.Layer(context.Background(), d); err != nil {
		t.Error(err)
	}
}

func TestCallersComeAndGo(t *testing.T) {
	s := newServer(t)
	d := push(t, s.memory, lt.Layer{lt.File("a", 0o644, noise(6, 100_000))}.Gzip(t))
	opened, proceed := make(chan struct{}, 8), make(chan struct{})
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpOpen && strings.HasPrefix(key, "blobs/") {
			opened <- struct{}{}
			<-proceed
		}
		return nil
	})
	results := make(chan error, 2)
	call := func(ctx context.Context) { _, err := s.Layer(ctx, d); results <- err }

	// The only caller leaves: the run ends and leaves nothing.
	ctx, cancel := context.WithCancel(context.Background())
	go call(ctx)
	<-opened
	cancel()
	if err := <-results; !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	// One who comes meanwhile gets a run of its own.
	go call(context.Background())
	close(proceed)
	if err := <-results; err != nil {
		t.Errorf("who came later: %v", err)
	}
	if _, err := s.Layer(context.Background(), d); err != nil {
		t.Error(err)
	}
	s.Close()
	e := push(t, s.memory, lt.Layer{lt.File("b", 0o644, "b")}.Gzip(t))
	if _, err := s.Layer(context.Background(), e); err == nil || !strings.Contains(err.Error(), "shutting down") {
		t.Errorf("after Close: %v", err)
	}
}

func TestTheFirstCallerMayLeave(t *testing.T) {
	s := newServer(t)
	d := push(t, s.memory, lt.Layer{lt.File("a", 0o644, noise(7, 100_000))}.Gzip(t))
	opened, proceed := make(chan struct{}, 8), make(chan struct{})
	s.memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpOpen && strings.HasPrefix(key, "blobs/") {
			opened <- struct{}{}
			<-proceed
		}
		return nil
	})
	first, second := make(chan error, 1), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { _, err := s.Layer(ctx, d); first <- err }()
	<-opened
	started := make(chan struct{})
	go func() { close(started); _, err := s.Layer(context.Background(), d); second <- err }()
	<-started
	time.Sleep(50 * time.Millisecond) // the second one now waits for the same run, or will start one: both must work
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("who left: %v", err)
	}
	close(proceed)
	if err := <-second; err != nil {
		t.Errorf("who stayed: %v", err)
	}
}
