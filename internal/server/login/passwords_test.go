package login_test

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/server/login"
)

func passwordFile(t *testing.T, users ...string) (path, config string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "htpasswd")
	var b strings.Builder
	b.WriteString("# users\n\n")
	for _, u := range users {
		hash, err := bcrypt.GenerateFromPassword([]byte("password of "+u), bcrypt.MinCost)
		if err != nil {
			t.Fatal(err)
		}
		// As Apache's htpasswd writes it.
		fmt.Fprintf(&b, "%s:%s\n", u, strings.Replace(string(hash), "$2a$", "$2y$", 1))
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, fmt.Sprintf("[passwords]\nfile=%q\n", path)
}

func basic(user, password string) string {
	req := httptest.NewRequest("GET", "/", nil)
	req.SetBasicAuth(user, password)
	return req.Header.Get("Authorization")
}

func TestPasswords(t *testing.T) {
	_, config := passwordFile(t, "ann", "bob")
	l := mustLogins(t, config)
	for _, test := range []struct{ authorization, want string }{
		{"", "anonymous"},
		{basic("ann", "password of ann"), "user:ann"},
		{basic("ann", "password of ann"), "user:ann"},
		{basic("ann", "password of bob"), "refused: the name or the password is wrong"},
		{basic("Ann", "password of ann"), "refused: the name or the password is wrong"},
		{basic("joe", "password of joe"), "refused: the name or the password is wrong"},
		{basic("ann", ""), "refused: the name or the password is wrong"},
		{basic("ann", strings.Repeat("x", 5000)), "refused: the name or the password is wrong"},
		{"Basic !", "refused: the Authorization header is no HTTP Basic"},
		{"Digest x", "refused: the Authorization header is neither Basic nor Bearer"},
		{"Bearer x", "refused: the token is no JWT"},
	} {
		if got := identify(l, test.authorization); !strings.HasPrefix(got, test.want) || len(got) > 0 && strings.HasPrefix(test.want, "refused") != strings.HasPrefix(got, "refused") {
			t.Errorf("%q: %s, want %s", test.authorization, got, test.want)
		}
	}
	req := httptest.NewRequest("GET", "/", nil)
	req.Header["Authorization"] = []string{basic("ann", "password of ann"), basic("bob", "password of bob")}
	if _, err := l.Identify(req, somewhere); err == nil {
		t.Error("two users in one request")
	}
}

func TestWrongPasswordFiles(t *testing.T) {
	for content, want := range map[string]string{
		"swordfish":                             "line 1: want NAME:HASH",
		"ann:swordfish":                         "user ann has no bcrypt hash",
		"ann:{SHA}swordfish":                    "user ann has no bcrypt hash",
		"a*:$2a$04$" + strings.Repeat("a", 53):  "no stars",
		"ann:$2a$31$" + strings.Repeat("a", 53): "has cost 31, at most 14",
		"ann:$2a$04$" + strings.Repeat("a", 53) + "\nann:$2a$04$" + strings.Repeat("a", 53): "line 2: user ann is there twice",
	} {
		path := filepath.Join(t.TempDir(), "htpasswd")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := logins(t, fmt.Sprintf("[passwords]\nfile=%q\n", path))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%q: %v, want %q", content, err, want)
		}
	}
}

// Failures count for an address, and an IPv6 network is one. Others go on.
func TestSlowedDown(t *testing.T) {
	_, config := passwordFile(t, "ann")
	l := mustLogins(t, config)
	try := func(address, password string) error {
		req := httptest.NewRequest("GET", "/", nil)
		req.SetBasicAuth("ann", password)
		_, err := l.Identify(req, netip.MustParseAddr(address))
		return err
	}
	slowed := func(err error) bool {
		e, ok := login.IsError(err)
		return ok && e.After > 0
	}
	tries := 0
	for err := error(nil); !slowed(err); tries++ {
		if err = try(fmt.Sprintf("2001:db8::%x", tries+1), "guess"); err == nil || tries > 100 {
			t.Fatalf("try %d: %v", tries, err)
		}
	}
	if tries < 5 {
		t.Errorf("slowed down after %d failures", tries)
	}
	if err := try("2001:db8:0:1::1", "password of ann"); err != nil {
		t.Errorf("another network: %v", err)
	}
	// The password is known now: nothing is computed for it.
	if err := try("2001:db8::1", "password of ann"); err != nil {
		t.Errorf("a password that was right before: %v", err)
	}
}

// Many logins at once end, in answers or in being told to come later.
func TestManyLogins(t *testing.T) {
	_, config := passwordFile(t, "ann")
	l := mustLogins(t, config)
	var all sync.WaitGroup
	for n := range 300 {
		all.Go(func() {
			req := httptest.NewRequest("GET", "/", nil)
			req.SetBasicAuth("ann", fmt.Sprint("guess ", n))
			if _, err := l.Identify(req, netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)})); err == nil {
				t.Error("a guess was right")
			}
		})
	}
	all.Wait()
	if got := identify(l, basic("ann", "password of ann")); got != "user:ann" {
		t.Errorf("afterwards: %s", got)
	}
}

// A new key signs after some time, and logs nobody out; nobody else can read the file.
func TestKeysRotate(t *testing.T) {
	path, config := passwordFile(t, "ann")
	_ = path
	keys := filepath.Join(t.TempDir(), "access", "keys.json")
	ids := func() (all []string) {
		t.Helper()
		b, err := os.ReadFile(keys)
		if err != nil {
			t.Fatal(err)
		}
		var f struct {
			Keys []struct {
				ID string `json:"id"`
			} `json:"keys"`
		}
		if err := json.Unmarshal(b, &f); err != nil {
			t.Fatal(err)
		}
		for _, k := range f.Keys {
			all = append(all, k.ID)
		}
		return all
	}
	synctest.Test(t, func(t *testing.T) {
		l := at(t, keys, config+"[tokens]\nrefresh=\"2160h\"\n")
		if info, err := os.Stat(keys); err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("%v, %v", info.Mode(), err)
		}
		token, refresh := tokens(t, l, "GET", "?offline_token=true", basic("ann", "password of ann"))
		if got := identify(l, "Bearer "+token); got != "user:ann" {
			t.Fatal(got)
		}
		first := ids()
		time.Sleep(6 * time.Minute)
		if got := identify(l, "Bearer "+token); !strings.Contains(got, "the token has expired") {
			t.Errorf("after 6 minutes: %s", got)
		}
		if got := identify(l, "Bearer "+refresh); !strings.HasPrefix(got, "refused") {
			t.Errorf("a refresh token as a token: %s", got)
		}
		for day := 0; day < 85; day += 5 {
			time.Sleep(5 * 24 * time.Hour)
			// Each time another process, with the same file.
			l = at(t, keys, config+"[tokens]\nrefresh=\"2160h\"\n")
			if token, _ = tokens(t, l, "POST", "grant_type=refresh_token&refresh_token="+refresh, ""); identify(l, "Bearer "+token) != "user:ann" {
				t.Fatalf("day %d: %s", day, identify(l, "Bearer "+token))
			}
		}
		if now := ids(); len(now) != 3 || now[0] != first[0] {
			t.Errorf("keys %v, at first %v", now, first)
		}
		time.Sleep(60 * 24 * time.Hour)
		at(t, keys, config)
		if now := ids(); now[0] == first[0] {
			t.Errorf("the first key is still there: %v", now)
		}
	})
	if err := os.Chmod(keys, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := login.OpenKeys(keys); err == nil || !strings.Contains(err.Error(), "others may read it") {
		t.Errorf("keys that others may read: %v", err)
	}
}
