package serve_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/layer/layertest"
)

// A push, a deletion and pulls are told, though nobody listens when they happen and the server is killed then.
func TestWebhooksOutliveAKill(t *testing.T) {
	var l net.ListenConfig
	free, err := l.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	free.Close()
	dir := t.TempDir()
	root, file := filepath.Join(dir, "root"), filepath.Join(dir, "webhooks.toml")
	writeFile(t, file, fmt.Sprintf("[[webhook]]\nname = \"ci\"\nurl = \"http://%s/hook\"\nevents = [\"push\", \"pull\", \"delete\"]\nrepositories = [\"**\"]\n", addr))
	t.Setenv(childWebhooks, file)
	base, cmd := child(t, root)
	m := makeImage(t, layertest.Layer{layertest.File("app", 0o755, noise(1, 10_000))})
	m.pushTo(t, strings.TrimPrefix(base, "http://"), "team/app")
	send(t, "DELETE", base+"/v2/team/app/manifests/1", "", nil, http.StatusAccepted)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	got := make(chan string, 100)
	back, err := l.Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	receiver := &httptest.Server{Listener: back, Config: &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		var e struct{ Type, Subject string }
		if err := json.NewDecoder(req.Body).Decode(&e); err != nil {
			t.Error(err)
		}
		got <- strings.TrimPrefix(e.Type, "dev.hydrofoil.image.") + " " + e.Subject
	})}}
	receiver.Start()
	t.Cleanup(receiver.Close)
	base, _ = child(t, root)
	d := digest.FromBytes(m.manifest).String()
	all := []string{<-got, <-got}
	slices.Sort(all)
	if want := []string{"deleted.v1 team/app:1", "pushed.v1 team/app@" + d}; !slices.Equal(all, want) {
		t.Errorf("told %q, want %q", all, want)
	}
	send(t, "HEAD", base+"/v2/team/app/manifests/"+d, "", nil, http.StatusOK)
	send(t, "GET", base+"/v2/team/app/manifests/"+d, "", nil, http.StatusOK)
	if one := <-got; one != "pulled.v1 team/app@"+d {
		t.Errorf("told %q", one)
	}
	// A bundle is a pull, of the same image by the same nobody.
	wantBundle(t, strings.TrimPrefix(base, "http://"), "team/app", d, digest.FromBytes(m.manifest))
	send(t, "DELETE", base+"/v2/team/app/manifests/"+d, "", nil, http.StatusAccepted)
	if one := <-got; one != "deleted.v1 team/app@"+d {
		t.Errorf("told %q", one)
	}
}
