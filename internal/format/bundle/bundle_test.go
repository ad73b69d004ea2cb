package bundle_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/toc/toctest"
)

var update = flag.Bool("update", false, "write golden files anew")

// unchecked compares images without what Reader notes of them.
var unchecked = cmpopts.IgnoreUnexported(bundle.Image{})

// fixture is an answer to a request for an image that is chosen from an index.
type fixture struct {
	req    *bundle.Request
	image  *bundle.Image
	toc    *toc.TOC
	plan   *bundle.Plan
	frames [][]byte
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func newImage(files ...string) (*bundle.Image, *toc.TOC) {
	diffID := digest.FromString(fmt.Sprint(files))
	config := mustJSON(ocispec.Image{Platform: forPlatform, RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diffID}}})
	manifest := mustJSON(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromBytes(config), Size: int64(len(config))},
		Layers: []ocispec.Descriptor{{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: diffID, Size: 1}},
	})
	root := &toc.File{Mode: unix.S_IFDIR | 0o755, Children: map[string]*toc.File{}}
	for i, f := range files {
		id := segment.Sum([]byte(f))
		root.Children[fmt.Sprintf("f%02d", i)] = &toc.File{Mode: unix.S_IFREG | 0o644, Content: &toc.Bytes{
			ID: id, Size: int64(len(f)), Segments: []toc.Segment{{ID: id, Length: uint32(len(f))}}}}
	}
	chain := identity.ChainID([]digest.Digest{diffID})
	t, err := toc.Build(chain, root)
	if err != nil {
		panic(err)
	}
	encoded, err := toc.Encode(t)
	if err != nil {
		panic(err)
	}
	return &bundle.Image{
		Manifest:  bundle.Blob{Digest: digest.FromBytes(manifest), MediaType: ocispec.MediaTypeImageManifest, Bytes: manifest},
		Config:    bundle.Blob{Digest: digest.FromBytes(config), MediaType: ocispec.MediaTypeImageConfig, Bytes: config},
		ChainID:   chain,
		TOCDigest: toc.Digest(encoded),
		TOC:       encoded,
		Segments:  uint32(len(t.Segments)),
	}, t
}

// forPlatform is the platform that fixtures are asked for.
var forPlatform = ocispec.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}

// entry is an image's in an index.
func entry(m *bundle.Image, p ocispec.Platform) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: m.Manifest.MediaType, Digest: m.Manifest.Digest, Size: int64(len(m.Manifest.Bytes)), Platform: &p}
}

var contents = []string{"one", "two", "three, which is longer longer longer longer longer longer longer longer", "four"}

func newFixture() *fixture {
	m, t := newImage(contents...)
	other, _ := newImage("of another platform")
	index := mustJSON(ocispec.Index{Manifests: []ocispec.Descriptor{
		entry(other, ocispec.Platform{OS: "linux", Architecture: "riscv64"}), entry(m, forPlatform)}})
	m.Chosen = &bundle.Blob{Digest: digest.FromBytes(index), MediaType: ocispec.MediaTypeImageIndex, Bytes: index}
	f := &fixture{
		req: &bundle.Request{
			Versions: []int{bundle.Version},
			Hold:     10 * time.Second,
			Image:    bundle.ImageRequest{Repository: "r", Reference: string(m.Chosen.Digest), Platform: &forPlatform},
		},
		image: m, toc: t, plan: &bundle.Plan{},
	}
	f.frame(2)
	f.frame(3, 1)
	return f
}

func (f *fixture) frame(numbers ...uint32) {
	var raw [][]byte
	n := 0
	for _, number := range numbers {
		s := contents[number]
		raw, n = append(raw, []byte(s)), n+len(s)
	}
	b, err := segment.AppendFrame(nil, segment.Zstd, raw...)
	if err != nil {
		panic(err)
	}
	p := f.plan
	p.Frames = append(p.Frames, bundle.PlanFrame{MaxLength: uint32(len(b)) + 3, RawLength: uint32(n),
		First: uint32(len(p.Segments)), Segments: uint32(len(numbers))})
	p.Segments = append(p.Segments, numbers...)
	p.MaxBytes += bundle.SectionLength(len(b) + 3)
	p.ContentBytes += int64(n)
	f.frames = append(f.frames, b)
}

func (f *fixture) write(w *bundle.Writer) {
	w.Hello(bundle.Hello{Version: 1, Stream: "stream-1"})
	w.Image(f.image)
	w.Plan(f.plan)
	for i := range f.frames {
		j := len(f.frames) - 1 - i // as after a promotion
		w.Frame(uint32(j), f.frames[j][:1], f.frames[j][1:])
	}
	w.End()
}

func (f *fixture) bytes() []byte {
	var b bytes.Buffer
	f.write(bundle.NewWriter(&b))
	return b.Bytes()
}

// readAll reads sections until an error.
func readAll(stream io.Reader, req *bundle.Request) (sections []any, r *bundle.Reader, err error) {
	r = bundle.NewReader(stream, bundle.ReaderOptions{Request: req})
	for {
		s, err := r.Next()
		if err != nil {
			return sections, r, err
		}
		sections = append(sections, s)
	}
}

func TestRoundTrip(t *testing.T) {
	f := newFixture()
	stream := f.bytes()
	got, r, err := readAll(iotest.OneByteReader(bytes.NewReader(stream)), f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	want := []any{
		&bundle.Hello{Version: 1, Stream: "stream-1"}, f.image, f.plan,
		&bundle.Frame{Index: 1, Data: f.frames[1]}, &bundle.Frame{Index: 0, Data: f.frames[0]},
	}
	if d := cmp.Diff(want, got, unchecked); d != "" {
		t.Error(d)
	}
	if r.Bytes() != int64(len(stream)) {
		t.Errorf("read %d bytes of %d", r.Bytes(), len(stream))
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
	if err := f.plan.Check(f.toc); err != nil {
		t.Error(err)
	}
	if x, err := f.image.DecodeTOC(nil); err != nil || x.ChainID != f.image.ChainID {
		t.Errorf("%v, %v", x, err)
	}
	if other, _ := newImage("other"); other != nil {
		other.TOC = nil
		if _, err := other.DecodeTOC(f.image.TOC); !errors.Is(err, bundle.ErrCorrupt) {
			t.Errorf("another TOC: %v", err)
		}
	}
}

// A TOC that the worker has need not come.
func TestTOCLeftOut(t *testing.T) {
	f := newFixture()
	encoded := f.image.TOC
	f.image.TOC = nil
	f.req.Have = []bundle.Have{{ChainID: f.image.ChainID, TOC: f.image.TOCDigest, Present: []byte{0}}}
	got, _, err := readAll(bytes.NewReader(f.bytes()), f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	if d := cmp.Diff(f.image, got[1], unchecked); d != "" {
		t.Error(d)
	}
	if _, err := got[1].(*bundle.Image).DecodeTOC(encoded); err != nil {
		t.Error(err)
	}
}

// A stream that is cut anywhere says so, and is never taken for a whole one.
func TestCut(t *testing.T) {
	f := newFixture()
	b := f.bytes()
	for n := range b {
		if _, _, err := readAll(bytes.NewReader(b[:n]), f.req); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("cut after %d of %d bytes: %v", n, len(b), err)
		}
	}
}

// The head of an image is told of before its TOC has come, and nothing else ever is.
func TestHead(t *testing.T) {
	f := newFixture()
	b := f.bytes()
	heads := func(b []byte) (list []bundle.Image) {
		r := bundle.NewReader(bytes.NewReader(b), bundle.ReaderOptions{Request: f.req, Head: func(m *bundle.Image) error {
			list = append(list, *m)
			return nil
		}})
		for {
			if _, err := r.Next(); err != nil {
				return list
			}
		}
	}
	head := *f.image
	head.TOC = nil
	want := []bundle.Image{head}
	toc := bytes.Index(b, f.image.TOC)
	for n, heard := range map[int]int{toc - 1: 0, toc: 1, len(b): 1} {
		if d := cmp.Diff(want[:heard], heads(b[:n]), cmpopts.EquateEmpty(), unchecked); d != "" {
			t.Errorf("cut after %d of %d bytes: %s", n, len(b), d)
		}
	}
	for n := range toc {
		c := bytes.Clone(b)
		c[n] ^= 0x10
		for _, m := range heads(c) {
			w := want[0]
			if m.ChainID != w.ChainID || !cmp.Equal(m.Manifest.Bytes, w.Manifest.Bytes) || !cmp.Equal(m.Config.Bytes, w.Config.Bytes) {
				t.Fatalf("byte %d: another image was told of", n)
			}
		}
	}
	stop := errors.New("stop")
	r := bundle.NewReader(bytes.NewReader(b), bundle.ReaderOptions{Request: f.req, Head: func(*bundle.Image) error { return stop }})
	r.Next() //nolint:errcheck // the greeting
	if s, err := r.Next(); !errors.Is(err, stop) {
		t.Errorf("%v, %v", s, err)
	}
}

// No changed byte may give other metadata: every byte of it hangs from a digest,
// from a number that is checked, or from an error.
func TestFlippedBytes(t *testing.T) {
	f := newFixture()
	b := f.bytes()
	for n := range b {
		c := bytes.Clone(b)
		c[n] ^= 0x10
		sections, _, err := readAll(bytes.NewReader(c), f.req)
		if err == nil {
			t.Fatalf("byte %d: no error at all", n)
		}
		for _, s := range sections {
			m, ok := s.(*bundle.Image)
			if !ok {
				continue
			}
			if !bytes.Equal(m.Config.Bytes, f.image.Config.Bytes) || m.ChainID != f.image.ChainID || !bytes.Equal(m.TOC, f.image.TOC) {
				t.Fatalf("byte %d: another image was read", n)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	hello := func(w *bundle.Writer) { w.Hello(bundle.Hello{Version: 1, Stream: "s"}) }
	for _, c := range []struct {
		name  string
		write func(w *bundle.Writer, f *fixture)
		want  string
	}{
		{"no hello", func(w *bundle.Writer, f *fixture) { w.Plan(f.plan) }, "out of order"},
		{"two hellos", func(w *bundle.Writer, f *fixture) { hello(w); hello(w) }, "out of order"},
		{"newer version", func(w *bundle.Writer, f *fixture) { w.Hello(bundle.Hello{Version: 2}) }, "version 2"},
		{"image twice", func(w *bundle.Writer, f *fixture) { hello(w); w.Image(f.image); w.Image(f.image) }, "a second one"},
		{"image after plan", func(w *bundle.Writer, f *fixture) {
			hello(w)
			w.Plan(&bundle.Plan{})
			w.Image(f.image)
		}, "out of order"},
		{"two plans", func(w *bundle.Writer, f *fixture) { hello(w); w.Plan(&bundle.Plan{}); w.Plan(&bundle.Plan{}) }, "out of order"},
		{"frame before plan", func(w *bundle.Writer, f *fixture) { hello(w); w.Frame(0, f.frames[0]) }, "before the plan"},
		{"frame twice", func(w *bundle.Writer, f *fixture) {
			hello(w)
			w.Image(f.image)
			w.Plan(f.plan)
			w.Frame(0, f.frames[0])
			w.Frame(0, f.frames[0])
		}, "second time"},
		{"frame not planned", func(w *bundle.Writer, f *fixture) { hello(w); w.Plan(&bundle.Plan{}); w.Frame(0, f.frames[0]) }, "frame 0 of 0"},
		{"frame too long", func(w *bundle.Writer, f *fixture) {
			hello(w)
			w.Image(f.image)
			w.Plan(f.plan)
			w.Frame(1, make([]byte, 200))
		}, "planned at most"},
		{"end before frames", func(w *bundle.Writer, f *fixture) { f.frames = nil; f.write(w) }, "out of order"},
		{"plan of other segments", func(w *bundle.Writer, f *fixture) { hello(w); f.plan.Segments[1] = 4; w.Image(f.image); w.Plan(f.plan) }, "segment 4 of 4"},
		{"plan with wrong totals", func(w *bundle.Writer, f *fixture) { f.plan.ContentBytes++; f.write(w) }, "totals"},
		{"manifest", func(w *bundle.Writer, f *fixture) { f.image.Manifest.Bytes[5]++; f.write(w) }, "has digest"},
		{"manifest of another tag", func(w *bundle.Writer, f *fixture) {
			f.req.Image.Reference = string(digest.FromString("x"))
			f.write(w)
		}, "asked for"},
		{"config of another image", func(w *bundle.Writer, f *fixture) {
			other, _ := newImage("other")
			f.image.Config = other.Config
			f.write(w)
		}, "the manifest says"},
		{"chain ID of another image", func(w *bundle.Writer, f *fixture) { f.image.ChainID = digest.FromString("x"); f.write(w) }, "chain ID"},
		{"TOC of another digest", func(w *bundle.Writer, f *fixture) { f.image.TOC[20]++; f.write(w) }, "TOC has digest"},
		{"TOC left out", func(w *bundle.Writer, f *fixture) { f.image.TOC = nil; f.write(w) }, "left out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture()
			var b bytes.Buffer
			w := bundle.NewWriter(&b)
			c.write(w, f)
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			_, _, err := readAll(&b, f.req)
			if !errors.Is(err, bundle.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestUnknownSections(t *testing.T) {
	f := newFixture()
	b := f.bytes()
	const helloEnd = 8 + 6 + 1 + 1 + len("stream-1")
	with := func(section ...byte) []byte {
		return append(append(bytes.Clone(b[:helloEnd]), section...), b[helloEnd:]...)
	}
	if _, _, err := readAll(bytes.NewReader(with(99, 0, 3, 0, 0, 0, 'a', 'b', 'c')), f.req); err != io.EOF {
		t.Errorf("an unknown section was not skipped: %v", err)
	}
	_, _, err := readAll(bytes.NewReader(with(99, 1, 3, 0, 0, 0, 'a', 'b', 'c')), f.req)
	if !errors.Is(err, bundle.ErrCorrupt) || !strings.Contains(err.Error(), "update foil") {
		t.Errorf("a section that must be understood: %v", err)
	}
	_, _, err = readAll(bytes.NewReader(with(99, 0, 0, 0, 0, 0xff)), f.req)
	if !errors.Is(err, bundle.ErrCorrupt) {
		t.Errorf("a huge section: %v", err)
	}
}

// TestAlive: what says that the server is at work may come anywhere, and is read as
// older programs read it.
func TestAlive(t *testing.T) {
	f := newFixture()
	want, _, err := readAll(bytes.NewReader(f.bytes()), f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := bundle.NewWriter(&b)
	w.Hello(bundle.Hello{Version: 1, Stream: "stream-1"})
	if err := w.Alive(); err != nil {
		t.Fatal(err)
	}
	if section := b.Bytes()[b.Len()-6:]; !bytes.Equal(section, []byte{11, 0, 0, 0, 0, 0}) {
		t.Errorf("the section is % x", section)
	}
	w.Image(f.image)
	w.Alive() //nolint:errcheck // End returns it
	w.Alive() //nolint:errcheck // End returns it
	w.Plan(f.plan)
	for i := len(f.frames) - 1; i >= 0; i-- {
		w.Alive() //nolint:errcheck // End returns it
		w.Frame(uint32(i), f.frames[i])
	}
	if err := w.End(); err != nil {
		t.Fatal(err)
	}
	got, _, err := readAll(&b, f.req)
	if err != io.EOF || !cmp.Equal(got, want, unchecked) {
		t.Errorf("%v; %s", err, cmp.Diff(want, got, unchecked))
	}
}

func TestErrorSection(t *testing.T) {
	var b bytes.Buffer
	w := bundle.NewWriter(&b)
	w.Hello(bundle.Hello{Version: 1})
	want := &bundle.Error{Code: bundle.CodeCorrupt, Message: "pack is damaged", Ref: "r:tag"}
	if err := w.Error(want); err != nil {
		t.Fatal(err)
	}
	_, _, err := readAll(&b, nil)
	var got *bundle.Error
	if !errors.As(err, &got) || *got != *want {
		t.Errorf("got %v", err)
	}
}

func TestWriterKeepsError(t *testing.T) {
	w := bundle.NewWriter(failing{})
	w.Hello(bundle.Hello{})
	if err := w.Flush(); !errors.Is(err, errFull) {
		t.Errorf("flush: %v", err)
	}
	if err := w.End(); !errors.Is(err, errFull) {
		t.Errorf("end: %v", err)
	}
}

var errFull = errors.New("full")

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errFull }

func TestPlanCheck(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(f *fixture)
	}{
		{"out of range", func(f *fixture) { f.plan.Segments[0] = 5 }},
		{"hole", func(f *fixture) { f.toc.Segments[2].ID = segment.ID{} }},
		{"twice", func(f *fixture) { f.plan.Segments[1] = 2 }},
		{"not the lowest", func(f *fixture) { f.toc.Segments[0].ID = f.toc.Segments[1].ID }},
		{"lengths", func(f *fixture) { f.plan.Frames[0].RawLength++ }},
	} {
		f := newFixture()
		c.damage(f)
		if err := f.plan.Check(f.toc); !errors.Is(err, bundle.ErrCorrupt) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestPlanProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &bundle.Plan{Frames: []bundle.PlanFrame{}, Segments: []uint32{}}
		for range rapid.IntRange(0, 20).Draw(t, "frames") {
			f := bundle.PlanFrame{
				MaxLength: rapid.Uint32Range(2, segment.MaxFrameRaw+1).Draw(t, "max"),
				RawLength: rapid.Uint32Range(1, segment.MaxFrameRaw).Draw(t, "raw"),
				First:     uint32(len(want.Segments)),
				Segments:  rapid.Uint32Range(1, 5).Draw(t, "segments"),
			}
			for range f.Segments {
				want.Segments = append(want.Segments, rapid.Uint32().Draw(t, "number"))
			}
			want.Frames = append(want.Frames, f)
			want.MaxBytes += bundle.SectionLength(int(f.MaxLength))
			want.ContentBytes += int64(f.RawLength)
		}
		b := bundle.AppendPlan(nil, want)
		got, err := bundle.DecodePlan(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, unchecked); d != "" {
			t.Fatal(d)
		}
	})
}

func TestDecodeRequest(t *testing.T) {
	good := newFixture().req
	got, err := bundle.DecodeRequest(mustJSON(good))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(good, got, unchecked); d != "" {
		t.Error(d)
	}
	newer := append(bytes.TrimSuffix(mustJSON(good), []byte("}")), `,"of a newer worker":{"versions":[7]}}`...)
	if got, err := bundle.DecodeRequest(newer); err != nil || !cmp.Equal(good, got) {
		t.Errorf("a request with a field that nobody knows yet: %+v, %v", got, err)
	}
	id := segment.Sum([]byte("bytes"))
	named := *good
	for range bundle.MaxDamaged {
		named.Damaged = append(named.Damaged, id)
	}
	if got, err := bundle.DecodeRequest(mustJSON(named)); err != nil || !cmp.Equal(&named, got) {
		t.Errorf("a request that names what arrived damaged: %v", err)
	}
	named.Damaged = append(named.Damaged, id)
	if _, err := bundle.DecodeRequest(mustJSON(named)); err == nil {
		t.Errorf("%d segments that arrived damaged: accepted", len(named.Damaged))
	}
	if b := mustJSON(good); bytes.Contains(b, []byte("damaged")) {
		t.Errorf("where nothing arrived damaged, %s", b)
	}
	for name, body := range map[string]string{
		"empty":         ``,
		"no images":     `{"versions":[1]}`,
		"two images":    `{"versions":[1],"images":[{"repository":"a","reference":"b"},{"repository":"c","reference":"d"}]}`,
		"no version":    `{"images":[{"repository":"a","reference":"b"}]}`,
		"newer version": `{"versions":[2],"images":[{"repository":"a","reference":"b"}]}`,
		"no repository": `{"versions":[1],"images":[{"reference":"b"}]}`,
		"bad digest":    `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"have":[{"chain_id":"x","toc":"y"}]}`,
		"long hold":     `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"hold":30000000001}`,
		"negative hold": `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"hold":-1}`,
		"damaged hole":  `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"damaged":["sha256:` + strings.Repeat("0", 64) + `"]}`,
		"short segment": `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"damaged":["sha256:12"]}`,
		"no segment":    `{"versions":[1],"images":[{"repository":"a","reference":"b"}],"damaged":[[1,2]]}`,
		"two":           `{"versions":[1],"images":[{"repository":"a","reference":"b"}]}{}`,
	} {
		if _, err := bundle.DecodeRequest([]byte(body)); err == nil {
			t.Errorf("%s: accepted", name)
		} else if name == "two images" && !strings.Contains(err.Error(), "2 images, want one") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestGolden reads a stream as it was written when the format was fixed.
func TestGolden(t *testing.T) {
	f := newFixture()
	got, _, err := readAll(bytes.NewReader(golden(t, "image.bundle", f.bytes())), f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	want := []any{
		&bundle.Hello{Version: 1, Stream: "stream-1"}, f.image, f.plan,
		&bundle.Frame{Index: 1, Data: f.frames[1]}, &bundle.Frame{Index: 0, Data: f.frames[0]},
	}
	if d := cmp.Diff(want, got, unchecked); d != "" {
		t.Error(d)
	}
}

// golden returns the bytes of a golden file, which -update makes of those given.
func golden(t *testing.T, name string, b []byte) []byte {
	t.Helper()
	name = filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Streams of several images, which servers could send once, are refused where the second one begins.
func TestSeveralImages(t *testing.T) {
	f := newFixture()
	var b bytes.Buffer
	w := bundle.NewWriter(&b)
	w.Hello(bundle.Hello{Version: 1, Stream: "s"})
	w.Image(f.image)
	w.Flush()
	var column []byte
	for _, n := range []uint64{1, 1, 0} { // the second image, without its TOC, of no segments
		column = binary.AppendUvarint(column, n)
	}
	for range 3*3 + 2 {
		column = columns.AppendBlock(column, "")
	}
	column = columns.AppendQuick(nil, column)
	b.Write(binary.LittleEndian.AppendUint32([]byte{byte(bundle.TypeImage), 1}, uint32(len(column))))
	b.Write(column)
	got, _, err := readAll(&b, f.req)
	if !errors.Is(err, bundle.ErrCorrupt) || !strings.Contains(err.Error(), "where one was asked for") || len(got) != 2 {
		t.Errorf("%d sections, %v", len(got), err)
	}
}

func FuzzReader(f *testing.F) {
	x := newFixture()
	f.Add(x.bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		sections, r, err := readAll(bytes.NewReader(b), x.req)
		if err == nil || r.Bytes() > int64(len(b)) {
			t.Fatalf("%v, %d of %d bytes", err, r.Bytes(), len(b))
		}
		frames := map[uint32]bool{}
		for _, s := range sections {
			if f, ok := s.(*bundle.Frame); ok {
				if frames[f.Index] {
					t.Fatal("a frame twice")
				}
				frames[f.Index] = true
			}
		}
	})
}

func FuzzDecodePlan(f *testing.F) {
	f.Add(bundle.AppendPlan(nil, newFixture().plan))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := bundle.DecodePlan(b)
		if err != nil {
			return
		}
		if again, err := bundle.DecodePlan(bundle.AppendPlan(nil, p)); err != nil || !cmp.Equal(p, again) {
			t.Fatalf("%v after a round trip, %v", again, err)
		}
	})
}

func FuzzDecodeRequest(f *testing.F) {
	named := *newFixture().req
	f.Add(mustJSON(named))
	named.Damaged = []segment.ID{segment.Sum(nil)}
	f.Add(mustJSON(named))
	f.Fuzz(func(t *testing.T, b []byte) {
		req, err := bundle.DecodeRequest(b)
		if err == nil && (req.Image.Repository == "" || len(req.Damaged) > bundle.MaxDamaged) {
			t.Fatal("limits are not kept")
		}
	})
}

// BenchmarkPlan codes and checks a plan of all segments of a large image.
func BenchmarkPlan(b *testing.B) {
	x := toctest.Synthetic(84_000, 1)
	p := &bundle.Plan{}
	seen := map[segment.ID]bool{}
	for i, s := range x.Segments {
		if s.ID.IsHole() || seen[s.ID] {
			continue
		}
		seen[s.ID] = true
		if n := len(p.Frames); n == 0 || p.Frames[n-1].RawLength+s.Length > segment.FrameTarget {
			p.Frames = append(p.Frames, bundle.PlanFrame{First: uint32(len(p.Segments))})
		}
		f := &p.Frames[len(p.Frames)-1]
		f.Segments++
		f.RawLength += s.Length
		f.MaxLength = f.RawLength/2 + 2
		p.Segments = append(p.Segments, uint32(i))
	}
	for _, f := range p.Frames {
		p.MaxBytes += bundle.SectionLength(int(f.MaxLength))
		p.ContentBytes += int64(f.RawLength)
	}
	b.Run("append", func(b *testing.B) {
		for b.Loop() {
			b.ReportMetric(float64(len(bundle.AppendPlan(nil, p))), "bytes")
		}
	})
	encoded := bundle.AppendPlan(nil, p)
	b.Run("decode", func(b *testing.B) {
		for b.Loop() {
			if _, err := bundle.DecodePlan(encoded); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("check", func(b *testing.B) {
		for b.Loop() {
			if err := p.Check(x); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// What is coded by AppendFrameHead and AppendPagesHead is the same stream.
func TestFrameHead(t *testing.T) {
	var whole, coded bytes.Buffer
	w, b := bundle.NewWriter(&whole), bundle.NewWriter(&coded)
	for _, w := range []*bundle.Writer{w, b} {
		w.Hello(bundle.Hello{Version: 1, Stream: "s"})
	}
	for _, index := range []uint32{0, 1, 127, 128, 1 << 20, 1<<32 - 1} {
		frame := bytes.Repeat([]byte{byte(index)}, int(index%1000))
		w.Frame(index, frame)
		b.Sections(append(bundle.AppendFrameHead(nil, index, len(frame)), frame...))
		w.Pages(index, frame)
		head := bundle.AppendPagesHead(nil, index, 0)
		b.Sections(append(bundle.AppendPagesHead(head[:0], index, len(frame)), frame...))
	}
	if err := errors.Join(w.End(), b.End()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(coded.Bytes(), whole.Bytes()) {
		t.Errorf("%x, want %x", coded.Bytes(), whole.Bytes())
	}
}
