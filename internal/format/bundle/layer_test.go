package bundle_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/columns"
	"hydrofoil.dev/foil/internal/format/segment"
)

// layerStream writes an answer about a layer.
func layerStream(t interface{ Fatal(...any) }, sections ...any) []byte {
	var out bytes.Buffer
	w := bundle.NewWriter(&out)
	err := w.Hello(bundle.Hello{Version: bundle.Version})
	last := int64(0)
	for _, s := range sections {
		switch v := s.(type) {
		case *bundle.Places:
			err = errors.Join(err, w.Places(v))
		case []byte:
			err = errors.Join(err, w.Recipe(v))
		case *bundle.Contents:
			err = errors.Join(err, w.Contents(v, last))
			last = v.Pieces[len(v.Pieces)-1].Content
		case *bundle.Error:
			if err = errors.Join(err, w.Error(v)); err == nil {
				return out.Bytes()
			}
		case string:
			err = errors.Join(err, w.Alive())
		}
	}
	if err = errors.Join(err, w.End()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func readLayer(b []byte, req *bundle.LayerRequest) (sections []any, err error) {
	r := bundle.NewLayerReader(bytes.NewReader(b), req)
	for {
		s, err := r.Next()
		if err == io.EOF {
			if r.Bytes() != int64(len(b)) {
				return sections, errors.New("not all of it was read")
			}
			return sections, nil
		}
		if err != nil {
			return sections, err
		}
		sections = append(sections, s)
	}
}

func frame(t interface{ Fatal(...any) }, raw string) []byte {
	b, err := segment.AppendFrame(nil, segment.Zstd, []byte(raw))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func sampleRecipe() []any {
	return []any{
		&bundle.Places{TOC: digest.FromString("toc"), Numbers: []int32{-1, 5, 6, 7, -1, -1, 0, 5, -1}},
		[]byte("the recipe"), []byte(" goes on"),
	}
}

func sampleContents(t interface{ Fatal(...any) }) []any {
	return []any{
		&bundle.Contents{Pieces: []bundle.ContentPiece{{Content: 2, Length: 3}, {Content: 3, Length: 1 << 20, Hole: true}, {Content: 3, Length: 2}},
			Frame: frame(t, "abcde"), RawLength: 5},
		&bundle.Contents{Pieces: []bundle.ContentPiece{{Content: 3, Length: 7, Hole: true}}},
		&bundle.Contents{Pieces: []bundle.ContentPiece{{Content: 900, Length: 1000}}, Frame: frame(t, strings.Repeat("0123456789", 100)), RawLength: 1000},
	}
}

var sampleRequest = &bundle.LayerRequest{Versions: []int{1}, Image: bundle.ImageRequest{Repository: "r", Reference: "1"}, Layer: 3,
	Contents: []bundle.ContentRun{{2, 2}, {900, 1}}}

func TestLayerStreams(t *testing.T) {
	want := sampleRecipe()
	got, err := readLayer(layerStream(t, append([]any{"alive"}, want...)...), &bundle.LayerRequest{})
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("recipe: %v\n%s", err, d)
	}
	want = sampleContents(t)
	got, err = readLayer(layerStream(t, append(want, "alive")...), sampleRequest)
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("contents: %v\n%s", err, d)
	}
	for name, b := range map[string][]byte{"layer-recipe": layerStream(t, sampleRecipe()...), "layer-contents": layerStream(t, sampleContents(t)...)} {
		sections, err := readLayer(golden(t, name+".bundle", b), sampleRequest)
		want := sampleContents(t)
		if name == "layer-recipe" {
			want = sampleRecipe()
		}
		if d := cmp.Diff(want, sections); d != "" || err != nil {
			t.Errorf("golden %s: %v\n%s", name, err, d)
		}
	}
	_, err = readLayer(layerStream(t, &bundle.Error{Code: bundle.CodeCorrupt, Message: "rotten"}), sampleRequest)
	if told, ok := errors.AsType[*bundle.Error](err); !ok || told.Code != bundle.CodeCorrupt {
		t.Errorf("an error: %v", err)
	}
}

func TestPlacesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := &bundle.Places{TOC: digest.FromString("x"), Numbers: rapid.SliceOf(rapid.Int32Range(-1, 1000)).Draw(t, "numbers")}
		got, err := readLayer(layerStream(t, want), &bundle.LayerRequest{})
		if err != nil || len(got) != 1 || !slices.Equal(got[0].(*bundle.Places).Numbers, want.Numbers) {
			t.Fatalf("%v, %v", got, err)
		}
	})
}

func TestLayerRequests(t *testing.T) {
	b, err := json.Marshal(sampleRequest)
	if err != nil || !strings.Contains(string(b), `"contents":[[2,2],[900,1]]`) {
		t.Errorf("%s, %v", b, err)
	}
	got, err := bundle.DecodeLayerRequest(b)
	if d := cmp.Diff(sampleRequest, got); d != "" || err != nil {
		t.Errorf("%v\n%s", err, d)
	}
	image := `"versions":[1,9],"image":{"repository":"r","reference":"1"}`
	for body, want := range map[string]string{
		`{` + image + `,"unknown":7}`:                                                        "",
		`{"versions":[2],"image":{"repository":"r","reference":"1"}}`:                        "versions [2]",
		`{"versions":[1],"image":{"repository":"r"}}`:                                        "without repository",
		`{` + image + `,"layer":-1}`:                                                         "layer -1",
		`{` + image + `,"contents":[[1,2],[2,1]]}`:                                           "1 contents from 2 on, after those up to 3",
		`{` + image + `,"contents":[[-1,2]]}`:                                                "contents from -1",
		`{` + image + `,"contents":[[1,0]]}`:                                                 "0 contents",
		`{` + image + `,"contents":[[1,9223372036854775807]]}`:                               "9223372036854775807 contents",
		`{` + image + `,"contents":[[1]]}`:                                                   "of 1 numbers",
		`{` + image + `} x`:                                                                  "invalid character",
		`{` + image + `,"contents":[` + strings.Repeat("[1,1],", bundle.MaxRuns) + `[1,1]]}`: "runs of contents, at most",
	} {
		_, err := bundle.DecodeLayerRequest([]byte(body))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.80s: %v, want %q", body, err, want)
		}
	}
}

// section is one that is put together by hand.
func section(t bundle.Type, parts ...[]byte) []byte {
	payload := bytes.Join(parts, nil)
	b := binary.LittleEndian.AppendUint32([]byte{byte(t), 1}, uint32(len(payload)))
	return append(b, payload...)
}

func uvarints(list ...uint64) (b []byte) {
	for _, n := range list {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func TestHostileLayerStreams(t *testing.T) {
	hello := section(bundle.TypeHello, []byte{1, 0})
	end := section(bundle.TypeEnd)
	toc := columns.AppendBlock(nil, digest.FromString("toc"))
	places := func(count uint64, absent, numbers []byte) []byte {
		return section(bundle.TypePlaces, toc, uvarints(count), columns.Append(nil, absent, true), columns.Append(nil, numbers, true))
	}
	contents := func(frame string, numbers ...uint64) []byte {
		return section(bundle.TypeContents, columns.Append(nil, uvarints(numbers...), true), []byte(frame))
	}
	for name, tc := range map[string]struct {
		sections [][]byte
		err      string
	}{
		"no hello":          {[][]byte{end}, "out of order"},
		"two hellos":        {[][]byte{hello, hello}, "out of order"},
		"recipe first":      {[][]byte{hello, section(bundle.TypeRecipe, []byte("x"))}, "out of order"},
		"places twice":      {[][]byte{hello, places(0, nil, nil), places(0, nil, nil)}, "out of order"},
		"contents after":    {[][]byte{hello, places(0, nil, nil), contents("", 4, 3)}, "out of order"},
		"a bundle":          {[][]byte{hello, section(bundle.TypePlan)}, "does not know it"},
		"long recipe":       {[][]byte{hello, places(0, nil, nil), section(bundle.TypeRecipe, make([]byte, bundle.MaxChunk+1))}, "at most"},
		"cut":               {[][]byte{hello}, "bundle was cut"},
		"fewer places":      {[][]byte{hello, places(2, nil, uvarints(2))}, "places of 2 contents"},
		"huge number":       {[][]byte{hello, places(1, nil, uvarints(1<<40))}, "is number"},
		"negative number":   {[][]byte{hello, places(1, nil, uvarints(1))}, "is number -2"},
		"absent beyond":     {[][]byte{hello, places(1, uvarints(2), nil)}, "is absent"},
		"absent twice":      {[][]byte{hello, places(2, uvarints(1, 0), nil)}, "is so twice"},
		"no TOC":            {[][]byte{hello, section(bundle.TypePlaces, []byte{0, 0}, columns.Append(nil, nil, true), columns.Append(nil, nil, true))}, "TOC \"\""},
		"not wanted":        {[][]byte{hello, contents("", 4, 3)}, "content 4, which nobody asked for"},
		"back":              {[][]byte{hello, contents("", 900, 3), contents("", 1<<22, 3)}, "nobody asked for"},
		"empty piece":       {[][]byte{hello, contents("", 2, 1)}, "0 bytes of content 2"},
		"no pieces":         {[][]byte{hello, contents("")}, "0 pieces"},
		"bytes of holes":    {[][]byte{hello, contents("x", 2, 3)}, "frame of 1"},
		"no bytes":          {[][]byte{hello, contents("", 2, 2)}, "frame of 0"},
		"too many":          {[][]byte{hello, contents("x", 2, 1<<21, 0, 1<<21)}, "2 pieces of 2097152 bytes"},
		"long piece":        {[][]byte{hello, contents("x", 2, 1<<22)}, "no number"},
		"half a piece":      {[][]byte{hello, contents("x", 2)}, "no number"},
		"nothing of recipe": {[][]byte{hello, section(bundle.TypeError, []byte{200})}, "corrupt"},
	} {
		b := append([]byte("HFBNDL\r\n"), bytes.Join(tc.sections, nil)...)
		_, err := readLayer(b, sampleRequest)
		if err == nil || !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %v, want %q", name, err, tc.err)
		}
		if !errors.Is(err, bundle.ErrCorrupt) && name != "cut" {
			t.Errorf("%s: %v is no ErrCorrupt", name, err)
		}
	}
	if _, err := readLayer([]byte("HTTP/1.1 200 OK"), sampleRequest); !errors.Is(err, bundle.ErrForeign) {
		t.Errorf("something else: %v", err)
	}
}

func FuzzLayerReader(f *testing.F) {
	f.Add(layerStream(f, sampleRecipe()...))
	f.Add(layerStream(f, sampleContents(f)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		sections, err := readLayer(b, sampleRequest)
		if err != nil {
			return
		}
		again, err := readLayer(layerStream(t, sections...), sampleRequest)
		if d := cmp.Diff(sections, again); d != "" || err != nil {
			t.Fatalf("what is accepted cannot be written: %v\n%s", err, d)
		}
	})
}
