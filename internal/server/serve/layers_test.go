package serve_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/recipe"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/server/serve"
)

// askLayer asks for something of a layer of r:1, or of another image, and returns the sections.
func askLayer(addr, path string, req bundle.LayerRequest) (sections []any, err error) {
	req.Versions = []int{bundle.Version}
	if req.Image.Repository == "" {
		req.Image = bundle.ImageRequest{Repository: "r", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	}
	body, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	res, err := http.Post("http://"+addr+path, "application/json", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		told := new(bundle.Error)
		if err := json.NewDecoder(res.Body).Decode(told); err != nil {
			return nil, err
		}
		return nil, told
	}
	r := bundle.NewLayerReader(res.Body, &req)
	for {
		s, err := r.Next()
		if err == io.EOF {
			return sections, nil
		}
		if err != nil {
			return sections, err
		}
		sections = append(sections, s)
	}
}

// askRecipe returns places and recipe of a layer.
func askRecipe(addr string, layer int) (*bundle.Places, []byte, error) {
	sections, err := askLayer(addr, bundle.RecipePath, bundle.LayerRequest{Layer: layer})
	if err != nil {
		return nil, nil, err
	}
	var encoded []byte
	for _, s := range sections[1:] {
		encoded = append(encoded, s.([]byte)...)
	}
	return sections[0].(*bundle.Places), encoded, nil
}

// askContents returns the bytes of contents of a layer.
func askContents(addr string, layer int, runs []bundle.ContentRun) (map[int64][]byte, error) {
	sections, err := askLayer(addr, bundle.ContentsPath, bundle.LayerRequest{Layer: layer, Contents: runs})
	if err != nil {
		return nil, err
	}
	contents := map[int64][]byte{}
	for _, s := range sections {
		c := s.(*bundle.Contents)
		var raw []byte
		if c.Frame != nil {
			if raw, err = segment.DecodeFrame(nil, c.Frame, c.RawLength); err != nil {
				return nil, err
			}
		}
		for _, p := range c.Pieces {
			if p.Hole {
				contents[p.Content] = append(contents[p.Content], make([]byte, p.Length)...)
			} else {
				contents[p.Content] = append(contents[p.Content], raw[:p.Length]...)
				raw = raw[p.Length:]
			}
		}
	}
	return contents, nil
}

// headerOf returns the config and the TOC of r:1.
func headerOf(addr string) (config ocispec.Image, d digest.Digest, x *toc.TOC, err error) {
	req := &bundle.Request{Versions: []int{1}, Image: bundle.ImageRequest{Repository: "r", Reference: "1", Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}}
	body, err := json.Marshal(req)
	if err != nil {
		return config, "", nil, err
	}
	res, err := http.Post("http://"+addr+bundle.PullPath, bundle.MediaTypeRequest, bytes.NewReader(body))
	if err != nil {
		return config, "", nil, err
	}
	defer res.Body.Close()
	r := bundle.NewReader(res.Body, bundle.ReaderOptions{Request: req})
	for {
		section, err := r.Next()
		if err != nil {
			return config, "", nil, err
		}
		if m, ok := section.(*bundle.Image); ok {
			if err := json.Unmarshal(m.Config.Bytes, &config); err != nil {
				return config, "", nil, err
			}
			x, err := m.DecodeTOC(nil)
			return config, m.TOCDigest, x, err
		}
	}
}

// entries are those of a layer.
type entries []*layer.Entry

// Next implements flatten.Entries.
func (l *entries) Next() (*layer.Entry, error) {
	if len(*l) == 0 {
		return nil, io.EOF
	}
	e := (*l)[0]
	*l = (*l)[1:]
	return e, nil
}

// parse reads a tar stream whose digest is to be diffID.
func parse(stream io.Reader, diffID digest.Digest) (list entries, err error) {
	r, err := layer.NewReader(context.Background(), stream, layer.Descriptor{Digest: diffID, DiffID: diffID}, layer.Options{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	splitter := segment.NewSplitter(nil)
	for {
		e, err := r.Next()
		if err == io.EOF {
			return list, nil
		}
		if err == nil && e.Size > 0 {
			err = e.Split(splitter, r, func(segment.ID, []byte) error { return nil })
		}
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
}

// proof proves an image as a worker does: it makes the tar stream of each layer from what it has, which is
// files, and what it asks for, and flattens these streams. It returns how many contents it had to ask for.
func proof(addr string, files []string) (asked int, err error) {
	config, d, x, err := headerOf(addr)
	if err != nil {
		return 0, err
	}
	byID := map[segment.ID][]byte{}
	for _, f := range files {
		byID[segment.Sum([]byte(f))] = []byte(f)
	}
	var layers []flatten.Layer
	for n, diffID := range config.RootFS.DiffIDs {
		places, encoded, err := askRecipe(addr, n)
		if err != nil {
			return asked, fmt.Errorf("recipe of layer %d: %w", n, err)
		}
		if places.TOC != d {
			return asked, fmt.Errorf("places of TOC %s, want %s", places.TOC, d)
		}
		var runs []bundle.ContentRun
		for i, at := range places.Numbers {
			if at < 0 {
				runs = append(runs, bundle.ContentRun{First: int64(i), Count: 1})
			}
		}
		absent := map[int64][]byte{}
		if len(runs) > 0 {
			if absent, err = askContents(addr, n, runs); err != nil {
				return asked, fmt.Errorf("contents of layer %d: %w", n, err)
			}
		}
		asked += len(runs)
		r := recipe.NewReader(bytes.NewReader(encoded), func(content, offset, length int64) (io.Reader, error) {
			b, ok := absent[content]
			if at := places.Numbers[content]; at >= 0 {
				b, ok = byID[x.Contents[at].ID]
			}
			if !ok || offset+length > int64(len(b)) {
				return nil, fmt.Errorf("no bytes at %d", offset)
			}
			return bytes.NewReader(b[offset:]), nil
		}, recipe.Limits{Contents: int64(len(places.Numbers))})
		list, err := parse(r, diffID)
		if err != nil {
			return asked, fmt.Errorf("layer %d: %w", n, err)
		}
		layers = append(layers, flatten.Layer{Digest: diffID, DiffID: diffID, Entries: &list})
	}
	if x.Rules != flatten.Version {
		return asked, fmt.Errorf("a TOC by rules %d", x.Rules)
	}
	again, err := flatten.Rootfs(context.Background(), layers)
	if err != nil {
		return asked, err
	}
	if diff := cmp.Diff(x, again); diff != "" {
		return asked, fmt.Errorf("the layers flatten to another TOC:\n%s", diff)
	}
	return asked, nil
}

// proven is an image with files that upper layers hide, and its files.
func proven(t *testing.T) (m image, files []string) {
	zeros := string(make([]byte, 3<<20))
	random := make([]byte, 200_000) // it is stored as it is: no decoder sees that it was changed
	for i, x := 0, uint32(1); i < len(random); i++ {
		x = x*1664525 + 1013904223
		random[i] = byte(x >> 24)
	}
	hidden := []string{string(random), noise(2, 2<<20) + zeros + noise(3, 300_000), zeros, "small"}
	files = []string{noise(11, 5000), noise(12, 3<<20), "seen", zeros + "x"}
	m = makeImage(t,
		layertest.Layer{
			layertest.Dir("d", 0o755), layertest.File("d/a", 0o644, hidden[0]), layertest.File("d/b", 0o644, files[0]), layertest.File("d/empty", 0o644, ""),
			layertest.File("gone", 0o644, hidden[1]), layertest.File("zeros", 0o644, hidden[2]), layertest.File("large", 0o644, files[1]),
			layertest.Link("link", "large").Xattr("user.a", "b"), layertest.File("again", 0o644, files[0]),
		},
		layertest.Layer{layertest.Whiteout("gone"), layertest.File("d/a", 0o644, files[2]), layertest.File("late", 0o644, hidden[3]), layertest.File("zeros", 0o644, files[3])},
		layertest.Layer{layertest.Whiteout("late"), layertest.Dir("new", 0o755)},
	)
	return m, files
}

// TestProof: what the server says of the layers of an image is enough to make their tar streams.
func TestProof(t *testing.T) {
	m, files := proven(t)
	s := start(t, serve.Options{})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	m.push(t, s.Addr())
	asked, err := proof(s.Addr(), files)
	if err != nil || asked != 4 {
		t.Errorf("%d contents were asked for, %v", asked, err)
	}
	all, err := askContents(s.Addr(), 0, []bundle.ContentRun{{First: 0, Count: 1 << 20}})
	if err != nil || len(all) != 6 {
		t.Errorf("all contents of a layer: %d, %v", len(all), err)
	}
}

// TestLayersHaveTheRightsOfImages: a digest is no permission.
func TestLayersHaveTheRightsOfImages(t *testing.T) {
	m, _ := proven(t)
	other := makeImage(t, layertest.Layer{layertest.File("other", 0o644, "other")})
	s := start(t, serve.Options{})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	m.push(t, s.Addr())
	other.pushTo(t, s.Addr(), "o")
	manifest := digest.FromBytes(m.manifest).String()
	for _, path := range []string{bundle.RecipePath, bundle.ContentsPath} {
		for name, tc := range map[string]struct {
			repository, reference string
			layer                 int
			contents              []bundle.ContentRun
			code                  string
		}{
			"in its repository":      {"r", manifest, 0, []bundle.ContentRun{{First: 0, Count: 1}}, ""},
			"in another":             {"o", manifest, 0, []bundle.ContentRun{{First: 0, Count: 1}}, bundle.CodeNotFound},
			"in none":                {"n", manifest, 0, []bundle.ContentRun{{First: 0, Count: 1}}, bundle.CodeNotFound},
			"no such tag":            {"r", "2", 0, []bundle.ContentRun{{First: 0, Count: 1}}, bundle.CodeNotFound},
			"a layer too high":       {"r", "1", 3, []bundle.ContentRun{{First: 0, Count: 1}}, bundle.CodeInvalid},
			"a request that is none": {"r", "1", -1, nil, bundle.CodeInvalid},
		} {
			_, err := askLayer(s.Addr(), path, bundle.LayerRequest{Image: bundle.ImageRequest{Repository: tc.repository, Reference: tc.reference,
				Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"}}, Layer: tc.layer, Contents: tc.contents})
			told, _ := errors.AsType[*bundle.Error](err)
			if tc.code == "" && err != nil || tc.code != "" && (told == nil || told.Code != tc.code) {
				t.Errorf("%s %s: %v, want %q", path, name, err, tc.code)
			}
		}
	}
	// What the repository holds no more, it does not give.
	req, err := http.NewRequest("DELETE", "http://"+s.Addr()+"/v2/r/blobs/"+digest.FromBytes(m.blobs[0]).String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil || res.StatusCode != http.StatusAccepted {
		t.Fatalf("delete: %v, %v", res, err)
	}
	res.Body.Close()
	_, _, err = askRecipe(s.Addr(), 0)
	if told, ok := errors.AsType[*bundle.Error](err); !ok || told.Code != bundle.CodeNotFound {
		t.Errorf("a layer that was deleted: %v", err)
	}
}

// TestRecipesOfOldServers: of what was ingested before there were recipes they are made, by
// who asks, or in the background after a start.
func TestRecipesOfOldServers(t *testing.T) {
	m, files := proven(t)
	root := t.TempDir()
	s := start(t, serve.Options{Root: root})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	m.push(t, s.Addr())
	if _, err := proof(s.Addr(), files); err != nil {
		t.Fatal(err)
	}
	restart := func(before func(db *sql.DB)) {
		t.Helper()
		http.DefaultClient.CloseIdleConnections()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		db, err := sql.Open("sqlite", filepath.Join(root, "catalog", "catalog.db"))
		if err != nil {
			t.Fatal(err)
		}
		before(db)
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		s = start(t, serve.Options{Root: root})
	}
	forget := func(db *sql.DB) {
		if _, err := db.Exec(`UPDATE layers SET recipe = '', recipe_digest = '', recipe_size = 0`); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(root, "objects", "recipes")); err != nil {
			t.Fatal(err)
		}
	}
	restart(forget)
	if _, err := proof(s.Addr(), files); err != nil {
		t.Errorf("at once after the start: %v", err)
	}
	restart(forget)
	// Nobody asks for them now.
	db, err := sql.Open("sqlite", filepath.Join(root, "catalog", "catalog.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		var made int
		err := db.QueryRow(`SELECT count(*) FROM layers WHERE recipe <> '' AND recipe_size > 0`).Scan(&made)
		if err != nil {
			t.Fatal(err)
		}
		if made == 3 {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("%d of 3 layers have recipes", made)
		}
	}
	if _, err := proof(s.Addr(), files); err != nil {
		t.Errorf("with those that were made in the background: %v", err)
	}
}

// TestDamageOfLayers: no worker gets bytes that are not the layer's without being told, and what
// is damaged is made anew.
func TestDamageOfLayers(t *testing.T) {
	m, files := proven(t)
	for _, kind := range []string{"recipes", "packs", "entries"} {
		for _, damage := range []string{"gone", "many bytes", "a byte"} {
			gone := damage == "gone"
			t.Run(kind+" "+damage, func(t *testing.T) {
				root := t.TempDir()
				s := start(t, serve.Options{Root: root, Log: slog.New(slog.DiscardHandler)})
				t.Cleanup(http.DefaultClient.CloseIdleConnections)
				m.push(t, s.Addr())
				if _, err := proof(s.Addr(), files); err != nil {
					t.Fatal(err)
				}
				err := filepath.Walk(filepath.Join(root, "objects", kind), func(path string, info os.FileInfo, err error) error {
					if err != nil || !info.Mode().IsRegular() {
						return err
					}
					if gone {
						return os.Remove(path)
					}
					b, err := os.ReadFile(path)
					if err != nil {
						return err
					}
					from, to := len(b)/3, len(b)*2/3
					if damage == "a byte" {
						from = min(5000, len(b)/2)
						to = from + 1
					}
					for i := from; i < to; i++ {
						b[i] ^= 0x55
					}
					return os.WriteFile(path, b, 0o600)
				})
				if err != nil {
					t.Fatal(err)
				}
				var told *bundle.Error
				for try := range 8 { // each layer may be damaged, and be found to be only when it is sent
					if _, err = proof(s.Addr(), files); err == nil {
						break
					}
					if !errors.As(err, &told) || told.Code != bundle.CodeCorrupt || strings.Contains(err.Error(), root) {
						t.Fatalf("try %d: %v", try, err)
					}
				}
				if err != nil {
					t.Errorf("not made anew: %v", err)
				}
				if told == nil && !gone { // what is gone may be found to be before anything is sent
					t.Error("nothing was told of the damage: the test shows nothing")
				}
			})
		}
	}
}
