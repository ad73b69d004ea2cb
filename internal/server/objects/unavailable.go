package objects

import (
	"fmt"
	"net/http"
	"time"
)

// UnavailableError says that a store does not answer, or not as it should: what was asked of it may work later. It never
// means that an object is lost or damaged.
type UnavailableError struct {
	Op, Key string
	// Reason is what was seen last. It is no error that others may take for one of an object's bytes.
	Reason string
	// After is when to ask again; 0: the store does not say.
	After time.Duration
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("%s object %s: the object store is not available: %s", e.Op, e.Key, e.Reason)
}

// Answer is what a client of the registry is told.
func (e *UnavailableError) Answer() (status int, code, message string) {
	return http.StatusServiceUnavailable, "UNAVAILABLE", "the registry's object store does not answer: try again later"
}

// RetryAfter is when to ask again.
func (e *UnavailableError) RetryAfter() time.Duration { return max(e.After, 5*time.Second) }
