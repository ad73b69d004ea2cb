package serve_test

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

// slowLink shares a rate, in bytes a second, between all that is written to it.
type slowLink struct {
	rate float64
	mu   sync.Mutex
	free time.Time // when what was written so far has passed; guarded by mu
}

func (l *slowLink) pass(n int) {
	l.mu.Lock()
	if now := time.Now(); l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(n) / l.rate * float64(time.Second)))
	until := l.free
	l.mu.Unlock()
	time.Sleep(time.Until(until))
}

type slowWriter struct {
	http.ResponseWriter
	link *slowLink
}

func (w slowWriter) Write(p []byte) (n int, err error) {
	for len(p) > 0 && err == nil {
		var m int
		b := p[:min(len(p), 32<<10)]
		w.link.pass(len(b))
		m, err = w.ResponseWriter.Write(b)
		n, p = n+m, p[m:]
	}
	return n, err
}

// BenchmarkFirstUse is the first pull of an image from an upstream behind a link
// of 20 or 100 Mbit/s: the time until the bundle's header and its first frame have come,
// and that of a plain download of all layers at once, without an accelerator.
// What an accelerator would take that begins to ingest when it has an image whole
// is the plain time and that of a first use of an upstream beside it ("near").
func BenchmarkFirstUse(b *testing.B) {
	var all []layertest.Blob
	words := make([]string, 4096)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range words {
		words[i] = fmt.Sprintf("%x ", r.Uint64()>>(4*r.IntN(14)))
	}
	for i := range 4 {
		var l layertest.Layer
		for j := range 400 {
			var data []byte
			for len(data) < 60_000 {
				data = append(data, words[r.IntN(len(words))]...)
			}
			l = append(l, layertest.File(fmt.Sprintf("l%d/f%d", i, j), 0o644, string(data)))
		}
		blob := layertest.GzipBlob(b, l.TarBytes(b))
		all = append(all, blob)
	}
	registry := upstreamtest.New()
	image := registry.Image("app", "1", all...)
	var size int64
	for _, l := range all {
		size += int64(len(l.Bytes))
	}
	for _, test := range []struct {
		name string
		rate float64
	}{{"20 Mbit/s", 20e6 / 8}, {"100 Mbit/s", 100e6 / 8}, {"near", 1e12}} {
		b.Run(test.name, func(b *testing.B) {
			link := &slowLink{rate: test.rate}
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				registry.ServeHTTP(slowWriter{w, link}, req)
			}))
			defer server.Close()
			up := server.URL
			b.SetBytes(size)
			var plain, header, frame, whole time.Duration
			for b.Loop() {
				began := time.Now()
				var wg sync.WaitGroup
				for _, l := range all {
					wg.Go(func() {
						resp, err := http.Get(up + "/v2/app/blobs/" + l.Digest.String())
						if err == nil {
							_, err = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
						}
						if err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				plain += time.Since(began)
				s, err := serve.Start(b.Context(), serve.Options{
					Root: b.TempDir(), Listen: "127.0.0.1:0",
					Log:      slog.New(slog.DiscardHandler),
					Upstream: upstream.Options{URL: up},
				})
				if err != nil {
					b.Fatal(err)
				}
				began = time.Now()
				p, err := pullBundle(s.Addr(), "app", "1")
				if err != nil || p.missing > 0 || p.manifest != image.Digest {
					b.Fatalf("%+v, %v", p, err)
				}
				whole += time.Since(began)
				header += p.header.Sub(began)
				frame += p.frame.Sub(began)
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
			for name, d := range map[string]time.Duration{"plain-s": plain, "header-s": header, "frame-s": frame, "whole-s": whole} {
				b.ReportMetric(d.Seconds()/float64(b.N), name)
			}
		})
	}
}
