// Package login finds out who sends a request. What they may do is package access's to say.
//
// # Ways
//
// Several may be configured at once, and each gives subjects of its own kind (package access):
//
//   - a name and a password, of an htpasswd file with bcrypt hashes (user:NAME);
//   - a token of the issuers that the configuration lists, OIDC ID tokens and the projected tokens
//     of CI systems and of Kubernetes (ISSUER:NAME, by rules on their claims);
//   - a client certificate (cert:NAME);
//   - a token of an external token service of the Distribution kind (token:NAME);
//   - nothing: anonymous.
//
// A password is sent as HTTP Basic; so may be an issuer's token, in place of the password, whatever
// the name beside it: that is what docker login can do. A token may be a Bearer as well.
// Credentials that are wrong are refused, and never count as none.
//
// # Tokens
//
// The built-in token service (ServeToken, at TokenPath) gives tokens to who shows one of these: JWTs, signed
// with HMAC-SHA256 by keys that only this server has (Keys). A token says who, and nothing of rights, which
// are looked up at each request. It holds for Config.Tokens.Lifetime. A token of a user holds as long as the
// user's line in the password file is the one that it was given for. A user who asks for
// offline_token gets a refresh token too, which counts at the token service only.
//
// An external token service takes the place of the built-in one. What its tokens say about rights
// (access) is a bound: rules decide, within it.
//
// # What a stranger can cost
//
// At most half of the processors compute bcrypt, for no more than maxWaiting requests; others are told to come
// later. Names that are not in the file cost as much as those that are. What was found
// right is remembered, by a keyed hash. Each failure of an address counts: after failBurst of them it has one try
// each failEvery (an IPv6 network of 64 bits is one address). What is remembered, and tokens that are
// valid, are not slowed down.
package login

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/access"
)

// Config is what the configuration says about logins. Its zero value knows nobody.
type Config struct {
	Passwords    Passwords      `toml:"passwords"`
	Tokens       Tokens         `toml:"tokens"`
	External     External       `toml:"external-tokens"`
	Certificates Certificates   `toml:"certificates"`
	Issuers      []IssuerConfig `toml:"issuer"`
}

// Passwords is the htpasswd file.
type Passwords struct {
	File string `toml:"file"`
}

// Tokens is the built-in token service.
type Tokens struct {
	// Service is the audience of its tokens; empty means "foil".
	Service string `toml:"service"`
	// URL is where clients find TokenPath; empty: where they have sent their request.
	URL string `toml:"url"`
	// Lifetime of a token; 0 means 5 minutes.
	Lifetime Duration `toml:"lifetime"`
	// Refresh is the lifetime of a refresh token; 0 means 30 days.
	Refresh Duration `toml:"refresh"`
}

// External is another token service.
type External struct {
	URL     string `toml:"url"`     // where clients get tokens
	Service string `toml:"service"` // their audience
	Issuer  string `toml:"issuer"`
	Keys    string `toml:"keys"` // URL or file of a JSON web key set
	CA      string `toml:"ca"`   // file with certificates that vouch for Keys' server
}

// Certificates are those of clients.
type Certificates struct {
	CA string `toml:"ca"` // file with the certificates of who issues them
	// Name says what of a certificate is its owner's name: "common-name" (the default), "dns", "email"
	// or "uri".
	Name string `toml:"name"`
}

// Duration is a time.Duration in the configuration.
type Duration time.Duration

// UnmarshalText reads "5m".
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err == nil && v <= 0 {
		err = fmt.Errorf("%s: want more than nothing", b)
	}
	*d = Duration(v)
	return err
}

// Identity is who sends a request, and how that is known.
type Identity struct {
	access.Subject
	// Way is one of Ways.
	Way string
	// Shown says that the request had credentials: a token of an anonymous one is some.
	Shown bool
	// Bound is what an external token service grants; nil: everything that rules allow.
	Bound []Bound

	password string    // of a user: the state of the line in the password file
	expires  time.Time // of who has shown one of the server's own tokens: when that ends
}

// Bound is what an external token service grants for a repository.
type Bound struct {
	Type    string   `json:"type"` // "repository", "registry"
	Name    string   `json:"name"`
	Actions []string `json:"actions"`
}

// Within reports whether a bound, if there is one, includes a right.
func (i *Identity) Within(right access.Right, repository string) bool {
	if i.Bound == nil {
		return true
	}
	for _, b := range i.Bound {
		if repository != "" && (b.Type != "repository" || b.Name != repository) {
			continue
		}
		for _, a := range b.Actions {
			if a == "*" || a == right.String() {
				return true
			}
		}
	}
	return false
}

// WithinCatalog reports whether a bound, if there is one, includes the names of all repositories.
func (i *Identity) WithinCatalog() bool {
	return i.Bound == nil || slices.ContainsFunc(i.Bound, func(b Bound) bool {
		return b.Type == "registry" && b.Name == "catalog" && slices.Contains(b.Actions, "*")
	})
}

// Ways by which somebody is known.
const (
	WayNone        = "none"
	WayPassword    = "password"
	WayIssuer      = "issuer"
	WayCertificate = "certificate"
	WayToken       = "token"
	WayExternal    = "external"
)

// Ways are all of them.
var Ways = []string{WayNone, WayPassword, WayIssuer, WayCertificate, WayToken, WayExternal}

// Error is why credentials do not count. It never has any of them in it.
type Error struct {
	Way     string
	Message string // for the client
	// After is when to try again: there were too many failures, or logins. 0: the credentials are wrong.
	After time.Duration
	// Reason is for the log: what the client is not told.
	Reason error
}

func (e *Error) Error() string {
	if e.Reason != nil {
		return e.Message + ": " + e.Reason.Error()
	}
	return e.Message
}

func (e *Error) Unwrap() error { return e.Reason }

// State is what lasts when the configuration is read again.
type State struct {
	keys     *Keys
	failures Failures
	verifier verifier
	seen     seen
	log      *slog.Logger
}

// Open returns the state of a server whose keys are in a file, which is made when missing.
func Open(keys string, log *slog.Logger) (*State, error) {
	k, err := OpenKeys(keys)
	if err != nil {
		return nil, err
	}
	return &State{keys: k, failures: NewFailures(), verifier: newVerifier(), seen: seen{new(sync.Mutex), make(map[[sha256.Size]byte]*claims)}, log: log}, nil
}

// Logins know clients as one configuration says.
type Logins struct {
	c        Config
	state    *State
	users    *users // nil: there are no passwords
	issuers  []*issuer
	external *external     // nil: tokens are the server's own
	certs    *certificates // nil: none
}

// New reads what a configuration names. The files that it names are read again when they change.
func New(c Config, state *State) (_ *Logins, err error) {
	c.Tokens.Service = cmp.Or(c.Tokens.Service, "foil")
	c.Tokens.Lifetime = cmp.Or(c.Tokens.Lifetime, Duration(5*time.Minute))
	c.Tokens.Refresh = cmp.Or(c.Tokens.Refresh, Duration(30*24*time.Hour))
	if time.Duration(c.Tokens.Lifetime) > time.Hour || time.Duration(c.Tokens.Refresh) > maxRefresh {
		return nil, fmt.Errorf("[tokens]: lifetime is at most 1h, refresh at most %v", maxRefresh)
	}
	if strings.ContainsAny(c.Tokens.Service+c.Tokens.URL+c.External.URL+c.External.Service, "\"\\\r\n") {
		return nil, errors.New("[tokens]: a service or URL has quotes or backslashes in it")
	}
	l := &Logins{c: c, state: state}
	if c.Passwords.File != "" {
		if l.users, err = openUsers(c.Passwords.File, state); err != nil {
			return nil, fmt.Errorf("[passwords] file %w", err)
		}
	}
	if c.Certificates != (Certificates{}) {
		if l.certs, err = openCertificates(c.Certificates, state); err != nil {
			return nil, fmt.Errorf("[certificates]: %w", err)
		}
	}
	if c.External != (External{}) {
		if l.external, err = newExternal(c.External, state); err != nil {
			return nil, fmt.Errorf("[external-tokens]: %w", err)
		}
	}
	names := map[string]bool{"user": true, "cert": true, "token": true, "group": true, access.Anonymous: true}
	for n, ic := range c.Issuers {
		i, err := newIssuer(ic, state)
		if err == nil && names[ic.Name] {
			err = errors.New("the name is taken: it is the kind of its subjects")
		}
		if err != nil {
			return nil, fmt.Errorf("issuer %d %q: %w", n+1, ic.Name, err)
		}
		for _, o := range l.issuers {
			if o.c.URL == ic.URL && o.c.Audience == ic.Audience {
				return nil, fmt.Errorf("issuer %d %q: %q has this URL and audience", n+1, ic.Name, o.c.Name)
			}
		}
		names[ic.Name] = true
		l.issuers = append(l.issuers, i)
	}
	return l, nil
}

// Any reports whether there is some way to log in.
func (l *Logins) Any() bool {
	return l.users != nil || l.certs != nil || l.external != nil || len(l.issuers) > 0
}

// Identify finds out who sends a request. address is the client's. Errors: *Error.
func (l *Logins) Identify(req *http.Request, address netip.Addr) (*Identity, error) {
	header := req.Header.Values("Authorization")
	switch {
	case len(header) > 1:
		return nil, &Error{Way: WayNone, Message: "the request has several Authorization headers"}
	case len(header) == 1:
		scheme, value, _ := strings.Cut(header[0], " ")
		switch {
		case strings.EqualFold(scheme, "Basic"):
			user, password, ok := req.BasicAuth()
			if !ok {
				return nil, &Error{Way: WayPassword, Message: "the Authorization header is no HTTP Basic"}
			}
			return l.basic(req.Context(), user, password, address)
		case strings.EqualFold(scheme, "Bearer"):
			return l.token(req.Context(), strings.TrimSpace(value), address)
		}
		return nil, &Error{Way: WayNone, Message: "the Authorization header is neither Basic nor Bearer"}
	}
	if l.certs != nil && req.TLS != nil && len(req.TLS.VerifiedChains) > 0 {
		return l.certs.identify(req.TLS.VerifiedChains[0][0])
	}
	return &Identity{Subject: access.Subject{Name: access.Anonymous}, Way: WayNone}, nil
}

// basic takes a name with a password, or with an issuer's token in its place.
func (l *Logins) basic(ctx context.Context, user, password string, address netip.Addr) (*Identity, error) {
	if isJWT(password) {
		return l.token(ctx, password, address)
	}
	if l.users == nil {
		return nil, &Error{Way: WayPassword, Message: "this server knows no passwords"}
	}
	return l.users.identify(ctx, user, password, address)
}

// token takes a token: the server's own, an external token service's, or an issuer's.
func (l *Logins) token(ctx context.Context, raw string, address netip.Addr) (*Identity, error) {
	if l.external == nil {
		name := sha256.Sum256([]byte(raw))
		if c := l.state.seen.get(name); c != nil {
			return l.ownClaims(c, useAccess)
		}
	}
	from, err := issuerOf(raw)
	if err != nil {
		return nil, &Error{Way: WayToken, Message: "the token is no JWT", Reason: err}
	}
	if l.external == nil && from.issuer == l.c.Tokens.Service {
		return l.own(raw, useAccess)
	}
	verify := func() (*Identity, error) { return nil, errors.New("it is of an issuer that is not configured") }
	way := WayIssuer
	switch {
	case l.external != nil && from.issuer == l.external.c.Issuer:
		way = WayExternal
		verify = func() (*Identity, error) { return l.external.identify(ctx, raw) }
	default:
		for _, i := range l.issuers {
			// Of two with one URL the audience decides.
			if i.c.URL == from.issuer && from.audience.Contains(i.c.Audience) {
				verify = func() (*Identity, error) { return i.identify(ctx, raw) }
			}
		}
	}
	if err := l.state.failures.Check(address, way); err != nil {
		return nil, err
	}
	id, err := verify()
	if err == nil {
		return id, nil
	}
	if errors.Is(err, errUnreachable) {
		return nil, &Error{Way: way, Message: "the issuer of the token cannot be asked for its keys", After: askEvery, Reason: err}
	}
	l.state.failures.Add(address)
	return nil, &Error{Way: way, Message: "the token is not valid here", Reason: err}
}

// isJWT reports whether a password looks like a token: no line of an htpasswd file does.
func isJWT(s string) bool {
	return strings.HasPrefix(s, "eyJ") && strings.Count(s, ".") == 2 && len(s) > 64
}
