package workload

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const subject = "eyJ.the-token-of-a-pod.sig"

// golden is a request, by hand, of the types that kubelet 1.37.2 has for it.
func golden(t *testing.T, name, host string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), "REGISTRY", host)
}

// registry is one whose token service answers with status and body.
func registry(t *testing.T, status int, body string, realm func(host string) string) (host, ca string, forms func() []string) {
	t.Helper()
	var got []string
	var s *httptest.Server
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v2/", func(w http.ResponseWriter, _ *http.Request) {
		if realm != nil {
			w.Header().Set("Www-Authenticate", fmt.Sprintf(`Bearer realm=%q,service="foil"`, realm(strings.TrimPrefix(s.URL, "https://"))))
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	mux.HandleFunc("POST /token", func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			t.Error(err)
		}
		got = append(got, r.PostForm.Encode())
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	})
	mux.HandleFunc("POST /elsewhere", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/token", http.StatusTemporaryRedirect)
	})
	s = httptest.NewTLSServer(mux)
	t.Cleanup(s.Close)
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(s.URL, "https://"), ca, func() []string { return got }
}

func https(host string) string { return "https://" + host + "/token" }

func TestProvide(t *testing.T) {
	host, ca, forms := registry(t, 200, `{"token":"T","access_token":"T","expires_in":300}`, https)
	var out bytes.Buffer
	if err := Provide(t.Context(), Options{CA: ca}, strings.NewReader(golden(t, "request.json", host)), &out); err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"apiVersion": Version, "kind": "CredentialProviderResponse", "cacheKeyType": "Registry", "cacheDuration": "2m30s",
		"auth": map[string]any{host: map[string]any{"username": "kubelet", "password": "T"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	form := "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Atoken-exchange&service=foil&subject_token=" + subject +
		"&subject_token_type=urn%3Aietf%3Aparams%3Aoauth%3Atoken-type%3Ajwt"
	if diff := cmp.Diff([]string{form}, forms()); diff != "" {
		t.Error(diff)
	}
}

// A registry that asks nobody to log in is not shown the token.
func TestOpenRegistry(t *testing.T) {
	host, ca, forms := registry(t, 200, `{}`, nil)
	var out bytes.Buffer
	if err := Provide(t.Context(), Options{CA: ca}, strings.NewReader(golden(t, "request.json", host)), &out); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "auth\"") || !strings.Contains(out.String(), `"cacheDuration":"0s"`) || len(forms()) != 0 {
		t.Errorf("answered %s, forms %q", out.String(), forms())
	}
}

func TestRefused(t *testing.T) {
	good := `{"token":"T"}`
	for name, c := range map[string]struct {
		request string
		status  int
		body    string
		realm   func(string) string
		says    string
		sent    int // requests that have the token
	}{
		"no token":            {"request-without-token.json", 200, good, https, "tokenAttributes", 0},
		"another version":     {"request-v1beta1.json", 200, good, https, "want a CredentialProviderRequest of " + Version, 0},
		"no request":          {"no-request.json", 200, good, https, "kubelets run this command", 0},
		"unknown issuer":      {"request.json", 401, `{"errors":[{"code":"UNAUTHORIZED","message":"the token is not valid here"}]}`, https, `"the token is not valid here": does the registry know the cluster`, 1},
		"no token comes back": {"request.json", 200, `{}`, https, "the answer has no token", 1},
		"without TLS":         {"request.json", 200, good, func(h string) string { return "http://" + h + "/token" }, "without TLS", 0},
		"no URL":              {"request.json", 200, good, func(string) string { return "token" }, "no URL", 0},
		"redirected":          {"request.json", 200, good, func(h string) string { return "https://" + h + "/elsewhere" }, "307", 0},
	} {
		t.Run(name, func(t *testing.T) {
			host, ca, forms := registry(t, c.status, c.body, c.realm)
			var out bytes.Buffer
			err := Provide(t.Context(), Options{CA: ca}, strings.NewReader(golden(t, c.request, host)), &out)
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), subject) {
				t.Errorf("%v, want %s", err, c.says)
			}
			if out.Len() > 0 || len(forms()) != c.sent {
				t.Errorf("answered %q; the token was sent %d times, want %d", out.String(), len(forms()), c.sent)
			}
		})
	}
}

// A registry that is not trusted is sent nothing.
func TestUntrusted(t *testing.T) {
	host, _, forms := registry(t, 200, `{"token":"T"}`, https)
	err := Provide(t.Context(), Options{}, strings.NewReader(golden(t, "request.json", host)), new(bytes.Buffer))
	if err == nil || !strings.Contains(err.Error(), "certificate") || len(forms()) != 0 {
		t.Errorf("%v, %q", err, forms())
	}
}
