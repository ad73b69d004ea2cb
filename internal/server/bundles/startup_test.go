package bundles_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"pgregory.net/rapid"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// ask sends a request about startup sets and returns status and body.
func (s *server) ask(t testing.TB, method, path, repo, reference, service string, body []byte) (int, []byte) {
	t.Helper()
	q := url.Values{"repository": {repo}, "reference": {reference}}
	if service != "" {
		q.Set("service", service)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, s.url+path+"?"+q.Encode(), bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, b
}

// record sends a trace that was recorded on purpose: its set is there when it
// returns.
func (s *server) record(t testing.TB, repo, reference string, x *toc.TOC, args []string, runs ...trace.Run) {
	t.Helper()
	if status, b := s.ask(t, http.MethodPost, bundle.TracePath, repo, reference, "", s.traceOf(t, x, trace.Recorded, args, runs)); status != http.StatusNoContent {
		t.Fatalf("trace: %d: %s", status, b)
	}
}

func (s *server) traceOf(t testing.TB, x *toc.TOC, kind trace.Kind, args []string, runs []trace.Run) []byte {
	t.Helper()
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	v := &trace.Trace{Kind: kind, ChainID: x.ChainID, TOC: r.TOC, Args: args}
	for _, r := range runs {
		v.Touched = append(v.Touched, trace.Touch{Run: r})
	}
	return v.Encode()
}

func (s *server) report(t testing.TB, repo, reference string) *bundle.StartupReport {
	t.Helper()
	status, b := s.ask(t, http.MethodGet, bundle.StartupPath, repo, reference, "", nil)
	report := &bundle.StartupReport{}
	if err := json.Unmarshal(b, report); err != nil || status != http.StatusOK {
		t.Fatalf("report: %d: %v: %s", status, err, b)
	}
	return report
}

// pagesOf returns a run of a file's pages; blocks 0 are all from first on.
func pagesOf(t testing.TB, x *toc.TOC, path string, first, blocks uint32) trace.Run {
	t.Helper()
	i, ok := x.Lookup(path)
	if !ok || x.Inodes[i].Content < 0 {
		t.Fatalf("%s is no file of the image", path)
	}
	if blocks == 0 {
		blocks = trace.Pages(x.Inodes[i].Size) - first
	}
	return trace.Run{Content: uint32(x.Inodes[i].Content), First: first, Blocks: blocks}
}

// startupRequest asks for an image with the set of a service.
func startupRequest(repo, reference string, args []string) *bundle.Request {
	req := request(repo, reference)
	req.Image.Startup = true
	if args != nil {
		req.Image.Entrypoint = args
	}
	return req
}

// verify fails unless pages are those of the files, and pages, what is here
// already and the plan cover all of x, each segment whole or by all its pages.
func (p *pulled) verify(t testing.TB, x *toc.TOC, files plannertest.Files, here []trace.Run) {
	t.Helper()
	if p.err != nil {
		t.Fatal(p.err)
	}
	bodies := map[segment.ID]string{}
	for _, b := range files {
		bodies[segment.Sum([]byte(b))] = b
	}
	all := slices.Clone(here)
	for r, b := range p.pages {
		c := &x.Contents[r.Content]
		off, n := r.Range(c.Size)
		if string(b) != bodies[c.ID][off:off+n] {
			t.Fatalf("run %+v has other bytes than the file", r)
		}
		all = append(all, r)
	}
	all = trace.Merge(all)
	for k := range x.Contents {
		c := &x.Contents[k]
		for i := c.First; i < c.First+c.Segments; i++ {
			s := &x.Segments[i]
			first := uint32(s.Offset / trace.BlockSize)
			last := uint32((s.Offset + int64(s.Length) - 1) / trace.BlockSize)
			covered := trace.Contains(all, trace.Run{Content: uint32(k), First: first, Blocks: last - first + 1})
			if !s.ID.IsHole() && !covered && p.segments[s.ID] == nil {
				t.Fatalf("segment %d of content %d is neither in the plan nor among the pages", i-c.First, k)
			}
		}
	}
}

func TestStartup(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	_, x := s.image(t, "redis", "1", files, ocispec.ImageConfig{Entrypoint: []string{"/usr/bin/app"}, Cmd: []string{"-v"}})
	args := []string{"/usr/bin/app", "-v"}
	if p := s.pull(t, startupRequest("redis", "1", nil), nil); len(p.startups) > 0 {
		t.Fatalf("a startup set that nobody traced: %+v", p.startups[0])
	} else {
		p.verify(t, x, files, nil)
	}
	touched := []trace.Run{
		pagesOf(t, x, "/usr/bin/app", 0, 0), pagesOf(t, x, "/var/big", 700, 30), pagesOf(t, x, "/bin/sh", 3, 4),
		pagesOf(t, x, "/var/big", 20, 300), pagesOf(t, x, "/etc/passwd", 0, 0), pagesOf(t, x, "/var/holes", 0, 0),
		pagesOf(t, x, "/var/big", 760, 12), // its end is a hole
	}
	s.record(t, "redis", "1", x, args, touched...)

	p := s.pull(t, startupRequest("redis", "1", nil), nil)
	p.verify(t, x, files, nil)
	if len(p.startups) != 1 || p.startups[0].Origin != bundle.OriginTraced {
		t.Fatalf("%d startup sets: %+v", len(p.startups), p.startups)
	}
	want := trace.Merge(append(slices.Clone(touched[:5]), pagesOf(t, x, "/var/big", 760, 8)))
	if got := trace.Merge(p.startups[0].Runs); !slices.Equal(got, want) {
		t.Errorf("got pages %v, want %v", got, want)
	}
	if max := p.startups[0].MaxBytes(); int64(p.stored) > max {
		t.Errorf("%d bytes of frames, at most %d were announced", p.stored, max)
	}
	// What is all in the set is not sent again, but for what shares its frame with
	// other small files.
	s.record(t, "redis", "1", x, []string{"other"}, pagesOf(t, x, "/bin/sh", 0, 0))
	other := s.pull(t, startupRequest("redis", "1", []string{"other"}), nil)
	other.verify(t, x, files, nil)
	if i, _ := x.Lookup("/bin/sh"); other.segments[x.SegmentsOf(i)[0].ID] != nil {
		t.Error("/bin/sh came with the set and with the plan")
	}
	if status, b := s.ask(t, http.MethodDelete, bundle.StartupPath, "redis", "1", trace.Service([]string{"other"}), nil); status != http.StatusNoContent {
		t.Errorf("forget: %d %s", status, b)
	}
	// What came in part is next.
	first := p.plan.Segments[0]
	if c := x.Contents[touched[2].Content]; first < c.First || first >= c.First+c.Segments {
		if c := x.Contents[touched[1].Content]; first < c.First || first >= c.First+c.Segments {
			t.Errorf("segment %d is planned first", first)
		}
	}

	// An unknown service gets what the image's services share; nobody has to ask.
	if p := s.pull(t, startupRequest("redis", "1", []string{"sh", "-c", "true"}), nil); len(p.startups) != 1 || p.startups[0].Origin != bundle.OriginCommon {
		t.Errorf("unknown service: %+v", p.startups)
	}
	if p := s.pull(t, request("redis", "1"), nil); len(p.startups) != 0 || missing(x, p.segments) > 0 {
		t.Errorf("not asked for: %+v, %d segments are missing", p.startups, missing(x, p.segments))
	}

	report := s.report(t, "redis", "1")
	if len(report.Services) != 1 || report.StoreBytes == 0 || report.ChainID != x.ChainID {
		t.Fatalf("%+v", report)
	}
	v := report.Services[0]
	if v.ID != trace.Service(args) || v.Traces != 1 || v.Reports != 0 || v.Pages != 30+4+300+8+2 || v.Stored != int64(p.stored) || v.Bytes != p.startups[0].ContentBytes() {
		t.Errorf("%+v", v)
	}
	status, b := s.ask(t, http.MethodGet, bundle.StartupPath, "redis", "1", v.ID, nil)
	var one bundle.ServiceReport
	if err := json.Unmarshal(b, &one); err != nil || status != http.StatusOK {
		t.Fatalf("%d, %v: %s", status, err, b)
	}
	if runs, _, err := trace.NextRuns(one.Runs); err != nil || !slices.Equal(runs, p.startups[0].Runs) {
		t.Errorf("%v, %v, want %v", err, runs, p.startups[0].Runs)
	}

	for range 2 {
		status, b = s.ask(t, http.MethodDelete, bundle.StartupPath, "redis", "1", v.ID, nil)
		if p := s.pull(t, startupRequest("redis", "1", nil), nil); len(p.startups) != 0 || status >= 500 {
			t.Errorf("after it was forgotten (%d %s): %+v", status, b, p.startups)
		}
	}
	if status != http.StatusNotFound {
		t.Errorf("forgotten twice: %d %s", status, b)
	}
}

func TestIncrementalLoading(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	_, x := s.image(t, "app", "1", files, ocispec.ImageConfig{})
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	shared := []trace.Run{pagesOf(t, x, "/bin/sh", 0, 20), pagesOf(t, x, "/var/big", 0, 100)}
	own := func(n uint32) trace.Run { return pagesOf(t, x, "/var/big", 100+100*n, 90) }
	for n := range uint32(3) {
		s.record(t, "app", "1", x, []string{"service", fmt.Sprint(n)}, append(slices.Clone(shared), own(n))...)
	}
	var here []trace.Run
	for n := range uint32(3) {
		req := startupRequest("app", "1", []string{"service", fmt.Sprint(n)})
		req.Have = []bundle.Have{{ChainID: x.ChainID, TOC: r.TOC, Present: []byte{0}, Pages: trace.AppendRuns(nil, here)}}
		p := s.pull(t, req, nil)
		p.verify(t, x, files, here)
		want := []trace.Run{own(n)}
		if n == 0 {
			want = append(want, shared...)
		}
		if got := trace.Merge(p.startups[0].Runs); !slices.Equal(got, trace.Merge(want)) {
			t.Errorf("service %d: got %v, want %v", n, got, want)
		}
		if n == 0 && len(p.heres) != 0 || n > 0 && (len(p.heres) != 1 || !slices.Equal(trace.Merge(p.heres[0].Runs), trace.Merge(shared))) {
			t.Errorf("service %d: told that %+v are here", n, p.heres)
		}
		here = trace.Merge(append(here, p.startups[0].Runs...))
	}
	if v := s.report(t, "app", "1").Services[0]; v.Shared != 120*trace.BlockSize {
		t.Errorf("%+v", v)
	}
}

func TestTraceRefused(t *testing.T) {
	s := start(t, nil)
	_, x := s.image(t, "a", "1", version(1), ocispec.ImageConfig{})
	_, y := s.image(t, "b", "2", version(2), ocispec.ImageConfig{})
	good := s.traceOf(t, x, trace.Recorded, nil, []trace.Run{{Content: 0, Blocks: 1}})
	for _, c := range []struct {
		name       string
		repo, ref  string
		body       []byte
		wantStatus int
	}{
		{"not pullable", "b", "1", good, 404},
		{"of another rootfs", "b", "2", good, 400},
		{"no trace", "a", "1", []byte("HFTRACE\nno"), 400},
		{"outside of its content", "a", "1", s.traceOf(t, x, trace.Recorded, nil, []trace.Run{{Content: 0, Blocks: 1 << 20}}), 400},
		{"outside of the TOC", "a", "1", s.traceOf(t, x, trace.Recorded, nil, []trace.Run{{Content: 1 << 20, Blocks: 1}}), 400},
		{"a page twice", "a", "1", s.traceOf(t, x, trace.Recorded, nil, []trace.Run{{Content: 0, Blocks: 1}, {Content: 0, Blocks: 1}}), 400},
		{"too large", "a", "1", make([]byte, 2<<20), 400},
		{"no image", "", "", good, 400},
		{"another rootfs as unused", "b", "2", s.traceOf(t, y, trace.Reported, nil, []trace.Run{{Content: 0, Blocks: 1}}), 204},
		{"good", "a", "1", good, 204},
	} {
		status, b := s.ask(t, http.MethodPost, bundle.TracePath, c.repo, c.ref, "", c.body)
		var e bundle.Error
		if status != c.wantStatus || status >= 400 && (json.Unmarshal(b, &e) != nil || e.Message == "") {
			t.Errorf("%s: %d %s, want %d", c.name, status, b, c.wantStatus)
		}
	}
	if status, _ := s.ask(t, http.MethodGet, bundle.StartupPath, "a", "1", "unknown", nil); status != 404 {
		t.Errorf("unknown service: %d", status)
	}
}

// Whatever a service touched and a worker has: pages and plan together are what
// it lacks.
func TestStartupProperty(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	_, x := s.image(t, "r", "1", files, ocispec.ImageConfig{})
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	run := rapid.Custom(func(t *rapid.T) trace.Run {
		c := rapid.IntRange(0, len(x.Contents)-1).Draw(t, "content")
		pages := trace.Pages(x.Contents[c].Size)
		first := rapid.Uint32Range(0, pages-1).Draw(t, "first")
		return trace.Run{Content: uint32(c), First: first, Blocks: rapid.Uint32Range(1, pages-first).Draw(t, "blocks")}
	})
	rapid.Check(t, func(rt *rapid.T) {
		if status, b := s.ask(t, http.MethodDelete, bundle.StartupPath, "r", "1", "", nil); status != http.StatusNoContent {
			t.Fatalf("forget: %d %s", status, b)
		}
		for i := range rapid.IntRange(0, 2).Draw(rt, "services") {
			s.record(t, "r", "1", x, []string{fmt.Sprint(i)}, trace.Merge(rapid.SliceOfN(run, 0, 30).Draw(rt, "touched"))...)
		}
		req := startupRequest("r", "1", []string{"0"})
		var here []trace.Run
		present := make([]byte, len(x.Segments)/8+1)
		if rapid.Bool().Draw(rt, "resumed") {
			here = trace.Merge(rapid.SliceOfN(run, 0, 30).Draw(rt, "pages"))
			for i := range present {
				present[i] = rapid.Byte().Draw(rt, "present")
			}
			req.Have = []bundle.Have{{ChainID: x.ChainID, TOC: r.TOC, Present: present, Pages: trace.AppendRuns(nil, here)}}
		}
		req.EarlyPlan = rapid.Bool().Draw(rt, "early plan")
		p := s.pull(t, req, nil)
		for i, g := range x.Segments {
			if present[i/8]>>(i%8)&1 != 0 {
				p.segments[g.ID] = []byte{} // here, as good as sent
			}
		}
		p.verify(t, x, files, here)
		for _, set := range p.startups {
			for _, r := range set.Runs {
				if trace.Contains(here, r) && len(set.Frames) == len(set.Runs) {
					rt.Fatalf("run %+v is here, and was sent alone", r)
				}
			}
		}
	})
}

// A pull goes on when the store of pages is lost or damaged, or cannot be read.
func TestStartupStoreLost(t *testing.T) {
	memory := objectstest.NewMemory()
	s := start(t, memory)
	files := version(1)
	_, x := s.image(t, "r", "1", files, ocispec.ImageConfig{})
	args := []string{"app"}
	touched := pagesOf(t, x, "/var/big", 0, 300)
	s.record(t, "r", "1", x, args, touched)
	object := func() (key string) {
		t.Helper()
		if err := memory.List(context.Background(), "startup/", func(k string, _ int64) error {
			key = k
			return nil
		}); err != nil || key == "" {
			t.Fatalf("no store: %v", err)
		}
		return key
	}
	check := func(what string, sets int) {
		t.Helper()
		p := s.pull(t, startupRequest("r", "1", args), nil)
		p.verify(t, x, files, nil)
		if len(p.startups) != sets {
			t.Errorf("%s: %d startup sets, want %d", what, len(p.startups), sets)
		}
	}
	check("whole", 1)

	// The index is in memory: its frames are made anew on the way.
	if err := memory.Delete(context.Background(), object()); err != nil {
		t.Fatal(err)
	}
	check("gone", 1)
	s.record(t, "r", "1", x, args, touched) // waits for the build
	s.Put(t, object(), []byte("no store"))
	s.serve(t)
	check("damaged", 0)
	s.record(t, "r", "1", x, args, touched)
	check("built anew", 1)

	memory.Inject(func(_ int, op objectstest.Op, key string) error {
		if op == objectstest.OpOpen && strings.HasPrefix(key, "startup/") {
			return errors.New("the disk does not answer")
		}
		return nil
	})
	check("cannot be read, after its index was", 1)
	// What that has begun to build would be found in memory by the next server,
	// if it were the one to end it.
	s.record(t, "r", "1", x, args, touched)
	s.serve(t)
	check("cannot be read", 0)
	memory.Inject(nil)
	// What failed may be under way still, in the background.
	for range 100 {
		if p := s.pull(t, startupRequest("r", "1", args), nil); len(p.startups) > 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	check("can be read again", 1)
}

// The order that was guessed is there after a restart, and is what a plan follows.
func TestOrderIsKept(t *testing.T) {
	s := start(t, nil)
	m, x := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	if p := s.pull(t, request("r", "1"), nil); p.err != nil {
		t.Fatal(p.err)
	}
	manifest, err := s.Catalog.Manifest(context.Background(), "r", m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	var v ocispec.Manifest
	if err := json.Unmarshal(manifest.Bytes, &v); err != nil {
		t.Fatal(err)
	}
	r, err := s.Catalog.Rootfs(context.Background(), x.ChainID)
	if err != nil {
		t.Fatal(err)
	}
	key := planner.OrderKey(v.Config.Digest, r.TOC)
	if _, err := s.Objects.Stat(context.Background(), key); err != nil {
		t.Fatal(err)
	}
	last := uint32(len(x.Segments) - 1)
	order := make(planner.Order, len(x.Segments))
	for i := range order {
		order[i] = last - uint32(i)
	}
	s.Put(t, key, order.Encode(v.Config.Digest, r.TOC))
	s.serve(t)
	p := s.pull(t, request("r", "1"), nil)
	if p.err != nil || !slices.Contains(p.plan.Segments[:p.plan.Frames[0].Segments], last) {
		t.Errorf("%v: the plan begins with %v, want %d", p.err, p.plan.Segments[:p.plan.Frames[0].Segments], last)
	}
	s.Put(t, key, []byte("no order"))
	s.serve(t)
	if p := s.pull(t, request("r", "1"), nil); p.err != nil || missing(x, p.segments) > 0 {
		t.Errorf("with a damaged order: %v", p.err)
	}
}

// What a container runs in the place of what the image says comes first, where no trace knows it.
func TestOrderOfService(t *testing.T) {
	s := start(t, nil)
	files := version(1)
	for i := range 8 {
		files[fmt.Sprintf("/opt/bin/tool-%d", i)] = text(uint64(900+i), 600_000)
	}
	_, x := s.image(t, "r", "1", files, ocispec.ImageConfig{Cmd: []string{"/usr/bin/app"}})
	first := func(entrypoint ...string) string {
		t.Helper()
		req := request("r", "1")
		req.Image.Entrypoint = entrypoint
		p := s.pull(t, req, nil)
		if p.err != nil || missing(x, p.segments) > 0 {
			t.Fatalf("%v: %v", entrypoint, p.err)
		}
		for _, n := range p.plan.Segments {
			for i := range 8 {
				inode, _ := x.Lookup(fmt.Sprintf("/opt/bin/tool-%d", i))
				if c := x.Contents[x.Inodes[inode].Content]; n >= c.First && n < c.First+c.Segments {
					return fmt.Sprintf("tool-%d", i)
				}
			}
		}
		return "none"
	}
	for _, i := range []int{3, 6, 3} {
		if got, want := first(fmt.Sprintf("/opt/bin/tool-%d", i)), fmt.Sprintf("tool-%d", i); got != want {
			t.Errorf("%s comes first, want %s", got, want)
		}
	}
}
