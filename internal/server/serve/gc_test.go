package serve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
	"hydrofoil.dev/foil/internal/server/serve"
)

// onDemand has a server collect only when it is told to, and lease for no time.
func onDemand(root string) serve.Options {
	return serve.Options{Root: root, Lease: 1, Reserve: -1, Collect: collect.Options{Interval: -1, Leftover: 1, Rate: 1 << 30}}
}

// administer asks for something that has to succeed, unless status says otherwise.
func administer(base, method, path string, body, out any) (status int, err error) {
	b, err := json.Marshal(body)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequest(method, base+admin.Prefix+path, bytes.NewReader(b))
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	b, err = io.ReadAll(res.Body)
	if err == nil && res.StatusCode == http.StatusOK && out != nil {
		err = json.Unmarshal(b, out)
	}
	if res.StatusCode == http.StatusInternalServerError {
		err = fmt.Errorf("%s %s: %s", method, path, b)
	}
	return res.StatusCode, err
}

// collectAll collects until nothing is in anybody's way.
func collectAll(t testing.TB, addr string) (total collect.Report) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		var r collect.Report
		if status, err := administer("http://"+addr, "POST", "gc", admin.GCRequest{Purge: true}, &r); err != nil || status != http.StatusOK {
			t.Fatalf("gc now: %d, %v", status, err)
		}
		total.Objects += r.Objects
		total.Bytes += r.Bytes
		total.Compacted += r.Compacted
		total.Packs += r.Packs
		if r.Busy+r.Waiting+r.Leased+r.Objects+r.Links == 0 {
			return total
		}
		if time.Now().After(deadline) {
			t.Fatalf("the collector does not come to an end: %+v", r)
		}
	}
}

// used returns the bytes of files below a directory.
func used(t *testing.T, dir string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return n
}

// overlapping makes images each of which has some files of the one before, so that packs are live in part.
func overlapping(t testing.TB, n, files, size int) (images []image) {
	file := func(i, k int) layertest.Entry {
		return layertest.File(fmt.Sprintf("d/%d-%d", i, k), 0o644, noise(uint64(i*1000+k), size))
	}
	for i := range n {
		l := layertest.Layer{layertest.Dir("d", 0o755)}
		for k := range files {
			l = append(l, file(i+1, k))
		}
		for k := range files / 3 {
			l = append(l, file(i, k), layertest.File(fmt.Sprintf("d/small-%d-%d", i, k), 0o644, noise(uint64(i*1000+k+500), 3000)),
				layertest.File(fmt.Sprintf("d/small-%d-%d", i-1, k), 0o644, noise(uint64((i-1)*1000+k+500), 3000)))
		}
		images = append(images, makeImage(t, l))
	}
	return images
}

func repositoryOf(i int) string { return fmt.Sprintf("team/app%d", i) }

// wantWhole compares all blobs of an image, and its bundle.
func wantWhole(t *testing.T, addr string, i int, m image) {
	t.Helper()
	for _, b := range m.blobs {
		status, got := get(t, "http://"+addr+"/v2/"+repositoryOf(i)+"/blobs/"+digest.FromBytes(b).String())
		if status != http.StatusOK || !bytes.Equal(got, b) {
			t.Fatalf("image %d: blob %s: %d with %d bytes, want %d", i, digest.FromBytes(b), status, len(got), len(b))
		}
	}
	wantBundle(t, addr, repositoryOf(i), "1", digest.FromBytes(m.manifest))
}

func pushAll(t *testing.T, addr string, images []image, wanted func(i int) bool) {
	t.Helper()
	for i, m := range images {
		if wanted(i) {
			m.pushTo(t, addr, repositoryOf(i))
			wantWhole(t, addr, i, m)
		}
	}
}

func remove(t testing.TB, addr string, i int) {
	t.Helper()
	status, err := administer("http://"+addr, "POST", "delete", admin.Reference{Repository: repositoryOf(i)}, nil)
	if err != nil || status != http.StatusOK {
		t.Fatalf("delete %s: %d, %v", repositoryOf(i), status, err)
	}
}

func stop(t *testing.T, s *serve.Server) {
	t.Helper()
	if err := errors.Join(s.Close(), s.Wait()); err != nil {
		t.Fatal(err)
	}
}

// After every image was deleted less than a hundredth of the bytes is left, and the server is as good as new.
func TestDeletedIsFreed(t *testing.T) {
	root := t.TempDir()
	images := overlapping(t, 5, 9, 500_000)
	s := start(t, onDemand(root))
	pushAll(t, s.Addr(), images, func(int) bool { return true })
	before := used(t, root)
	for i := range images {
		remove(t, s.Addr(), i)
	}
	r := collectAll(t, s.Addr())
	var stats admin.Status
	if _, err := administer("http://"+s.Addr(), "GET", "gc", nil, &stats); err != nil {
		t.Fatal(err)
	}
	for _, q := range stats.Queues {
		if q.Length > 0 {
			t.Errorf("%d %s wait to be reviewed", q.Length, q.Name)
		}
	}
	if _, list := get(t, "http://"+s.Addr()+"/v2/_catalog"); !strings.Contains(string(list), "[]") {
		t.Errorf("repositories that are left: %s", list)
	}
	stop(t, s)
	after := used(t, root)
	t.Logf("%d bytes before, %d after (%.2f%%): catalog %d, journal %d; %+v", before, after, 100*float64(after)/float64(before),
		used(t, rootdir.Catalog(root)), used(t, filepath.Join(rootdir.Objects(root), "journal")), r)
	if after*100 > before {
		t.Errorf("%d of %d bytes are left", after, before)
	}
	s = start(t, onDemand(root))
	pushAll(t, s.Addr(), images[:2], func(int) bool { return true })
}

// After half of the images were deleted the packs are about as large as if the others had never been there, and whoever
// lives is whole: also when the catalog is made anew.
func TestHalfIsFreed(t *testing.T) {
	root, other := t.TempDir(), t.TempDir()
	n := 8
	if s := os.Getenv("FOIL_TEST_IMAGES"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	images := overlapping(t, n, 9, 120_000)
	odd := func(i int) bool { return i%2 == 1 }
	s := start(t, onDemand(root))
	pushAll(t, s.Addr(), images, func(int) bool { return true })
	for i := range images {
		if !odd(i) {
			remove(t, s.Addr(), i)
		}
	}
	r := collectAll(t, s.Addr())
	var stats admin.Status
	if _, err := administer("http://"+s.Addr(), "GET", "gc", nil, &stats); err != nil {
		t.Fatal(err)
	}
	fresh := start(t, onDemand(other))
	pushAll(t, fresh.Addr(), images, odd)
	packs, want := used(t, filepath.Join(rootdir.Objects(root), "packs")), used(t, filepath.Join(rootdir.Objects(other), "packs"))
	t.Logf("packs of %d bytes, %d dead; as new %d; %+v", packs, stats.DeadBytes, want, r)
	if r.Compacted == 0 || stats.DeadBytes*10 > stats.PackBytes || packs*10 > want*11 {
		t.Errorf("%d packs were compacted, %d of %d bytes are dead, as new there are %d", r.Compacted, stats.DeadBytes, packs, want)
	}
	whole := func() {
		t.Helper()
		for i, m := range images {
			if odd(i) {
				wantWhole(t, s.Addr(), i, m)
			} else if _, err := pullBundle(s.Addr(), repositoryOf(i), "1"); err == nil {
				t.Errorf("image %d was deleted, and is served", i)
			}
		}
	}
	whole()
	stop(t, s)
	if err := os.RemoveAll(rootdir.Catalog(root)); err != nil {
		t.Fatal(err)
	}
	if report, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); err != nil || report.Dropped > 0 {
		t.Fatalf("rebuild: %+v, %v", report, err)
	}
	s = start(t, onDemand(root))
	whole()
	if again := collectAll(t, s.Addr()); again.Bytes*20 > packs {
		t.Errorf("after a rebuild %+v was collected: the catalog was another one", again)
	}
	whole()
}

// What was deleted is brought back with all that belongs to it, until its window is over; also by a catalog that was made anew.
func TestUndelete(t *testing.T) {
	root := t.TempDir()
	images := overlapping(t, 2, 3, 50_000)
	s := start(t, onDemand(root))
	pushAll(t, s.Addr(), images, func(int) bool { return true })
	base := func() string { return "http://" + s.Addr() }
	tag := admin.Reference{Repository: repositoryOf(0), Tag: "1"}
	ask := func(what string, want int) admin.Items {
		t.Helper()
		var out admin.Items
		if status, err := administer(base(), "POST", what, tag, &out); err != nil || status != want {
			t.Fatalf("%s: %d, %v, want %d", what, status, err, want)
		}
		return out
	}
	now := func(purge bool) {
		t.Helper()
		if status, err := administer(base(), "POST", "gc", admin.GCRequest{Purge: purge}, nil); err != nil || status != http.StatusOK {
			t.Fatalf("gc: %d, %v", status, err)
		}
	}
	gone := func() {
		t.Helper()
		if status, _ := get(t, base()+"/v2/"+repositoryOf(0)+"/manifests/1"); status != http.StatusNotFound {
			t.Errorf("what was deleted is answered with %d", status)
		}
	}
	if out := ask("delete", http.StatusOK); len(out.Items) != 2 {
		t.Errorf("deleted %+v, want a tag and a manifest", out)
	}
	gone()
	now(false)
	stop(t, s)
	if err := os.RemoveAll(rootdir.Catalog(root)); err != nil {
		t.Fatal(err)
	}
	if _, err := rebuild.Run(t.Context(), rebuild.Options{Root: root}); err != nil {
		t.Fatal(err)
	}
	s = start(t, onDemand(root))
	gone()
	now(false)
	if out := ask("undelete", http.StatusOK); len(out.Items) != 2 {
		t.Errorf("brought back %+v", out)
	}
	wantWhole(t, s.Addr(), 0, images[0])
	now(true)
	wantWhole(t, s.Addr(), 0, images[0])
	ask("undelete", http.StatusNotFound)

	ask("delete", http.StatusOK)
	images[1].pushTo(t, s.Addr(), repositoryOf(0)) // the tag is another image's now
	ask("undelete", http.StatusNotFound)
	tag = admin.Reference{Repository: repositoryOf(0), Digest: digest.FromBytes(images[0].manifest)}
	if out := ask("undelete", http.StatusOK); len(out.Items) != 1 || out.Items[0].Tag != "" {
		t.Errorf("brought back %+v, want the manifest alone", out)
	}
	wantBundle(t, s.Addr(), repositoryOf(0), "1", digest.FromBytes(images[1].manifest))

	for _, tag = range []admin.Reference{tag, {Repository: repositoryOf(0), Tag: "1"}} {
		ask("delete", http.StatusOK)
		now(true)
		ask("undelete", http.StatusNotFound)
	}
	gone()
	wantWhole(t, s.Addr(), 1, images[1])
}

// A client that was told that a blob is there can push a manifest that names it, whatever is collected meanwhile.
func TestExistsIsALease(t *testing.T) {
	o := onDemand(t.TempDir())
	o.Lease = 2 * time.Second
	s := start(t, o)
	base := "http://" + s.Addr()
	end := time.Now().Add(8 * time.Second)
	var work sync.WaitGroup
	var mu sync.Mutex
	exists, absent, slow := 0, 0, 0
	for n := range 4 {
		work.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(n)))
			for time.Now().Before(end) {
				blob := fmt.Appendf(nil, "blob %d", random.IntN(1+200*n)) // some often, some rarely; several clients' at once
				repo := base + "/v2/race"
				d := digest.FromBytes(blob)
				asked := time.Now()
				res, err := http.Head(repo + "/blobs/" + d.String())
				if err != nil {
					t.Error(err)
					return
				}
				res.Body.Close()
				there := res.StatusCode == http.StatusOK
				if !there {
					if res, err = http.Post(repo+"/blobs/uploads/?digest="+d.String(), "", bytes.NewReader(blob)); err != nil || res.StatusCode != http.StatusCreated {
						t.Errorf("upload: %v, %v", res, err)
						return
					}
					res.Body.Close()
				}
				m, err := json.Marshal(ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Annotations: map[string]string{"by": fmt.Sprint(n, random.Uint64())},
					Config: ocispec.Descriptor{MediaType: "application/x", Digest: d, Size: int64(len(blob))}})
				if err != nil {
					t.Error(err)
					return
				}
				at := repo + "/manifests/" + digest.FromBytes(m).String()
				status := func(method string) int {
					req, err := http.NewRequest(method, at, bytes.NewReader(m))
					if err != nil {
						t.Error(err)
						return 0
					}
					req.Header.Set("Content-Type", ocispec.MediaTypeImageManifest)
					res, err := http.DefaultClient.Do(req)
					if err != nil {
						t.Error(err)
						return 0
					}
					res.Body.Close()
					return res.StatusCode
				}
				put := status("PUT")
				late := time.Since(asked) > o.Lease/2
				if put != http.StatusCreated && !late {
					t.Errorf("HEAD said %v, and then the manifest is refused with %d", there, put)
				}
				if put == http.StatusCreated {
					res, err := http.Get(repo + "/blobs/" + d.String())
					if err != nil || res.StatusCode != http.StatusOK {
						t.Errorf("a blob of a manifest that was pushed: %v, %v", res, err)
						return
					}
					res.Body.Close()
					if del := status("DELETE"); del != http.StatusAccepted {
						t.Errorf("delete: %d", del)
					}
				}
				mu.Lock()
				if there {
					exists++
				} else {
					absent++
				}
				if late {
					slow++
				}
				mu.Unlock()
			}
		})
	}
	passes, links := 0, 0
	for time.Now().Before(end) {
		var r collect.Report
		if status, err := administer(base, "POST", "gc", admin.GCRequest{Purge: true}, &r); err != nil || status != http.StatusOK {
			t.Fatalf("gc: %d, %v", status, err)
		}
		passes, links = passes+1, links+r.Links
	}
	work.Wait()
	t.Logf("%d were told that a blob is there, %d that it is not; %d passes took %d blobs out; %d pushes were too slow to count", exists, absent, passes, links, slow)
	if exists == 0 || links == 0 {
		t.Error("nothing was tested")
	}
}
