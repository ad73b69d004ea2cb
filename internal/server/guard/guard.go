// Package guard is the one place that every endpoint of the server asks who sends a request (package
// login) and whether they may (package access).
//
// # The configuration
//
// Both are in one TOML file, read strictly, and read again when it changes. A file that cannot
// be used keeps the rules and logins that were, and is told in the log.
//
//	trusted-proxies = ["10.0.0.0/8"]   # whose X-Forwarded-For is believed
//	[passwords]                        # package login says what each table has
//	[tokens]
//	[external-tokens]
//	[certificates]
//	[[issuer]]
//	[limits]                           # Limits
//	[[quota]]                          # package holdings says what these have
//	[[immutable]]
//	[[retention]]
//	[[group]]                          # package access says what these have
//	[[rule]]
//
// # What is refused, and how
//
// Wrap finds out who sends a request, before any endpoint sees it. Credentials that are wrong are
// answered with 401, on every path, and never count as none. Endpoints ask Check for each right and
// repository that they use, as the rules are at that moment, so that a right that is
// withdrawn is gone with the next request, whatever token there is.
//
// What somebody may not pull does not exist. Nobody in particular (anonymous) gets 401 for it, there or not,
// with the challenge that makes clients log in. Others get what is said of a repository that there is not: endpoints
// answer from catalog.Hide, which asks the catalog as often. What somebody may pull and not change is 403.
// /v2/ and the catalog are 401 without credentials, since clients look there for how to log in; a token of
// anonymous counts as some.
//
// A nil *Guard is of a server that is open: everybody may do everything. One that Relay returns has neither
// file nor rules: a Judge decides.
package guard

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/prometheus/client_golang/prometheus"

	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/holdings"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/reread"
)

// Options configure a Guard.
type Options struct {
	// File is the configuration. Required.
	File string
	// Keys is the file of the keys that sign tokens; it is made when missing. Required.
	Keys string
	// Audit takes a line of JSON for each decision; nil: none are written.
	Audit io.Writer
	// Log takes what clients are not told; nil means slog.Default.
	Log *slog.Logger
}

// Guard says who may do what.
type Guard struct {
	log       *slog.Logger
	audit     *slog.Logger          // nil: there is none
	file      *reread.File[*policy] // nil: there is a judge
	fixed     *policy               // beside a judge
	judge     Judge                 // nil: rules decide
	decisions *prometheus.CounterVec
	decided   map[access.Right]*[2]prometheus.Counter // of decisions: denied, allowed
	logins    *prometheus.CounterVec
	known     map[string]prometheus.Counter // of logins, by way
	limited   *prometheus.CounterVec
	delayed   prometheus.Counter
	untagged  prometheus.Counter
	places    *places
}

// policy is what one version of the configuration says.
type policy struct {
	rules    *access.Rules
	logins   *login.Logins
	proxies  []netip.Prefix
	quotas   *quotas
	holdings *holdings.Rules
}

// config is the file.
type config struct {
	login.Config
	holdings.Settings
	Proxies []netip.Prefix       `toml:"trusted-proxies"`
	Limits  Limits               `toml:"limits"`
	Groups  []access.GroupConfig `toml:"group"`
	Rules   []access.RuleConfig  `toml:"rule"`
}

// parse reads a configuration, strictly. An error says where.
func parse(b []byte) (c config, rules *access.Rules, err error) {
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok && len(unknown.Errors) > 0 {
			e := unknown.Errors[0]
			line, _ := e.Position()
			return c, nil, fmt.Errorf("line %d: there is no setting %s: docs/access.md has those there are", line, strings.Join(e.Key(), "."))
		}
		if decode, ok := errors.AsType[*toml.DecodeError](err); ok {
			line, column := decode.Position()
			return c, nil, fmt.Errorf("line %d, column %d: %w", line, column, err)
		}
		return c, nil, err
	}
	rules, err = access.New(c.Rules, c.Groups)
	return c, rules, err
}

// ParseHoldings reads what a configuration says about what repositories hold and keep, for explanations.
func ParseHoldings(b []byte) (*holdings.Rules, error) {
	c, _, err := parse(b)
	if err != nil {
		return nil, err
	}
	return holdings.New(c.Settings)
}

// ParseRules reads the rules of a configuration, for explanations.
func ParseRules(b []byte) (*access.Rules, error) {
	_, rules, err := parse(b)
	return rules, err
}

// Open reads the configuration.
func Open(o Options) (*Guard, error) {
	g := newGuard(o.Audit, o.Log)
	state, err := login.Open(o.Keys, g.log)
	if err != nil {
		return nil, err
	}
	g.file = &reread.File[*policy]{
		Path: o.File,
		Parse: func(b []byte) (*policy, error) {
			c, rules, err := parse(b)
			if err != nil {
				return nil, err
			}
			logins, err := login.New(c.Config, state)
			if err != nil {
				return nil, err
			}
			quotas, err := newQuotas(c.Limits)
			if err != nil {
				return nil, err
			}
			kept, err := holdings.New(c.Settings)
			return &policy{rules: rules, logins: logins, proxies: c.Proxies, quotas: quotas, holdings: kept}, err
		},
		Failed:  func(err error) { g.log.Error("rules and logins stay as they were", "error", err) },
		Changed: func() { g.log.Info("rules and logins were read again", "file", o.File) },
	}
	p, err := g.file.Get()
	if err == nil && !p.logins.Any() && !p.rules.Names(access.Subject{Name: access.Anonymous}) {
		err = fmt.Errorf("%s: nobody can log in, and no rule allows anonymous anything: docs/access.md has examples", o.File)
	}
	if err != nil {
		return nil, fmt.Errorf("rules of access: %w", err)
	}
	return g, nil
}

// newGuard returns a Guard that knows nothing yet.
func newGuard(audit io.Writer, log *slog.Logger) *Guard {
	if log == nil {
		log = slog.Default()
	}
	g := &Guard{
		log: log, places: newPlaces(),
		decisions: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_access_total",
			Help: "Decisions about rights, by the right that was asked for."}, []string{"right", "result"}, decisionLabels()...),
		logins: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_logins_total",
			Help: "Requests by how their sender is known; failed: the credentials do not count; slowed: after too many failures, or logins at once."}, []string{"way", "result"}, loginLabels()...),
		limited: metrics.Counters(prometheus.CounterOpts{Name: "foil_serve_limited_total",
			Help: "Requests that were refused because of a limit of the file of access: one of [limits], a quota, or an immutable tag."}, []string{"limit"}, metrics.Each(limits...)...),
		untagged: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_untagged_total",
			Help: "Tags that rules of retention did not keep."}),
		delayed: prometheus.NewCounter(prometheus.CounterOpts{Name: "foil_serve_delayed_seconds_total",
			Help: "How long bodies of requests and answers were held up to keep to [limits] bytes."}),
	}
	// Asked for by name each time they would cost each request more than its rules do.
	g.decided, g.known = make(map[access.Right]*[2]prometheus.Counter), make(map[string]prometheus.Counter)
	for _, r := range access.Rights() {
		g.decided[r] = &[2]prometheus.Counter{g.decisions.WithLabelValues(r.String(), "denied"), g.decisions.WithLabelValues(r.String(), "allowed")}
	}
	for _, way := range login.Ways {
		g.known[way] = g.logins.WithLabelValues(way, "known")
	}
	if audit != nil {
		g.audit = slog.New(slog.NewJSONHandler(audit, nil))
	}
	return g
}

func decisionLabels() (all [][]string) {
	for _, r := range access.Rights() {
		all = append(all, []string{r.String(), "allowed"}, []string{r.String(), "denied"})
	}
	return all
}

func loginLabels() (all [][]string) {
	for _, way := range login.Ways {
		for _, result := range []string{"known", "failed", "slowed"} {
			all = append(all, []string{way, result})
		}
	}
	return all
}

// Metrics returns what tells of decisions and logins.
func (g *Guard) Metrics() metrics.Collectors {
	if g == nil {
		return nil
	}
	return metrics.Collectors{g.decisions, g.delayed, g.limited, g.logins, g.untagged}
}

// Logins are the ways to log in, as they are now.
func (g *Guard) Logins() *login.Logins { return g.now().logins }

// Holdings are the rules about what repositories hold and keep, as they are now. Not to be called of nil.
func (g *Guard) Holdings() *holdings.Rules { return g.now().holdings }

// Untagged counts a tag that no rule of retention kept.
func (g *Guard) Untagged() { g.untagged.Inc() }

// Audit writes a line about something that the server does by itself.
func (g *Guard) Audit(what string, about ...any) {
	if g != nil && g.audit != nil {
		g.audit.Info(what, about...)
	}
}

// now is the policy that counts.
func (g *Guard) now() *policy {
	if g.fixed != nil {
		return g.fixed
	}
	p, _ := g.file.Get() // it was read once, and stays
	return p
}

// caller is who sends a request.
type caller struct {
	login.Identity
	address netip.Addr
	client  Client
	worker  *worker
	request *http.Request
	began   time.Time
	policy  *policy // of when it began

	relayed       bool   // a judge decides
	authorization string // then: what the request shows
}

// now is the policy that counts for what a caller wants. Of a request that has just begun it is the one that it was let in by;
// one that goes on for long is asked anew.
func (c *caller) now(g *Guard) *policy {
	if time.Since(c.began) < time.Second {
		return c.policy
	}
	return g.now()
}

type callerKey struct{}

func from(ctx context.Context) *caller {
	c, _ := ctx.Value(callerKey{}).(*caller)
	return c
}

// Subject names who sends a request; empty where the server is open, or a judge decides: there whoever knows
// the name of a stream, which nobody can guess, and may pull its repository, is who began it. Tokens change meanwhile.
func Subject(ctx context.Context) string {
	if c := from(ctx); c != nil && !c.relayed {
		return c.Name
	}
	return ""
}

// Address is where a request comes from, behind proxies that are trusted the client's own. Not valid where the server is
// open.
func Address(ctx context.Context) netip.Addr {
	if c := from(ctx); c != nil {
		return c.address
	}
	return netip.Addr{}
}

// Wrap finds out who sends each request. open is for paths that ask nobody: whatever credentials a
// request has are passed over there.
func (g *Guard) Wrap(next http.Handler, open func(*http.Request) bool) http.Handler {
	if g == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		p := g.now()
		c := &caller{address: p.address(req), request: req, began: time.Now(), policy: p}
		if g.judge != nil {
			if !g.relay(w, req, c, open(req)) {
				return
			}
		} else if open(req) {
			c.Name, c.Way = access.Anonymous, login.WayNone
		} else {
			id, err := p.logins.Identify(req, c.address)
			if err != nil {
				g.failed(w, req, p, c.address, err)
				return
			}
			c.Identity = *id
			g.known[id.Way].Inc()
		}
		c.client = clientOf(c, open(req))
		end, err := g.begin(p.quotas, c.client)
		if err != nil {
			tooMany(w, err)
			return
		}
		defer end()
		w, paid := g.paced(p.quotas, w, req, c.client)
		defer paid()
		left, err := g.work(req, c)
		if err != nil {
			return // the client has gone
		}
		defer left()
		next.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), callerKey{}, c)))
	})
}

// Token is the built-in token service.
func (g *Guard) Token(w http.ResponseWriter, req *http.Request) {
	p := g.now()
	address := p.address(req)
	id, err := p.logins.Token(req, w, address)
	if err != nil {
		g.failed(w, req, p, address, err)
		return
	}
	g.known[id.Way].Inc()
	if g.audit != nil {
		g.audit.Info("token", "subject", id.Name, "way", id.Way, "address", address.String())
	}
}

// failed answers a request whose credentials do not count.
func (g *Guard) failed(w http.ResponseWriter, req *http.Request, p *policy, address netip.Addr, err error) {
	e, ok := errors.AsType[*login.Error](err)
	if !ok {
		g.log.Error("login failed", "path", req.URL.Path, "error", err)
		answer(w, http.StatusInternalServerError, "INTERNAL", "the registry failed; its log says why")
		return
	}
	result := "failed"
	if e.After > 0 {
		result = "slowed"
	}
	g.logins.WithLabelValues(e.Way, result).Inc()
	// Neither names nor tokens: what is wrong is often a password in the wrong field.
	g.log.Info("login refused", "way", e.Way, "address", address.String(), "why", e.Message, "reason", e.Reason)
	if g.audit != nil {
		g.audit.Info("login", "decision", "refused", "way", e.Way, "address", address.String(), "method", req.Method, "path", req.URL.Path, "why", e.Message)
	}
	if e.After > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.After.Seconds()))))
		answer(w, http.StatusTooManyRequests, "TOOMANYREQUESTS", e.Message)
		return
	}
	if challenge := p.logins.Challenge(req, "", true); challenge != "" {
		w.Header().Set("Www-Authenticate", challenge)
	}
	answer(w, http.StatusUnauthorized, "UNAUTHORIZED", e.Message)
}

// answer writes an error as the distribution API has it. It has the fields of a bundle.Error
// besides, for workers.
func answer(w http.ResponseWriter, status int, code, message string) {
	type one struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	b, err := json.Marshal(struct {
		Errors []one `json:"errors"`
	}{[]one{{code, message}}})
	if err != nil {
		b = nil
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // the client has gone if this fails
}

// Denied is a right that somebody does not have.
type Denied struct {
	Right      access.Right // 0: to be known at all
	Repository string
	// Unknown: nobody in particular asks, who may log in.
	Unknown bool
	// Challenge is what WWW-Authenticate says, if Unknown; it may be empty.
	Challenge string
}

func (e *Denied) Error() string {
	if e.Unknown {
		return "log in: this needs to know who you are, and that you may"
	}
	if e.Repository == "" {
		return fmt.Sprintf("you lack the right %s on this server", e.Right)
	}
	return fmt.Sprintf("you lack the right %s on %s", e.Right, e.Repository)
}

// Write answers a request with the error, in the distribution API's way.
func (e *Denied) Write(w http.ResponseWriter) {
	if !e.Unknown {
		answer(w, http.StatusForbidden, "DENIED", e.Error())
		return
	}
	e.SetChallenge(w)
	answer(w, http.StatusUnauthorized, "UNAUTHORIZED", e.Error())
}

// SetChallenge tells the client how to log in.
func (e *Denied) SetChallenge(w http.ResponseWriter) {
	if e.Challenge != "" {
		w.Header().Set("Www-Authenticate", e.Challenge)
	}
}

// errUnguarded is of an endpoint that was reached without Wrap.
var errUnguarded = errors.New("a request came past the guard")

// Check reports whether who sends a request may use a right on a repository ("": the server) now. about is what of
// it they want, for the audit log: a digest or a tag. Errors: *Denied.
func (g *Guard) Check(ctx context.Context, right access.Right, repository string, about ...string) error {
	if right == 0 {
		return &Denied{Repository: repository} // an endpoint without a right is closed, on open servers too
	}
	if g == nil {
		return nil
	}
	c := from(ctx)
	if c == nil {
		return errUnguarded
	}
	if g.judge != nil {
		err := g.judged(ctx, c, right, repository, about)
		if _, denied := errors.AsType[*Denied](err); denied || err == nil {
			g.record(c, right, repository, about, err == nil, nil)
		}
		return err
	}
	p := c.now(g)
	allowed, rule := p.rules.Decide(c.Subject, right, repository)
	within := c.Within(right, repository)
	g.record(c, right, repository, about, allowed && within, rule)
	if allowed && within {
		return nil
	}
	// Clients get an external token for what they are about to do, and another one when a challenge names more.
	d := &Denied{Right: right, Repository: repository, Unknown: c.Name == access.Anonymous || allowed}
	if d.Unknown {
		d.Challenge = p.logins.Challenge(c.request, login.Scope(right, repository), false)
	}
	return d
}

// Known reports whether a request had credentials, where there are any. Errors: *Denied.
func (g *Guard) Known(ctx context.Context, scope string) error {
	if g == nil {
		return nil
	}
	c := from(ctx)
	if c == nil {
		return errUnguarded
	}
	if g.judge != nil {
		return g.judged(ctx, c, access.Pull, "", nil)
	}
	p := c.now(g)
	if c.Shown || !p.logins.Any() {
		return nil
	}
	return &Denied{Unknown: true, Challenge: p.logins.Challenge(c.request, scope, false)}
}

// May is Check for one of many, as the names in a list: it is in no log.
func (g *Guard) May(ctx context.Context, right access.Right, repository string, about ...string) bool {
	if g == nil {
		return true
	}
	c := from(ctx)
	if c == nil {
		return false
	}
	if g.judge != nil {
		return g.judged(ctx, c, right, repository, about) == nil
	}
	allowed, _ := g.now().allows(c, right, repository)
	return allowed
}

// Lists reports whether a repository is listed for who sends a request: who may pull it. A token that grants the catalog
// names no repositories.
func (g *Guard) Lists(ctx context.Context, repository string) bool {
	if g.May(ctx, access.Pull, repository) {
		return true
	}
	c := from(ctx)
	if c == nil || !c.WithinCatalog() {
		return false
	}
	allowed, _ := g.now().rules.Decide(c.Subject, access.Pull, repository)
	return allowed
}

// Hides reports whether err says that what was asked for is to look as if it were not there.
func Hides(err error) bool {
	d, ok := errors.AsType[*Denied](err)
	return ok && d.Right == access.Pull && !d.Unknown
}

func (p *policy) allows(c *caller, right access.Right, repository string) (bool, *access.Rule) {
	allowed, rule := p.rules.Decide(c.Subject, right, repository)
	return allowed && c.Within(right, repository), rule
}

func (g *Guard) record(c *caller, right access.Right, repository string, about []string, allowed bool, rule *access.Rule) {
	result, n := "denied", 0
	if allowed {
		result, n = "allowed", 1
	}
	if of := g.decided[right]; of != nil { // a right that there is
		of[n].Inc()
	}
	if g.audit == nil {
		return
	}
	name := ""
	if rule != nil {
		name = rule.Name
	}
	g.audit.Info("access", "subject", c.Name, "way", c.Way, "address", c.address.String(), "right", right.String(),
		"repository", repository, "about", strings.Join(about, " "), "decision", result, "rule", name,
		"method", c.request.Method, "path", c.request.URL.Path)
}

// address is where a request comes from: of those that proxies name, the last that is not itself a proxy that
// is trusted.
func (p *policy) address(req *http.Request) netip.Addr {
	peer, err := netip.ParseAddrPort(req.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	a := peer.Addr().Unmap()
	if !p.trusts(a) {
		return a
	}
	hops := strings.Split(strings.Join(req.Header.Values("X-Forwarded-For"), ","), ",")
	for n := len(hops) - 1; n >= 0 && p.trusts(a); n-- {
		hop, err := netip.ParseAddr(strings.TrimSpace(hops[n]))
		if err != nil {
			break // the proxy that is trusted named nobody
		}
		a = hop.Unmap()
	}
	return a
}

func (p *policy) trusts(a netip.Addr) bool {
	for _, prefix := range p.proxies {
		if prefix.Contains(a) {
			return true
		}
	}
	return false
}
