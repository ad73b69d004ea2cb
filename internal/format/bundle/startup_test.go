package bundle_test

import (
	"bytes"
	"errors"
	"io"
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

// startupFixture is an answer with a startup set of two frames.
type startupFixture struct {
	req    *bundle.Request
	image  *bundle.Image
	toc    *toc.TOC
	set    *bundle.Startup
	frames [][]byte // of the set
}

func newStartupFixture() *startupFixture {
	long := strings.Repeat("0123456789abcdef", 600) // 2.3 pages
	m, x := newImage("short", long)
	f := &startupFixture{image: m, toc: x, req: &bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{
		Repository: "r", Reference: string(m.Manifest.Digest), Startup: true, Args: []string{"serve"}}}}
	content := func(text string) uint32 {
		for i := range x.Contents {
			if x.Contents[i].ID == segment.Sum([]byte(text)) {
				return uint32(i)
			}
		}
		panic("no content " + text)
	}
	shortID, longID := content("short"), content(long)
	f.set = &bundle.Startup{Origin: bundle.OriginTraced}
	for _, runs := range [][]trace.Run{
		{{Content: longID, First: 2, Blocks: 1}, {Content: shortID, First: 0, Blocks: 1}},
		{{Content: longID, First: 0, Blocks: 1}},
	} {
		var raw []byte
		for _, r := range runs {
			all := long
			if r.Content == shortID {
				all = "short"
			}
			off, n := r.Range(int64(len(all)))
			f.set.Digests = append(f.set.Digests, segment.Sum([]byte(all[off:off+n])))
			raw = append(raw, all[off:off+n]...)
		}
		data, err := segment.AppendFrame(nil, segment.Zstd, raw)
		if err != nil {
			panic(err)
		}
		f.set.Frames = append(f.set.Frames, bundle.StartupFrame{MaxLength: uint32(len(data)) + 1, RawLength: uint32(len(raw)),
			First: uint32(len(f.set.Runs)), Count: uint32(len(runs))})
		f.set.Runs = append(f.set.Runs, runs...)
		f.frames = append(f.frames, data)
	}
	return f
}

func (f *startupFixture) header(w *bundle.Writer) {
	w.Hello(bundle.Hello{Version: 1, Stream: "stream-1"})
	w.Image(f.image)
}

func (f *startupFixture) write(w *bundle.Writer) {
	f.header(w)
	w.Startup(f.set, f.toc)
	for k, data := range f.frames {
		w.Pages(uint32(k), data[:1], data[1:])
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
	want := []any{&bundle.Hello{Version: 1, Stream: "stream-1"}, f.image, f.set}
	for k, data := range f.frames {
		want = append(want, &bundle.Pages{Frame: uint32(k), Data: data})
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
			if err := s.Resolve(f.toc); err != nil {
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
	if n := f.set.ContentBytes(); n != 9600-8192+5+4096 {
		t.Errorf("%d bytes in the set", n)
	}
	sent := int64(0)
	for _, data := range f.frames {
		sent += int64(len(data)) + 8
	}
	if most := f.set.MaxBytes(); most < sent {
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
	w.Startup(f.set, f.toc)
	w.Pages(0, f.frames[0])
	w.Plan(p)
	w.Frame(1, []byte("frame 1"))
	w.Pages(1, f.frames[1])
	w.Frame(0, []byte("frame 0"))
	w.End()
	sections, _, err := readAll(&b, f.req)
	if err != io.EOF {
		t.Fatal(err)
	}
	want := []any{
		&bundle.Pages{Frame: 0, Data: f.frames[0]}, p, &bundle.Frame{Index: 1, Data: []byte("frame 1")},
		&bundle.Pages{Frame: 1, Data: f.frames[1]},
		&bundle.Frame{Index: 0, Data: []byte("frame 0")},
	}
	if d := cmp.Diff(want, sections[len(sections)-len(want):]); d != "" {
		t.Error(d)
	}
}

// TestStartupGolden reads a stream as it was written when the sections were fixed.
func TestStartupGolden(t *testing.T) {
	f := newStartupFixture()
	f.check(t, bytes.NewReader(golden(t, "image-startup.bundle", f.bytes())))
}

// How many frames hold filled pages is said in a section that a reader may skip.
func TestFilled(t *testing.T) {
	f := newStartupFixture()
	f.set.Filled = 1
	for _, stream := range [][]byte{f.bytes(), golden(t, "image-filled.bundle", f.bytes())} {
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
		w.Startup(f.set, f.toc)
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
		{"after pages", func(w *bundle.Writer, f *startupFixture) { sets(w, f); w.Pages(0, f.frames[0]) }, section(0, 1)},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			w.Startup(f.set, f.toc)
			w.Plan(&bundle.Plan{})
		}, section(0, 1)},
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
		{"not asked for", func(w *bundle.Writer, f *startupFixture) { f.req.Image.Startup = false; f.write(w) }, "not asked for"},
		{"twice", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Startup(f.set, f.toc)
		}, "a second one"},
		{"before its image", func(w *bundle.Writer, f *startupFixture) {
			w.Hello(bundle.Hello{Version: 1})
			w.Startup(f.set, f.toc)
		}, "not asked for"},
		{"image after it", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Image(f.image)
		}, "out of order"},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Plan(&bundle.Plan{})
			w.Startup(f.set, f.toc)
		}, "out of order"},
		{"plan before its pages", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Pages(0, f.frames[0])
			w.Plan(&bundle.Plan{})
		}, "out of order"},
		{"end before its pages", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Plan(&bundle.Plan{})
			w.Pages(0, f.frames[0])
			w.End()
		}, "out of order"},
		{"set after an early plan", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Pages(0, f.frames[0])
			w.Plan(&bundle.Plan{})
			w.Startup(f.set, f.toc)
		}, "out of order"},
		{"too many pages after an early plan", func(w *bundle.Writer, f *startupFixture) {
			f.req.EarlyPlan = true
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Plan(&bundle.Plan{})
			w.Pages(0, f.frames[0])
			w.Pages(1, f.frames[1])
			w.Pages(2, f.frames[1])
		}, "no startup set"},
		{"pages of no set", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Pages(0, f.frames[0]) }, "no startup set"},
		{"pages out of order", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Pages(1, f.frames[1])
		}, "want 0 of image 0"},
		{"too many pages", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Pages(0, f.frames[0])
			w.Pages(1, f.frames[1])
			w.Pages(2, f.frames[1])
		}, "no startup set"},
		{"pages too long", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Startup(f.set, f.toc)
			w.Pages(0, f.frames[0], []byte("more"))
		}, "planned at most"},
		{"empty pages", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Startup(f.set, f.toc); w.Pages(0) }, "have 0 bytes"},
		{"runs of no frame", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.set.Frames = f.set.Frames[:1]
			w.Startup(f.set, f.toc)
		}, "in frames"},
		{"frames of no runs", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.set.Frames[1].Count = 0
			w.Startup(f.set, f.toc)
		}, "frame 1"},
		{"frames of more runs", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			f.set.Frames[1].Count++
			w.Startup(f.set, f.toc)
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

// newHere is an answer that says what is here of its startup set.
func newHere() (f *startupFixture, b []byte, want *bundle.Here) {
	f = newStartupFixture()
	want = &bundle.Here{Runs: []trace.Run{{Content: 1, First: 2, Blocks: 1}, {Content: 0, First: 0, Blocks: 1}, {Content: 1, First: 0, Blocks: 1}}}
	var out bytes.Buffer
	w := bundle.NewWriter(&out)
	f.header(w)
	w.Startup(f.set, f.toc)
	w.Here(want)
	for k, data := range f.frames {
		w.Pages(uint32(k), data)
	}
	w.Plan(&bundle.Plan{})
	w.End()
	return f, out.Bytes(), want
}

func TestHere(t *testing.T) {
	f, b, want := newHere()
	for _, stream := range [][]byte{b, golden(t, "image-here.bundle", b)} {
		sections, _, err := readAll(bytes.NewReader(stream), f.req)
		if err != io.EOF {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, sections[3]); d != "" {
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
			f.req.Image.Startup = false
			f.header(w)
			w.Here(&bundle.Here{})
		}},
		{"twice", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Here(&bundle.Here{}); w.Here(&bundle.Here{}) }},
		{"after the plan", func(w *bundle.Writer, f *startupFixture) { f.header(w); w.Plan(&bundle.Plan{}); w.Here(&bundle.Here{}) }},
		{"image after it", func(w *bundle.Writer, f *startupFixture) {
			f.header(w)
			w.Here(&bundle.Here{})
			w.Image(f.image)
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
		s := sections[2].(*bundle.Startup)
		c.change(s, f.toc)
		if err := s.Resolve(f.toc); !errors.Is(err, bundle.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
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
		image, _ := newImage("a file")
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
		req := &bundle.Request{Image: bundle.ImageRequest{Reference: string(image.Manifest.Digest), Startup: true}}
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
		var set *bundle.Startup
		pages, planned := 0, false
		for _, s := range sections {
			switch s := s.(type) {
			case *bundle.Startup:
				if set != nil || planned {
					t.Fatal("a set out of order")
				}
				set = s
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
				if s.Resolve(x.toc) == nil && len(s.Digests) != len(s.Runs) {
					t.Fatalf("%d digests of %d runs", len(s.Digests), len(s.Runs))
				}
			case *bundle.Here:
				if planned || !x.req.Image.Startup {
					t.Fatal("what is here, out of order or not asked for")
				}
			case *bundle.Pages:
				if planned || len(s.Data) > int(set.Frames[s.Frame].MaxLength) {
					t.Fatal("pages out of order, or too long")
				}
				pages++
			case *bundle.Plan:
				planned = true
				if set != nil && pages != len(set.Frames) {
					t.Fatal("a plan before all pages")
				}
			}
		}
	})
}
