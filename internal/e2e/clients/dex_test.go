package clients

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/logtest"
)

// dex is a real provider (tools/dex).
type dex struct {
	t       testing.TB
	address string
	url     string
	cmd     *exec.Cmd
	log     *logtest.Buffer
}

// newDex starts one, whose ID tokens hold for a while.
func newDex(t testing.TB, lifetime string) *dex {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &dex{t: t, address: l.Addr().String(), log: new(logtest.Buffer)}
	d.url = "http://" + d.address + "/dex"
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.start(lifetime)
	t.Cleanup(d.stop)
	return d
}

func (d *dex) start(lifetime string) {
	d.t.Helper()
	d.cmd = exec.Command(program(d.t, "dex"), d.address, lifetime)
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	eventually(d.t, "dex answers", func() error {
		res, err := http.Get(d.url + "/.well-known/openid-configuration")
		if err != nil {
			return fmt.Errorf("%w; it said: %s", err, d.log.String())
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			return errors.New(res.Status)
		}
		return nil
	})
}

func (d *dex) stop() {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err == nil {
		_ = d.cmd.Wait() // it ends by the signal
	}
}

// rotate has it sign with a new key from now on.
func (d *dex) rotate() {
	d.t.Helper()
	before := d.keys()
	if err := d.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		d.t.Fatal(err)
	}
	eventually(d.t, "dex has a new key", func() error {
		if d.keys() == before {
			return errors.New("the keys are what they were")
		}
		return nil
	})
}

func (d *dex) keys() string {
	d.t.Helper()
	res, err := http.Get(d.url + "/keys")
	if err != nil {
		d.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return string(b)
}

// ask asks for tokens.
func (d *dex) ask(client string, form url.Values) tokens {
	d.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), "POST", d.url+"/token", strings.NewReader(form.Encode()))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.SetBasicAuth(client, "secret")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		d.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return readTokens(d.t, res.StatusCode, string(b))
}

// ann is an ID token of a user who has shown a password, and is in no group.
func (d *dex) ann(client string) string {
	d.t.Helper()
	return d.ask(client, url.Values{"grant_type": {"password"}, "scope": {"openid email groups"}, "username": {"ann@corp.example"}, "password": {"password of ann"}}).ID
}

// author is an ID token of somebody who is in the group authors, and came with a browser.
func (d *dex) author(client string) string {
	d.t.Helper()
	back := "http://127.0.0.1/" + client
	browser := &http.Client{CheckRedirect: func(req *http.Request, _ []*http.Request) error {
		if strings.HasPrefix(req.URL.String(), back) {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	query := url.Values{"client_id": {client}, "redirect_uri": {back}, "response_type": {"code"}, "scope": {"openid email groups"}, "state": {"x"}}
	res, err := browser.Get(d.url + "/auth/mock?" + query.Encode())
	if err != nil {
		d.t.Fatal(err)
	}
	defer res.Body.Close()
	at, err := res.Location()
	if err != nil {
		d.t.Fatalf("login with a browser: %s, %v", res.Status, err)
	}
	return d.ask(client, url.Values{"grant_type": {"authorization_code"}, "code": {at.Query().Get("code")}, "redirect_uri": {back}}).ID
}

// issuer is what the server is told of dex, and who may what: everybody pulls, authors push.
func (d *dex) issuer() string {
	return fmt.Sprintf(`[[issuer]]
name = "corp"
url = %q
audience = "registry"
[[issuer.identity]]
name = "{email}"
groups = "groups"
where = { email_verified = "true" }

[[rule]]
to = ["corp:*"]
allow = ["pull"]
repositories = ["team/**"]
[[rule]]
to = ["group:corp:authors"]
allow = ["push"]
repositories = ["team/**"]
`, d.url)
}

const exchangeGrant = "urn:ietf:params:oauth:grant-type:token-exchange"

// A real provider's users log in with their ID tokens, as docker login sends them and by token exchange. Groups give
// rights; keys rotate; what is for another client, of another provider, or has expired is refused.
func TestDex(t *testing.T) {
	d := newDex(t, "1h")
	r := newRegistry(t, newAuthority(t), d.issuer())
	pull := func(token string) int {
		status, _ := r.ask("GET", "/v2/team/app/tags/list", "bearer", token, nil)
		return status
	}
	push := func(token string) int {
		status, _ := r.ask("POST", "/v2/team/app/blobs/uploads/", "bearer", token, nil)
		return status
	}
	ways := map[string]func(id string) string{
		"bearer": func(id string) string { return id },
		"docker login": func(id string) string {
			status, body := r.ask("GET", "/token?service=foil&scope=repository:team/app:pull,push", "oidc", id, nil)
			return readTokens(t, status, body).Token
		},
		"token exchange": func(id string) string {
			status, body := r.ask("POST", "/token", "", "", url.Values{"grant_type": {exchangeGrant}, "subject_token": {id},
				"subject_token_type": {"urn:ietf:params:oauth:token-type:id_token"}, "service": {"foil"}})
			return readTokens(t, status, body).Access
		},
	}
	ann, author := d.ann("registry"), d.author("registry")
	for way, token := range ways {
		// There is no repository yet: 404 is an answer to who may pull it.
		if status := pull(token(ann)); status != http.StatusNotFound {
			t.Errorf("%s: ann pulls: %d", way, status)
		}
		if status := push(token(ann)); status != http.StatusForbidden {
			t.Errorf("%s: ann, who is in no group, pushes: %d", way, status)
		}
		if status := push(token(author)); status != http.StatusAccepted {
			t.Errorf("%s: an author pushes: %d", way, status)
		}
	}
	if who := r.subjects("team/app"); !who["corp:ann@corp.example"] || !who["corp:kilgore@kilgore.trout"] {
		t.Errorf("the audit log names %v", who)
	}
	refused := func(what, token, why string) {
		t.Helper()
		for _, ask := range []func() (int, string){
			func() (int, string) { return r.ask("GET", "/v2/team/app/tags/list", "bearer", token, nil) },
			func() (int, string) { return r.ask("GET", "/token?service=foil", "oidc", token, nil) },
			func() (int, string) {
				return r.ask("POST", "/token", "", "", url.Values{"grant_type": {exchangeGrant}, "subject_token": {token}})
			},
		} {
			if status, body := ask(); status != http.StatusUnauthorized {
				t.Errorf("%s: %d %s", what, status, body)
			}
		}
		if !strings.Contains(r.log.String(), why) {
			t.Errorf("%s: the log does not say %q", what, why)
		}
	}
	refused("a token for another client", d.ann("other"), "it is of an issuer that is not configured")
	refused("a token with another signature", ann[:len(ann)-8]+"AAAAAAAA", "failed to verify")

	d.rotate()
	if status := push(d.author("registry")); status != http.StatusAccepted {
		t.Errorf("signed by the new key: %d", status)
	}
	if status := push(author); status != http.StatusAccepted {
		t.Errorf("signed by the former key, which is still published: %d", status)
	}
	// All keys are others from one moment to the next.
	d.stop()
	d.start("1h")
	if status := push(d.author("registry")); status != http.StatusAccepted {
		t.Errorf("after all keys were changed: %d", status)
	}
	if status := push(author); status != http.StatusUnauthorized {
		t.Errorf("signed by a key that is published no more: %d", status)
	}
}

// An ID token that has expired counts no more, though it was right, and though it was exchanged before.
func TestDexExpiry(t *testing.T) {
	d := newDex(t, "1s")
	r := newRegistry(t, newAuthority(t), d.issuer())
	id := d.author("registry")
	eventually(t, "the token has expired", func() error {
		status, body := r.ask("GET", "/v2/", "bearer", id, nil)
		if status == http.StatusUnauthorized {
			return nil
		}
		return fmt.Errorf("%d %s", status, body)
	})
	if status, body := r.ask("GET", "/token?service=foil", "oidc", id, nil); status != http.StatusUnauthorized {
		t.Errorf("exchanged: %d %s", status, body)
	}
	if !strings.Contains(r.log.String(), "token is expired") {
		t.Error("the log does not say that it has expired")
	}
	// It is the time, and nothing else: one that has just been made counts, on a machine that is not too busy.
	eventually(t, "a new one counts", func() error {
		if status, body := r.ask("GET", "/v2/", "bearer", d.author("registry"), nil); status != http.StatusOK {
			return fmt.Errorf("%d %s", status, body)
		}
		return nil
	})
}

// A provider that is down is no reason to guess: who comes is told to try again, and is known when it is back.
func TestDexDown(t *testing.T) {
	d := newDex(t, "1h")
	id := d.author("registry")
	r := newRegistry(t, newAuthority(t), d.issuer())
	d.stop()
	if status, body := r.ask("GET", "/v2/", "bearer", id, nil); status != http.StatusTooManyRequests {
		t.Errorf("without its keys: %d %s", status, body)
	}
	d.start("1h")
	began := time.Now()
	eventually(t, "the provider is asked again", func() error {
		if status, body := r.ask("GET", "/v2/", "bearer", d.author("registry"), nil); status != http.StatusOK {
			return fmt.Errorf("after %v: %d %s", time.Since(began), status, body)
		}
		return nil
	})
}
