package bundles_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/server/objects/objectstest"
)

// read returns an object.
func (s *server) read(t *testing.T, key string) []byte {
	t.Helper()
	o, err := s.Objects.Open(context.Background(), key, 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	b, err := io.ReadAll(o)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A frame that was made of parts of others, and is in memory, is made anew when it is said
// to have arrived damaged, and so are those if they are wrong; not otherwise.
func TestDamagedPartClaimed(t *testing.T) {
	s := start(t, nil)
	_, x := s.image(t, "r", "1", version(1), ocispec.ImageConfig{})
	fresh := s.pull(t, request("r", "1"), nil)
	present := bytes.Repeat([]byte{0xff}, len(x.Segments)/8+1)
	i, _ := x.Lookup("/usr/share/f7")
	n := x.Contents[x.Inodes[i].Content].First
	id := x.Segments[n].ID
	present[n/8] &^= 1 << (n % 8)
	req := request("r", "1")
	req.Have = []bundle.Have{{ChainID: x.ChainID, TOC: fresh.image.TOCDigest, Present: present}}
	if p := s.pull(t, req, nil); p.err != nil || p.segments[id] == nil {
		t.Fatalf("%d segments, %v", len(p.segments), p.err)
	}
	req.Damaged = []segment.ID{id}
	if p := s.pull(t, req, nil); p.err != nil || p.segments[id] == nil || s.repairs.Load() != 0 {
		t.Errorf("of a frame that is right: %d segments, %v, %d repairs", len(p.segments), p.err, s.repairs.Load())
	}
	place, err := s.Places.Locate(context.Background(), []segment.ID{id})
	if err != nil {
		t.Fatal(err)
	}
	f := place[0].Frame
	b := s.read(t, f.Pack)
	for i := range int64(f.Length) - 1 {
		b[f.Offset+1+i] ^= 0x55
	}
	s.Put(t, f.Pack, b)
	req.Damaged = nil
	if p := s.pull(t, req, nil); p.err != nil || p.segments[id] == nil || s.repairs.Load() != 0 {
		t.Errorf("from memory: %d segments, %v, %d repairs", len(p.segments), p.err, s.repairs.Load())
	}
	// The server of these tests repairs nothing: it has to fail.
	req.Damaged = []segment.ID{id}
	var e *bundle.Error
	if p := s.pull(t, req, nil); !errors.As(p.err, &e) || e.Code != bundle.CodeCorrupt || s.repairs.Load() != 1 {
		t.Errorf("of a frame that is wrong: %v, %d repairs", p.err, s.repairs.Load())
	}
}

// A stored startup set that is wrong is not sent, and built anew.
func TestDamagedSetClaimed(t *testing.T) {
	memory := objectstest.NewMemory()
	s := start(t, memory)
	files := version(1)
	_, x := s.image(t, "r", "1", files, ocispec.ImageConfig{})
	args := []string{"app"}
	touched := pagesOf(t, x, "/var/big", 0, 300)
	s.record(t, "r", "1", x, args, touched)
	req := startupRequest("r", "1", args)
	p := s.pull(t, req, nil)
	p.verify(t, x, files, nil)
	if len(p.startups) != 1 {
		t.Fatalf("%d startup sets", len(p.startups))
	}
	req.Damaged = p.startups[0].Digests[:1]
	if p := s.pull(t, req, nil); len(p.startups) != 1 || p.err != nil {
		t.Errorf("of a set that is right: %d startup sets, %v", len(p.startups), p.err)
	}
	var key string
	if err := memory.List(context.Background(), "startup/", func(k string, _ int64) error {
		key = k
		return nil
	}); err != nil || key == "" {
		t.Fatalf("no store: %v", err)
	}
	b := s.read(t, key)
	b[100] ^= 0x55
	s.Put(t, key, b)
	p = s.pull(t, req, nil)
	p.verify(t, x, files, nil)
	if len(p.startups) != 0 || s.repairs.Load() != 0 {
		t.Errorf("of a set that is wrong: %d startup sets, %d repairs", len(p.startups), s.repairs.Load())
	}
	s.record(t, "r", "1", x, args, touched) // waits for the build
	p = s.pull(t, startupRequest("r", "1", args), nil)
	p.verify(t, x, files, nil)
	if len(p.startups) != 1 {
		t.Errorf("built anew: %d startup sets", len(p.startups))
	}
}
