package bundles_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
	"hydrofoil.dev/foil/internal/server/planner/plannertest"
)

// The header of an image leaves before anybody knows where its segments are. When one turns
// out to be nowhere then, the image is repaired, and the pull goes on; unless its TOC is another one
// now than the worker has.
func TestRepairedAfterHeader(t *testing.T) {
	for _, test := range []struct {
		name   string
		repair func(t *testing.T, s *server, diffID digest.Digest)
		code   string // of the error; none: it is served whole
	}{
		{"nothing helps", func(*testing.T, *server, digest.Digest) {}, bundle.CodeCorrupt},
		{"stored again", func(t *testing.T, s *server, diffID digest.Digest) { s.Rootfs(t, diffID, version(1)) }, ""},
		{"another TOC", func(t *testing.T, s *server, diffID digest.Digest) { s.Rootfs(t, diffID, version(2)) }, bundle.CodeUnavailable},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := start(t, nil)
			_, x := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
			i, _ := x.Lookup("/usr/share/f7")
			lost := x.Segments[x.Contents[x.Inodes[i].Content].First].ID
			place, err := s.Places.Locate(context.Background(), []segment.ID{lost})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Catalog.Forget(context.Background(), []catalog.Resting{{Pack: place[0].Frame.Pack, ID: lost}}); err != nil {
				t.Fatal(err)
			}
			s.repair = func() { test.repair(t, s, digest.FromString(fmt.Sprint("1", len(version(1))))) }
			p := s.pull(t, request("r", "1"), nil)
			if p.image == nil || s.repairs.Load() != 1 {
				t.Fatalf("header %v, %d repairs, %v", p.image, s.repairs.Load(), p.err)
			}
			var e *bundle.Error
			switch {
			case test.code == "":
				p.verify(t, x, version(1), nil)
			case !errors.As(p.err, &e) || e.Code != test.code:
				t.Errorf("%v, want %s", p.err, test.code)
			}
		})
	}
}

// What one image of a request was answered with is what each server answers, whether it has
// the image in memory or not; and what its indices were lost for in between.
func TestSameAnswer(t *testing.T) {
	memory := objectstest.NewMemory()
	s := start(t, memory)
	_, x := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	args := []string{"app"}
	s.record(t, "r", "1", x, args, pagesOf(t, x, "/var/big", 0, 300), pagesOf(t, x, "/bin/sh", 3, 2))
	var first *pulled
	for _, state := range []string{"new", "in memory", "restarted", "index and order lost"} {
		switch state {
		case "restarted":
			s.serve(t)
		case "index and order lost":
			for _, kind := range []string{"indices/", "orders/"} {
				var keys []string
				if err := memory.List(t.Context(), kind, func(key string, _ int64) error {
					keys = append(keys, key)
					return nil
				}); err != nil || len(keys) == 0 {
					t.Fatalf("%s: %d objects, %v", kind, len(keys), err)
				}
				for _, key := range keys {
					if err := memory.Delete(t.Context(), key); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.serve(t)
		}
		p := s.pull(t, startupRequest("r", "1", args), nil)
		p.verify(t, x, version(1), nil)
		if len(p.startups) != 1 {
			t.Fatalf("%s: %d startup sets", state, len(p.startups))
		}
		if first == nil {
			first = p
			continue
		}
		if !bytes.Equal(p.image.TOC, first.image.TOC) || p.image.Segments != first.image.Segments ||
			p.bytes+int64(len(first.hello.Stream)-len(p.hello.Stream)) != first.bytes || len(p.pages) != len(first.pages) {
			t.Errorf("%s: %d bytes, %d page runs; %d and %d of the first pull", state, p.bytes, len(p.pages), first.bytes, len(first.pages))
		}
	}
}

// BenchmarkPull asks a server for an image of 10,000 files and a startup set of 4 MB: one that was
// just started, with nothing in memory ("fresh"), and one that has answered before
// ("again"). It gives the times from the request to the header and to the last byte of
// the set, and the processor time of both sides together.
func BenchmarkPull(b *testing.B) {
	dir, err := objects.OpenDir(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	s := start(b, dir)
	files := plannertest.Files{"/usr/bin/app": text(1, 4<<20)}
	for i := range 10_000 {
		files[fmt.Sprintf("/usr/share/%d/f%d", i%100, i)] = text(uint64(i), 1000)
	}
	_, x := s.image(b, "r", "1", files, ocispec.ImageConfig{})
	args := []string{"app"}
	s.record(b, "r", "1", x, args, pagesOf(b, x, "/usr/bin/app", 0, 0))
	for _, fresh := range []bool{true, false} {
		name := "again"
		if fresh {
			name = "fresh"
		}
		b.Run(name, func(b *testing.B) {
			s.serve(b)
			s.timed(b, startupRequest("r", "1", args))
			var header, set, cpu time.Duration
			for b.Loop() {
				if fresh {
					b.StopTimer()
					s.serve(b)
					runtime.GC()
					b.StartTimer()
				}
				h, p, c := s.timed(b, startupRequest("r", "1", args))
				header, set, cpu = header+h, set+p, cpu+c
			}
			for unit, d := range map[string]time.Duration{"header-ms/op": header, "set-ms/op": set, "cpu-ms/op": cpu} {
				b.ReportMetric(float64(d)/1e6/float64(b.N), unit)
			}
		})
	}
}

// timed pulls up to the plan, which follows the startup set.
func (s *server) timed(b *testing.B, req *bundle.Request) (header, set, cpu time.Duration) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	req.Versions, req.Hold = []int{bundle.Version}, bundle.MaxHold
	used := processorTime(b)
	began := time.Now()
	resp := s.post(b, ctx, bundle.PullPath, req)
	defer resp.Body.Close()
	for r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: req}); ; {
		section, err := r.Next()
		switch section.(type) {
		case *bundle.Image:
			header = time.Since(began)
		case *bundle.Pages:
			set = time.Since(began)
		case *bundle.Plan:
			return header, set, processorTime(b) - used
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
