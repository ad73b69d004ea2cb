package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/guard"
)

// kind is what went wrong with a request.
type kind int

const (
	internal kind = iota
	blobUnknown
	uploadUnknown
	uploadInvalid
	chunkOutOfOrder
	digestInvalid
	sizeInvalid
	rangeInvalid
	manifestUnknown
	manifestInvalid
	manifestTooLarge
	manifestRefUnknown
	nameInvalid
	nameUnknown
	parameterInvalid
	unsupported
	notFound
	noSpace
	overQuota
	immutable
	uploadTooLarge
)

// wire is how each kind is told: the distribution-spec's code and the HTTP
// status. Of the 4xx the specification lists every code that may be used, and
// none for a bad query parameter or range.
var wire = map[kind]struct {
	code   string
	status int
}{
	internal:           {"INTERNAL", http.StatusInternalServerError},
	blobUnknown:        {"BLOB_UNKNOWN", http.StatusNotFound},
	uploadUnknown:      {"BLOB_UPLOAD_UNKNOWN", http.StatusNotFound},
	uploadInvalid:      {"BLOB_UPLOAD_INVALID", http.StatusBadRequest},
	chunkOutOfOrder:    {"BLOB_UPLOAD_INVALID", http.StatusRequestedRangeNotSatisfiable},
	digestInvalid:      {"DIGEST_INVALID", http.StatusBadRequest},
	sizeInvalid:        {"SIZE_INVALID", http.StatusBadRequest},
	rangeInvalid:       {"SIZE_INVALID", http.StatusRequestedRangeNotSatisfiable},
	manifestUnknown:    {"MANIFEST_UNKNOWN", http.StatusNotFound},
	manifestInvalid:    {"MANIFEST_INVALID", http.StatusBadRequest},
	manifestTooLarge:   {"MANIFEST_INVALID", http.StatusRequestEntityTooLarge},
	manifestRefUnknown: {"MANIFEST_BLOB_UNKNOWN", http.StatusNotFound},
	nameInvalid:        {"NAME_INVALID", http.StatusBadRequest},
	nameUnknown:        {"NAME_UNKNOWN", http.StatusNotFound},
	parameterInvalid:   {"UNSUPPORTED", http.StatusBadRequest},
	unsupported:        {"UNSUPPORTED", http.StatusMethodNotAllowed},
	notFound:           {"UNSUPPORTED", http.StatusNotFound},
	noSpace:            {"INSUFFICIENT_STORAGE", http.StatusInsufficientStorage},
	overQuota:          {"DENIED", http.StatusForbidden},
	immutable:          {"DENIED", http.StatusForbidden},
	uploadTooLarge:     {"SIZE_INVALID", http.StatusRequestEntityTooLarge},
}

// requestError is an error that the client is told, word for word.
type requestError struct {
	kind    kind
	message string
}

func (e *requestError) Error() string { return e.message }

func errorf(k kind, format string, args ...any) error {
	return &requestError{k, fmt.Sprintf(format, args...)}
}

// answerer is an error of a catalog or a store that knows what clients are to be
// told: that of an upstream, for instance.
type answerer interface {
	error
	Answer() (status int, code, message string)
	// RetryAfter is when to ask again; 0: it does not say.
	RetryAfter() time.Duration
}

// orUnknown turns catalog.ErrNotFound into an error of the kind that fits.
func orUnknown(err error, k kind, format string, args ...any) error {
	if _, ok := errors.AsType[answerer](err); ok {
		return err
	}
	if errors.Is(err, catalog.ErrNotFound) {
		return errorf(k, format, args...)
	}
	return err
}

func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// classify decides what a client is told of any error.
func classify(err error) *requestError {
	var e *requestError
	var refusal *catalog.Refusal
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &refusal) && refusal.Quota:
		return &requestError{overQuota, refusal.Message}
	case errors.As(err, &refusal):
		return &requestError{immutable, refusal.Message}
	case isNoSpace(err):
		return &requestError{noSpace, "the registry's disk is full; nothing was stored: free space on the server, then push again"}
	}
	return &requestError{internal, "the registry failed; its log says why"}
}

// refusedBy says which kinds are limits, as metrics have them.
var refusedBy = map[kind]string{overQuota: guard.LimitQuota, immutable: guard.LimitImmutable, uploadTooLarge: guard.LimitUploadBytes}

// apiError is one error in the specification's JSON.
type apiError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (r *Registry) writeError(w http.ResponseWriter, req *http.Request, err error) {
	if denied, ok := errors.AsType[*guard.Denied](err); ok {
		denied.Write(w)
		hearOut(w, req)
		return
	}
	e := classify(err)
	known := wire[e.kind]
	if limit, ok := refusedBy[e.kind]; ok {
		r.opts.Guard.Refused(limit)
	}
	if a, ok := errors.AsType[answerer](err); ok && e.kind == internal {
		known.status, known.code, e.message = a.Answer()
		bundle.SetRetryAfter(w.Header(), a.RetryAfter())
	}
	if known.status >= 500 {
		if errors.Is(err, context.Canceled) && req.Context().Err() != nil {
			return // the client went away: there is nobody to tell, and nothing wrong here
		}
		r.log.Error("request failed", "method", req.Method, "path", req.URL.Path, "error", err)
	}
	body := struct {
		Errors []apiError `json:"errors"`
	}{[]apiError{{known.code, e.message}}}
	if err := writeJSON(w, known.status, "application/json", body); err != nil {
		r.log.Error("answer not written", "method", req.Method, "path", req.URL.Path, "error", err)
	}
	hearOut(w, req)
}

// hearOut reads what a client goes on sending whose request was refused. The HTTP server has said
// that it closes the connection if more is to come than it reads itself.
func hearOut(w http.ResponseWriter, req *http.Request) {
	rc := http.NewResponseController(w)
	if req.ProtoMajor == 1 && rc.Flush() == nil && rc.SetReadDeadline(time.Now().Add(refused)) == nil {
		_, _ = io.Copy(io.Discard, req.Body)
	}
}

// refused is for how long what a client goes on sending is read, and thrown away, after
// its request was refused. A connection that is closed while somebody sends is reset,
// and who sends may lose the answer, which says why, with it.
const refused = 10 * time.Second

func writeJSON(w http.ResponseWriter, status int, mediaType string, body any) error {
	b, err := encodeJSON(body)
	if err == nil {
		writeEncoded(w, status, mediaType, b)
	}
	return err
}

func encodeJSON(body any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(body)
	return b.Bytes(), err
}

func writeEncoded(w http.ResponseWriter, status int, mediaType string, b []byte) {
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // a client that is gone learns nothing, which is no failure of ours
}
