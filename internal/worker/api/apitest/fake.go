// Package apitest is a stand-in for the daemon in tests of what talks to it.
package apitest

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Daemon answers each request by the function for it. A request whose function
// is nil fails with api.CodeUnsupported.
type Daemon struct {
	// Pull and Verify call emit for each event. An error that they return is
	// the answer when nothing was emitted before, the last line otherwise.
	Pull            func(ctx context.Context, req api.PullRequest, emit func(api.Event)) error
	Verify          func(ctx context.Context, ref string, emit func(api.VerifyEvent)) error
	Images          func() ([]api.Image, error)
	RemoveImage     func(ref string) error
	CreateContainer func(req api.ContainerRequest) (*api.Container, error)
	Containers      func() ([]api.Container, error)
	RemoveContainer func(id string) error
	Status          func() (*api.Status, error)
}

// Start serves d on the socket of a worker at root until stop is called.
func (d *Daemon) Start(root string) (stop func(), err error) {
	path := api.SocketPath(root)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	srv := httptest.NewUnstartedServer(d)
	srv.Listener.Close() // of a TCP port that nobody asked for
	srv.Listener = l
	srv.Start()
	return srv.Close, nil
}

// ServeHTTP implements the daemon's HTTP interface.
func (d *Daemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ref := r.URL.Query().Get("ref")
	mux := http.NewServeMux()
	handle(mux, "GET /v1/images", d.Images != nil, func() (any, error) { return d.Images() })
	handle(mux, "DELETE /v1/images", d.RemoveImage != nil, func() (any, error) { return nil, d.RemoveImage(ref) })
	handle(mux, "GET /v1/containers", d.Containers != nil, func() (any, error) { return d.Containers() })
	handle(mux, "POST /v1/containers", d.CreateContainer != nil, func() (any, error) {
		var req api.ContainerRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			return nil, err
		}
		return d.CreateContainer(req)
	})
	mux.HandleFunc("DELETE /v1/containers/{id}", func(w http.ResponseWriter, r *http.Request) {
		if d.RemoveContainer == nil {
			answer(w, nil, unsupported(r))
			return
		}
		answer(w, nil, d.RemoveContainer(r.PathValue("id")))
	})
	handle(mux, "GET /v1/status", d.Status != nil, func() (any, error) { return d.Status() })
	mux.HandleFunc("POST /v1/pulls", func(w http.ResponseWriter, r *http.Request) {
		if d.Pull == nil {
			answer(w, nil, unsupported(r))
			return
		}
		var req api.PullRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			answer(w, nil, err)
			return
		}
		var last api.Event
		begun := false
		err := d.Pull(r.Context(), req, func(ev api.Event) {
			last, begun = ev, true
			line(w, ev)
		})
		switch {
		case err != nil && begun:
			e := asError(err)
			last.Event, last.Err, last.Code = api.Failed, e.Message, e.Code
			line(w, last)
		case err != nil:
			answer(w, nil, err)
		}
	})
	mux.HandleFunc("POST /v1/verify", func(w http.ResponseWriter, r *http.Request) {
		if d.Verify == nil {
			answer(w, nil, unsupported(r))
			return
		}
		begun := false
		err := d.Verify(r.Context(), ref, func(ev api.VerifyEvent) {
			begun = true
			line(w, ev)
		})
		switch {
		case err != nil && begun:
			e := asError(err)
			line(w, api.VerifyEvent{Err: e.Message, Code: e.Code})
		case err != nil:
			answer(w, nil, err)
		}
	})
	mux.ServeHTTP(w, r)
}

func handle(mux *http.ServeMux, pattern string, known bool, fn func() (any, error)) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		if !known {
			answer(w, nil, unsupported(r))
			return
		}
		v, err := fn()
		answer(w, v, err)
	})
}

func unsupported(r *http.Request) error {
	return &api.Error{Code: api.CodeUnsupported, Message: "this fake daemon has no " + r.Method + " " + r.URL.Path}
}

func asError(err error) *api.Error {
	if e, ok := errors.AsType[*api.Error](err); ok {
		return e
	}
	return &api.Error{Code: api.CodeInternal, Message: err.Error()}
}

// statusOf lets the client see some of the statuses that mean failure. It goes
// by the code alone.
var statusOf = map[string]int{
	api.CodeNotFound: http.StatusNotFound,
	api.CodeConflict: http.StatusConflict,
	api.CodeInvalid:  http.StatusBadRequest,
}

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	switch {
	case err != nil:
		e := asError(err)
		status, ok := statusOf[e.Code]
		if !ok {
			status = http.StatusInternalServerError
		}
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(e)
	case v == nil:
		w.WriteHeader(http.StatusNoContent)
	default:
		_ = json.NewEncoder(w).Encode(v)
	}
}

// line sends one event at once. The client may have left, which is its right.
func line(w http.ResponseWriter, v any) {
	_ = json.NewEncoder(w).Encode(v)
	_ = http.NewResponseController(w).Flush()
}
