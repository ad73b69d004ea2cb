package bundle_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
)

// startupFixture is an answer with startup sets: of image 0 with two frames, of
// image 1, whose TOC the worker has, with none, of image 2 with one.
type startupFixture struct {
	req    *bundle.Request
	images []*bundle.Image
	tocs   []*toc.TOC
	sets   []*bundle.Startup
	frames [][][]byte // of sets
}

func newStartupFixture() *startupFixture {
	long := strings.Repeat("0123456789abcdef", 600) // 2.3 pages
	a, ta := newImage(0, "short", long)
	b, tb := newImage(1, "another")
	c, tc := newImage(2, "x"+long)
	f := &startupFixture{images: []*bundle.Image{a, b, c}, tocs: []*toc.TOC{ta, tb, tc},
		req: &bundle.Request{Versions: []int{bundle.Version}}}
	for _, m := range f.images {
		f.req.Images = append(f.req.Images, bundle.ImageRequest{
			Repository: "r", Reference: string(m.Manifest.Digest), Startup: true, Args: []string{"serve"}})
	}
	f.req.Have = []bundle.Have{{ChainID: b.ChainID, TOC: b.TOCDigest}}
	b.TOC = nil
	contents := func(t *toc.TOC, text string) uint32 {
		for i := range t.Contents {
			if t.Contents[i].ID == segment.Sum([]byte(text)) {
				return uint32(i)
			}
		}
		panic("no content " + text)
	}
	set := func(image int, origin string, text func(content uint32) string, frames ...[]trace.Run) {
		s := &bundle.Startup{Index: image, Origin: origin, Runs: []trace.Run{}, Digests: []segment.ID{}}
		var sent [][]byte
		for _, runs := range frames {
			var raw []byte
			for _, r := range runs {
				all := text(r.Content)
				off, n := r.Range(int64(len(all)))
				s.Digests = append(s.Digests, segment.Sum([]byte(all[off:off+n])))
				raw = append(raw, all[off:off+n]...)
			}
			data, err := segment.AppendFrame(nil, segment.Zstd, raw)
			if err != nil {
				panic(err)
			}
			s.Frames = append(s.Frames, bundle.StartupFrame{MaxLength: uint32(len(data)) + 1, RawLength: uint32(len(raw)),
				First: uint32(len(s.Runs)), Count: uint32(len(runs))})
			s.Runs = append(s.Runs, runs...)
			sent = append(sent, data)
		}
		f.sets, f.frames = append(f.sets, s), append(f.frames, sent)
	}
	shortA, longA := contents(ta, "short"), contents(ta, long)
	set(0, bundle.OriginTraced, func(c uint32) string {
		if c == shortA {
			return "short"
		}
		return long
	}, []trace.Run{{Content: longA, First: 2, Blocks: 1}, {Content: shortA, First: 0, Blocks: 1}}, []trace.Run{{Content: longA, First: 0, Blocks: 1}})
	set(1, bundle.OriginCommon, nil)
	set(2, bundle.OriginLearned, func(uint32) string { return "x" + long }, []trace.Run{{Content: 0, First: 0, Blocks: 3}})
	return f
}

func (f *startupFixture) header(w *bundle.Writer) {
	w.Hello(bundle.Hello{Version: 1, Stream: "stream-1"})
	for _, m := range f.images {
		w.Image(m)
	}
}

func (f *startupFixture) write(w *bundle.Writer) {
	f.header(w)
	for i, s := range f.sets {
		w.Startup(s, f.tocs[i])
		for k, data := range f.frames[i] {
			w.Pages(s.Index, uint32(k), data[:1], data[1:])
		}
	}
	w.Plan(&bundle.Plan{})
	w.End()
}

func (f *startupFixture) bytes() []byte {
	var b bytes.Buffer
	f.write(bundle.NewWriter(&b))
	return b.Bytes()
}

// sections is what a reader gives, after Resolve.
func (f *startupFixture) sections() []any {
	want := []any{&bundle.Hello{Version: 1, Stream: "stream-1"}}
	for _, m := range f.images {
		want = append(want, m)
	}
	for i, s := range f.sets {
		want = append(want, s)
		for k, data := range f.frames[i] {
			want = append(want, &bundle.Pages{Image: s.Index, Frame: uint32(k), Data: data})
		}
	}
	return append(want, &bundle.Plan{})
}

var startupEqual = cmp.Options{cmpopts.IgnoreUnexported(bundle.Startup{}, bundle.Image{}), cmpopts.EquateEmpty()}

func (f *startupFixture) check(t *testing.T, stream io.Reader) {
	t.Helper()
	got, _, err := readAll(stream, f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	for _, s := range got {
		if s, ok := s.(*bundle.Startup); ok {
			if err := s.Resolve(f.tocs[s.Index]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if d := cmp.Diff(f.sections(), got, startupEqual); d != "" {
		t.Error(d)
	}
}

func TestStartupRoundTrip(t *testing.T) {
	f := newStartupFixture()
	stream := f.bytes()
	f.check(t, iotest.OneByteReader(bytes.NewReader(stream)))
	// All sets may come before the first frame of one.
	var b bytes.Buffer
	w := bundle.NewWriter(&b)
	f.header(w)
	for i, s := range f.sets {
		w.Startup(s, f.tocs[i])
	}
	most := int64(0)
	for i, s := range f.sets {
		for k, data := range f.frames[i] {
			w.Pages(s.Index, uint32(k), data)
		}
		most += s.MaxBytes()
	}
	w.Plan(&bundle.Plan{})
	w.End()
	sections, _, err := readAll(&b, f.req)
	if err != io.EOF || len(sections) != 11 {
		t.Errorf("%d sections, %v", len(sections), err)
	}
	if n := f.sets[0].ContentBytes(); n != 9600-8192+5+4096 {
		t.Errorf("%d bytes in the set", n)
	}
	sent := int64(0)
	for _, frames := range f.frames {
		for _, data := range frames {
			sent += int64(len(data)) + 8
		}
	}
	if most < sent {
		t.Errorf("at most %d bytes, %d were sent", most, sent)
	}
	for n := range stream {
		if _, _, err := readAll(bytes.NewReader(stream[:n]), f.req); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("cut after %d of %d bytes: %v", n, len(stream), err)
		}
	}
}

// TestEarlyPlan reads a plan, and frames of it, that come among pages.
func TestEarlyPlan(t *testing.T) {
	f := newStartupFixture()
	f.req.EarlyPlan = true
	p := &bundle.Plan{
		Frames:   []bundle.PlanFrame{{MaxLength: 10, RawLength: 5, First: 0, Segments: 1}, {MaxLength: 10, RawLength: 7, First: 1, Segments: 1}},
		Segments: []uint32{0, 1}, MaxBytes: 20, ContentBytes: 12,
	}
	var b bytes.Buffer
	w := bundle.NewWriter(&b)
	f.header(w)
	for i, s := range f.sets {
		w.Startup(s, f.tocs[i])
	}
	w.Pages(0, 0, f.frames[0][0])
	w.Plan(p)
	w.Frame(1, []byte("frame 1"))
	w.Pages(0, 1, f.frames[0][1])
	w.Pages(2, 0, f.frames[2][0])
	w.Frame(0, []byte("frame 0"))
	w.End()
	sections, _, err := readAll(&b, f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	want := []any{
		&bundle.Pages{Image: 0, Frame: 0, Data: f.frames[0][0]}, p, &bundle.Frame{Index: 1, Data: []byte("frame 1")},
		&bundle.Pages{Image: 0, Frame: 1, Data: f.frames[0][1]}, &bundle.Pages{Image: 2, Frame: 0, Data: f.frames[2][0]},
		&bundle.Frame{Index: 0, Data: []byte("frame 0")},
	}
	if d := cmp.Diff(want, sections[len(sections)-len(want):]); d != "" {
		t.Error(d)
	}
}

// TestStartupGolden reads a stream as it was written when the sections were fixed.
func TestStartupGolden(t *testing.T) {
	f := newStartupFixture()
	name := filepath.Join("testdata", "startup.bundle")
	if *update {
		if err := os.WriteFile(name, f.bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	f.check(t, bytes.NewReader(b))
}

// How many frames hold filled pages is said in a section that a reader may skip.
func TestFilled(t *testing.T) {
	f := newStartupFixture()
	f.sets[0].Filled, f.sets[2].Filled = 1, 1
	name := filepath.Join("testdata", "filled.bundle")
	if *update {
		if err := os.WriteFile(name, f.bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, stream := range [][]byte{f.bytes(), golden} {
		f.check(t, bytes.NewReader(stream))
		at := bytes.Index(stream, []byte{byte(bundle.TypeFilled), 0, 2, 0, 0, 0, 0, 1})
		if at < 0 {
			t.Fatal("no section that may be skipped")
		}
		// A reader that does not know it.
		stream = bytes.ReplaceAll(stream, []byte{byte(bundle.TypeFilled), 0, 2, 0, 0, 0}, []byte{99, 0, 2, 0, 0, 0})
		newStartupFixture().check(t, bytes.NewReader(stream))
	}
	section := func(payload ...byte) string {
		return string([]byte{byte(bundle.TypeFilled), 0, byte(len(payload)), 0, 0, 0}) + string(payload)
	}
	sets := func(w *bundle.Writer, f *startupFixture) {
		w.Startup(f.sets[0], f.tocs[0])
	}
	for _, c := range []struct {
		name  string
		write func(w *bundle.Writer, f *startupFixture)
		then  string
	}{
		{"before its set", nil, section(0, 1)},
		{"twice", sets, section(0, 1) + section(0, 1)},
		{"of another image", sets, section(1, 1)},
		{"none", sets, section(0, 0)},
		{"more than there are", sets, section(0, 3)},
		{"too long", sets, section(0, 1, 0)},
		{"cut", sets, section(0)},
		{"after pages", func(w *bundle.Writer, f *startupFixture) { sets(w, f); w.Pages(0, 0, f.frames[0][0]) }, section(0, 1)},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) {
			w.Startup(f.sets[1], f.tocs[1])
			w.Plan(&bundle.Plan{})
		}, section(1, 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newStartupFixture()
			var b bytes.Buffer
			w := bundle.NewWriter(&b)
			f.header(w)
			if c.write != nil {
				c.write(w, f)
			}
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			b.WriteString(c.then)
			if _, _, err := readAll(&b, f.req); !errors.Is(err, bundle.ErrCorrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestStartupRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		write func(w *bundle.Writer, f *startupFixture)
		want  string
	}{
		{"not asked for", func(w *bundle.Writer, f *startupFixture) { f.req.Images[0].Startup = false; f.write(w) }, "not asked for"},
		{"twice", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[1], f.tocs[1])
			w.Startup(f.sets[1], f.tocs[1])
		}, "a second one"},
		{"of no image", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.sets[1].Index = 3
			w.Startup(f.sets[1], f.tocs[1])
		}, "not asked for"},
		{"before its image", func(w *bundle.Writer, f *startupFixture) {
			w.Hello(bundle.Hello{Version: 1})
			w.Startup(f.sets[0], f.tocs[0])
		}, "not asked for"},
		{"image after it", func(w *bundle.Writer, f *startupFixture) {
			w.Hello(bundle.Hello{Version: 1})
			w.Image(f.images[0])
			w.Startup(f.sets[0], f.tocs[0])
			w.Image(f.images[1])
		}, "out of order"},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Plan(&bundle.Plan{})
			w.Startup(f.sets[0], f.tocs[0])
		}, "out of order"},
		{"plan before its pages", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Pages(0, 0, f.frames[0][0])
			w.Plan(&bundle.Plan{})
		}, "out of order"},
		{"end before its pages", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Plan(&bundle.Plan{})
			w.Pages(0, 0, f.frames[0][0])
			w.End()
		}, "out of order"},
		{"set after an early plan", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Pages(0, 0, f.frames[0][0])
			w.Plan(&bundle.Plan{})
			w.Startup(f.sets[2], f.tocs[2])
		}, "out of order"},
		{"too many pages after an early plan", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.sets[2], f.tocs[2])
			w.Plan(&bundle.Plan{})
			w.Pages(2, 0, f.frames[2][0])
			w.Pages(2, 1, f.frames[2][0])
		}, "no startup set"},
		{"pages of no set", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Pages(0, 0, f.frames[0][0]) }, "no startup set"},
		{"pages out of order", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Pages(0, 1, f.frames[0][1])
		}, "want 0 of image 0"},
		{"pages of another image", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Pages(1, 0, f.frames[0][0])
		}, "want 0 of image 0"},
		{"too many pages", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[2], f.tocs[2])
			w.Pages(2, 0, f.frames[2][0])
			w.Pages(2, 1, f.frames[2][0])
		}, "no startup set"},
		{"pages too long", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.sets[0], f.tocs[0])
			w.Pages(0, 0, f.frames[0][0], []byte("more"))
		}, "planned at most"},
		{"empty pages", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Startup(f.sets[0], f.tocs[0]); w.Pages(0, 0) }, "have 0 bytes"},
		{"runs of no frame", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.sets[0].Frames = f.sets[0].Frames[:1]
			w.Startup(f.sets[0], f.tocs[0])
		}, "in frames"},
		{"frames of no runs", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.sets[0].Frames[1].Count = 0
			w.Startup(f.sets[0], f.tocs[0])
		}, "frame 1"},
		{"frames of more runs", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.sets[0].Frames[1].Count++
			w.Startup(f.sets[0], f.tocs[0])
		}, "frame 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newStartupFixture()
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

// newHere is an answer that says of two images what is here of their startup sets.
func newHere() (f *startupFixture, b []byte, want []*bundle.Here) {
	f = newStartupFixture()
	want = []*bundle.Here{
		{Index: 1, Runs: []trace.Run{{Content: 0, First: 0, Blocks: 1}}},
		{Index: 0, Runs: []trace.Run{{Content: 1, First: 2, Blocks: 1}, {Content: 0, First: 0, Blocks: 1}, {Content: 1, First: 0, Blocks: 1}}},
	}
	var out bytes.Buffer
	w := bundle.NewWriter(&out)
	f.header(w)
	w.Here(want[0])
	w.Startup(f.sets[0], f.tocs[0])
	w.Here(want[1])
	for k, data := range f.frames[0] {
		w.Pages(0, uint32(k), data)
	}
	w.Plan(&bundle.Plan{})
	w.End()
	return f, out.Bytes(), want
}

func TestHere(t *testing.T) {
	f, b, want := newHere()
	name := filepath.Join("testdata", "here.bundle")
	if *update {
		if err := os.WriteFile(name, b, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, stream := range [][]byte{b, golden} {
		sections, _, err := readAll(bytes.NewReader(stream), f.req)
		if err != io.EOF {
			t.Fatal(err)
		}
		var got []*bundle.Here
		for _, s := range sections {
			if h, ok := s.(*bundle.Here); ok {
				got = append(got, h)
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
	// A reader that does not know the section skips it.
	if flags := b[bytes.Index(b, []byte{byte(bundle.TypeHere), 0})+1]; flags != 0 {
		t.Errorf("flags %d", flags)
	}

	for _, c := range []struct {
		name  string
		write func(w *bundle.Writer, f *startupFixture)
	}{
		{"not asked for", func(w *bundle.Writer, f *startupFixture) {
			f.req.Images[0].Startup = false
			f.header(w)
			w.Here(&bundle.Here{})
		}},
		{"twice", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Here(&bundle.Here{}); w.Here(&bundle.Here{}) }},
		{"of no image", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Here(&bundle.Here{Index: 3}) }},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Plan(&bundle.Plan{}); w.Here(&bundle.Here{}) }},
		{"image after it", func(w *bundle.Writer, f *startupFixture) {
			w.Hello(bundle.Hello{Version: 1})
			w.Image(f.images[0])
			w.Here(&bundle.Here{})
			w.Image(f.images[1])
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newStartupFixture()
			var b bytes.Buffer
			w := bundle.NewWriter(&b)
			c.write(w, f)
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			if _, _, err := readAll(&b, f.req); !errors.Is(err, bundle.ErrCorrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestStartupResolve(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(s *bundle.Startup, x *toc.TOC)
		want   string
	}{
		{"run outside of its content", func(_ *bundle.Startup, x *toc.TOC) { x.Contents[0].Size, x.Contents[1].Size = 1, 1 }, "run of pages"},
		{"no such content", func(_ *bundle.Startup, x *toc.TOC) { x.Contents = x.Contents[:1] }, "of 1"},
		{"too few digests", func(_ *bundle.Startup, x *toc.TOC) { x.Contents[0].Size, x.Contents[1].Size = 5*4096, 5*4096 }, "bytes of digests"},
		{"too many digests", func(s *bundle.Startup, _ *toc.TOC) { s.Runs = s.Runs[:2]; s.Frames = s.Frames[:1] }, "bytes of digests"},
		{"frame too large", func(s *bundle.Startup, x *toc.TOC) {
			x.Contents[s.Runs[0].Content].Size = 1 << 40
			s.Runs[0].Blocks = 1 << 20
		}, "at most"},
	} {
		f := newStartupFixture()
		sections, _, err := readAll(bytes.NewReader(f.bytes()), f.req)
		if err != io.EOF {
			t.Fatal(err)
		}
		s := sections[4].(*bundle.Startup)
		c.change(s, f.tocs[0])
		if err := s.Resolve(f.tocs[0]); !errors.Is(err, bundle.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestStartupProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := &toc.TOC{}
		for i := range rapid.IntRange(1, 5).Draw(t, "contents") {
			x.Contents = append(x.Contents, toc.Content{ID: segment.Sum([]byte{byte(i)}), Size: rapid.Int64Range(1, 50_000).Draw(t, "size")})
		}
		image, _ := newImage(0, "a file")
		want := &bundle.Startup{Origin: rapid.StringN(0, 16, 64).Draw(t, "origin")}
		for range rapid.IntRange(0, 4).Draw(t, "frames") {
			f := bundle.StartupFrame{First: uint32(len(want.Runs)), Count: rapid.Uint32Range(1, 4).Draw(t, "count"),
				MaxLength: rapid.Uint32Range(2, segment.MaxFrameRaw+1).Draw(t, "most")}
			for range f.Count {
				c := rapid.IntRange(0, len(x.Contents)-1).Draw(t, "content")
				size := x.Contents[c].Size
				r := trace.Run{Content: uint32(c), First: rapid.Uint32Range(0, trace.Pages(size)-1).Draw(t, "first")}
				r.Blocks = rapid.Uint32Range(1, trace.Pages(size)-r.First).Draw(t, "blocks")
				id := segment.Sum([]byte{byte(len(want.Runs)), 1})
				if r.Whole(size) {
					id = x.Contents[c].ID
				}
				_, n := r.Range(size)
				f.RawLength += uint32(n)
				want.Runs, want.Digests = append(want.Runs, r), append(want.Digests, id)
			}
			want.Frames = append(want.Frames, f)
		}
		var b bytes.Buffer
		w := bundle.NewWriter(&b)
		w.Hello(bundle.Hello{Version: 1})
		w.Image(image)
		w.Startup(want, x)
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		req := &bundle.Request{Images: []bundle.ImageRequest{{Reference: string(image.Manifest.Digest), Startup: true}}}
		sections, _, err := readAll(&b, req)
		if !errors.Is(err, io.ErrUnexpectedEOF) || len(sections) != 3 {
			t.Fatalf("%d sections, %v", len(sections), err)
		}
		got := sections[2].(*bundle.Startup)
		if err := got.Resolve(x); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, startupEqual); d != "" {
			t.Fatal(d)
		}
	})
}

func TestService(t *testing.T) {
	image := ocispec.ImageConfig{Entrypoint: []string{"e"}, Cmd: []string{"c"}}
	for _, c := range []struct {
		r    bundle.ImageRequest
		want []string
	}{
		{bundle.ImageRequest{}, []string{"e", "c"}},
		{bundle.ImageRequest{Args: []string{"a", "b"}}, []string{"e", "a", "b"}},
		{bundle.ImageRequest{Entrypoint: []string{"x"}}, []string{"x"}},
		{bundle.ImageRequest{Entrypoint: []string{"x"}, Args: []string{"a"}}, []string{"x", "a"}},
	} {
		if d := cmp.Diff(c.want, c.r.Service(image)); d != "" {
			t.Errorf("%+v: %s", c.r, d)
		}
	}
}

func FuzzReaderStartup(f *testing.F) {
	x := newStartupFixture()
	f.Add(x.bytes())
	_, here, _ := newHere()
	f.Add(here)
	f.Fuzz(func(t *testing.T, b []byte) {
		sections, r, err := readAll(bytes.NewReader(b), x.req)
		if err == nil || r.Bytes() > int64(len(b)) {
			t.Fatalf("%v, %d of %d bytes", err, r.Bytes(), len(b))
		}
		sets := map[int]*bundle.Startup{}
		pages, planned := 0, false
		for _, s := range sections {
			switch s := s.(type) {
			case *bundle.Startup:
				if sets[s.Index] != nil || planned {
					t.Fatal("a set out of order")
				}
				sets[s.Index] = s
				covered := uint32(0)
				for _, f := range s.Frames {
					if f.First != covered || f.Count == 0 {
						t.Fatalf("frames %+v", s.Frames)
					}
					covered += f.Count
				}
				if int(covered) != len(s.Runs) {
					t.Fatalf("frames of %d runs, %d runs", covered, len(s.Runs))
				}
				if s.Resolve(x.tocs[s.Index]) == nil && len(s.Digests) != len(s.Runs) {
					t.Fatalf("%d digests of %d runs", len(s.Digests), len(s.Runs))
				}
			case *bundle.Here:
				if planned || !x.req.Images[s.Index].Startup {
					t.Fatal("what is here, out of order or not asked for")
				}
			case *bundle.Pages:
				if planned || len(s.Data) > int(sets[s.Image].Frames[s.Frame].MaxLength) {
					t.Fatal("pages out of order, or too long")
				}
				pages++
			case *bundle.Plan:
				planned = true
				for _, set := range sets {
					pages -= len(set.Frames)
				}
				if pages != 0 {
					t.Fatal("a plan before all pages")
				}
			}
		}
	})
}
