package serve_test

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/server/access"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/login"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
	"hydrofoil.dev/foil/internal/server/upstream/upstreamtest"
)

var update = flag.Bool("update", false, "write docs/endpoints.md anew")

// named is a path of an endpoint as documents have it.
var named = strings.NewReplacer("blobs/uploads/*", "blobs/uploads/ID", "manifests/*", "manifests/REFERENCE", "/*", "/DIGEST")

// adminPaths are those of package admin, with a request that makes sense of something that is not there.
var adminPaths = []call{
	{"GET", "gc", "", nil}, {"POST", "gc", "", []byte(`{}`)}, {"GET", "deleted?repository=none", "", nil},
	{"POST", "delete", "", []byte(`{"repository":"none"}`)}, {"POST", "undelete", "", []byte(`{"repository":"none"}`)},
}

// line is a row of the table: an endpoint, the right that it asks for, and what who gets.
type line struct {
	method, path, right string
	user                string // who has the right
	// prepare makes what is called for a repository; nil: there is no repository to speak of, and fixed is called.
	prepare func(g *guarded, repo string, who credential) call
	fixed   call
	server  *guarded
	open    bool // asks for nothing
}

// docs/endpoints.md is the table of all endpoints: what they answer to whom. It is made here, of what they do answer.
func TestEndpointTable(t *testing.T) {
	g := startGuarded(t, "", nil)
	up := upstreamtest.Start(t)
	up.Image("mine/app", "1", layers(t, 1, 1000)...)
	up.Image("other/app", "1", layers(t, 2, 1000)...)
	front := *g
	front.root, front.rules = filepath.Join(t.TempDir(), "root"), filepath.Join(t.TempDir(), "access.toml")
	rules, err := os.ReadFile(g.rules)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, front.rules, string(rules))
	front.Server = start(t, serve.Options{Root: front.root, Access: front.rules, Upstream: upstream.Options{URL: up.URL, Pause: time.Millisecond}})

	var lines []line
	for _, e := range endpoints() {
		l := line{method: e.method, path: e.path, right: "none", user: e.userFor(), server: g, open: e.open()}
		if e.right != 0 {
			l.right = e.right.String()
		}
		if !strings.HasPrefix(l.path, "/") {
			l.path = "/v2/NAME/" + named.Replace(e.path)
		}
		l.prepare = func(g *guarded, repo string, who credential) call { return g.request(e.method, e.path, repo, who) }
		lines = append(lines, l)
	}
	for _, c := range adminPaths {
		c.path = admin.Prefix + c.path
		name, _, _ := strings.Cut(c.path, "?")
		lines = append(lines, line{method: c.method, path: name, right: access.Admin.String(), user: "admin", fixed: c, server: g})
	}
	lines = append(lines,
		line{method: "GET", path: serve.MetricsPath, right: access.Admin.String(), user: "admin", fixed: call{method: "GET", path: serve.MetricsPath}, server: g},
		line{method: "GET", path: "/v2/", right: "to be known", user: "none", fixed: call{method: "GET", path: "/v2/"}, server: g},
		line{method: "GET", path: "/v2/_catalog", right: "to be known; lists what one may pull", user: "pull", fixed: call{method: "GET", path: "/v2/_catalog"}, server: g},
		line{method: "GET", path: login.TokenPath, right: "none", user: "none", fixed: call{method: "GET", path: login.TokenPath + "?service=foil"}, server: g},
		line{method: "GET", path: "/healthz", right: "none", user: "none", fixed: call{method: "GET", path: "/healthz"}, server: g, open: true},
		line{method: "GET", path: "/readyz", right: "none", user: "none", fixed: call{method: "GET", path: "/readyz"}, server: g, open: true},
		line{method: "POST", path: upstream.WebhookPath, right: access.Push.String(), user: "pusher", server: &front,
			prepare: func(_ *guarded, repo string, _ credential) call {
				return call{"POST", upstream.WebhookPath, "application/json", fmt.Appendf(nil,
					`{"events":[{"action":"push","target":{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":%q,"repository":%q}}]}`, digest.FromString(repo), repo)}
			}},
	)
	slices.SortStableFunc(lines, func(a, b line) int {
		return cmp.Or(strings.Compare(a.path, b.path), strings.Compare(a.method, b.method))
	})

	tokens := map[*guarded]map[string]string{g: {}, &front: {}}
	for s, of := range tokens {
		for _, u := range guardedUsers {
			of[u], _ = s.token(basic(u), "")
		}
	}
	hour := time.Now().Add(time.Hour)
	cells := make([][]string, len(lines))
	later := make([]call, len(lines))
	for i, l := range lines {
		s := l.server
		who := bearer(tokens[s][l.user])
		ask := func(repo string, as credential) string {
			t.Helper()
			c := l.fixed
			if l.prepare != nil {
				c = l.prepare(s, repo, as)
			}
			return strconv.Itoa(s.do(c, as).status)
		}
		other := "pull" // who has some right, and not this one
		if l.right == "pull" {
			other = "none"
		}
		elsewhere := "–"
		if l.prepare != nil {
			elsewhere = ask("other/app", who)
		}
		cells[i] = []string{
			ask("mine/app", who), ask("mine/app", bearer(tokens[s][other])), elsewhere, ask("mine/app", nobody),
			ask("mine/app", bearer(s.forged("user:root", "foil", time.Now().Add(-time.Minute), nil))),
			ask("mine/app", bearer(s.forged("user:root", "other", hour, nil))),
		}
		// What is made while there is the right, and asked for when it is gone.
		if later[i] = l.fixed; l.prepare != nil {
			later[i] = l.prepare(s, "mine/app", who)
		}
	}
	for s := range tokens {
		// Everybody but root.
		writeFile(t, s.rules, regexp.MustCompile(`"user:[a-qs-z]\w*"`).ReplaceAllString(string(rules), `"user:gone"`))
	}
	for i, l := range lines {
		cells[i] = append(cells[i], strconv.Itoa(l.server.do(later[i], bearer(tokens[l.server][l.user])).status))
	}
	// Whatever the table says: who may gets an answer, and nobody else.
	for i, l := range lines {
		for column, got := range cells[i] {
			status, err := strconv.Atoi(got)
			refused := status == 401 || status == 403 || status == 404
			switch {
			case err != nil && got == "–", l.open:
			case l.path == login.TokenPath || strings.HasPrefix(l.right, "to be known"):
				if wrong := column == 4 || column == 5; (status == 401) != (wrong || column == 3 && l.path != login.TokenPath) {
					t.Errorf("%s %s, column %d: %d", l.method, l.path, column, status)
				}
			case column == 0:
				// What is not there to be deleted is looked for by who may delete.
				if missing := strings.HasPrefix(l.path, admin.Prefix); refused && !(missing && status == 404) {
					t.Errorf("%s %s: who may is refused: %d", l.method, l.path, status)
				}
			case !refused && !(strings.HasSuffix(l.path, "referrers/DIGEST") && status == 200): // of nothing
				t.Errorf("%s %s, column %d: %d", l.method, l.path, column, status)
			}
		}
	}

	var b bytes.Buffer
	b.WriteString(endpointsHead)
	for i, l := range lines {
		fmt.Fprintf(&b, "| `%s %s` | %s | %s |\n", l.method, l.path, l.right, strings.Join(cells[i], " | "))
	}
	const file = "../../../docs/endpoints.md"
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("go test ./internal/server/serve -run TestEndpointTable -update writes %s anew (-is +should be):\n%s", file, diff)
	}
}

const endpointsHead = `# What each endpoint answers to whom

Made by ` + "`go test ./internal/server/serve -run TestEndpointTable -update`" + ` of what a server with rules ([access.md](access.md)) answers, and
compared by each run of the tests. Requests are for what is there, but for streams to promote in and what administrators delete.

- **may**: who has the right on this repository, and that to pull it.
- **lacks it**: who may pull the repository and has not this right; for those of ` + "`pull`" + ` and those that ask for none, who has no right at all.
- **elsewhere**: who has the right on another repository, and none on this one. The answer is that to what does not exist, to the last byte
  (` + "`TestEveryEndpointAsks`" + `); referrers of nothing are an empty list.
- **anonymous**: without credentials, where no rule is for everyone; with a challenge.
- **expired**, **wrong audience**: a token of who may everything, signed by this server.
- **revoked**: who had the right, by a token of that time, after the rule has gone.

| endpoint | right | may | lacks it | elsewhere | anonymous | expired | wrong audience | revoked |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
`
