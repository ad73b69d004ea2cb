package login_test

import (
	"encoding/json"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"

	"hydrofoil.dev/foil/internal/server/login"
)

// at is a server's logins with its keys in a file.
func at(t *testing.T, keys, config string) *login.Logins {
	t.Helper()
	var c login.Config
	if err := toml.Unmarshal([]byte(config), &c); err != nil {
		t.Fatal(err)
	}
	state, err := login.Open(keys, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := login.New(c, state)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tokens gets a token, and one to refresh it, by GET of a query or POST of a form.
func tokens(t *testing.T, l *login.Logins, method, query, authorization string) (token, refresh string) {
	t.Helper()
	req := httptest.NewRequest("GET", login.TokenPath+query, nil)
	if method == "POST" {
		req = httptest.NewRequest("POST", login.TokenPath, strings.NewReader(query))
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	w := httptest.NewRecorder()
	if _, err := l.Token(req, w, somewhere); err != nil {
		t.Fatal(err)
	}
	var a struct {
		Token   string `json:"token"`
		Refresh string `json:"refresh_token"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	return a.Token, a.Refresh
}
