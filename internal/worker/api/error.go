package api

import (
	"encoding/json"
	"errors"
	"net/http"
)

// The values of Error.Code.
const (
	CodeNotFound     = "not_found"    // no such image, container or repository
	CodeInvalid      = "invalid"      // the request makes no sense as it stands
	CodeUnauthorized = "unauthorized" // the registry refuses
	CodeConflict     = "conflict"     // in use, or exists already
	CodeUnavailable  = "unavailable"  // the server cannot be reached, or does not give it now
	CodeCorrupt      = "corrupt"      // bytes do not match their digest
	CodeNoSpace      = "no_space"     // the worker's disk is full
	CodeUnsupported  = "unsupported"  // this kernel or host cannot do it
	CodeInternal     = "internal"     // a bug, or an error nobody expected
)

// ServerAnswers is in messages of CodeUnavailable about servers that were reached.
const ServerAnswers = "the server answers"

// Codes are all of them.
var Codes = []string{CodeNotFound, CodeInvalid, CodeUnauthorized, CodeConflict, CodeUnavailable, CodeCorrupt, CodeNoSpace, CodeUnsupported, CodeInternal}

// statusOf is the one table from code to HTTP status. The status is for people
// with curl: programs read the code.
var statusOf = map[string]int{
	CodeNotFound:     http.StatusNotFound,
	CodeInvalid:      http.StatusBadRequest,
	CodeUnauthorized: http.StatusForbidden,
	CodeConflict:     http.StatusConflict,
	CodeUnavailable:  http.StatusBadGateway,
	CodeCorrupt:      http.StatusUnprocessableEntity,
	CodeNoSpace:      http.StatusInsufficientStorage,
	CodeUnsupported:  http.StatusNotImplemented,
	CodeInternal:     http.StatusInternalServerError,
}

// AsError returns the *Error in err's chain, with err's whole message, or wraps
// err as CodeInternal. It returns nil for nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return &Error{Code: e.Code, Message: err.Error()}
	}
	return &Error{Code: CodeInternal, Message: err.Error()}
}

// WriteError answers a request with err as an *Error and the HTTP status of
// its code.
func WriteError(w http.ResponseWriter, err error) {
	e := AsError(err)
	status, ok := statusOf[e.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	writeJSON(w, status, e)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The only errors are the client's hanging up and a value that cannot be
	// JSON, which the types of this package rule out.
	_ = json.NewEncoder(w).Encode(v)
}
