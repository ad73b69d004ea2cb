package serve_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/server/serve"
)

// healing is a server with one image, whose log is kept.
type healing struct {
	*serve.Server
	t     *testing.T
	root  string
	image image
	log   logtest.Buffer
}

// logged returns the lines of the log that have a text.
func (h *healing) logged(text string) (lines []string) {
	for l := range strings.Lines(h.log.String()) {
		if strings.Contains(l, text) {
			lines = append(lines, l)
		}
	}
	return lines
}

func newHealing(t *testing.T) *healing {
	t.Helper()
	var first layertest.Layer
	for i := range 60 {
		first = append(first, layertest.File(fmt.Sprintf("f%d", i), 0o644, noise(uint64(i), 4000)))
	}
	first = append(first, layertest.File("large", 0o644, noise(1000, 3<<19)))
	h := &healing{t: t, root: t.TempDir(), image: makeImage(t, first, layertest.Layer{layertest.File("second", 0o644, noise(2000, 50_000))})}
	h.Server = start(t, serve.Options{Root: h.root, Log: slog.New(slog.NewTextHandler(&h.log, nil))})
	// A server waits for connections that a client keeps.
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	h.image.push(t, h.Addr())
	if err := h.image.pull(h.Addr()); err != nil {
		t.Fatal(err)
	}
	return h
}

// objects returns the files of a kind, in order of their names.
func (h *healing) objects(kind string) (paths []string) {
	h.t.Helper()
	err := filepath.WalkDir(filepath.Join(h.root, "objects", kind), func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil || len(paths) == 0 {
		h.t.Fatalf("%s: %d objects, %v", kind, len(paths), err)
	}
	return paths
}

// overwrite changes eight bytes of each file, as a disk does: below a server that
// has it open.
func (h *healing) overwrite(paths ...string) {
	h.t.Helper()
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			h.t.Fatal(err)
		}
		info, err := f.Stat()
		b := make([]byte, 8)
		if err == nil {
			_, err = f.ReadAt(b, info.Size()/3)
		}
		for i := range b {
			b[i] ^= 0x55
		}
		if err == nil {
			_, err = f.WriteAt(b, info.Size()/3)
		}
		if err != nil {
			h.t.Fatal(err)
		}
		f.Close()
	}
}

// counts returns the values of a metric, by label.
func (h *healing) counts(name string) map[string]float64 {
	h.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(h.Metrics())
	families, err := registry.Gather()
	if err != nil {
		h.t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			label := ""
			for _, l := range m.GetLabel() {
				label += l.GetValue()
			}
			got[label] = m.GetCounter().GetValue()
		}
	}
	return got
}

// clients are one that is served from files, and one to which bytes are copied.
func clients(t *testing.T) map[string]*http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return map[string]*http.Client{"HTTP/1.1": http.DefaultClient, "HTTP/2": {Transport: tr}}
}

// Bytes of packs that the disk has changed are noticed by the worker alone: what
// it then says heals them, by the next request.
func TestOverwrittenPackHeals(t *testing.T) {
	for name, c := range clients(t) {
		t.Run(name, func(t *testing.T) {
			h := newHealing(t)
			t.Cleanup(c.CloseIdleConnections)
			h.overwrite(h.objects("packs")...)
			wrong, err := ask(c, h.Addr(), nil)
			if err != nil || len(wrong) == 0 {
				t.Fatalf("%d wrong segments, %v", len(wrong), err)
			}
			if again, err := ask(c, h.Addr(), wrong); err != nil || len(again) > 0 {
				t.Fatalf("after the worker said so: %d wrong segments, %v", len(again), err)
			}
			if again, err := ask(c, h.Addr(), nil); err != nil || len(again) > 0 {
				t.Errorf("the next worker: %d wrong segments, %v", len(again), err)
			}
			lines := h.logged("a stored frame is damaged")
			if len(lines) != 1 || !strings.Contains(lines[0], "image=r:1") || !strings.Contains(lines[0], "pack=packs/") ||
				!slices.ContainsFunc(wrong, func(id segment.ID) bool { return strings.Contains(lines[0], "segment="+id.String()) }) {
				t.Errorf("log: %q", lines)
			}
			if n := h.counts("foil_serve_damage_checks_total")["damaged"]; n != 1 {
				t.Errorf("%v frames were found damaged", n)
			}
		})
	}
}

// A pack that is shorter than it was is noticed by the server, whoever asks.
func TestTruncatedPackHeals(t *testing.T) {
	for name, c := range clients(t) {
		t.Run(name, func(t *testing.T) {
			h := newHealing(t)
			t.Cleanup(c.CloseIdleConnections)
			for _, path := range h.objects("packs") {
				info, err := os.Stat(path)
				if err == nil {
					err = os.Truncate(path, info.Size()/2)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if _, err := ask(c, h.Addr(), nil); err == nil {
				t.Error("half a pack was served")
			}
			if wrong, err := ask(c, h.Addr(), nil); err != nil || len(wrong) > 0 {
				t.Errorf("the next request: %d wrong segments, %v", len(wrong), err)
			}
		})
	}
}

// If what the packs were made of is damaged as well, the worker is told to push, and
// a push heals.
func TestDamagedBlobToo(t *testing.T) {
	h := newHealing(t)
	h.overwrite(h.objects("packs")...)
	config := digest.FromBytes(h.image.blobs[len(h.image.blobs)-1]).Encoded()
	h.overwrite(slices.DeleteFunc(h.objects("blobs"), func(path string) bool { return filepath.Base(path) == config })...)
	wrong, err := ask(http.DefaultClient, h.Addr(), nil)
	if err != nil || len(wrong) == 0 {
		t.Fatalf("%d wrong segments, %v", len(wrong), err)
	}
	for range 2 { // the worker tries more than once
		if _, err = ask(http.DefaultClient, h.Addr(), wrong); err == nil || !strings.Contains(err.Error(), "push the image again") {
			t.Errorf("from damaged blobs: %v", err)
		}
	}
	h.image.push(t, h.Addr())
	if wrong, err = ask(http.DefaultClient, h.Addr(), wrong); err != nil || len(wrong) > 0 {
		t.Errorf("pushed again: %d wrong segments, %v", len(wrong), err)
	}
}

// A worker that lies has the server read a bounded number of frames, and nothing
// is made anew.
func TestClaimedDamage(t *testing.T) {
	h := newHealing(t)
	const made = "foil_serve_ingest_rootfs_total"
	before, rootfs := h.objects("packs"), h.counts(made)
	var claims []segment.ID
	for i := range 60 {
		claims = append(claims, segment.Sum([]byte(noise(uint64(i), 4000))))
	}
	claims = append(claims, segment.Sum([]byte(noise(2000, 50_000))))
	for len(claims) < bundle.MaxDamaged { // of no image, or said twice
		claims = append(claims, claims[0], segment.Sum(fmt.Append(nil, len(claims))))
	}
	claims = claims[:bundle.MaxDamaged]
	for range 3 {
		if wrong, err := ask(http.DefaultClient, h.Addr(), claims); err != nil || len(wrong) > 0 {
			t.Errorf("%d wrong segments, %v", len(wrong), err)
		}
	}
	if d := cmp.Diff(before, h.objects("packs")) + cmp.Diff(rootfs, h.counts(made)); d != "" {
		t.Errorf("packs and rootfs that were made (-before +after):\n%s", d)
	}
	if lines := append(h.logged("damaged"), h.logged("repaired")...); len(lines) > 0 {
		t.Errorf("log: %q", lines)
	}
	// The small files are in one frame, the other layer in another: each is read
	// once a request.
	if d := cmp.Diff(map[string]float64{"damaged": 0, "sound": 6, "unchecked": 0}, h.counts("foil_serve_damage_checks_total")); d != "" {
		t.Errorf("checks (-want +got):\n%s", d)
	}
}
