package bundles

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
	"hydrofoil.dev/foil/internal/server/objects"
)

// statuses says how an error's code is told before the stream has begun.
var statuses = map[string]int{
	bundle.CodeNotFound:     http.StatusNotFound,
	bundle.CodeInvalid:      http.StatusBadRequest,
	bundle.CodeUnauthorized: http.StatusUnauthorized,
	bundle.CodeUnsupported:  http.StatusUnprocessableEntity,
	bundle.CodeUnavailable:  http.StatusServiceUnavailable,
	bundle.CodeCorrupt:      http.StatusInternalServerError,
	bundle.CodeInternal:     http.StatusInternalServerError,
}

// wireError turns any error into what the worker is told about the image ref.
// Its first match in this order counts; what is said of the server's own
// trouble names no paths and keys, the log does.
func wireError(err error, ref string) *bundle.Error {
	var e *bundle.Error
	code, message := bundle.CodeInternal, "the server failed; its log says how"
	switch {
	case isBeyond(err):
		return &bundle.Error{Code: bundle.CodeUnavailable, Message: err.Error(), Ref: ref}
	case isDenied(err):
		return &bundle.Error{Code: bundle.CodeUnauthorized, Message: err.Error(), Ref: ref}
	case errors.As(err, &e):
		if e.Ref == "" && ref != "" {
			e = &bundle.Error{Code: e.Code, Message: e.Message, Ref: ref}
		}
		return e
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		code, message = bundle.CodeUnavailable, "the server stopped working on it; try again"
	case isAway(err):
		code, message = bundle.CodeUnavailable, "the server's object store does not answer; try again"
	case errors.Is(err, syscall.ENOSPC):
		code, message = bundle.CodeUnavailable, "the server's disk is full; free space there and try again"
	case isDamage(err), errors.Is(err, catalog.ErrNotFound):
		code, message = bundle.CodeCorrupt, "bytes of it are missing or damaged on the server; push the image again"
	}
	return &bundle.Error{Code: code, Message: message, Ref: ref}
}

func isDenied(err error) bool {
	_, ok := errors.AsType[*guard.Denied](err)
	return ok
}

// isAway reports whether objects cannot be had now.
func isAway(err error) bool {
	_, ok := errors.AsType[*objects.UnavailableError](err)
	return ok
}

// isBeyond reports whether a client is to wait, and nothing is wrong here.
func isBeyond(err error) bool {
	_, ok := errors.AsType[*guard.Beyond](err)
	return ok
}

// errDamaged is returned, wrapped, when stored bytes are not what their digest
// says.
var errDamaged = errors.New("stored bytes are damaged")

// retryAfter is an error of an upstream, or of the guard, that says when to ask again; 0: it does not.
type retryAfter interface {
	error
	RetryAfter() time.Duration
}

func writeError(w http.ResponseWriter, log *slog.Logger, err error, ref string) {
	e := wireError(err, ref)
	status, ok := statuses[e.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	if isBeyond(err) {
		status = http.StatusTooManyRequests
	}
	if status >= 500 {
		log.Error("bundle failed", "image", ref, "error", err)
	}
	if denied, ok := errors.AsType[*guard.Denied](err); ok {
		if denied.SetChallenge(w); !denied.Unknown {
			status = http.StatusForbidden
		}
	}
	if asks, ok := errors.AsType[retryAfter](err); ok {
		bundle.SetRetryAfter(w.Header(), asks.RetryAfter())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(e) // the client has gone if this fails
}
