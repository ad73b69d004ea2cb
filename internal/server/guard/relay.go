package guard

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/holdings"
	"hydrofoil.dev/foil/internal/server/login"
)

// Asked is who wants what, for a Judge.
type Asked struct {
	// Shown is the Authorization header of the request; empty: it has none. It is a secret.
	Shown   string
	Address netip.Addr
	// Repository is empty for the registry itself.
	Repository string
	// Reference is the tag or digest that is asked for, of a blob or else of a manifest; empty: none in particular.
	Reference string
	Blob      bool
}

// Judge decides in place of rules: the upstream of an accelerator, by what clients show.
type Judge interface {
	// MayPull reports why somebody may not pull. Errors: *Denied; what keeps the judge from deciding.
	MayPull(ctx context.Context, a Asked) error
}

// RelayOptions configure a Guard that has a judge. Judge is required.
type RelayOptions struct {
	Judge Judge
	Audit io.Writer    // as in Options
	Log   *slog.Logger // as in Options
}

// Relay returns a Guard that asks a judge. It has no rules and no logins: nobody is told apart but by what the judge
// says, and nothing but to pull is allowed. Limits are the usual ones, of an address.
func Relay(o RelayOptions) (*Guard, error) {
	rules, err := access.New(nil, nil)
	if err != nil {
		return nil, err
	}
	quotas, err := newQuotas(Limits{})
	if err != nil {
		return nil, err
	}
	kept, err := holdings.New(holdings.Settings{})
	if err != nil {
		return nil, err
	}
	g := newGuard(o.Audit, o.Log)
	g.judge, g.fixed = o.Judge, &policy{rules: rules, logins: new(login.Logins), quotas: quotas, holdings: kept}
	return g, nil
}

// Relays reports whether a judge decides, and lists of repositories are those that it gives whoever asks.
func (g *Guard) Relays() bool { return g != nil && g.judge != nil }

// Shown is the Authorization header of a request that a judge decides about, and whether one does.
func Shown(ctx context.Context) (string, bool) {
	c := from(ctx)
	if c == nil || !c.relayed {
		return "", false
	}
	return c.authorization, true
}

// maxShown bounds an Authorization header: tokens with many groups have some thousand bytes.
const maxShown = 64 << 10

// relay keeps what a request shows for the judge.
func (g *Guard) relay(w http.ResponseWriter, req *http.Request, c *caller, open bool) bool {
	c.relayed, c.Name, c.Way = true, access.Anonymous, login.WayNone
	header := req.Header.Values("Authorization")
	if open || len(header) == 0 {
		return true
	}
	if len(header) > 1 || len(header[0]) > maxShown || header[0] == "" {
		answer(w, http.StatusBadRequest, "UNSUPPORTED", "want one Authorization header at most, that is not empty, of 64 KiB at most")
		return false
	}
	c.authorization, c.Shown, c.Name, c.Way = header[0], true, "client", login.WayExternal
	return true
}

// judged is Check and May where a judge decides. about is as Check has it.
func (g *Guard) judged(ctx context.Context, c *caller, right access.Right, repository string, about []string) error {
	if right != access.Pull && right != access.Push {
		return &Denied{Right: right, Repository: repository}
	}
	// What pushes here are notifications, which have it fetch what a pull would.
	a := Asked{Shown: c.authorization, Address: c.address, Repository: repository}
	if len(about) > 0 {
		a.Reference = about[0]
		a.Blob = strings.HasPrefix(c.request.URL.Path, "/v2/") && strings.HasSuffix(c.request.URL.Path, "/blobs/"+a.Reference)
	}
	err := g.judge.MayPull(ctx, a)
	if denied, ok := errors.AsType[*Denied](err); ok && right != access.Pull {
		other := *denied
		other.Right = right
		return &other
	}
	return err
}
