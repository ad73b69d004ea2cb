package mirror

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"hydrofoil.dev/foil/internal/worker/credentials"
)

// tokenPath is where containerd gets a token when it is asked to show who it is, as package tokens of registries. A
// Basic challenge does not do where an image must be seen: a containerd without credentials does not come back after
// one, but asks the next host, which may let it in though it did not let the daemon in. It comes back with a token.
const tokenPath = "/token"

// caller is who asks, as far as a request shows.
type caller struct {
	credential credentials.Credential // none: it has none, or was not asked
	known      bool                   // it was asked
}

// callerOf reads who sends a request.
func callerOf(r *http.Request) caller {
	if user, password, given := r.BasicAuth(); given {
		return caller{credentials.Credential{Username: user, Secret: password}, true}
	}
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return caller{}
	}
	var shown [2]string
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || json.Unmarshal(b, &shown) != nil {
		return caller{}
	}
	return caller{credentials.Credential{Username: shown[0], Secret: shown[1]}, true}
}

// challenge has a caller show what it has, if anything: it comes back in any case.
func challenge(w http.ResponseWriter, r *http.Request, repository string) {
	w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q,service=%q,scope=%q", "https://"+r.Host+tokenPath, r.Host, "repository:"+repository+":pull"))
	w.WriteHeader(http.StatusUnauthorized)
}

// token answers with what a caller has shown, as a token that says it again: it is for this mirror alone, over TLS.
func (m *Mirror) token(w http.ResponseWriter, r *http.Request) {
	user, secret, _ := r.BasicAuth()
	if r.Method == http.MethodPost {
		r.Body = http.MaxBytesReader(w, r.Body, 64<<10)
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		user, secret = r.PostForm.Get("username"), r.PostForm.Get("password")
		if refresh := r.PostForm.Get("refresh_token"); refresh != "" {
			user, secret = "", refresh
		}
	}
	b, err := json.Marshal([2]string{user, secret})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	token := base64.RawURLEncoding.EncodeToString(b)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"token": token, "access_token": token, "expires_in": 300})
}
