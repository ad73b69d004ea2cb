package serve_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"hydrofoil.dev/foil/internal/server/serve"
)

// Who gets a manifest gets its layers soon: they are made before anybody asks.
func TestRestoredAhead(t *testing.T) {
	m := newModed(t, 0, `mode = "full"`)
	m.now()
	const requests = "foil_serve_restore_requests_total"
	manifest := fmt.Sprintf("http://%s/v2/r/manifests/1", m.Addr())
	send(t, "GET", manifest, "", nil, 200)
	restored := func() int {
		files, err := os.ReadDir(filepath.Join(m.root, "restored"))
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	m.until("both are made", func() bool { return restored() == 2 && m.counts("foil_serve_restores_total")["done"] >= 2 })
	m.until("both are kept", func() bool {
		for _, b := range m.made {
			if _, got, err := m.get(b.Bytes, "bytes=9-"); err != nil || !bytes.Equal(got, b.Bytes[9:]) {
				t.Fatalf("%d bytes, or others: %v", len(got), err)
			}
		}
		n := m.counts(requests)
		return n["hit"] >= 2
	})
	hits := m.counts(requests)["hit"]
	m.want(false)
	if n := m.counts(requests); n["miss"] > 0 || n["hit"] < hits+8 {
		t.Errorf("requests: %v", n)
	}
	// It has them now: nothing is expected, and nothing made.
	before := m.counts("foil_serve_restores_total")["done"]
	send(t, "GET", manifest, "", nil, 200)
	m.want(false)
	if after := m.counts("foil_serve_restores_total")["done"]; after != before {
		t.Errorf("%v restores", after-before)
	}
	// The next process believes nothing of it.
	m.stop()
	m.start()
	if restored() != 0 {
		t.Error("what another process made is there")
	}
	m.want(false)
}

// One restore serves all who wait for it, also if the one that came first goes away.
func TestOneRestoreForAll(t *testing.T) {
	m := newModed(t, 0, `mode = "full"`)
	m.now()
	before := m.counts("foil_serve_restores_total")["done"]
	url := fmt.Sprintf("http://%s/v2/r/blobs/%s", m.Addr(), m.made[0].Digest)
	var all sync.WaitGroup
	for i := range 30 {
		all.Go(func() {
			res, err := http.Get(url)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if i%5 == 0 {
				_, _ = io.CopyN(io.Discard, res.Body, 1000)
				return
			}
			if got, err := io.ReadAll(res.Body); err != nil || !bytes.Equal(got, m.made[0].Bytes) {
				t.Errorf("%d bytes, or others: %v", len(got), err)
			}
		})
	}
	all.Wait()
	n := m.counts("foil_serve_restore_requests_total")
	if done := m.counts("foil_serve_restores_total")["done"] - before; done > 1+n["direct"] {
		t.Errorf("%v restores for 30 clients; %v", done, n)
	}
	if n["hit"]+n["wait"]+n["miss"]+n["direct"] != 30 || n["hit"]+n["wait"] < 20 {
		t.Errorf("requests: %v", n)
	}
}

// What is kept is bounded, and without room everything is served all the same.
func TestRestoredIsBounded(t *testing.T) {
	for _, limit := range []int64{-1, 1, 3 << 20} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			m := newModed(t, 0, `mode = "full"`)
			m.now()
			m.stop()
			m.Server = start(t, serve.Options{Root: m.root, Modes: m.rules, Restored: limit})
			m.want(false)
			files, err := os.ReadDir(filepath.Join(m.root, "restored"))
			if err != nil {
				t.Fatal(err)
			}
			var sum int64
			for _, f := range files {
				info, err := f.Info()
				if err != nil {
					t.Fatal(err)
				}
				sum += info.Size()
			}
			if sum > max(limit, 0) || limit > 1 && sum == 0 {
				t.Errorf("%d bytes are kept, at most %d", sum, limit)
			}
		})
	}
}
