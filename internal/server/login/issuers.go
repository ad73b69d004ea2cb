package login

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/reread"
)

// IssuerConfig is an issuer of tokens that are taken: an OIDC provider, a CI system, a
// Kubernetes API server.
type IssuerConfig struct {
	// Name is the kind of its subjects, and comes before their names.
	Name string `toml:"name"`
	// URL is what its tokens say is their issuer (iss). Its keys are found from there by OIDC discovery, unless
	// Keys says where: a URL, or a file, of a JSON web key set.
	URL  string `toml:"url"`
	Keys string `toml:"keys"`
	// CA is a file with certificates that vouch for its server; empty: the system's do.
	CA string `toml:"ca"`
	// Audience must be among those of the token (aud): a token for somebody else is none for this server.
	Audience string `toml:"audience"`
	// Identities say whose tokens are taken, and what they are called. The first whose Where holds counts.
	Identities []IdentityConfig `toml:"identity"`
}

// IdentityConfig makes a subject of the claims of a token.
type IdentityConfig struct {
	// Name is made of claims: "{sub}", or "{project}:{branch}". The value of a claim that text follows must
	// not have that text in it, so that different claims never make one name.
	Name string `toml:"name"`
	// Groups is the claim that lists groups; empty: none.
	Groups string `toml:"groups"`
	// Where says what claims must be: a pattern in which * stands for any characters. A list has to have one that
	// matches. A claim inside another one is OUTER/INNER.
	Where map[string]string `toml:"where"`
}

// askTime bounds each question to an issuer.
const askTime = 10 * time.Second

type issuer struct {
	c          IssuerConfig
	identities []identityRule
	client     *http.Client

	mu       sync.Mutex
	verifier *oidc.IDTokenVerifier // guarded by mu; nil: its keys have not been found yet
	failed   error                 // guarded by mu: why not
	asked    time.Time             // guarded by mu: when that was
}

// errUnreachable is, wrapped, an error of an issuer that cannot be asked for its keys.
var errUnreachable = errors.New("its issuer cannot be asked")

// askEvery is the pause after an issuer could not be asked.
const askEvery = 5 * time.Second

// identityRule is an IdentityConfig that was read: parts are text and claims, in turns, text first.
type identityRule struct {
	IdentityConfig
	parts []string
}

var issuerName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*$`)

func newIssuer(c IssuerConfig, state *State) (*issuer, error) {
	i := &issuer{c: c}
	switch {
	case !issuerName.MatchString(c.Name):
		return nil, errors.New("it wants a name of a-z 0-9 . -, which is the kind of its subjects")
	case c.URL == "":
		return nil, errors.New("it wants a url, which is what its tokens say is their issuer (iss)")
	case c.Audience == "":
		return nil, errors.New("it wants an audience: tokens for others must not count here")
	case len(c.Identities) == 0:
		return nil, errors.New(`it wants to know whose tokens count: [[issuer.identity]] with name = "{sub}"`)
	case c.Keys == "" && !strings.HasPrefix(c.URL, "https://") && !strings.HasPrefix(c.URL, "http://"):
		return nil, errors.New("its url is none that keys are found from: name them by keys")
	}
	for n, ic := range c.Identities {
		rule, err := readIdentity(ic)
		if err != nil {
			return nil, fmt.Errorf("identity %d: %w", n+1, err)
		}
		i.identities = append(i.identities, rule)
	}
	var err error
	if i.client, err = clientOf(c.CA); err != nil {
		return nil, err
	}
	if c.Keys != "" {
		keys, err := keySet(c.Keys, i.client, state)
		if err != nil {
			return nil, err
		}
		i.verifier = oidc.NewVerifier(c.URL, keys, verifierConfig(c.Audience))
	}
	return i, nil
}

func verifierConfig(audience string) *oidc.Config {
	c := &oidc.Config{ClientID: audience}
	for _, a := range algorithms {
		c.SupportedSigningAlgs = append(c.SupportedSigningAlgs, string(a))
	}
	return c
}

// clientOf makes what asks an issuer.
func clientOf(ca string) (*http.Client, error) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	if ca != "" {
		b, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("ca: %s has no certificates in PEM form", ca)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	return &http.Client{Transport: t, Timeout: askTime}, nil
}

// keySet returns the keys at a URL, or in a file.
func keySet(where string, client *http.Client, state *State) (oidc.KeySet, error) {
	if strings.HasPrefix(where, "https://") || strings.HasPrefix(where, "http://") {
		return oidc.NewRemoteKeySet(oidc.ClientContext(context.Background(), client), where), nil
	}
	f := &fileKeys{reread.File[*oidc.StaticKeySet]{
		Path: where, Parse: parseKeySet,
		Failed: func(err error) { state.log.Error("keys of an issuer stay as they were", "error", err) },
	}}
	_, err := f.file.Get()
	return f, err
}

// fileKeys are the keys in a file.
type fileKeys struct {
	file reread.File[*oidc.StaticKeySet]
}

// VerifySignature implements oidc.KeySet.
func (f *fileKeys) VerifySignature(ctx context.Context, raw string) ([]byte, error) {
	keys, err := f.file.Get()
	if err != nil {
		return nil, err
	}
	return keys.VerifySignature(ctx, raw)
}

func parseKeySet(b []byte) (*oidc.StaticKeySet, error) {
	var set jose.JSONWebKeySet
	if err := json.Unmarshal(b, &set); err != nil {
		return nil, fmt.Errorf("it is no JSON web key set: %w", err)
	}
	keys := new(oidc.StaticKeySet)
	for _, k := range set.Keys {
		if !k.IsPublic() {
			return nil, errors.New("it has a key that is not public")
		}
		keys.PublicKeys = append(keys.PublicKeys, crypto.PublicKey(k.Key))
	}
	if len(keys.PublicKeys) == 0 {
		return nil, errors.New("it has no keys")
	}
	return keys, nil
}

// ready returns what verifies its tokens. Its keys are found when the first one comes: it may
// be down when the server starts.
func (i *issuer) ready(ctx context.Context) (*oidc.IDTokenVerifier, error) {
	i.mu.Lock()
	v, err := i.verifier, i.failed
	if v == nil && time.Since(i.asked) >= askEvery {
		i.asked, i.failed = time.Now(), errors.New("it is being asked")
		err = nil
	}
	i.mu.Unlock()
	if v != nil {
		return v, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreachable, err)
	}
	// The provider keeps the context for later: the request's would have ended.
	p, err := oidc.NewProvider(oidc.ClientContext(context.WithoutCancel(ctx), i.client), i.c.URL)
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.failed = err; err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreachable, err)
	}
	i.verifier = p.Verifier(verifierConfig(i.c.Audience))
	return i.verifier, nil
}

func (i *issuer) identify(ctx context.Context, raw string) (*Identity, error) {
	v, err := i.ready(ctx)
	if err != nil {
		return nil, err
	}
	t, err := v.Verify(ctx, raw)
	if err != nil {
		return nil, err
	}
	var claims map[string]any
	if err := t.Claims(&claims); err != nil {
		return nil, err
	}
	for _, rule := range i.identities {
		if !rule.holds(claims) {
			continue
		}
		name, err := rule.make(claims)
		if err != nil {
			return nil, err
		}
		s := access.Subject{Name: i.c.Name + ":" + name}
		for _, g := range values(claims, rule.Groups) {
			if printable(g) {
				s.Groups = append(s.Groups, i.c.Name+":"+g)
			}
		}
		return &Identity{Subject: s, Way: WayIssuer, Shown: true}, nil
	}
	return nil, errors.New("it is right, but no identity of its issuer has such claims")
}

// readIdentity reads a name with claims in it.
func readIdentity(c IdentityConfig) (identityRule, error) {
	rule := identityRule{IdentityConfig: c}
	rest := c.Name
	for {
		text, after, found := strings.Cut(rest, "{")
		rule.parts = append(rule.parts, text)
		if !found {
			break
		}
		claim, next, closed := strings.Cut(after, "}")
		if !closed || claim == "" {
			return rule, fmt.Errorf("name %q: want claims in braces, as {sub}", c.Name)
		}
		rule.parts = append(rule.parts, claim)
		rest = next
	}
	if len(rule.parts) < 3 {
		return rule, fmt.Errorf("name %q has no claims: everybody would have the same; want {sub}, for instance", c.Name)
	}
	for n := 2; n < len(rule.parts)-1; n += 2 {
		if rule.parts[n] == "" {
			return rule, fmt.Errorf("name %q: two claims with nothing between them", c.Name)
		}
	}
	return rule, nil
}

func (rule *identityRule) holds(claims map[string]any) bool {
	for claim, pattern := range rule.Where {
		if !slices.ContainsFunc(values(claims, claim), func(v string) bool { return access.Glob(pattern, v) }) {
			return false
		}
	}
	return true
}

// make makes the name.
func (rule *identityRule) make(claims map[string]any) (string, error) {
	var b strings.Builder
	for n, part := range rule.parts {
		if n%2 == 0 {
			b.WriteString(part)
			continue
		}
		v := values(claims, part)
		if len(v) != 1 || !printable(v[0]) {
			return "", fmt.Errorf("its claim %s is no name", part)
		}
		if after := rule.parts[n+1]; after != "" && strings.Contains(v[0], after) {
			return "", fmt.Errorf("its claim %s has %q in it, which ends the claim in the name", part, after)
		}
		b.WriteString(v[0])
	}
	if b.Len() > 512 {
		return "", errors.New("its name is too long")
	}
	return b.String(), nil
}

// values returns what a claim says, one or several; none if it is not there. OUTER/INNER is a claim
// inside another one.
func values(claims map[string]any, claim string) []string {
	if claim == "" {
		return nil
	}
	v, ok := claims[claim]
	if !ok {
		for at := 0; ; {
			n := strings.IndexByte(claim[at:], '/')
			if n < 0 {
				return nil
			}
			at += n + 1
			if inner, is := claims[claim[:at-1]].(map[string]any); is {
				return values(inner, claim[at:])
			}
		}
	}
	if list, is := v.([]any); is {
		var all []string
		for _, one := range list {
			if s, ok := text(one); ok {
				all = append(all, s)
			}
		}
		return all
	}
	if s, ok := text(v); ok {
		return []string{s}
	}
	return nil
}

func text(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case bool:
		return strconv.FormatBool(v), true
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), true
	}
	return "", false
}

// external is an external token service.
type external struct {
	c        External
	verifier *oidc.IDTokenVerifier
}

func newExternal(c External, state *State) (*external, error) {
	if c.URL == "" || c.Service == "" || c.Issuer == "" || c.Keys == "" {
		return nil, errors.New("it wants url, service, issuer and keys")
	}
	client, err := clientOf(c.CA)
	if err != nil {
		return nil, err
	}
	keys, err := keySet(c.Keys, client, state)
	if err != nil {
		return nil, err
	}
	return &external{c: c, verifier: oidc.NewVerifier(c.Issuer, keys, verifierConfig(c.Service))}, nil
}

func (e *external) identify(ctx context.Context, raw string) (*Identity, error) {
	t, err := e.verifier.Verify(ctx, raw)
	if err != nil {
		return nil, err
	}
	var c struct {
		Access []Bound `json:"access"`
	}
	if err := t.Claims(&c); err != nil {
		return nil, err
	}
	id := &Identity{Way: WayExternal, Shown: true, Bound: c.Access}
	if id.Bound == nil {
		id.Bound = []Bound{} // it grants nothing
	}
	// By custom nobody's tokens have no subject.
	id.Name = access.Anonymous
	if t.Subject != "" {
		if !printable(t.Subject) {
			return nil, errors.New("its subject is no name")
		}
		id.Name = "token:" + t.Subject
	}
	return id, nil
}
