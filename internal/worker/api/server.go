package api

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// Service is what the daemon does, one method for each request. Errors that
// carry an *Error keep its code; others reach the client as CodeInternal.
type Service interface {
	// Pull starts the pull of an image, or joins the one that runs, and emits
	// its events until the one that req.Until names. When ctx ends, Pull
	// returns and the pull goes on. With req.Container it fails as CreateContainer
	// does, too, and the pull goes on then as well.
	Pull(ctx context.Context, req PullRequest, emit func(Event) error) error
	// PullReport fails with CodeNotFound when the daemon has not pulled the image since
	// it began.
	PullReport(ctx context.Context, ref string) (*PullReport, error)
	Images(ctx context.Context) ([]Image, error)
	// RemoveImage fails with CodeConflict while a container uses the image.
	RemoveImage(ctx context.Context, ref string) error
	// CreateContainer fails with CodeNotFound when the image is not mounted,
	// with CodeConflict when the ID is taken.
	CreateContainer(ctx context.Context, req ContainerRequest) (*Container, error)
	Containers(ctx context.Context) ([]Container, error)
	// RemoveContainer fails with CodeConflict while the container runs. One that
	// waits for its image goes, and the Pull that asked for it fails.
	RemoveContainer(ctx context.Context, id string) error
	// ContainerStarted takes what is known of a container's start, and again when
	// it is ready.
	ContainerStarted(ctx context.Context, id string, s Start) error
	// Commit makes an image of what a container has changed. It fails with CodeConflict while the container's image has
	// not arrived, or when the container changes files while they are read.
	Commit(ctx context.Context, id string, req CommitRequest) (*CommitReport, error)
	// Changes emits what a container has changed of its image. The last has Done set.
	Changes(ctx context.Context, id string, emit func(Change) error) error
	// TraceStatus and Trace fail with CodeNotFound when the container was not
	// made to be traced by this daemon.
	TraceStatus(ctx context.Context, id string) (*TraceStatus, error)
	Trace(ctx context.Context, id string, req TraceRequest) (*TraceResult, error)
	// Tags asks a registry for the tags of a repository.
	Tags(ctx context.Context, req TagsRequest) (*Tags, error)
	// TOC returns the encoded table of contents of an image, from its server
	// when it is not here.
	TOC(ctx context.Context, req AboutImage) ([]byte, error)
	// Startup returns what the image's server has of startup sets, Service one of
	// them, and ForgetStartup forgets one or all.
	Startup(ctx context.Context, req AboutImage) (*bundle.StartupReport, error)
	StartupService(ctx context.Context, req AboutImage) (*bundle.ServiceReport, error)
	ForgetStartup(ctx context.Context, req AboutImage) error
	// Verify compares every local byte of an image with its digest. The last
	// event has Done set.
	Verify(ctx context.Context, ref string, emit func(VerifyEvent) error) error
	// Prove has an image proven now, and waits. Its last event has Done set.
	Prove(ctx context.Context, ref string, emit func(VerifyEvent) error) error
	// GC frees what it can, or says what it would.
	GC(ctx context.Context, req GCRequest) (*GCReport, error)
	Status(ctx context.Context) (*Status, error)
}

// maxRequest bounds a request's body. Requests are names, flags and command
// lines.
const maxRequest = 4 << 20

// Handler serves s over HTTP as the package comment says.
func Handler(s Service) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/pulls", func(w http.ResponseWriter, r *http.Request) { pull(w, r, s) })
	mux.HandleFunc("GET /v1/pulls", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.PullReport(r.Context(), r.URL.Query().Get("ref"))
		answer(w, http.StatusOK, v, err)
	})
	mux.HandleFunc("POST /v1/verify", func(w http.ResponseWriter, r *http.Request) { verify(w, r, s.Verify) })
	mux.HandleFunc("POST /v1/prove", func(w http.ResponseWriter, r *http.Request) { verify(w, r, s.Prove) })
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.Images(r.Context())
		answer(w, http.StatusOK, nonNil(v), err)
	})
	mux.HandleFunc("DELETE /v1/images", func(w http.ResponseWriter, r *http.Request) {
		gone(w, s.RemoveImage(r.Context(), r.URL.Query().Get("ref")))
	})
	mux.HandleFunc("POST /v1/containers", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusCreated, s.CreateContainer)
	})
	mux.HandleFunc("GET /v1/containers", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.Containers(r.Context())
		answer(w, http.StatusOK, nonNil(v), err)
	})
	mux.HandleFunc("DELETE /v1/containers/{id}", func(w http.ResponseWriter, r *http.Request) {
		gone(w, s.RemoveContainer(r.Context(), r.PathValue("id")))
	})
	mux.HandleFunc("POST /v1/containers/{id}/start", func(w http.ResponseWriter, r *http.Request) {
		tell(w, r, func(ctx context.Context, req Start) error {
			return s.ContainerStarted(ctx, r.PathValue("id"), req)
		})
	})
	mux.HandleFunc("POST /v1/containers/{id}/commit", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusCreated, func(ctx context.Context, req CommitRequest) (*CommitReport, error) {
			return s.Commit(ctx, r.PathValue("id"), req)
		})
	})
	mux.HandleFunc("POST /v1/containers/{id}/changes", func(w http.ResponseWriter, r *http.Request) { changes(w, r, s) })
	mux.HandleFunc("GET /v1/containers/{id}/trace", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.TraceStatus(r.Context(), r.PathValue("id"))
		answer(w, http.StatusOK, v, err)
	})
	mux.HandleFunc("POST /v1/containers/{id}/trace", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusOK, func(ctx context.Context, req TraceRequest) (*TraceResult, error) {
			return s.Trace(ctx, r.PathValue("id"), req)
		})
	})
	mux.HandleFunc("POST /v1/startup", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusOK, s.Startup)
	})
	mux.HandleFunc("POST /v1/startup/service", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusOK, s.StartupService)
	})
	mux.HandleFunc("POST /v1/startup/forget", func(w http.ResponseWriter, r *http.Request) {
		tell(w, r, s.ForgetStartup)
	})
	mux.HandleFunc("POST /v1/tags", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusOK, s.Tags)
	})
	mux.HandleFunc("POST /v1/toc", func(w http.ResponseWriter, r *http.Request) { toc(w, r, s) })
	mux.HandleFunc("POST /v1/gc", func(w http.ResponseWriter, r *http.Request) {
		ask(w, r, http.StatusOK, s.GC)
	})
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.Status(r.Context())
		answer(w, http.StatusOK, v, err)
	})
	return mux
}

// pull answers with events. An error is the last of them if it comes after others.
func pull(w http.ResponseWriter, r *http.Request, s Service) {
	req, err := decode[PullRequest](w, r)
	if err != nil {
		WriteError(w, err)
		return
	}
	out := &stream{w: w}
	var last Event
	err = s.Pull(r.Context(), req, func(ev Event) error {
		last = ev
		return out.send(ev)
	})
	switch {
	case err == nil:
	case !out.begun:
		WriteError(w, err)
	case last.Err == "":
		e := AsError(err)
		last.Event, last.Err, last.Code = Failed, e.Message, e.Code
		_ = out.send(last) // the client may be gone: nobody is left to tell
	}
}

// verify answers as pull does.
func verify(w http.ResponseWriter, r *http.Request, of func(ctx context.Context, ref string, emit func(VerifyEvent) error) error) {
	out := &stream{w: w}
	var last VerifyEvent
	err := of(r.Context(), r.URL.Query().Get("ref"), func(ev VerifyEvent) error {
		last = ev
		return out.send(ev)
	})
	switch {
	case err == nil:
	case !out.begun:
		WriteError(w, err)
	case last.Err == "":
		e := AsError(err)
		last.Bad, last.Err, last.Code = "", e.Message, e.Code
		_ = out.send(last)
	}
}

// changes answers as pull does.
func changes(w http.ResponseWriter, r *http.Request, s Service) {
	out := bufio.NewWriterSize(w, 64<<10) // there may be very many
	lines, begun := json.NewEncoder(out), false
	err := s.Changes(r.Context(), r.PathValue("id"), func(c Change) error {
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			begun = true
		}
		return lines.Encode(c)
	})
	if err != nil {
		e := AsError(err)
		if !begun {
			WriteError(w, err)
			return
		}
		_ = lines.Encode(Change{Err: e.Message, Code: e.Code})
	}
	_ = out.Flush() // the client may be gone: nobody is left to tell
}

func toc(w http.ResponseWriter, r *http.Request, s Service) {
	req, err := decode[AboutImage](w, r)
	var b []byte
	if err == nil {
		b, err = s.TOC(r.Context(), req)
	}
	if err != nil {
		WriteError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	_, _ = w.Write(b)
}

func decode[T any](w http.ResponseWriter, r *http.Request) (T, error) {
	var v T
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	// A field that this daemon does not know is a newer client's: to ignore it
	// would do something other than what was asked.
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return v, &Error{CodeInvalid, "request body: " + err.Error()}
	}
	return v, nil
}

// nonNil makes an empty list [] in JSON, not null.
func nonNil[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// ask passes a request's body to fn, and answers with what fn returns.
func ask[Q, A any](w http.ResponseWriter, r *http.Request, status int, fn func(context.Context, Q) (A, error)) {
	req, err := decode[Q](w, r)
	if err != nil {
		WriteError(w, err)
		return
	}
	v, err := fn(r.Context(), req)
	answer(w, status, v, err)
}

// tell passes a request's body to fn, which has no answer.
func tell[Q any](w http.ResponseWriter, r *http.Request, fn func(context.Context, Q) error) {
	req, err := decode[Q](w, r)
	if err == nil {
		err = fn(r.Context(), req)
	}
	gone(w, err)
}

func answer(w http.ResponseWriter, status int, v any, err error) {
	if err != nil {
		WriteError(w, err)
		return
	}
	writeJSON(w, status, v)
}

func gone(w http.ResponseWriter, err error) {
	if err != nil {
		WriteError(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// stream writes one JSON object a line, each sent at once.
type stream struct {
	w     http.ResponseWriter
	begun bool
}

func (s *stream) send(v any) error {
	if !s.begun {
		s.w.Header().Set("Content-Type", "application/x-ndjson")
		s.begun = true
	}
	if err := json.NewEncoder(s.w).Encode(v); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}
