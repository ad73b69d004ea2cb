package serve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/serve"
)

// busyClient is somebody who pushes, moves tags, and deletes, and remembers what was answered.
type busyClient struct {
	id   int
	rng  *rand.Rand
	base string
	// held is what each path answers a GET with: the bytes; nil: it is gone. What was asked for and not answered has several.
	held  map[string][][]byte
	acked int
	wrong []string
}

// do sends a request that has path be body, or nothing. It reports false when the server is gone.
func (c *busyClient) do(method, path, mediaType string, body []byte, changes map[string][]byte) bool {
	req, err := http.NewRequest(method, c.base+path, bytes.NewReader(body))
	if err != nil {
		c.wrong = append(c.wrong, err.Error())
		return false
	}
	if mediaType != "" {
		req.Header.Set("Content-Type", mediaType)
	}
	res, err := http.DefaultClient.Do(req)
	if err == nil {
		_, err = io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	if err != nil {
		for path, b := range changes {
			if c.held[path] == nil { // it was not there
				c.held[path] = [][]byte{nil}
			}
			c.held[path] = append(c.held[path], b)
		}
		return false
	}
	if res.StatusCode/100 != 2 {
		c.wrong = append(c.wrong, fmt.Sprintf("%s %s: %s", method, path, res.Status))
		return true
	}
	c.acked++
	for path, b := range changes {
		c.held[path] = [][]byte{b}
	}
	return true
}

// step is one thing that a client does.
func (c *busyClient) step() bool {
	repo := fmt.Sprintf("/v2/busy/%d", c.id%3) // shared with others
	blob := []byte(fmt.Sprintf("blob %d of client %d", c.rng.Uint64(), c.id))
	d := digest.FromBytes(blob)
	at := repo + "/blobs/" + d.String()
	if !c.do("POST", repo+"/blobs/uploads/?digest="+d.String(), "", blob, map[string][]byte{at: blob}) {
		return false
	}
	m := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: ocispec.Descriptor{MediaType: "application/x", Digest: d, Size: int64(len(blob))},
	}
	subject := digest.FromString(fmt.Sprint("subject of ", c.id))
	if c.rng.IntN(2) == 0 {
		m.Subject = &ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: subject, Size: 7}
		m.Annotations = map[string]string{"n": fmt.Sprint(c.rng.IntN(100))}
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	tag := fmt.Sprintf("%s/manifests/c%d-%d", repo, c.id, c.rng.IntN(6))
	byDigest := repo + "/manifests/" + digest.FromBytes(b).String()
	if !c.do("PUT", tag, m.MediaType, b, map[string][]byte{tag: b, byDigest: b}) {
		return false
	}
	switch c.rng.IntN(5) {
	case 0: // the tag alone
		return c.do("DELETE", tag, "", nil, map[string][]byte{tag: nil})
	case 1: // the manifest with its tag, and the blob
		return c.do("DELETE", byDigest, "", nil, map[string][]byte{tag: nil, byDigest: nil}) &&
			c.do("DELETE", at, "", nil, map[string][]byte{at: nil})
	}
	return true
}

// check compares all that was answered with what is answered now.
func (c *busyClient) check(t *testing.T) (checked int) {
	t.Helper()
	for path, may := range c.held {
		status, body := get(t, c.base+path)
		got := body
		if status == http.StatusNotFound {
			got = nil
		}
		if !slices.ContainsFunc(may, func(b []byte) bool { return (b == nil) == (got == nil) && bytes.Equal(b, got) }) {
			t.Errorf("%s: %d %.60q, want one of %.60q", path, status, got, may)
		}
		c.held[path] = [][]byte{got} // that is what it is now
		checked++
	}
	return checked
}

func get(t *testing.T, url string) (status int, body []byte) {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err = io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, append([]byte{}, body...)
}

// answers is everything that a registry answers about these clients' things.
func answers(t *testing.T, base string, clients []*busyClient) map[string]string {
	t.Helper()
	all := map[string]string{}
	ask := func(path string) {
		status, body := get(t, base+path)
		all[path] = fmt.Sprintf("%d %s", status, body)
	}
	ask("/v2/_catalog")
	for n := range 3 {
		ask(fmt.Sprintf("/v2/busy/%d/tags/list", n))
		for _, c := range clients {
			ask(fmt.Sprintf("/v2/busy/%d/referrers/%s", n, digest.FromString(fmt.Sprint("subject of ", c.id))))
		}
	}
	for _, c := range clients {
		for path := range c.held {
			ask(path)
		}
	}
	return all
}

// The server is killed in the middle of a busy time, its catalog is gone, and is rebuilt: everything that was
// acknowledged is there, what was deleted is not, and in quiet times every answer is the same, bundles as well.
func TestRebuild(t *testing.T) {
	root := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	var clients []*busyClient
	for id := range 6 {
		clients = append(clients, &busyClient{id: id, rng: rand.New(rand.NewPCG(seed, uint64(id))), held: map[string][][]byte{}})
	}
	img := makeImage(t, layertest.Layer{layertest.File("a", 200_000, noise(1, 200_000)), layertest.File("b", 5, "small")})
	base, cmd := child(t, root)
	img.push(t, strings.TrimPrefix(base, "http://"))
	if err := img.pull(strings.TrimPrefix(base, "http://")); err != nil {
		t.Fatal(err)
	}
	again := func() *rebuild.Report {
		t.Helper()
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if err := os.RemoveAll(rootdir.Catalog(root)); err != nil {
			t.Fatal(err)
		}
		if _, err := serve.Start(t.Context(), serve.Options{Root: root, Listen: "127.0.0.1:0"}); !errors.Is(err, rootdir.ErrNoCatalog) || !strings.Contains(err.Error(), "foil server rebuild") {
			t.Fatalf("a start without the catalog: %v", err)
		}
		r, err := rebuild.Run(t.Context(), rebuild.Options{Root: root})
		if err != nil {
			t.Fatal(err)
		}
		base, cmd = child(t, root)
		return r
	}
	checked := 0
	for round := range 3 {
		var busy sync.WaitGroup
		enough := make(chan struct{})
		var once sync.Once
		for _, c := range clients {
			c.base = base
			busy.Go(func() {
				for n := 0; c.step(); n++ {
					if n == 15+10*round {
						once.Do(func() { close(enough) })
					}
				}
			})
		}
		<-enough
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		busy.Wait()
		again()
		for _, c := range clients {
			c.base = base
			checked += c.check(t)
			if len(c.wrong) > 0 {
				t.Errorf("client %d: %q", c.id, c.wrong)
			}
		}
	}
	before := answers(t, base, clients)
	r := again()
	if diff := cmp.Diff(before, answers(t, base, clients)); diff != "" {
		t.Errorf("answers before the catalog was lost and after (-before +after):\n%s", diff)
	}
	if err := img.pull(strings.TrimPrefix(base, "http://")); err != nil {
		t.Errorf("a bundle: %v", err)
	}
	if r.Dropped > 0 || r.Catalog.Layers == 0 || r.Catalog.Rootfs == 0 || r.Catalog.Hooks == 0 {
		t.Errorf("ingested layers were lost: %+v", r)
	}
	acked := 0
	for _, c := range clients {
		acked += c.acked
	}
	t.Logf("%d acknowledged, %d answers compared with them, %d before and after; %+v", acked, checked, len(before), r)
}

// A rebuild that dies at any point leaves the old catalog or the new one.
func TestRebuildDies(t *testing.T) {
	root := t.TempDir()
	base, cmd := child(t, root)
	blob := []byte("a blob")
	d := digest.FromBytes(blob)
	send(t, "POST", base+"/v2/r/blobs/uploads/?digest="+d.String(), "", blob, http.StatusCreated)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	for _, point := range []string{"made", "named", "swapped"} {
		func() {
			defer func() {
				if recover() != point {
					t.Errorf("it did not die at %s", point)
				}
			}()
			_, err := rebuild.Run(t.Context(), rebuild.Options{Root: root, At: func(p string) {
				if p == point {
					panic(p)
				}
			}})
			t.Error("still alive", err)
		}()
		base, cmd := child(t, root)
		send(t, "GET", base+"/v2/r/blobs/"+d.String(), "", nil, http.StatusOK)
		if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); !errors.Is(err, rootdir.ErrUsed) {
			t.Errorf("while a server runs: %v", err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	r, err := rebuild.Run(t.Context(), rebuild.Options{Root: root})
	if err != nil || r.Old == "" {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := os.Stat(filepath.Join(r.Old, "catalog.db")); err != nil {
		t.Errorf("the old catalog: %v", err)
	}
	if _, err := os.Stat(filepath.Join(root, "catalog.new")); err == nil {
		t.Error("something is left beside")
	}
}

// A damaged journal is not passed over in silence, and a damaged catalog is told with the command that mends it.
func TestDamagedCatalogs(t *testing.T) {
	root := t.TempDir()
	n := 0 // blobs that were pushed
	blob := func(n int) ([]byte, digest.Digest) {
		b := []byte(fmt.Sprint("blob", n))
		return b, digest.FromBytes(b)
	}
	start := func() error {
		s, err := serve.Start(t.Context(), serve.Options{Root: root, Listen: "127.0.0.1:0"})
		if err != nil {
			return err
		}
		for range 20 {
			b, d := blob(n)
			send(t, "POST", "http://"+s.Addr()+"/v2/r/blobs/uploads/?digest="+d.String(), "", b, http.StatusCreated)
			n++
		}
		for i := range n {
			_, d := blob(i)
			send(t, "HEAD", "http://"+s.Addr()+"/v2/r/blobs/"+d.String(), "", nil, http.StatusOK)
		}
		return errors.Join(s.Close(), s.Wait())
	}
	if err := start(); err != nil {
		t.Fatal(err)
	}
	file := rootdir.CatalogFile(root)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(good)
	for i := 4096; i < len(flipped); i += 512 {
		flipped[i] ^= 0xff
	}
	for name, b := range map[string][]byte{
		"empty": {}, "cut": good[:len(good)/2], "cut within a page": good[:5000], "no database": bytes.Repeat([]byte("text "), 1000), "flipped": flipped,
	} {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		err := start()
		if err == nil || !strings.Contains(err.Error(), "foil server rebuild --root "+root) {
			t.Errorf("%s: %v does not say how to mend it", name, err)
		}
		if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := start(); err != nil {
			t.Errorf("%s: after the rebuild: %v", name, err)
		}
	}
	// An older catalog does not pretend to be the present one: it catches up.
	if err := os.WriteFile(file, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := start(); err != nil {
		t.Errorf("an older catalog: %v", err)
	}
	paths, err := filepath.Glob(filepath.Join(rootdir.Objects(root), "journal", "*", "*"))
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	if err := os.WriteFile(paths[0], []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); !errors.Is(err, rebuild.ErrIncomplete) || !strings.Contains(err.Error(), "--incomplete") {
		t.Errorf("a damaged journal: %v, want ErrIncomplete", err)
	}
	r, err := rebuild.Run(t.Context(), rebuild.Options{Root: root, Incomplete: true})
	if err != nil || len(r.Journal.Damaged) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}
