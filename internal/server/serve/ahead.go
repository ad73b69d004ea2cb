package serve

import (
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/ahead"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
)

// DefaultRestored is how much is kept of blobs that were made again from packs, bytes; of a small disk a twentieth.
const DefaultRestored = 4 << 30

// openAhead makes what has layers ready before clients ask for them.
func (s *Server) openAhead(p *parts) (*ahead.Ahead, error) {
	limit := s.opts.Restored
	if limit == 0 || limit == DefaultRestored {
		limit = DefaultRestored
		if _, total, err := newSpace(s.opts.Root, -1).free(); err == nil {
			limit = min(limit, total/20)
		}
	}
	a, err := ahead.New(ahead.Options{Dir: filepath.Join(s.opts.Root, "restored"), Limit: max(0, limit), Store: p.here, Blobs: p.blobs,
		Workers: max(1, runtime.GOMAXPROCS(0)/2), Log: s.log})
	if err == nil {
		s.closers = append(s.closers, a.Close)
	}
	return a, err
}

// clientOf names who may have layers already: a machine, or one of several users on it.
func clientOf(req *http.Request) string {
	host, _, err := net.SplitHostPort(req.RemoteAddr)
	if err != nil {
		host = req.RemoteAddr
	}
	if a := guard.Address(req.Context()); a.IsValid() { // behind a proxy
		host = a.String()
	}
	if subject := guard.Subject(req.Context()); subject != "" && subject != access.Anonymous {
		return subject + " " + host
	}
	return host
}

// pulled is told of blobs that somebody gets.
func (p *parts) pulled(req *http.Request, d digest.Digest) {
	now := time.Now()
	p.modes.popularity.Pulled(d, now)
	p.ahead.Pulled(clientOf(req), d, now)
}

// shown is told of manifests that somebody gets.
func (p *parts) shown(req *http.Request, m catalog.Manifest) {
	image, err := oci.ReadManifest(m.MediaType, m.Bytes)
	if err != nil {
		return // an index, or an artifact that is no image
	}
	layers := make([]digest.Digest, len(image.Layers))
	for i, l := range image.Layers {
		layers[i] = l.Digest
	}
	p.ahead.Manifest(clientOf(req), layers)
}
