package hosts

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// requests returns what a registry has been asked since the last time.
func (r *registry) requests() (log []string) {
	r.do(func() { log, r.log = r.log, nil })
	return log
}

// newEarly has a Set that knows a registry, with Docker's configuration for it.
func newEarly(t *testing.T, basic bool) (r *registry, s *Set, logIn func()) {
	r, dirs := newRegistry(t, basic)
	config := write(t, filepath.Join(t.TempDir(), "config.json"),
		fmt.Sprintf(`{"auths": {%q: {"username": %q, "password": %q}}}`, r.Listener.Addr(), user, secret))
	s = New(Options{Dirs: dirs, DockerConfig: config})
	t.Cleanup(s.Close)
	if _, err := s.For(t.Context(), Want{Registry: "r.example"}); err != nil {
		t.Fatal(err)
	}
	call := s.LogIn(r.URL + "/")
	return r, s, func() { call(t.Context()) }
}

func TestLogInEarly(t *testing.T) {
	for name, basic := range map[string]bool{"token": false, "password": true} {
		t.Run(name, func(t *testing.T) {
			r, s, logIn := newEarly(t, basic)
			const ask = "/hydrofoil/v1/bundle?ns=r.example"
			for range 3 {
				logIn()
			}
			want := []string{"/v2/?", "token [repository:a:pull]"}
			if basic {
				want = want[:1]
			}
			if diff := cmp.Diff(want, r.requests()); diff != "" {
				t.Errorf("logging in:\n%s", diff)
			}
			if err := post(t, s, credentials.Credential{}); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{ask}, r.requests()); diff != "" {
				t.Errorf("a pull afterwards:\n%s", diff)
			}
			// A pull with a credential of its own shows that alone.
			if err := post(t, s, credentials.Credential{Username: "bob", Secret: "other"}); err == nil {
				t.Error("a wrong credential was let in")
			}
		})
	}
}

// What a server gave early, and takes no more, costs a pull what it would have cost without.
func TestEarlyRefused(t *testing.T) {
	r, s, logIn := newEarly(t, false)
	k := s.at(r.URL)
	a := k.auth(credentials.Credential{}, s.opts.DockerConfig)
	const ask, token = "/hydrofoil/v1/bundle?ns=r.example", "token [repository:a:pull]"
	for i := range earlyRefusals + 1 {
		a.mu.Lock()
		a.early.next, a.inner = time.Time{}, nil
		a.mu.Unlock()
		logIn()
		if got := len(r.requests()); (got > 0) != (i < earlyRefusals) {
			t.Errorf("after %d refusals: %d requests", i, got)
		}
		r.do(func() { r.valid = "" })
		if err := post(t, s, credentials.Credential{}); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{ask, token, ask}, r.requests()); diff != "" {
			t.Errorf("refused %d times:\n%s", i+1, diff)
		}
	}
}

func TestNobodyLogsInWithoutNeed(t *testing.T) {
	r, dirs := newRegistry(t, false)
	s := New(Options{Dirs: dirs})
	defer s.Close()
	s.LogIn(r.URL)(t.Context()) // not known
	if _, err := s.For(t.Context(), Want{Registry: "r.example"}); err != nil {
		t.Fatal(err)
	}
	s.LogIn(r.URL)(t.Context()) // no credentials
	if got := r.requests(); len(got) > 0 {
		t.Errorf("asked %q", got)
	}
}
