package bundles

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/startup"
)

// startup finds the startup set of the image and, if it was asked for, selects what the worker
// lacks of it; what that brings, and the pages that are here, are left out of the plan. A set only
// makes a pull faster: it goes on without one that cannot be had.
func (p *pull) startup(ctx context.Context, d *planner.Difference, x *planner.Index, here []trace.Run) (*startup.Set, *startup.Delivery) {
	if p.req.Image.Header && !p.req.Image.Startup {
		return nil, nil
	}
	m := p.image
	set, err := p.h.sets.Find(ctx, m.startupImage(x.TOC()), p.req.Image.Service(m.Image.Config), x.Table())
	if err != nil && ctx.Err() == nil {
		p.h.log.Warn("image is sent without its startup set", "image", p.about, "error", err)
	}
	if set != nil && p.setDamaged(ctx, set, x.Table()) {
		set = nil
	}
	if set == nil || !p.req.Image.Startup {
		d.Arrive(here)
		return set, nil
	}
	delivery := set.Select(x.Table(), func(r trace.Run) bool {
		return !trace.Contains(here, r) && d.Lacks(r)
	})
	d.Arrive(slices.Concat(here, delivery.Wire.Runs))
	return set, delivery
}

// orderOf returns in which order the rest of an image is likely to be needed:
// what its service touched in some runs, but not in most; what pages have brought
// in part; and as guessed. If the pages of the set are not sent, they are first.
func orderOf(x *planner.Index, guess planner.Order, set *startup.Set, sent bool) planner.Order {
	switch {
	case set == nil:
		return guess
	case sent:
		return x.OrderBy(guess, set.Late, set.Runs())
	}
	return x.OrderBy(guess, set.Runs(), set.Late)
}

// hold is for how long only promoted frames follow the startup set.
func (p *pull) hold(d *startup.Delivery) time.Duration {
	if d != nil && d.Wire.Held() {
		return p.req.Hold
	}
	return 0
}

// pages sends the startup set, with what of the plan may go early.
func (p *pull) pages(ctx context.Context, x *planner.Index, d *startup.Delivery, plan *plan) error {
	if d == nil {
		return nil
	}
	if len(d.Rest) > 0 {
		if err := p.w.Here(&bundle.Here{Runs: d.Rest}); err != nil {
			return writeFailed{err}
		}
	}
	if err := p.w.Startup(&d.Wire, x.Table()); err != nil {
		return writeFailed{err}
	}
	contents := &planner.Contents{TOC: x.Table(), Index: x, Objects: p.h.o.Objects}
	return p.suspect(d.Send(ctx, contents, func(sections []byte) error {
		if err := plan.between(ctx); err != nil {
			return err
		}
		if err := p.w.Sections(sections); err != nil {
			return writeFailed{err}
		}
		if err := p.flush(); err != nil {
			return writeFailed{err}
		}
		return nil
	}))
}

// startupImage names the image to package startup.
func (r *Resolved) startupImage(toc digest.Digest) startup.Image {
	return startup.Image{Repository: r.Repository, ChainID: r.ChainID, TOC: toc, Platform: platform(&r.Image.Platform)}
}

// loadTOC returns the TOC of a rootfs and its index.
func (h *Handler) loadTOC(ctx context.Context, chainID digest.Digest) (*toc.TOC, *planner.Index, error) {
	r, err := h.o.Catalog.Rootfs(ctx, chainID)
	if err != nil {
		return nil, nil, err
	}
	encoded, err := h.encodedTOC(ctx, r)
	if err != nil {
		return nil, nil, err
	}
	t, err := toc.Decode(encoded)
	if err != nil {
		return nil, nil, fmt.Errorf("read TOC of %s: %w: %w", r.ChainID, errDamaged, err)
	}
	x, err := h.index(ctx, r, nil, encoded)
	return t, x, err
}

// named resolves the image that a request's parameters name, as a pull does, and
// returns its index. Whoever asks must have the right besides that to pull.
func (h *Handler) named(r *http.Request, right access.Right) (*Resolved, *planner.Index, error) {
	want := bundle.ImageRequest{Repository: r.URL.Query().Get("repository"), Reference: r.URL.Query().Get("reference")}
	if want.Repository == "" || want.Reference == "" {
		return nil, nil, &bundle.Error{Code: bundle.CodeInvalid, Message: "want the parameters repository and reference"}
	}
	m, err := h.resolve(r.Context(), want)
	if err == nil && right != access.Pull {
		err = h.o.Guard.Check(r.Context(), right, want.Repository, want.Reference)
	}
	if err != nil {
		return nil, nil, err
	}
	_, _, x, err := h.whole(r.Context(), m)
	return m, x, err
}

// about names the image of a request in messages.
func about(r *http.Request) string {
	q := r.URL.Query()
	return ref(q.Get("repository"), q.Get("reference"))
}

// rightFor is what a trace wants: one that was recorded decides what a startup set has, reports have little weight
// each. What is no trace is refused in any case.
func (h *Handler) rightFor(body []byte) access.Right {
	if h.o.Guard == nil {
		return access.Pull
	}
	if t, err := trace.Decode(body); err == nil && t.Kind == trace.Reported {
		return access.Pull
	}
	return access.Teach
}

// trace takes a trace.
func (h *Handler) trace(w http.ResponseWriter, r *http.Request) {
	b, err := h.body(w, r, trace.MaxEncoded)
	if err == nil {
		var m *Resolved
		var x *planner.Index
		if m, x, err = h.named(r, h.rightFor(b)); err == nil {
			err = h.sets.Add(r.Context(), m.startupImage(x.TOC()), x.Table(), client(r), b)
		}
	}
	if errors.Is(err, startup.ErrRefused) {
		err = &bundle.Error{Code: bundle.CodeInvalid, Message: err.Error()}
	}
	if err != nil {
		writeError(w, h.log, err, about(r))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// startup answers with what there is of an image's startup sets.
func (h *Handler) startup(w http.ResponseWriter, r *http.Request) {
	m, x, err := h.named(r, access.Pull)
	var v any
	if err == nil {
		if id := r.URL.Query().Get("service"); id != "" {
			v, err = h.sets.Service(r.Context(), m.startupImage(x.TOC()), x.Table(), id)
		} else {
			v, err = h.sets.Report(r.Context(), m.startupImage(x.TOC()), x.Table())
		}
	}
	if errors.Is(err, startup.ErrUnknown) {
		err = &bundle.Error{Code: bundle.CodeNotFound, Message: err.Error()}
	}
	if err != nil {
		writeError(w, h.log, err, about(r))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client has gone if this fails
}

// forget forgets a service, or all of an image's.
func (h *Handler) forget(w http.ResponseWriter, r *http.Request) {
	m, x, err := h.named(r, access.Teach)
	if err == nil {
		err = h.sets.Forget(r.Context(), m.startupImage(x.TOC()), r.URL.Query().Get("service"))
	}
	if errors.Is(err, startup.ErrUnknown) {
		err = &bundle.Error{Code: bundle.CodeNotFound, Message: err.Error()}
	}
	if err != nil {
		writeError(w, h.log, err, about(r))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// client names who sent a request, as far as influence on sets goes: by network
// address, of which an IPv6 host has 2^64. What a client says about itself
// does not count.
func client(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	if a := guard.Address(r.Context()); a.IsValid() { // behind a proxy
		host = a.String()
	}
	if a, err := netip.ParseAddr(host); err == nil {
		a = a.Unmap().WithZone("")
		if a.Is6() {
			if p, err := a.Prefix(64); err == nil {
				a = p.Addr()
			}
		}
		host = a.String()
	}
	sum := sha256.Sum256([]byte("client " + host))
	return hex.EncodeToString(sum[:12])
}
