package hostiletest

import (
	"bytes"
	"slices"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/bundletest"
	"hydrofoil.dev/foil/internal/worker/hosttest"
)

// liar is an image that says what is not so.
type liar struct {
	m     *bundletest.Image
	told  []string // the lies
	stays bool     // its pull may not end by itself
	mute  bool     // a question about a layer may not be answered

	ref  string
	pull chan error // how its pull has ended
}

// lies are what a server may lie about. Each is told of a copy of an honest image, of which others are nearby; false: not
// of this one.
var lies = map[string]func(t *rapid.T, l *liar, others []*honest) bool{
	// The table of contents.
	"mode": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) { pick(t, "inode", x.Inodes).Mode ^= 0o4111 })
	},
	"owner": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) { pick(t, "inode", x.Inodes).UID++ })
	},
	"swapped files": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) {
			a, b := pick(t, "file", x.Inodes), pick(t, "other", x.Inodes)
			a.Content, b.Content, a.Size, b.Size = b.Content, a.Content, b.Size, a.Size
		})
	},
	"name": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) { pick(t, "name", x.Dirents).Name += "~" })
	},
	"no TOC": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.m.TOC = slices.Clone(l.m.TOC)
		l.m.TOC[rapid.IntRange(0, len(l.m.TOC)-1).Draw(t, "byte")] ^= 0x10
		l.m.TOCDigest = toc.Digest(l.m.TOC)
		return true
	},
	// Contents, segments, holes.
	"content ID": func(t *rapid.T, l *liar, others []*honest) bool {
		id := pick(t, "content of another image", oneOf(t, "of", others).m.Tree.Contents).ID
		return l.change(t, func(x *toc.TOC) { pick(t, "content", x.Contents).ID = id })
	},
	"segment": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) {
			c := pick(t, "content", x.Contents)
			s := &x.Segments[c.First+uint32(rapid.IntRange(0, int(c.Segments)-1).Draw(t, "segment"))]
			b := bytes.Repeat([]byte("evil"), int(s.Length)/4+1)[:s.Length]
			s.ID = segment.Sum(b)
			l.m.Data[s.ID] = b
			if c.Segments == 1 {
				c.ID = s.ID
			}
		})
	},
	"hole": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) { pick(t, "segment", x.Segments).ID = segment.ID{} })
	},
	"no hole": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) {
			for i := range x.Segments {
				if s := &x.Segments[i]; s.ID.IsHole() {
					b := make([]byte, s.Length)
					s.ID = segment.Sum(b)
					l.m.Data[s.ID] = b
					return
				}
			}
		})
	},
	"damaged bytes": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.segment(t, func(b []byte) []byte {
			b = slices.Clone(b)
			b[rapid.IntRange(0, len(b)-1).Draw(t, "byte")] ^= 1
			return b
		})
	},
	// Sizes.
	"short bytes": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.segment(t, func(b []byte) []byte { return b[:len(b)-1] })
	},
	"bytes withheld": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.segment(t, func([]byte) []byte { return nil })
	},
	"size": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.change(t, func(x *toc.TOC) {
			c := pick(t, "content", x.Contents)
			s := &x.Segments[c.First+c.Segments-1]
			d := int64(rapid.IntRange(-1, 1).Draw(t, "bytes"))
			c.Size, s.Length = c.Size+d, uint32(int64(s.Length)+d)
			for i := range x.Inodes {
				if f := &x.Inodes[i]; f.IsRegular() && f.Content >= 0 {
					f.Size = x.Contents[f.Content].Size
				}
			}
		})
	},
	"segments": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.m.Segments += uint32(oneOf(t, "more", []int{-1, 1, 1 << 30}))
		return true
	},
	// Digests, documents, other images' chain IDs.
	"digest of the TOC": func(t *rapid.T, l *liar, others []*honest) bool {
		l.m.TOCDigest = oneOf(t, "of", others).m.TOCDigest
		return true
	},
	"chain ID": func(t *rapid.T, l *liar, others []*honest) bool {
		l.m.ChainID = oneOf(t, "of", others).m.ChainID
		return true
	},
	"another image's names": func(t *rapid.T, l *liar, others []*honest) bool {
		other := oneOf(t, "of", others).m
		ok := l.change(t, func(x *toc.TOC) { x.ChainID = other.ChainID })
		l.m.ChainID, l.m.Config, l.m.Manifest = other.ChainID, other.Config, other.Manifest
		if l.m.Layers = nil; rapid.Bool().Draw(t, "with its layers") {
			for _, made := range other.Layers {
				l.m.Layers = append(l.m.Layers, new(*made))
			}
		}
		return ok
	},
	"nothing of another image": func(t *rapid.T, l *liar, others []*honest) bool {
		other := oneOf(t, "of", others).m
		*l.m = *other.Clone(t)
		clear(l.m.Data)
		return true
	},
	"document": func(t *rapid.T, l *liar, _ []*honest) bool {
		b := oneOf(t, "which", []*bundle.Blob{&l.m.Manifest, &l.m.Config})
		b.Bytes = append(slices.Clone(b.Bytes), ' ')
		if rapid.Bool().Draw(t, "with its digest") {
			b.Digest = digest.FromBytes(b.Bytes)
		}
		return true
	},
	"media type": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.m.Manifest.MediaType = oneOf(t, "type", []string{"", ocispec.MediaTypeImageIndex, "text/plain"})
		return true
	},
	"index": func(t *rapid.T, l *liar, others []*honest) bool {
		other := oneOf(t, "of", others).m
		x := bundletest.JSON(t, ocispec.MediaTypeImageIndex, ocispec.Index{MediaType: ocispec.MediaTypeImageIndex,
			Manifests: []ocispec.Descriptor{{MediaType: other.Manifest.MediaType, Digest: other.Manifest.Digest, Size: int64(len(other.Manifest.Bytes))}}})
		l.m.Chosen = &x
		return true
	},
	"blobs of other layers": func(t *rapid.T, l *liar, others []*honest) bool {
		return l.blobs(t, oneOf(t, "of", others).m)
	},
	// What a proof asks for.
	"recipe withheld": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) { made.Recipe = nil })
	},
	"recipe": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) {
			if len(made.Recipe) > 0 {
				made.Recipe = slices.Clone(made.Recipe)
				made.Recipe[rapid.IntRange(0, len(made.Recipe)-1).Draw(t, "byte")] ^= 0x20
			}
		})
	},
	"half a recipe": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) { made.Recipe = made.Recipe[:len(made.Recipe)/2] })
	},
	"places": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) {
			made.IDs = slices.Clone(made.IDs)
			slices.Reverse(made.IDs)
		})
	},
	"hidden contents": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) {
			made.Contents = slices.Clone(made.Contents)
			for i := range made.Contents {
				made.Contents[i] = made.Contents[i][:len(made.Contents[i])/2]
			}
		})
	},
	"blob withheld": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) { made.Blob.Bytes = nil })
	},
	"blob": func(t *rapid.T, l *liar, _ []*honest) bool {
		return l.layer(t, func(made *bundletest.Layer) {
			made.Blob.Bytes = append(slices.Clone(made.Blob.Bytes), 'x')
		})
	},
	"silence about a layer": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.mute = true
		return l.layer(t, func(made *bundletest.Layer) { made.Silent = true })
	},
	// The stream: order, and silence.
	"shuffled frames": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.m.Lies.Shuffle = rapid.Uint64Range(1, 1<<40).Draw(t, "seed")
		return true
	},
	"frames by other numbers": func(t *rapid.T, l *liar, _ []*honest) bool {
		by := rapid.Uint32Range(0, 1).Draw(t, "by")
		l.m.Lies.Frame = func(i uint32, b []byte) (uint32, []byte) { return i ^ 1 + by, b }
		return true
	},
	"plan": func(t *rapid.T, l *liar, _ []*honest) bool {
		what := rapid.IntRange(0, 3).Draw(t, "what of it")
		l.m.Lies.Plan = func(p *bundle.Plan) {
			if len(p.Frames) == 0 {
				return
			}
			switch what {
			case 0:
				p.Frames[0].RawLength++
			case 1:
				p.Frames[0].MaxLength = 1
			case 2:
				slices.Reverse(p.Segments)
			case 3:
				p.MaxBytes, p.ContentBytes = 1<<50, 1<<50
			}
		}
		return true
	},
	"sections out of turn": func(t *rapid.T, l *liar, _ []*honest) bool {
		at := oneOf(t, "before", []string{"image", "plan", "frame", "end"})
		what := rapid.IntRange(0, 4).Draw(t, "which")
		header := l.m.Image
		l.m.Lies.Before = func(section string, _ int, out *bundle.Writer) bool {
			switch {
			case section != at:
			case what == 0:
				_ = out.Plan(&bundle.Plan{})
			case what == 1:
				_ = out.Image(&header)
			case what == 2:
				_ = out.End()
			case what == 3:
				_ = out.Error(&bundle.Error{Code: bundle.CodeNotFound, Message: "it says so"})
			default:
				_ = out.Frame(7, []byte("no frame"))
			}
			return true
		}
		return true
	},
	"silence": func(t *rapid.T, l *liar, _ []*honest) bool {
		l.stays = true
		at, after := oneOf(t, "before", []string{"image", "plan", "frame", "end"}), rapid.IntRange(0, 3).Draw(t, "frames")
		alive := rapid.Bool().Draw(t, "but for signs of life")
		l.m.Lies.Before = func(section string, n int, out *bundle.Writer) bool {
			if section != at || section == "frame" && n < after {
				return true
			}
			if alive {
				_ = out.Alive()
			}
			return false
		}
		return true
	},
}

// pick draws one of a list.
func pick[T any](t *rapid.T, what string, list []T) *T {
	return &list[evenly(t, what, len(list))]
}

func oneOf[T any](t *rapid.T, what string, list []T) T { return *pick(t, what, list) }

// change changes the TOC, unless it would be none then.
func (l *liar) change(t *rapid.T, fn func(*toc.TOC)) bool {
	x, err := toc.Decode(l.m.TOC)
	if err != nil {
		return false // another lie
	}
	fn(x)
	b, err := toc.Encode(x)
	if err != nil {
		return false
	}
	if x, err = toc.Decode(b); err != nil { // with what is derived
		t.Fatal(err)
	}
	l.m.Tree, l.m.TOC, l.m.TOCDigest, l.m.Segments = x, b, toc.Digest(b), uint32(len(x.Segments))
	return true
}

// segment changes what is sent of one of the segments.
func (l *liar) segment(t *rapid.T, fn func([]byte) []byte) bool {
	var ids []segment.ID
	for _, s := range l.m.Tree.Segments {
		if len(l.m.Data[s.ID]) > 0 {
			ids = append(ids, s.ID)
		}
	}
	if len(ids) == 0 {
		return false
	}
	id := oneOf(t, "segment", ids)
	if l.m.Data[id] = fn(l.m.Data[id]); l.m.Data[id] == nil {
		delete(l.m.Data, id)
	}
	return true
}

// layer changes one of the layers.
func (l *liar) layer(t *rapid.T, fn func(*bundletest.Layer)) bool {
	if len(l.m.Layers) == 0 {
		return false
	}
	fn(oneOf(t, "layer", l.m.Layers))
	return true
}

// blobs has the manifest name the blobs of another image's layers; the config stays.
func (l *liar) blobs(t hosttest.T, other *bundletest.Image) bool {
	var m ocispec.Manifest
	decode(t, other.Manifest.Bytes, &m)
	m.Config = ocispec.Descriptor{MediaType: l.m.Config.MediaType, Digest: l.m.Config.Digest, Size: int64(len(l.m.Config.Bytes))}
	if len(m.Layers) != len(l.m.Layers) {
		return false
	}
	l.m.Manifest = bundletest.JSON(t, ocispec.MediaTypeImageManifest, m)
	for i := range l.m.Layers {
		l.m.Layers[i].Blob = other.Layers[i].Blob
	}
	return true
}
