package serve

import (
	"net/http"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/collect"
)

// openCollector begins to collect what nobody needs, and to answer administrators. An accelerator collects nothing: what
// it has is its upstream's, and nobody deletes here.
func (s *Server) openCollector(p *parts) error {
	o := s.opts.Collect
	if o.Window == 0 {
		o.Window = catalog.DefaultWindow
	}
	o.Window = max(0, o.Window)
	if s.opts.Lease > 0 {
		p.local.SetLease(s.opts.Lease)
	}
	p.admin = &admin.Admin{Catalog: p.local, Window: o.Window, Room: p.space.spend, Root: s.opts.Root}
	if p.modes != nil {
		p.admin.Converter = p.modes.converter
	}
	o.Begin, o.End = p.space.spend, p.space.refill
	p.local.SetWindow(0)
	if p.front == nil {
		p.local.SetWindow(o.Window)
		o.Garbage, o.Catalog, o.Objects, o.RemoveBlob, o.Readers, o.Log = p.local, p.local, p.here, p.registry.RemoveUnheld, p.readers, s.log
		p.admin.Collector = collect.New(o)
		s.closers = append(s.closers, p.admin.Collector.Close)
	}
	end, err := admin.Serve(s.opts.Root, p.admin.Handler(func(http.ResponseWriter, *http.Request) bool { return true }))
	if err != nil {
		return err
	}
	s.closers = append(s.closers, end)
	return nil
}

// mayAdminister reports whether whoever sends a request has the right admin, and answers it if not. On an open server everybody
// may everything.
func (s *Server) mayAdminister(w http.ResponseWriter, req *http.Request) bool {
	if err := s.guard.Check(req.Context(), access.Admin, ""); err != nil {
		refuse(w, err)
		return false
	}
	return true
}
