// Package admin is what administrators ask of a running server: to delete, to bring back, to collect what nobody needs.
//
// The server answers on a socket below its root, which only who owns the root can open, and at the same paths on its
// address, to those with the right admin. Requests and answers are JSON:
//
//	POST   /hydrofoil/v1/admin/delete     {"repository", "tag" or "digest"}: what was deleted
//	GET    /hydrofoil/v1/admin/deleted    ?repository=: what can be brought back
//	POST   /hydrofoil/v1/admin/undelete   as delete: what was brought back
//	GET    /hydrofoil/v1/admin/gc         Status
//	POST   /hydrofoil/v1/admin/gc         {"purge"}: collect now; a collect.Report
//	GET    /hydrofoil/v1/admin/mode       convert.Status: in how many stores blobs rest intact
//	POST   /hydrofoil/v1/admin/mode       the same, after a pass over all blobs
//
// An error is a status and {"error": MESSAGE}.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/convert"
)

// Prefix is that of all paths.
const Prefix = "/hydrofoil/v1/admin/"

// Catalog is what of the catalog is used.
type Catalog interface {
	catalog.Repositories
	catalog.Garbage
}

// Admin answers.
type Admin struct {
	Catalog   Catalog
	Collector *collect.Collector // nil: this server deletes nothing, as an accelerator
	Window    time.Duration      // of Collector
	Converter *convert.Converter // nil: this server has no modes, as an accelerator
	Root      string             // of the server, for messages
	// Room is asked before something is deleted; nil: there is room.
	Room func() error
}

// Reference names what is to be deleted or brought back: all of a repository, if it has neither tag nor digest.
type Reference struct {
	Repository string        `json:"repository"`
	Tag        string        `json:"tag,omitempty"`
	Digest     digest.Digest `json:"digest,omitempty"`
}

// Items are manifests and tags.
type Items struct {
	Items []catalog.DeletedItem `json:"items"`
	// Until says from when on things that were deleted now may be gone for good.
	Until time.Time `json:"until,omitzero"`
}

// Status is what `foil server gc stats` shows.
type Status struct {
	catalog.GarbageStats
	Window   time.Duration  `json:"window"`
	Done     collect.Report `json:"done"` // since the server was started
	LastPass time.Time      `json:"last_pass,omitzero"`
	// Freeable are bytes that the next passes free, or begin to: of blobs that no manifest names, and dead in packs.
	Freeable int64 `json:"freeable"`
}

// GCRequest asks for a pass.
type GCRequest struct {
	Purge bool `json:"purge"`
}

// Handler answers requests; allowed says who may ask, and answers those who may not.
func (a *Admin) Handler(allowed func(w http.ResponseWriter, req *http.Request) bool) http.Handler {
	mux := http.NewServeMux()
	for pattern, answer := range map[string]func(*http.Request) (any, error){
		"POST " + Prefix + "delete":   a.delete,
		"GET " + Prefix + "deleted":   a.deleted,
		"POST " + Prefix + "undelete": a.undelete,
		"GET " + Prefix + "gc":        a.status,
		"POST " + Prefix + "gc":       a.now,
		"GET " + Prefix + "mode":      a.mode,
		"POST " + Prefix + "mode":     a.convert,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, req *http.Request) {
			if !allowed(w, req) {
				return
			}
			v, err := answer(req)
			status := http.StatusOK
			if err != nil {
				v, status = map[string]string{"error": err.Error()}, http.StatusInternalServerError
				if errors.Is(err, catalog.ErrNotFound) {
					status = http.StatusNotFound
				} else if errors.Is(err, errBad) {
					status = http.StatusBadRequest
				}
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(v) // a client that is gone is no failure of ours
		})
	}
	return mux
}

var errBad = errors.New("the request makes no sense")

// errAccelerator is what an accelerator says.
var errAccelerator = errors.Join(errBad, errors.New("an accelerator deletes nothing: delete at its upstream"))

func (a *Admin) reference(req *http.Request) (r Reference, err error) {
	if a.Collector == nil {
		return r, errAccelerator
	}
	if err := json.NewDecoder(http.MaxBytesReader(nil, req.Body, 64<<10)).Decode(&r); err != nil {
		return r, errors.Join(errBad, err)
	}
	if a.Room != nil {
		if err := a.Room(); err != nil {
			return r, err
		}
	}
	if r.Repository == "" || r.Tag != "" && r.Digest != "" {
		return r, errors.Join(errBad, errors.New("want a repository, and one of a tag and a digest, or neither"))
	}
	return r, nil
}

// status counts.
func (a *Admin) status(req *http.Request) (any, error) {
	if a.Collector == nil {
		return nil, errAccelerator
	}
	s := Status{Window: a.Window}
	var err error
	if s.GarbageStats, err = a.Catalog.GarbageStats(req.Context(), a.Collector.Due(collect.Mode{})); err != nil {
		return nil, err
	}
	s.Done, s.LastPass = a.Collector.Totals()
	s.Freeable = s.DeadBytes + s.Unnamed
	return s, nil
}

// errNoModes is what an accelerator says.
var errNoModes = errors.Join(errBad, errors.New("an accelerator has no modes: what it has it can fetch again"))

// mode says what rests where.
func (a *Admin) mode(*http.Request) (any, error) {
	if a.Converter == nil {
		return nil, errNoModes
	}
	return a.Converter.Status(a.Root), nil
}

// convert makes a pass.
func (a *Admin) convert(req *http.Request) (any, error) {
	if a.Converter == nil {
		return nil, errNoModes
	}
	if _, err := a.Converter.Now(req.Context()); err != nil {
		return nil, err
	}
	return a.Converter.Status(a.Root), nil
}

// now collects. Once begun a pass goes on if its client goes: it is as well that it ends.
func (a *Admin) now(req *http.Request) (any, error) {
	if a.Collector == nil {
		return nil, errAccelerator
	}
	var r GCRequest
	if err := json.NewDecoder(http.MaxBytesReader(nil, req.Body, 64<<10)).Decode(&r); err != nil {
		return nil, errors.Join(errBad, err)
	}
	return a.Collector.Now(req.Context(), collect.Mode{Purge: r.Purge})
}

// deleted lists what can be brought back.
func (a *Admin) deleted(req *http.Request) (any, error) {
	items, err := a.Catalog.Deleted(req.Context(), req.URL.Query().Get("repository"))
	return Items{Items: items}, err
}

// delete deletes a tag with the image that nothing else names, an image, or a repository.
func (a *Admin) delete(req *http.Request) (any, error) {
	r, err := a.reference(req)
	if err != nil {
		return nil, err
	}
	ctx := context.WithoutCancel(req.Context())
	out := Items{Until: time.Now().Add(a.Window)}
	switch {
	case r.Tag != "":
		d, err := a.Catalog.Tag(ctx, r.Repository, r.Tag)
		if err != nil {
			return nil, err
		}
		if err := a.Catalog.DeleteTag(ctx, r.Repository, r.Tag); err != nil {
			return nil, err
		}
		out.Items = append(out.Items, catalog.DeletedItem{Repository: r.Repository, Tag: r.Tag, Digest: d})
		err = a.unlessNamed(ctx, r.Repository, d, &out)
		return out, err
	case r.Digest != "":
		err := a.image(ctx, r.Repository, r.Digest, &out)
		return out, err
	}
	manifests, err := a.Catalog.Manifests(ctx, r.Repository)
	if err != nil {
		return nil, err
	}
	for _, d := range manifests {
		if err := a.manifest(ctx, r.Repository, d, &out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// manifest deletes one, if it is there.
func (a *Admin) manifest(ctx context.Context, repo string, d digest.Digest, out *Items) error {
	err := a.Catalog.DeleteManifest(ctx, repo, d)
	if errors.Is(err, catalog.ErrNotFound) {
		return nil
	}
	if err == nil {
		out.Items = append(out.Items, catalog.DeletedItem{Repository: repo, Digest: d, Deleted: time.Now()})
	}
	return err
}

// image deletes a manifest, its referrers, and those that it names if nothing else does.
func (a *Admin) image(ctx context.Context, repo string, d digest.Digest, out *Items) error {
	f, err := a.Catalog.Family(ctx, repo, d)
	if err != nil {
		return err
	}
	if err := a.Catalog.DeleteManifest(ctx, repo, d); err != nil {
		return err
	}
	out.Items = append(out.Items, catalog.DeletedItem{Repository: repo, Digest: d, Deleted: time.Now()})
	for _, of := range [][]digest.Digest{f.Referrers, f.Children} {
		for _, d := range of {
			if err := a.unlessNamed(ctx, repo, d, out); err != nil {
				return err
			}
		}
	}
	return nil
}

// unlessNamed is image, unless a tag or an index names it, or it is gone.
func (a *Admin) unlessNamed(ctx context.Context, repo string, d digest.Digest, out *Items) error {
	f, err := a.Catalog.Family(ctx, repo, d)
	if err != nil || f.Named {
		return err
	}
	err = a.image(ctx, repo, d, out)
	if errors.Is(err, catalog.ErrNotFound) {
		err = nil
	}
	return err
}

// undelete brings back a tag or a manifest with what belongs to it, or all of a repository.
func (a *Admin) undelete(req *http.Request) (any, error) {
	r, err := a.reference(req)
	if err != nil {
		return nil, err
	}
	ctx := req.Context()
	all, err := a.Catalog.Deleted(ctx, r.Repository)
	if err != nil {
		return nil, err
	}
	wanted := all
	if r.Tag != "" || r.Digest != "" {
		wanted = nil
		family := map[digest.Digest]bool{}
		for _, it := range all {
			if r.Tag != "" && it.Tag == r.Tag {
				wanted = append(wanted, it)
				err = a.family(ctx, r.Repository, it.Digest, family)
			} else if r.Digest != "" && it.Digest == r.Digest && it.Tag != "" {
				wanted = append(wanted, it)
			}
			if err != nil {
				return nil, err
			}
		}
		if r.Digest != "" {
			if err := a.family(ctx, r.Repository, r.Digest, family); err != nil {
				return nil, err
			}
		}
		for _, it := range all {
			if it.Tag == "" && family[it.Digest] {
				wanted = append(wanted, it)
			}
		}
	}
	if len(wanted) == 0 {
		return nil, errors.Join(catalog.ErrNotFound, errors.New("nothing like that can be brought back: foil server undelete lists what can be"))
	}
	restored, err := a.Catalog.Undelete(ctx, r.Repository, wanted)
	return Items{Items: restored}, err
}

// family adds a manifest and all that belongs to it.
func (a *Admin) family(ctx context.Context, repo string, d digest.Digest, to map[digest.Digest]bool) error {
	if to[d] {
		return nil
	}
	to[d] = true
	f, err := a.Catalog.Family(ctx, repo, d)
	if err != nil {
		return err
	}
	for _, of := range [][]digest.Digest{f.Children, f.Referrers} {
		for _, d := range of {
			if err := a.family(ctx, repo, d, to); err != nil {
				return err
			}
		}
	}
	return nil
}
