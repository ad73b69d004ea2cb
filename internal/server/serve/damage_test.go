package serve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/serve"
)

// image is an image as a client holds it.
type image struct {
	blobs    [][]byte
	manifest []byte
}

func makeImage(t testing.TB, layers ...layertest.Layer) image {
	t.Helper()
	var blobs []layertest.Blob
	for _, l := range layers {
		blobs = append(blobs, l.Zstd(t)) // of which nothing is proven, so that what is lost stays lost
	}
	return imageOf(t, blobs...)
}

// imageOf makes an image of blobs.
func imageOf(t testing.TB, layers ...layertest.Blob) image {
	t.Helper()
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	config := ocispec.Image{Platform: ocispec.Platform{Architecture: "amd64", OS: "linux"}, RootFS: ocispec.RootFS{Type: "layers"}}
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	var m image
	for _, b := range layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, b.DiffID)
		manifest.Layers = append(manifest.Layers, b.Descriptor())
		m.blobs = append(m.blobs, b.Bytes)
	}
	c := encode(config)
	manifest.Config = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromBytes(c), Size: int64(len(c))}
	m.blobs, m.manifest = append(m.blobs, c), encode(manifest)
	return m
}

// push pushes it as r:1.
func (m image) push(t *testing.T, addr string) {
	t.Helper()
	m.pushTo(t, addr, "r")
}

// pushTo does what clients do: a blob that is there is not sent.
func (m image) pushTo(t testing.TB, addr, repository string) {
	t.Helper()
	base := "http://" + addr + "/v2/" + repository + "/"
	for _, b := range m.blobs {
		d := digest.FromBytes(b)
		res, err := http.Head(base + "blobs/" + d.String())
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode == http.StatusNotFound {
			send(t, "POST", base+"blobs/uploads/?digest="+d.String(), "application/octet-stream", b, http.StatusCreated)
		}
	}
	send(t, "PUT", base+"manifests/1", ocispec.MediaTypeImageManifest, m.manifest, http.StatusCreated)
}

// pull pulls the image as a bundle and verifies every segment.
func (m image) pull(addr string) error {
	wrong, err := ask(http.DefaultClient, addr, nil)
	if err == nil && len(wrong) > 0 {
		err = fmt.Errorf("%d segments have other bytes", len(wrong))
	}
	return err
}

// ask does the same for a worker that got damaged segments before, and returns those that
// come with other bytes than theirs; one of a frame that does not decode.
func ask(c *http.Client, addr string, damaged []segment.ID) (wrong []segment.ID, err error) {
	return askFor(c, addr, "r", damaged)
}

// askFor is ask for tag 1 of a repository.
func askFor(c *http.Client, addr, repository string, damaged []segment.ID) (wrong []segment.ID, err error) {
	req := &bundle.Request{Versions: []int{1}, Damaged: damaged, Image: bundle.ImageRequest{
		Repository: repository, Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"},
	}}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	res, err := c.Post("http://"+addr+bundle.PullPath, bundle.MediaTypeRequest, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(res.Body)
		return nil, fmt.Errorf("%s: %s", res.Status, b)
	}
	r := bundle.NewReader(res.Body, bundle.ReaderOptions{Request: req})
	var x *toc.TOC
	var plan *bundle.Plan
	got := map[segment.ID]bool{}
	for {
		section, err := r.Next()
		if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		switch v := section.(type) {
		case *bundle.Image:
			if x, err = v.DecodeTOC(nil); err != nil {
				return nil, err
			}
		case *bundle.Plan:
			plan = v
			if err := v.Check(x); err != nil {
				return nil, err
			}
		case *bundle.Frame:
			f := plan.Frames[v.Index]
			raw, err := segment.DecodeFrame(nil, v.Data, int(f.RawLength))
			if err != nil {
				wrong = append(wrong, x.Segments[plan.Segments[f.First]].ID)
			}
			for _, n := range plan.Segments[f.First : f.First+f.Segments] {
				s := x.Segments[n]
				got[s.ID] = true
				if err != nil {
					continue
				}
				if segment.Sum(raw[:s.Length]) != s.ID {
					wrong = append(wrong, s.ID)
				}
				raw = raw[s.Length:]
			}
		}
	}
	for _, s := range x.Segments {
		if !s.ID.IsHole() && !got[s.ID] {
			return wrong, fmt.Errorf("segment %s did not come", s.ID)
		}
	}
	return wrong, nil
}

func noise(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, n)
	for i := range b {
		b[i] = "abcdefghijklmnop"[r.IntN(16)]
	}
	return string(b)
}

// Whatever happens to a stored object, a pull gets no wrong byte that it could
// take for a right one, and after the image was pushed again, as any client
// does it, it can be pulled.
func TestDamageIsRepaired(t *testing.T) {
	var first layertest.Layer
	for i := range 60 {
		first = append(first, layertest.File(fmt.Sprintf("f%d", i), 0o644, noise(uint64(i), 4000)))
	}
	first = append(first, layertest.File("large", 0o644, noise(1000, 3<<19)))
	m := makeImage(t, first, layertest.Layer{layertest.File("second", 0o644, noise(2000, 50_000))})

	damages := map[string]func(t *testing.T, path string){
		"gone": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
		"cut": func(t *testing.T, path string) {
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, info.Size()/2); err != nil {
				t.Fatal(err)
			}
		},
		"other bytes": func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := len(b) / 3; i < len(b)/3+min(len(b)/3, 400_000); i++ {
				b[i] ^= 0x55
			}
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		},
	}
	for _, kind := range []string{"packs", "entries", "tocs", "indices", "blobs", ""} { // "" is all of them
		for name, damage := range damages {
			for _, restart := range []bool{false, true} {
				if restart && name != "other bytes" {
					continue // what is in memory hides no more than that
				}
				t.Run(fmt.Sprintf("%s %s, restart %v", kind, name, restart), func(t *testing.T) {
					root := t.TempDir()
					opts := serve.Options{Root: root, Listen: "127.0.0.1:0"}
					opts.Log = slog.New(slog.DiscardHandler)
					s := start(t, opts)
					m.push(t, s.Addr())
					if err := m.pull(s.Addr()); err != nil {
						t.Fatal(err)
					}
					if restart { // and with it what is in memory
						http.DefaultClient.CloseIdleConnections() // a server waits for them
						if err := s.Close(); err != nil {
							t.Fatal(err)
						}
					}
					hit := 0
					err := filepath.WalkDir(filepath.Join(root, "objects", kind), func(path string, e fs.DirEntry, err error) error {
						if err == nil && e.Type().IsRegular() {
							damage(t, path)
							hit++
						}
						return err
					})
					if err != nil || hit == 0 {
						t.Fatalf("damaged %d objects, %v", hit, err)
					}
					if restart {
						s = start(t, opts)
					}
					// This may fail, or be repaired at once; pull verifies.
					before := m.pull(s.Addr())
					// That a blob has other bytes is found out when the client has
					// been told that it need not push it: the push after it does.
					for range 2 {
						m.push(t, s.Addr())
						if err = m.pull(s.Addr()); err == nil {
							break
						}
					}
					if err != nil {
						t.Errorf("before: %v; pushed again: %v", before, err)
					}
					for _, b := range m.blobs { // plain clients, too
						res, err := http.Get("http://" + s.Addr() + "/v2/r/blobs/" + digest.FromBytes(b).String())
						if err != nil {
							t.Fatal(err)
						}
						got, err := io.ReadAll(res.Body)
						res.Body.Close()
						if err != nil || !bytes.Equal(got, b) {
							t.Errorf("plain pull: %s, %d of %d bytes, %v", res.Status, len(got), len(b), err)
						}
					}
					if before != nil && strings.Contains(before.Error(), root) {
						t.Errorf("the error names a path: %v", before)
					}
				})
			}
		}
	}
}
