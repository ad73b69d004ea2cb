package serve_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
)

// pulledBundle is what one bundle brought.
type pulledBundle struct {
	manifest digest.Digest
	segments int // in all TOCs, holes aside
	missing  int // of them
	header   time.Time
	frame    time.Time // the first one
}

// pullBundle asks a server for an image that the client has nothing of, and
// verifies all that comes.
func pullBundle(addr, repository, reference string) (*pulledBundle, error) {
	request := &bundle.Request{Versions: []int{bundle.Version}, Image: bundle.ImageRequest{
		Repository: repository, Reference: reference, Platform: &ocispec.Platform{OS: "linux", Architecture: "amd64"},
	}}
	b, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	resp, err := http.Post("http://"+addr+bundle.PullPath, "application/json", bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		e := new(bundle.Error)
		if err := json.NewDecoder(resp.Body).Decode(e); err != nil {
			return nil, fmt.Errorf("%s: %w", resp.Status, err)
		}
		return nil, e
	}
	p := new(pulledBundle)
	var ids []segment.ID
	var lengths []uint32
	here := map[segment.ID]bool{}
	var plan *bundle.Plan
	r := bundle.NewReader(resp.Body, bundle.ReaderOptions{Request: request})
	for {
		section, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		switch v := section.(type) {
		case *bundle.Image:
			p.header = time.Now()
			p.manifest = v.Manifest.Digest
			t, err := v.DecodeTOC(nil)
			if err != nil {
				return nil, err
			}
			for _, s := range t.Segments {
				ids, lengths = append(ids, s.ID), append(lengths, s.Length)
			}
		case *bundle.Plan:
			plan = v
		case *bundle.Frame:
			if p.frame.IsZero() {
				p.frame = time.Now()
			}
			f := plan.Frames[v.Index]
			raw, err := segment.DecodeFrame(nil, v.Data, int(f.RawLength))
			if err != nil {
				return nil, err
			}
			for _, n := range plan.Segments[f.First : f.First+f.Segments] {
				if segment.Sum(raw[:lengths[n]]) != ids[n] {
					return nil, fmt.Errorf("segment %d has other bytes", n)
				}
				here[ids[n]] = true
				raw = raw[lengths[n]:]
			}
		}
	}
	for _, id := range ids {
		if !id.IsHole() {
			p.segments++
			if !here[id] {
				p.missing++
			}
		}
	}
	return p, nil
}

func wantBundle(t *testing.T, addr, repository, reference string, want digest.Digest) {
	t.Helper()
	p, err := pullBundle(addr, repository, reference)
	if err != nil {
		t.Fatalf("bundle of %s:%s: %v", repository, reference, err)
	}
	if p.manifest != want || p.segments == 0 || p.missing > 0 {
		t.Errorf("bundle of %s:%s is %s with %d of %d segments missing, want %s", repository, reference, p.manifest, p.missing, p.segments, want)
	}
}
