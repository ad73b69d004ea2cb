package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/crypto/bcrypt"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
	"hydrofoil.dev/foil/internal/worker/api"
)

// A worker logs in with what docker login left, at a server with rules: it pulls what it may, and what it may not
// pull, or may no more, is as if it were not there. What is here stays.
func TestWorkerLogsIn(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	s := startServer(t, root)
	img := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.Dir("data", 0o755), layertest.File("data/x", 0o644, noise(300_000))}.Gzip(t))
	other := newImage(t, ocispec.ImageConfig{}, layertest.Layer{layertest.File("y", 0o644, noise(1000))}.Gzip(t))
	ref, secret := s.push("team/app", "1", img), s.push("secret/app", "1", other)
	next := s.push("team/next", "1", other)
	s.signal(syscall.SIGINT)
	<-s.done

	hash, err := bcrypt.GenerateFromPassword([]byte("s3cret-Pa55"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	passwords := file("htpasswd", fmt.Sprintf("worker:%s\n", hash))
	rules := func(repositories string) string {
		t.Helper()
		// Tokens that end while a pull is under way.
		return file("access.toml", fmt.Sprintf("[passwords]\nfile = %q\n[tokens]\nlifetime = \"1s\"\n[[rule]]\nto = [\"user:worker\"]\nallow = [\"pull\"]\nrepositories = [%q]\n", passwords, repositories))
	}
	audit := filepath.Join(dir, "audit.jsonl")
	s.guard(t, rules("team/**"), audit)

	config := func(password string) string {
		t.Helper()
		b, err := json.Marshal(map[string]any{"auths": map[string]any{s.addr: map[string]string{"username": "worker", "password": password}}})
		if err != nil {
			t.Fatal(err)
		}
		return file("config.json", string(b))
	}
	w := startWorker(t, workerRoot(t), "--docker-config", config("wrong"), "--give-up", "1s")
	fails := func(what, ref string) {
		t.Helper()
		if _, err := w.pull(ref, api.Complete); err == nil {
			t.Errorf("%s: pulled", what)
		} else if strings.Contains(err.Error(), "Pa55") {
			t.Errorf("%s: the error has the password: %v", what, err)
		}
	}
	fails("a wrong password", ref)
	config("s3cret-Pa55")
	w.mustPull(ref, api.Complete)
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Errorf("the image:\n%s", diff)
	}
	fails("what it may not pull", secret)
	rules("nothing")
	fails("what it may pull no more", next)
	if diff := differs(t, img, w.mountOf(ref)); diff != "" {
		t.Errorf("what is here has gone:\n%s", diff)
	}
	rules("team/**")
	w.mustPull(next, api.Complete)
	b, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"subject":"user:worker"`, `"repository":"team/app"`, `"decision":"denied"`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the audit log lacks %s", want)
		}
	}
	if strings.Contains(string(b)+s.log.String()+w.log.String(), "Pa55") {
		t.Error("a log has the password")
	}
}

// guard starts a server again that has ended, with rules.
func (s *server) guard(t *testing.T, rules, audit string) {
	t.Helper()
	s.process = start(t, "serve", "--root", s.root, "--listen", s.addr, "--access", rules, "--audit", audit)
	eventually(t, "the server answers", func() error {
		if status, _ := s.ask(t, "/v2/", func(*http.Request) {}); status != http.StatusUnauthorized {
			return fmt.Errorf("status %d", status)
		}
		return nil
	})
}

// ask asks the server; 0 is that it does not answer.
func (s *server) ask(t *testing.T, path string, who func(*http.Request)) (status int, body []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+s.addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	who(req)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil
	}
	defer resp.Body.Close()
	if body, err = io.ReadAll(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, body
}

// The token that a pull began with expires while its bytes are on the way: what the worker asks then, and the rest of a stream
// that is cut, come with another one.
func TestTokenExpiresInTheMiddle(t *testing.T) {
	s, dir := startServer(t, t.TempDir()), t.TempDir()
	img := manyFiles(t, 200, 60_000, 4, 0)
	ref := s.push("half", "1", img)
	s.signal(syscall.SIGINT)
	<-s.done
	file := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	hash, err := bcrypt.GenerateFromPassword([]byte("s3cret-Pa55"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	passwords := file("htpasswd", fmt.Sprintf("worker:%s\n", hash))
	audit := filepath.Join(dir, "audit.jsonl")
	s.guard(t, file("access.toml", fmt.Sprintf("[passwords]\nfile = %q\n[tokens]\nlifetime = \"2s\"\n[[rule]]\nto = [\"user:worker\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n", passwords)), audit)
	k := newLink(t, s.addr, 0)
	k.stallAfter(3 << 20)
	ref = k.via(ref)
	b, err := json.Marshal(map[string]any{"auths": map[string]any{k.addr: map[string]string{"username": "worker", "password": "s3cret-Pa55"}}})
	if err != nil {
		t.Fatal(err)
	}
	w := startWorker(t, workerRoot(t), "--docker-config", file("config.json", string(b)))
	w.mustPull(ref, api.Mounted)

	// One that was given later, of the same lifetime, tells when the worker's has expired.
	_, body := s.ask(t, "/token?service=foil", func(r *http.Request) { r.SetBasicAuth("worker", "s3cret-Pa55") })
	var later struct {
		Token string `json:"token"`
	}
	if err := json.Unmarshal(body, &later); err != nil || later.Token == "" {
		t.Fatalf("no token: %s", body)
	}
	eventually(t, "the token has expired", func() error {
		if status, _ := s.ask(t, "/v2/", func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+later.Token) }); status != http.StatusUnauthorized {
			return fmt.Errorf("status %d", status)
		}
		return nil
	})
	given := func() int {
		t.Helper()
		b, err := os.ReadFile(audit)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), `"msg":"token","subject":"user:worker"`)
	}
	before := given()
	if st := w.imageOf(ref); st.State != "pulling" {
		t.Fatalf("the image is %+v, want it on its way", st)
	}
	k.setCut(true)
	k.open()
	k.setCut(false)
	intact(t, w, ref, img)
	if given() == before {
		t.Error("no token was given while the pull went on")
	}
}
