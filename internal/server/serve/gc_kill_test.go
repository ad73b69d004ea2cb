package serve_test

import (
	"bytes"
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

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/rebuild"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// owned is an image whose owner pushes, deletes and brings it back.
type owned struct {
	number int
	image  image
	there  string // "yes", "no", or "perhaps": something was asked and not answered
	acked  map[string]int

	damaged  bool // objects are, meanwhile
	compared int  // how often all of it was
}

// ask sends a request whose answer decides. It returns 0 when the server is gone.
func (o *owned) ask(method, url, mediaType string, body []byte) int {
	req, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		return 0
	}
	req.Header.Set("Content-Type", mediaType)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return 0
	}
	return res.StatusCode
}

// push pushes as clients do. It reports false when the server is gone.
func (o *owned) push(base string) bool {
	repo := base + "/v2/" + repositoryOf(o.number)
	for _, b := range o.image.blobs {
		d := digest.FromBytes(b).String()
		switch o.ask("HEAD", repo+"/blobs/"+d, "", nil) {
		case 0:
			return false
		case http.StatusNotFound:
			if o.ask("POST", repo+"/blobs/uploads/?digest="+d, "application/octet-stream", b) != http.StatusCreated {
				return false
			}
		}
	}
	o.there = "perhaps"
	switch o.ask("PUT", repo+"/manifests/1", ocispec.MediaTypeImageManifest, o.image.manifest) {
	case 0:
		return false
	case http.StatusCreated:
		o.there = "yes"
		o.acked["push"]++
	default: // it took longer than the lease
		o.there = "no"
	}
	return true
}

// step does something.
func (o *owned) step(base string, random *rand.Rand) bool {
	r := admin.Reference{Repository: repositoryOf(o.number), Tag: "1"}
	switch {
	case o.there != "no" && random.IntN(3) == 0:
		before := o.there
		o.there = "perhaps"
		status, err := administer(base, "POST", "delete", r, nil)
		switch {
		case err != nil:
			return false
		case status == http.StatusOK:
			o.there = "no"
			o.acked["delete"]++
		case before != "perhaps":
			return false // told below: it is not there, and should be
		default:
			o.there = "no"
		}
	case o.there == "no" && random.IntN(2) == 0:
		o.there = "perhaps"
		status, err := administer(base, "POST", "undelete", r, nil)
		switch {
		case err != nil:
			return false
		case status == http.StatusOK:
			o.there = "yes"
			o.acked["undelete"]++
		default:
			o.there = "no" // its window was over
		}
	case o.there != "yes" || random.IntN(4) == 0:
		return o.push(base)
	default:
		if _, err := pullBundle(strings.TrimPrefix(base, "http://"), repositoryOf(o.number), "1"); err == nil {
			o.acked["pull"]++
		}
	}
	return true
}

// check compares what is there with what was acknowledged.
func (o *owned) check(t *testing.T, base string) {
	t.Helper()
	status, got := get(t, base+"/v2/"+repositoryOf(o.number)+"/manifests/1")
	there := status == http.StatusOK && bytes.Equal(got, o.image.manifest)
	if !there && status != http.StatusNotFound {
		t.Errorf("image %d: %d with %d bytes", o.number, status, len(got))
	}
	if o.there == "yes" && !there || o.there == "no" && there {
		t.Errorf("image %d: %d, and it should be there: %s", o.number, status, o.there)
	}
	if o.there = "no"; there {
		o.there = "yes"
		addr := strings.TrimPrefix(base, "http://")
		// A worker compares each segment with its ID, and asks again when one is wrong, and says so; or when the server has
		// found damage itself. The answer is whole in the end.
		var wrong []segment.ID
		for tries := 0; o.damaged && tries < 20; tries++ {
			var err error
			if wrong, err = askFor(http.DefaultClient, addr, repositoryOf(o.number), wrong); err == nil && len(wrong) == 0 {
				break
			}
		}
		wantWhole(t, addr, o.number, o.image)
		o.compared++
	}
}

// A server that collects is killed again and again, amid pushes, deletions, pulls, and whatever the collector does. What
// was acknowledged is there and whole, each time; at last also with a catalog that was made anew.
func TestKilledWhileCollecting(t *testing.T) { killedAmid(t, 15, false) }

// The same beside a scrub that never rests, while objects of all kinds but blobs are flipped, cut and lost: all of those can be
// made again.
func TestKilledWhileScrubbing(t *testing.T) {
	t.Setenv(childScrub, "1")
	killedAmid(t, 12, true)
}

// spoilt are the kinds of objects that killedAmid damages.
var spoilt = []string{"packs", "entries", "recipes", "tocs", "indices", "orders"}

// spoil flips, cuts or deletes an object below a root, and returns its kind; none when there is nothing to damage.
func spoil(t *testing.T, root string, random *rand.Rand) (kind, how string) {
	t.Helper()
	kind = spoilt[random.IntN(len(spoilt))]
	var files []string
	err := filepath.WalkDir(filepath.Join(rootdir.Objects(root), kind), func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, path)
		}
		return nil // the server adds and removes some
	})
	if err != nil || len(files) == 0 {
		return "", ""
	}
	path := files[random.IntN(len(files))]
	b, err := os.ReadFile(path)
	if err != nil || len(b) < 2 {
		return "", ""
	}
	switch random.IntN(3) {
	case 0:
		how = "flipped"
		b[random.IntN(len(b))] ^= 1 << random.IntN(8)
	case 1:
		how = "cut"
		b = b[:random.IntN(len(b))]
	default:
		how = "lost"
		if os.Remove(path) != nil {
			return "", ""
		}
		return kind, how
	}
	// In place: a name that the server has removed meanwhile must not come back.
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return "", ""
	}
	defer f.Close()
	if _, err = f.WriteAt(b, 0); err == nil {
		err = f.Truncate(int64(len(b)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return kind, how
}

func killedAmid(t *testing.T, rounds int, damage bool) {
	root := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("FOIL_TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Log("seed", seed)
	var all []*owned
	for i, m := range overlapping(t, 6, 6, 60_000) {
		all = append(all, &owned{number: i, image: m, there: "no", acked: map[string]int{}, damaged: damage})
	}
	random := rand.New(rand.NewPCG(seed, 0))
	var done collect.Report
	damages := map[string]int{}
	if s := os.Getenv("FOIL_TEST_KILLS"); s != "" {
		var err error
		if rounds, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	} else if testing.Short() {
		rounds = 3
	}
	for round := range rounds {
		base, cmd := child(t, root)
		for _, o := range all {
			o.check(t, base)
		}
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
		var busy sync.WaitGroup
		for _, o := range all {
			own := rand.New(rand.NewPCG(seed, uint64(100*round+o.number+1)))
			busy.Go(func() {
				for o.step(base, own) {
				}
			})
		}
		purges := random.IntN(2) == 0
		busy.Go(func() {
			for {
				var r collect.Report
				if status, err := administer(base, "POST", "gc", admin.GCRequest{Purge: purges}, &r); err != nil || status != http.StatusOK {
					return
				}
				done.Blobs, done.Packs, done.Compacted, done.Purged = done.Blobs+r.Blobs, done.Packs+r.Packs, done.Compacted+r.Compacted, done.Purged+r.Purged
			}
		})
		kill := time.After(time.Duration(500+random.IntN(2500)) * time.Millisecond) // a random instant is what is tested
		for waits := true; waits; {
			var next <-chan time.Time
			if damage {
				next = time.After(time.Duration(random.IntN(200)) * time.Millisecond)
			}
			select {
			case <-kill:
				waits = false
			case <-next:
				if kind, how := spoil(t, root, random); kind != "" {
					damages[kind+" "+how]++
				}
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		busy.Wait()
	}
	acked, compared := map[string]int{}, 0
	for _, o := range all {
		for what, n := range o.acked {
			acked[what] += n
		}
		compared += o.compared
	}
	if err := os.RemoveAll(rootdir.Catalog(root)); err != nil {
		t.Fatal(err)
	}
	report, err := rebuild.Run(t.Context(), rebuild.Options{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	base, _ := child(t, root)
	for _, o := range all {
		o.check(t, base)
	}
	t.Logf("seed %d: %d kills; acknowledged %v; collected %+v; damaged %v; %d images compared; rebuilt %+v", seed, rounds, acked, done, damages, compared, report.Catalog)
	// What passes between two kills have done is mostly not in done: the server makes some itself.
	if acked["undelete"] == 0 || acked["delete"] == 0 || damage && len(damages) < 3 {
		t.Error("nothing was tested")
	}
}
