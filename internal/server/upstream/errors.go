package upstream

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/server/catalog"
)

// Kind is what an upstream's failure means to who asks.
type Kind int

const (
	// Down: it cannot be reached, or says that it has trouble.
	Down Kind = iota
	// Busy: it wants fewer requests.
	Busy
	// Missing: it says that there is no such thing.
	Missing
	// Denied: it does not let these credentials.
	Denied
	// Wrong: its answer is none that a registry gives, or has other bytes than
	// its digest says.
	Wrong
)

// kinds says what each means to clients: the status and code of the
// distribution API, the code of a bundle, and what to do.
var kinds = map[Kind]struct {
	status       int
	code, bundle string
	advice       string
}{
	Down:    {http.StatusServiceUnavailable, "UNAVAILABLE", bundle.CodeUnavailable, "try again when it can be reached; what is here already can be pulled"},
	Busy:    {http.StatusTooManyRequests, "TOOMANYREQUESTS", bundle.CodeUnavailable, "try again later, or give the server credentials that have a higher limit"},
	Missing: {http.StatusNotFound, "", bundle.CodeNotFound, "check the name, or push it to the upstream"},
	Denied:  {http.StatusForbidden, "DENIED", bundle.CodeUnauthorized, "give the server credentials that may pull it: --upstream-auth, " + AuthEnv + " or its user's Docker configuration"},
	Wrong:   {http.StatusBadGateway, "UPSTREAM", bundle.CodeUnavailable, "look at the upstream's address, its storage, and what is between it and this server"},
}

// Error is a failure of the upstream.
type Error struct {
	Upstream string // its URL
	What     string // what was asked for, as "manifest redis:7"
	Kind     Kind
	Detail   string // what happened
	// After is when it wants to be asked again; 0: not said.
	After time.Duration
	Err   error // the cause, or nil
	// said: the answer was one of a registry, not of something in front of it.
	said bool
	// code is that of the distribution API, when it said one.
	code string
	// challenge is how the upstream wants to be logged in to: of an answer 401. unauthorized: it was one.
	challenge    string
	unauthorized bool
	// advice replaces that of Kind, unless empty.
	advice string
}

func (e *Error) Error() string {
	advice := e.advice
	if advice == "" {
		advice = kinds[e.Kind].advice
	}
	detail := e.Detail
	if e.Err != nil {
		if detail != "" {
			detail += ": "
		}
		detail += e.Err.Error()
	}
	return fmt.Sprintf("upstream %s: %s: %s: %s", e.Upstream, e.What, detail, advice)
}

func (e *Error) Unwrap() error { return e.Err }

// Is makes what is missing there missing here.
func (e *Error) Is(target error) bool { return e.Kind == Missing && target == catalog.ErrNotFound }

// As tells workers what happened.
func (e *Error) As(target any) bool {
	t, ok := target.(**bundle.Error)
	if ok {
		*t = &bundle.Error{Code: kinds[e.Kind].bundle, Message: e.Error()}
	}
	return ok
}

// Answer tells clients of the distribution API what happened.
func (e *Error) Answer() (status int, code, message string) {
	k := kinds[e.Kind]
	code = k.code
	if e.Kind == Missing {
		switch code = e.code; {
		case code != "":
		case strings.HasPrefix(e.What, "blob"):
			code = "BLOB_UNKNOWN"
		case strings.HasPrefix(e.What, "manifest"):
			code = "MANIFEST_UNKNOWN"
		default:
			code = "NAME_UNKNOWN"
		}
	}
	return k.status, code, e.Error()
}

// RetryAfter is how long clients should wait before they ask again; 0: not said.
func (e *Error) RetryAfter() time.Duration { return e.After }

// bridged reports whether what is here may be served in place of an answer.
func bridged(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && (e.Kind == Down || e.Kind == Busy || e.Kind == Wrong)
}

// again reports whether another try may end differently.
func again(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.advice == "" && (e.Kind == Down || e.Kind == Busy)
}

// maxErrorBody is read of an answer that says what is wrong.
const maxErrorBody = 16 << 10

// wireError is one error of the distribution API.
type wireError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

type wireErrors struct {
	Errors []wireError `json:"errors"`
}

func writeErrors(w io.Writer, code, message string) error {
	return json.NewEncoder(w).Encode(wireErrors{[]wireError{{code, message}}})
}

// parseErrors reads the first error of a body, cut to what fits into a line.
func parseErrors(b []byte) (e wireError, ok bool) {
	var body wireErrors
	if json.Unmarshal(b, &body) != nil || len(body.Errors) == 0 || body.Errors[0].Code == "" {
		return e, false
	}
	e = body.Errors[0]
	e.Code, e.Message = line(e.Code, 64), line(e.Message, 300)
	return e, true
}

// line makes foreign text fit for one line of a log.
func line(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// statusError makes an Error of an answer that is no success, and reads its body.
func (c *client) statusError(resp *http.Response, what string) *Error {
	e := &Error{Upstream: c.String(), What: what, Detail: resp.Status, said: true}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what came is enough
	if w, ok := parseErrors(b); ok {
		e.code = w.Code
		e.Detail += " (" + strings.TrimSuffix(w.Code+": "+w.Message, ": ") + ")"
	} else if resp.Request.Method != http.MethodHead {
		e.said = false
	}
	switch s := resp.StatusCode; {
	case s == http.StatusUnauthorized || s == http.StatusForbidden:
		e.Kind = Denied
		e.unauthorized, e.challenge = s == http.StatusUnauthorized, strings.Join(resp.Header.Values("Www-Authenticate"), ", ")
	case s == http.StatusNotFound || s == http.StatusGone:
		e.Kind = Missing
	case s == http.StatusTooManyRequests:
		e.Kind, e.After = Busy, bundle.RetryAfter(resp.Header, time.Now())
	case s == http.StatusRequestTimeout || s >= 500:
		e.Kind, e.After = Down, bundle.RetryAfter(resp.Header, time.Now())
	default:
		e.Kind = Wrong
	}
	if host := resp.Request.URL.Host; host != c.base.Host {
		e.Detail += ", from " + host + ", which it redirected to"
		if e.Kind == Missing || e.Kind == Denied {
			// The registry found it; what keeps its bytes did not.
			e.Kind = Wrong
		}
	}
	return e
}

// wrong is an Error about an answer's content.
func (c *client) wrong(what, format string, args ...any) *Error {
	return &Error{Upstream: c.String(), What: what, Kind: Wrong, Detail: fmt.Sprintf(format, args...)}
}

// failed makes an Error of what kept a request from being answered.
func (c *client) failed(ctx context.Context, what string, err error) error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("upstream %s: %s: %w", c, what, context.Canceled)
	}
	// Its text has the URL, and that of a store may be a permission.
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	e := &Error{Upstream: c.String(), What: what, Kind: Down, Err: err}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		e.advice = "if its certificate is right, name the certificates that vouch for it with --upstream-ca"
	} else if strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") {
		e.advice = "it speaks plain HTTP: write http:// if that is meant"
	}
	return e
}
