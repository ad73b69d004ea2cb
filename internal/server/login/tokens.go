package login

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"hydrofoil.dev/foil/internal/server/access"
)

// What a token is for: a refresh token is nothing to an endpoint.
const (
	useAccess  = "access"
	useRefresh = "refresh"
)

// claims are those of the server's own tokens.
type claims struct {
	jwt.Claims
	Use    string   `json:"use"`
	Way    string   `json:"way"` // by which its owner was known
	Groups []string `json:"groups,omitempty"`
	Line   string   `json:"line,omitempty"` // of a user: Identity.password
}

// algorithms are those of others' tokens. None is symmetric: an issuer's public key must
// not become a secret.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.ES256, jose.ES384, jose.ES512, jose.PS256, jose.PS384, jose.PS512, jose.EdDSA,
}

// unverified is what a token says of its issuer.
type unverified struct {
	issuer   string
	audience jwt.Audience
}

// issuerOf reads who a token says it is from, to choose who verifies it.
func issuerOf(raw string) (unverified, error) {
	t, err := jwt.ParseSigned(raw, append([]jose.SignatureAlgorithm{jose.HS256}, algorithms...))
	if err != nil {
		return unverified{}, err
	}
	var c jwt.Claims
	err = t.UnsafeClaimsWithoutVerification(&c)
	return unverified{c.Issuer, c.Audience}, err
}

// sign makes a token.
func (l *Logins) sign(id *Identity, use string, lifetime time.Duration) (string, error) {
	k, err := l.state.keys.signing()
	if err != nil {
		return "", err
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: k.Secret}, new(jose.SignerOptions).WithType("JWT").WithHeader("kid", k.ID))
	if err != nil {
		return "", err
	}
	now := time.Now()
	return jwt.Signed(signer).Claims(claims{
		Claims: jwt.Claims{
			Issuer: l.c.Tokens.Service, Subject: id.Name, Audience: jwt.Audience{l.c.Tokens.Service}, ID: rand.Text(),
			IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now), Expiry: jwt.NewNumericDate(now.Add(lifetime)),
		},
		Use: use, Way: id.Way, Groups: id.Groups, Line: id.password,
	}).Serialize()
}

// own verifies one of the server's own tokens. Errors: *Error.
func (l *Logins) own(raw, use string) (*Identity, error) {
	name := sha256.Sum256([]byte(raw))
	c := l.state.seen.get(name)
	if c == nil {
		var err error
		if c, err = l.parse(raw); err != nil {
			return nil, &Error{Way: WayToken, Message: "the token is not valid here", Reason: err}
		}
		l.state.seen.put(name, c)
	}
	return l.ownClaims(c, use)
}

// ownClaims is own of a token that was right before: signature and claims do not change, and its time, and whether its
// owner is still known, are looked at each time.
func (l *Logins) ownClaims(c *claims, use string) (*Identity, error) {
	if err := l.counts(c, use); err != nil {
		message := "the token is not valid here"
		if errors.Is(err, jwt.ErrExpired) {
			message = "the token has expired"
		}
		return nil, &Error{Way: WayToken, Message: message, Reason: err}
	}
	return &Identity{Subject: access.Subject{Name: c.Subject, Groups: c.Groups}, Way: WayToken, Shown: true, password: c.Line, expires: c.Expiry.Time()}, nil
}

// counts reports why a token does not count now for a use.
func (l *Logins) counts(c *claims, use string) error {
	service := l.c.Tokens.Service
	if err := c.ValidateWithLeeway(jwt.Expected{Issuer: service, AnyAudience: jwt.Audience{service}, Time: time.Now()}, 0); err != nil {
		return err
	}
	if c.Use != use {
		return errors.New("it is for something else: " + c.Use)
	}
	return l.holds(c)
}

// parse reads a token that one of the server's keys has signed.
func (l *Logins) parse(raw string) (*claims, error) {
	t, err := jwt.ParseSigned(raw, []jose.SignatureAlgorithm{jose.HS256})
	if err != nil {
		return nil, err
	}
	if len(t.Headers) != 1 {
		return nil, errors.New("it has not one signature")
	}
	secret, ok := l.state.keys.secret(t.Headers[0].KeyID)
	if !ok {
		return nil, errors.New("its key is not known any more")
	}
	var c claims
	if err := t.Claims(secret, &c); err != nil {
		return nil, err
	}
	if c.Expiry == nil {
		return nil, errors.New("it does not say how long it holds")
	}
	return &c, nil
}

// seen are tokens that were verified, by their hash.
type seen struct {
	mu  *sync.Mutex
	all map[[sha256.Size]byte]*claims // guarded by mu; claims do not change
}

// maxSeen bounds the tokens that are remembered.
const maxSeen = 4096

func (s *seen) get(name [sha256.Size]byte) *claims {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[name]
}

func (s *seen) put(name [sha256.Size]byte, c *claims) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxSeen {
		clear(s.all)
	}
	s.all[name] = c
}

// holds reports why a token's owner is not known any more: what the token was given for must still
// be configured.
func (l *Logins) holds(c *claims) error {
	kind, name, _ := strings.Cut(c.Subject, ":")
	switch kind {
	case access.Anonymous:
		return nil
	case "user":
		if l.users == nil || !l.users.current(name, c.Line) {
			return errors.New("the user is gone, or has another password")
		}
		return nil
	case "cert":
		if l.certs == nil {
			return errors.New("certificates do not count any more")
		}
		return nil
	}
	if !slices.ContainsFunc(l.issuers, func(i *issuer) bool { return i.c.Name == kind }) {
		return errors.New("its issuer is not configured any more")
	}
	return nil
}
