// Package registry is the OCI distribution API (distribution-spec 1.1) over an
// object store and a catalog: pull, push, content discovery, content
// management.
//
// Bytes of blobs are objects (catalog.BlobKey); what a repository holds, tags
// and the bytes of manifests are in the catalog. A push is acknowledged when
// all of it is durable, in this order:
//
//	blob:      upload file synced, renamed into the object store, directories
//	           synced; catalog row committed; 201
//	manifest:  what it refers to is in the repository; catalog row and tags
//	           committed in one transaction; 201
//
// A crash between the steps leaves, at worst, an object that no repository
// holds, which the next start removes.
//
// Uploads under way are files in a directory of their own. They survive a
// restart, and are dropped when nothing was added for a week.
package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/limit"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/webhooks"
)

// Options configure a Registry.
type Options struct {
	Store   objects.Store        // required
	Catalog catalog.Repositories // required
	// Uploads is the directory of uploads under way, made when missing. On the
	// file system of the store a finished upload is renamed, not copied.
	// Required.
	Uploads string

	// Guard says who may do what; nil: everybody may everything.
	Guard *guard.Guard
	// Bounds is Catalog as far as there are quotas and immutable tags; nil: there are none.
	Bounds catalog.Bounded
	// OnManifest is called after a manifest was pushed and acknowledged, before
	// the handler returns: it must not block. ctx is that of the request.
	OnManifest func(ctx context.Context, repo string, m catalog.Manifest)
	// Heal makes the object of a blob again that is lost or cut; nil: nobody can.
	Heal func(ctx context.Context, d digest.Digest) error
	// Pulled is told of each blob that somebody gets from its beginning on, Shown of each manifest that somebody gets, and Pushed of
	// each blob that a repository gets; nil: nobody is. They must not block.
	Pulled func(req *http.Request, d digest.Digest)
	Shown  func(req *http.Request, m catalog.Manifest)
	Pushed func(d digest.Digest)
	// Webhooks is told of manifests that are pushed, pulled and deleted; nil: nobody is.
	Webhooks *webhooks.Sender
	// Room is asked before a request that adds bytes, or deletes something. Its error is answered; ENOSPC: the disk is
	// full. nil: there is room.
	Room func(adds bool) error
	// MaxManifest is the limit of a manifest's size in bytes; 0 means 4 MiB,
	// the least that clients may count on.
	MaxManifest int64
	// UploadExpiry is when an upload that nobody continues is dropped, unless the
	// Guard's limits say it; 0 means a week.
	UploadExpiry time.Duration
	// MaxPage is the limit of the names in one answer to a list request,
	// whatever n the client asks for; 0 means 10,000.
	MaxPage int
	// Heavy is where what is dear to read or to answer waits for its turn; nil: nothing does.
	Heavy *limit.Heavy[guard.Client]
	// Log takes what clients are not told; nil means slog.Default.
	Log *slog.Logger
}

// Registry answers requests below /v2/.
type Registry struct {
	opts    Options
	log     *slog.Logger
	uploads *uploads
	// blobs serialises, for each digest, making the object and recording it
	// against forgetting it and removing the object.
	blobs keyLock

	// hidden answers those who may not pull from a repository, as if there were none.
	hidden *Registry

	stop context.CancelFunc
	wg   sync.WaitGroup // the cleaner
}

// New returns a registry and begins to remove, in the background, what earlier
// crashes and forgotten uploads left behind. Close ends that.
func New(opts Options) (*Registry, error) {
	if opts.Store == nil || opts.Catalog == nil || opts.Uploads == "" {
		return nil, errors.New("start registry: a store, a catalog and a directory of uploads are required")
	}
	if opts.MaxManifest == 0 {
		opts.MaxManifest = 4 << 20
	}
	if opts.UploadExpiry == 0 {
		opts.UploadExpiry = 7 * 24 * time.Hour
	}
	if opts.MaxPage == 0 {
		opts.MaxPage = 10_000
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	uploads, err := openUploads(opts.Uploads, opts.Guard)
	if err != nil {
		return nil, fmt.Errorf("start registry: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	if opts.Room == nil {
		opts.Room = func(bool) error { return nil }
	}
	if opts.Pulled == nil {
		opts.Pulled = func(*http.Request, digest.Digest) {}
	}
	if opts.Shown == nil {
		opts.Shown = func(*http.Request, catalog.Manifest) {}
	}
	if opts.Pushed == nil {
		opts.Pushed = func(digest.Digest) {}
	}
	r := &Registry{opts: opts, log: opts.Log, uploads: uploads, stop: stop}
	opts.Catalog = catalog.Hide(opts.Catalog)
	r.hidden = &Registry{opts: opts, log: opts.Log}
	r.wg.Go(func() { r.clean(ctx) })
	return r, nil
}

// Close waits for the background work. Requests are the HTTP server's to end.
func (r *Registry) Close() error {
	r.stop()
	r.wg.Wait()
	return nil
}

// A handler answers one kind of request. name is the repository, arg what the
// route's * stands for. An error is written as the answer.
type handler func(r *Registry, w http.ResponseWriter, req *http.Request, name, arg string) error

// An endpoint is a handler with the right that it is for. What is not asked of the repository alone (where a mount
// is from, say) it asks itself.
type endpoint struct {
	answer handler
	right  access.Right
}

// methods are the endpoints of a route.
type methods map[string]endpoint

// routes are tried in order. A tail is what follows /v2/<name>/; names have
// slashes in them, so a route is found from the end of the path.
var routes = []struct {
	tail string
	methods
}{
	{"blobs/uploads/", methods{"POST": {(*Registry).postUpload, access.Push}}},
	{"blobs/uploads", methods{"POST": {(*Registry).postUpload, access.Push}}},
	{"blobs/uploads/*", methods{
		"GET": {(*Registry).getUpload, access.Push}, "PATCH": {(*Registry).patchUpload, access.Push},
		"PUT": {(*Registry).putUpload, access.Push}, "DELETE": {(*Registry).deleteUpload, access.Push},
	}},
	{"blobs/*", methods{
		"GET": {(*Registry).getBlob, access.Pull}, "HEAD": {(*Registry).getBlob, access.Pull},
		"DELETE": {(*Registry).deleteBlob, access.Delete},
	}},
	{"manifests/*", methods{
		"GET": {(*Registry).getManifest, access.Pull}, "HEAD": {(*Registry).getManifest, access.Pull},
		"PUT": {(*Registry).putManifest, access.Push}, "DELETE": {(*Registry).deleteManifest, access.Delete},
	}},
	{"tags/list", methods{"GET": {(*Registry).listTags, access.Pull}}},
	{"referrers/*", methods{"GET": {(*Registry).listReferrers, access.Pull}}},
}

// Endpoint is one endpoint of a repository, for tests that go over all of them.
type Endpoint struct {
	Method string
	Tail   string // follows /v2/NAME/; * stands for a digest, a tag or an upload
	Right  access.Right
}

// Endpoints returns all that ask for a right on a repository. Besides, there are /v2/ and /v2/_catalog, which lists what
// may be pulled.
func Endpoints() (all []Endpoint) {
	for _, route := range routes {
		for method, e := range route.methods {
			all = append(all, Endpoint{method, route.tail, e.right})
		}
	}
	return all
}

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	// Clients of before the OCI tell a registry by this.
	w.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
	if err := r.serve(w, req); err != nil {
		r.writeError(w, req, err)
	}
}

func (r *Registry) serve(w http.ResponseWriter, req *http.Request) error {
	switch req.URL.Path {
	case "/v2", "/v2/":
		return greet(r, w, req, "", methods{"GET": {answer: (*Registry).ping}, "HEAD": {answer: (*Registry).ping}})
	case "/v2/_catalog":
		return greet(r, w, req, "registry:catalog:*", methods{"GET": {answer: (*Registry).listRepositories}})
	}
	path, ok := strings.CutPrefix(req.URL.Path, "/v2/")
	if !ok {
		return errorf(notFound, "there is nothing at %s", req.URL.Path)
	}
	for _, route := range routes {
		name, arg, ok := match(path, route.tail)
		if !ok {
			continue
		}
		if err := checkName(name); err != nil {
			return err
		}
		return dispatch(r, w, req, name, arg, route.methods)
	}
	return errorf(notFound, "there is nothing at %s", req.URL.Path)
}

// dispatch answers a request about a repository, if its sender may.
func dispatch(r *Registry, w http.ResponseWriter, req *http.Request, name, arg string, m methods) error {
	e, err := choose(w, req, m)
	if err != nil {
		return err
	}
	err = r.opts.Guard.Check(req.Context(), e.right, name, arg)
	if guard.Hides(err) {
		r, err = r.hidden, nil
	}
	if err != nil {
		return err
	}
	if e.right != access.Pull {
		if err := r.opts.Room(e.right == access.Push && req.Method != http.MethodDelete); err != nil {
			return err
		}
	}
	return e.answer(r, w, req, name, arg)
}

// greet answers a request about no repository, where clients look for how to log in.
func greet(r *Registry, w http.ResponseWriter, req *http.Request, scope string, m methods) error {
	e, err := choose(w, req, m)
	if err == nil {
		err = r.opts.Guard.Known(req.Context(), scope)
	}
	if err != nil {
		return err
	}
	return e.answer(r, w, req, "", "")
}

func choose(w http.ResponseWriter, req *http.Request, m methods) (endpoint, error) {
	e, ok := m[req.Method]
	if !ok {
		for method := range m {
			w.Header().Add("Allow", method)
		}
		return e, errorf(unsupported, "%s is not a method of %s", req.Method, req.URL.Path)
	}
	return e, nil
}

// match splits a path into the repository's name and, for a tail that ends in
// *, its last element.
func match(path, tail string) (name, arg string, ok bool) {
	if prefix, wild := strings.CutSuffix(tail, "*"); wild {
		i := strings.LastIndexByte(path, '/') + 1
		path, arg, tail = path[:i], path[i:], prefix
		if arg == "" {
			return "", "", false
		}
	}
	name, ok = strings.CutSuffix(path, "/"+tail)
	return name, arg, ok
}

func (r *Registry) ping(w http.ResponseWriter, _ *http.Request, _, _ string) error {
	return writeJSON(w, http.StatusOK, "application/json", struct{}{})
}
