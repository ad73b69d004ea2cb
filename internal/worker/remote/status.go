package remote

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// StatusError is a response that is not a success.
type StatusError struct {
	Method, URL string
	Status      int
	Message     string // the response's body, or what it says
	// Said is the response's body when it is one of the bundle protocol, or nil.
	Said *bundle.Error
	// After is how long the server asks not to be asked again, at most MostAfter; 0: it does not say.
	After time.Duration
}

// MostAfter bounds how long is waited because a server asks for it: readers wait
// as well.
const MostAfter = time.Minute

// Asked returns how long the server from which err is asks not to be asked again, at
// most MostAfter; 0: it does not say.
func Asked(err error) time.Duration {
	if status, ok := errors.AsType[*StatusError](err); ok {
		return status.After
	}
	return 0
}

// Unwrap returns Said.
func (e *StatusError) Unwrap() error {
	if e.Said == nil {
		return nil
	}
	return e.Said
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("%s %s: %d %s", e.Method, e.URL, e.Status, http.StatusText(e.Status))
	if e.Message != "" {
		s += ": " + e.Message
	}
	return s
}

// Final reports whether the same request would fail again.
func (e *StatusError) Final() bool {
	switch e.Status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported:
		return true
	}
	return e.Status < 500
}

// describe takes what a person should read out of an error's body: the message
// of the bundle protocol's or the registry's JSON, or the text.
func (e *StatusError) describe(body []byte) {
	var said bundle.Error
	var registry struct {
		Errors []struct{ Message string }
	}
	switch {
	case json.Unmarshal(body, &said) == nil && said.Code != "":
		e.Said, e.Message = &said, said.Message
	case json.Unmarshal(body, &registry) == nil && len(registry.Errors) > 0:
		e.Message = registry.Errors[0].Message
	default:
		e.Message = strings.TrimSpace(string(body))
	}
}
