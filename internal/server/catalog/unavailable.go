package catalog

import (
	"net/http"
	"time"
)

// Unavailable is returned, wrapped, when the database of a catalog does not answer, or not now. Nothing may be concluded from it: a change
// may have been made.
type Unavailable struct{ Err error }

func (e *Unavailable) Error() string {
	return "the catalog's database does not answer: " + e.Err.Error()
}

func (e *Unavailable) Unwrap() error { return e.Err }

// Answer is what clients are told: a status, and a code and a message of the distribution API.
func (e *Unavailable) Answer() (status int, code, message string) {
	return http.StatusServiceUnavailable, "UNAVAILABLE", "the registry's database does not answer: try again later"
}

// RetryAfter is when they may come again.
func (e *Unavailable) RetryAfter() time.Duration { return 5 * time.Second }
