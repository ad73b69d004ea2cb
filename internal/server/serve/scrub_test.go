package serve_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/scrub"
	"hydrofoil.dev/foil/internal/server/serve"
)

// scrubbed is a store with everything that there can be, and what was pushed to it.
type scrubbed struct {
	root   string
	images map[string]image // by repository
}

func newScrubbed(t *testing.T) scrubbed {
	t.Helper()
	var first, shared layertest.Layer
	for i := range 60 {
		first = append(first, layertest.File(fmt.Sprintf("f%d", i), 0o644, noise(uint64(i), 4000)))
		shared = append(shared, layertest.File(fmt.Sprintf("g%d", i), 0o644, noise(uint64(i/2), 4000)))
	}
	first = append(first, layertest.File("large", 0o644, noise(1000, 3<<19)))
	s := scrubbed{t.TempDir(), map[string]image{
		"r":     makeImage(t, first, layertest.Layer{layertest.File("second", 0o644, noise(2000, 50_000))}),
		"plain": imageOf(t, shared.Tar(t)),
	}}
	server := start(t, serve.Options{Root: s.root})
	for repo, m := range s.images {
		m.pushTo(t, server.Addr(), repo)
		if _, err := askFor(http.DefaultClient, server.Addr(), repo, nil); err != nil {
			t.Fatal(err)
		}
	}
	query := "?" + url.Values{"repository": {"r"}, "reference": {"1"}}.Encode()
	res, err := http.Get("http://" + server.Addr() + bundle.StartupPath + query)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var known bundle.StartupReport
	if err := json.NewDecoder(res.Body).Decode(&known); err != nil {
		t.Fatal(err)
	}
	v := trace.Trace{Kind: trace.Recorded, ChainID: known.ChainID, TOC: known.TOC, Args: []string{"app"}, Touched: []trace.Touch{{Run: trace.Run{Blocks: 1}}}}
	send(t, "POST", "http://"+server.Addr()+bundle.TracePath+query, bundle.MediaTypeTrace, v.Encode(), http.StatusNoContent)
	http.DefaultClient.CloseIdleConnections()
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	return s
}

// copy returns the store in another root.
func (s scrubbed) copy(t *testing.T) scrubbed {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	if err := os.CopyFS(root, os.DirFS(s.root)); err != nil {
		t.Fatal(err)
	}
	return scrubbed{root, s.images}
}

// damage does something to all objects of a kind.
func (s scrubbed) damage(t *testing.T, kind string, how func(path string) error) (hit int) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(s.root, "objects", kind), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			hit++
			err = how(path)
		}
		return err
	})
	if err != nil || hit == 0 {
		t.Fatalf("damaged %d objects of %s: %v", hit, kind, err)
	}
	return hit
}

func flip(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	b[len(b)/2] ^= 4
	return os.WriteFile(path, b, 0o600)
}

func cut(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, info.Size()*2/3)
}

// scrub makes a pass.
func (s scrubbed) scrub(t *testing.T, check bool) *scrub.Report {
	t.Helper()
	r, err := scrub.Run(t.Context(), scrub.Options{Root: s.root, Check: check, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// compare starts a server and has every blob and a bundle of every image. Wrong bytes are an error always; blobs that are missing are returned.
func (s scrubbed) compare(t *testing.T) (missing []digest.Digest) {
	t.Helper()
	var log logtest.Buffer
	server := start(t, serve.Options{Root: s.root, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer func() {
		http.DefaultClient.CloseIdleConnections()
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	}()
	for repo, m := range s.images {
		wrong, err := askFor(http.DefaultClient, server.Addr(), repo, nil)
		if err != nil || len(wrong) > 0 {
			t.Errorf("bundle of %s: %v, %d wrong segments", repo, err, len(wrong))
		}
		for _, b := range m.blobs {
			d := digest.FromBytes(b)
			res, err := http.Get("http://" + server.Addr() + "/v2/" + repo + "/blobs/" + d.String())
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			res.Body.Close()
			if res.StatusCode == http.StatusNotFound {
				missing = append(missing, d)
			} else if err != nil || !bytes.Equal(got, b) {
				t.Errorf("blob %s of %s: %s, %d bytes of %d, %v", d, repo, res.Status, len(got), len(b), err)
			}
		}
	}
	if strings.Contains(log.String(), "repaired") {
		t.Errorf("a pull had to repair: %s", log.String())
	}
	return missing
}

// What is damaged of any kind is found, named, and mended if it can be: then every blob and every bundle is as
// it was.
func TestScrubMends(t *testing.T) {
	whole := newScrubbed(t)
	if r := whole.scrub(t, true); len(r.Findings) > 0 || r.Checked["packs"].Objects == 0 || r.Checked["startup"].Objects == 0 || r.Checked["layers"].Objects != 6 {
		t.Fatalf("of a whole store: %+v", r)
	}
	for name, how := range map[string]func(string) error{"flipped": flip, "cut": cut, "lost": os.Remove} {
		for _, kind := range []string{"packs", "entries", "recipes", "tocs", "indices", "orders", "startup", "journal"} {
			t.Run(kind+" "+name, func(t *testing.T) {
				t.Parallel()
				s := whole.copy(t)
				hit := s.damage(t, kind, how)
				checked := s.scrub(t, true)
				r := s.scrub(t, false)
				if kind == "orders" { // guesses, made anew and not told
					if name != "lost" && r.Remade == 0 || len(r.Findings) > 0 {
						t.Errorf("%+v", r)
					}
				} else if len(r.Findings) == 0 || r.Unmended > 0 || len(checked.Findings) == 0 || checked.Mended > 0 {
					t.Errorf("%d objects of %s %s; a check: %+v; mended: %+v", hit, kind, name, checked.Findings, r.Findings)
				}
				for _, f := range r.Findings {
					if f.Of != "" && !slices.ContainsFunc(f.Images, func(i string) bool { return strings.HasSuffix(i, ":1") }) {
						t.Errorf("no image is named: %+v", f)
					}
				}
				if again := s.scrub(t, false); len(again.Findings) > 0 {
					t.Errorf("the next pass finds %+v", again.Findings)
				}
				if kind == "journal" || kind == "packs" {
					if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: s.root}); err != nil {
						t.Error(err)
					}
				}
				if missing := s.compare(t); len(missing) > 0 {
					t.Errorf("missing: %v", missing)
				}
			})
		}
	}
}

// What was deleted and can be brought back is in the journal, and a scrub of it is content. When the journal is lost, it is
// written again, with that: a catalog that is made of it can bring it back.
func TestScrubKnowsWhatWasDeleted(t *testing.T) {
	s := newScrubbed(t)
	deleted := admin.Reference{Repository: "plain", Tag: "1"}
	ask := func(what string) {
		t.Helper()
		server := start(t, serve.Options{Root: s.root})
		if status, err := administer("http://"+server.Addr(), "POST", what, deleted, nil); err != nil || status != http.StatusOK {
			t.Fatalf("%s: %d, %v", what, status, err)
		}
		http.DefaultClient.CloseIdleConnections()
		stop(t, server)
	}
	ask("delete")
	if r := s.scrub(t, false); len(r.Findings) > 0 {
		t.Errorf("of a whole store: %+v", r.Findings)
	}
	s.damage(t, "journal", os.Remove)
	if r := s.scrub(t, false); len(r.Findings) == 0 || r.Unmended > 0 {
		t.Errorf("of a store without a journal: %+v", r)
	}
	if err := os.RemoveAll(rootdir.Catalog(s.root)); err != nil {
		t.Fatal(err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: s.root}); err != nil {
		t.Fatal(err)
	}
	ask("undelete")
	if missing := s.compare(t); len(missing) > 0 {
		t.Errorf("missing: %v", missing)
	}
}

// A blob is mended where its tar stream is the blob. Others are named with their images, never sent with wrong bytes, and
// whole again when they are pushed; meanwhile bundles come.
func TestScrubOfBlobs(t *testing.T) {
	whole := newScrubbed(t)
	for name, how := range map[string]func(string) error{"flipped": flip, "cut": cut, "lost": os.Remove} {
		t.Run(name, func(t *testing.T) {
			s := whole.copy(t)
			hit := s.damage(t, "blobs", func(path string) error {
				if b, err := os.ReadFile(path); err != nil || json.Valid(b) {
					return err // a config: no bundle can do without
				}
				return how(path)
			})
			r := s.scrub(t, false)
			mended := digest.FromBytes(s.images["plain"].blobs[0])
			// One that is lost and can be made again of packs is as one whose mode wants no intact copy.
			some := 1
			if name == "lost" {
				some = 0
			}
			if len(r.Findings) != 2+some || r.Mended != some || r.Unmended != 2 || hit != 5 {
				t.Errorf("of %d blobs: %+v", hit, r)
			}
			for _, f := range r.Findings {
				want := []string{"r:1"}
				if f.Of == mended {
					want = []string{"plain:1"}
				}
				if diff := cmp.Diff(want, f.Images); diff != "" || (f.Mended != "") != (f.Of == mended) {
					t.Errorf("%+v", f)
				}
			}
			want := []digest.Digest{digest.FromBytes(s.images["r"].blobs[0]), digest.FromBytes(s.images["r"].blobs[1])}
			server := start(t, serve.Options{Root: s.root})
			if _, err := askFor(http.DefaultClient, server.Addr(), "r", nil); err != nil {
				t.Errorf("a bundle of what blobs are lost of: %v", err)
			}
			for _, d := range want {
				res, err := http.Head("http://" + server.Addr() + "/v2/r/blobs/" + d.String())
				if err != nil || res.StatusCode != http.StatusNotFound {
					t.Fatalf("a blob that is damaged: %s, %v", res.Status, err)
				}
			}
			s.images["r"].pushTo(t, server.Addr(), "r")
			http.DefaultClient.CloseIdleConnections()
			if err := server.Close(); err != nil {
				t.Fatal(err)
			}
			if missing := s.compare(t); len(missing) > 0 {
				t.Errorf("missing: %v", missing)
			}
		})
	}
}

// What nobody holds any more is lost with its images named: a pack and the blob of its layer.
func TestScrubOfWhatNobodyHolds(t *testing.T) {
	s := newScrubbed(t)
	s.damage(t, "packs", os.Remove)
	s.damage(t, "blobs", os.Remove)
	r := s.scrub(t, false)
	images := map[string]bool{}
	for _, f := range r.Findings {
		if f.Mended == "" {
			for _, i := range f.Images {
				images[i] = true
			}
		}
	}
	if !images["r:1"] || !images["plain:1"] || r.Unmended < 5 {
		t.Errorf("%+v", r)
	}
}

// scrubChild names the point at which a process that scrubs kills itself, and the root.
const scrubChild = "FOIL_TEST_SCRUB_CHILD"

func TestScrubChild(t *testing.T) {
	at, root, ok := strings.Cut(os.Getenv(scrubChild), " ")
	if !ok {
		t.Skip("it is run by TestScrubIsKilled")
	}
	_, err := scrub.Run(context.Background(), scrub.Options{Root: root, Log: slog.New(slog.DiscardHandler), At: func(point string) {
		if point == at {
			killSelf()
		}
	}})
	t.Fatalf("it came to its end: %v", err)
}

// killSelf ends this process as a crash does.
func killSelf() {
	p, _ := os.FindProcess(os.Getpid())
	_ = p.Kill()
	select {}
}

// killedChild runs a test in a process that is to kill itself: what says "came to its end" did not.
func killedChild(t *testing.T, test, env string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$")
	cmd.Env = append(os.Environ(), env)
	out, err := cmd.CombinedOutput()
	if _, exited := errors.AsType[*exec.ExitError](err); !exited || strings.Contains(string(out), "came to its end") {
		t.Fatalf("the child: %v, %s", err, out)
	}
}

// Killed anywhere, the next pass goes on, and mends all.
func TestScrubIsKilled(t *testing.T) {
	whole := newScrubbed(t)
	for _, at := range []string{"blobs", "salvaged", "replaced", "packs", "layers", "rootfs", "logged"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			s := whole.copy(t)
			for _, kind := range []string{"packs", "entries", "recipes", "tocs", "indices", "journal"} {
				s.damage(t, kind, flip)
			}
			killedChild(t, "TestScrubChild", scrubChild+"="+at+" "+s.root)
			r := s.scrub(t, false)
			if r.Unmended > 0 || len(r.Findings) == 0 {
				t.Errorf("%+v", r)
			}
			if again := s.scrub(t, false); len(again.Findings) > 0 {
				t.Errorf("the next pass finds %+v", again.Findings)
			}
			if missing := s.compare(t); len(missing) > 0 {
				t.Errorf("missing: %v", missing)
			}
		})
	}
}

// A server scrubs while it serves: what is in its memory of what was damaged is forgotten, and pulls that come meanwhile are right.
func TestScrubWhileServing(t *testing.T) {
	s := newScrubbed(t)
	for _, kind := range []string{"packs", "startup", "indices"} {
		s.damage(t, kind, flip)
	}
	var log logtest.Buffer
	server := start(t, serve.Options{Root: s.root, ScrubRate: 50 << 20, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer http.DefaultClient.CloseIdleConnections()
	for !strings.Contains(log.String(), "scrub: all was read") {
		for repo := range s.images { // some of these repair, some get what is damaged, and none gets what it could take for right
			_, _ = askFor(http.DefaultClient, server.Addr(), repo, nil)
		}
	}
	for _, kind := range []string{"packs", "startup"} {
		if !strings.Contains(log.String(), "scrub: mended\" kind="+kind) {
			t.Errorf("%s were not mended: %s", kind, log.String())
		}
	}
	for repo := range s.images {
		if wrong, err := askFor(http.DefaultClient, server.Addr(), repo, nil); err != nil || len(wrong) > 0 {
			t.Errorf("%s: %v, %d wrong segments", repo, err, len(wrong))
		}
	}
}
