package login

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/server/access"
)

// TokenPath is where the built-in token service answers.
const TokenPath = "/token"

// maxForm bounds the body of a request for a token.
const maxForm = 64 << 10

// grants are the values of grant_type.
const (
	grantPassword = "password"
	grantRefresh  = "refresh_token"
	grantExchange = "urn:ietf:params:oauth:grant-type:token-exchange"
)

// answer is what the token service gives. Clients of before OAuth look for Token.
type answer struct {
	Token     string    `json:"token"`
	Access    string    `json:"access_token"`
	Kind      string    `json:"token_type"`
	Issued    string    `json:"issued_token_type,omitempty"`
	ExpiresIn int       `json:"expires_in"` // seconds
	IssuedAt  time.Time `json:"issued_at"`
	Refresh   string    `json:"refresh_token,omitempty"`
}

// Token answers a request for a token: GET, with credentials as any request has them; or POST of a form, as
// OAuth 2 has it: by password, by a refresh token, or in exchange for an issuer's token. Who shows nothing gets
// a token of anonymous: some clients go on only with one. A token does not depend on the scope that is
// asked for. For a token of this service there is another one, which ends when it does: what kubelets are given as a password is one.
// Errors: *Error.
func (l *Logins) Token(req *http.Request, w http.ResponseWriter, address netip.Addr) (*Identity, error) {
	if l.external != nil || !l.challenges() {
		return nil, &Error{Way: WayToken, Message: "this server gives no tokens"}
	}
	id, offline, err := l.applicant(req, w, address)
	if err != nil {
		return nil, err
	}
	lifetime := time.Duration(l.c.Tokens.Lifetime)
	if !id.expires.IsZero() {
		lifetime = min(lifetime, time.Until(id.expires))
	}
	a := answer{Kind: "Bearer", ExpiresIn: int(lifetime.Seconds()), IssuedAt: time.Now().UTC().Truncate(time.Second)}
	if a.Token, err = l.sign(id, useAccess, lifetime); err != nil {
		return nil, err
	}
	a.Access = a.Token
	if req.PostForm.Get("grant_type") == grantExchange {
		a.Issued = "urn:ietf:params:oauth:token-type:access_token"
	}
	if offline && id.password != "" {
		if a.Refresh, err = l.sign(id, useRefresh, time.Duration(l.c.Tokens.Refresh)); err != nil {
			return nil, err
		}
	}
	b, err := json.Marshal(a)
	if err != nil {
		return nil, err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(b) // the client has gone if this fails
	return id, nil
}

// applicant finds out who wants a token, and whether also one to refresh it.
func (l *Logins) applicant(req *http.Request, w http.ResponseWriter, address netip.Addr) (id *Identity, offline bool, err error) {
	wrong := func(format string, args ...any) (*Identity, bool, error) {
		return nil, false, &Error{Way: WayToken, Message: fmt.Sprintf(format, args...)}
	}
	if req.Method == http.MethodPost {
		req.Body = http.MaxBytesReader(w, req.Body, maxForm)
		if err := req.ParseForm(); err != nil {
			return wrong("the form of the request cannot be read")
		}
	}
	q := req.URL.Query()
	if req.Method == http.MethodPost {
		q = req.PostForm
	}
	if s := q.Get("service"); s != "" && s != l.c.Tokens.Service {
		return wrong("this is the token service of %s, not of %.100q", l.c.Tokens.Service, s)
	}
	grant := q.Get("grant_type")
	defer func() {
		// A token gives another one that ends when it does, and none to refresh that: together they would never expire.
		if err == nil && id.Way == WayToken && grant != grantRefresh {
			offline = false
		}
	}()
	if req.Method != http.MethodPost {
		id, err = l.Identify(req, address)
		return id, q.Get("offline_token") == "true", err
	}
	offline = q.Get("access_type") == "offline"
	switch grant {
	case grantPassword:
		id, err = l.basic(req.Context(), q.Get("username"), q.Get("password"), address)
	case grantRefresh:
		raw := q.Get("refresh_token")
		if from, perr := issuerOf(raw); perr != nil || from.issuer != l.c.Tokens.Service {
			// docker login with an issuer's token keeps it as one to refresh with.
			id, err = l.token(req.Context(), raw, address)
			break
		}
		id, err = l.own(raw, useRefresh)
	case grantExchange:
		id, err = l.token(req.Context(), q.Get("subject_token"), address)
	default:
		return wrong("grant_type %.100q: want %s, %s or %s", grant, grantPassword, grantRefresh, grantExchange)
	}
	return id, offline, err
}

// challenges reports whether clients are told to get a token.
func (l *Logins) challenges() bool {
	return l.users != nil || l.external != nil || len(l.issuers) > 0 || l.certs != nil
}

var hostPattern = regexp.MustCompile(`^[A-Za-z0-9.:_\[\]-]+$`)

// Challenge is what WWW-Authenticate says to who has to log in for a scope; empty: there is no way to. invalid
// says that there were credentials, which do not count.
func (l *Logins) Challenge(req *http.Request, scope string, invalid bool) string {
	if !l.challenges() {
		return ""
	}
	realm, service := l.c.Tokens.URL, l.c.Tokens.Service
	switch {
	case l.external != nil:
		realm, service = l.external.c.URL, l.external.c.Service
	case realm != "":
		realm = strings.TrimSuffix(realm, "/") + TokenPath
	default:
		scheme := "http"
		if req.TLS != nil {
			scheme = "https"
		}
		host := req.Host
		if !hostPattern.MatchString(host) {
			host = "localhost" // it would break out of the quotes
		}
		realm = scheme + "://" + host + TokenPath
	}
	s := fmt.Sprintf(`Bearer realm="%s",service="%s"`, realm, service)
	if scope != "" {
		s += fmt.Sprintf(`,scope="%s"`, scope)
	}
	if invalid {
		s += `,error="invalid_token"`
	}
	return s
}

// Scope is what clients ask a token service for to use a right.
func Scope(right access.Right, repository string) string {
	if repository == "" {
		return ""
	}
	actions := right.String()
	switch right {
	case access.Push:
		actions = "pull,push"
	case access.Teach:
		actions = "pull,teach"
	}
	return "repository:" + repository + ":" + actions
}

// IsError returns the login's error in err.
func IsError(err error) (*Error, bool) { return errors.AsType[*Error](err) }
