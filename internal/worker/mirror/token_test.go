package mirror

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/pull"
)

// A registry that does not let the daemon in, and lets anybody in who comes as containerd does: what it has is not known.
// containerd's own client must not come by it where it could be run on what is not proven.
func TestMirrorOfARegistryThatHides(t *testing.T) {
	for name, c := range map[string]struct {
		user, secret string
		besides      bool
		want         string // who resolves it: mirror, registry, nobody
	}{
		"nothing is to be claimed":                    {want: "registry"},
		"without credentials":                         {besides: true, want: "nobody"},
		"with those of somebody else":                 {user: "bob", secret: "pw", besides: true, want: "nobody"},
		"with an identity token of somebody":          {secret: "token", besides: true, want: "nobody"},
		"with its credentials":                        {user: "alice", secret: "pw", besides: true, want: "mirror"},
		"with its credentials, nothing to be claimed": {user: "alice", secret: "pw", want: "mirror"},
	} {
		t.Run(name, func(t *testing.T) {
			f, h := newFake()
			f.private = true
			m := New(Options{Node: f, Besides: func(string) bool { return c.besides }, Claim: func(*pull.Header) error { return nil }})
			near := httptest.NewTLSServer(m)
			defer near.Close()
			hides := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", h.Manifest.MediaType)
				w.Header().Set("Docker-Content-Digest", h.Manifest.Digest.String())
				_, _ = w.Write(h.Manifest.Bytes)
			}))
			defer hides.Close()
			host := func(s *httptest.Server) docker.RegistryHost {
				return docker.RegistryHost{
					Client: s.Client(), Host: strings.TrimPrefix(s.URL, "https://"), Scheme: "https", Path: "/v2",
					Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
					Authorizer: docker.NewDockerAuthorizer(docker.WithAuthClient(s.Client()),
						docker.WithAuthCreds(func(string) (string, string, error) { return c.user, c.secret, nil })),
				}
			}
			r := docker.NewResolver(docker.ResolverOptions{Hosts: func(string) ([]docker.RegistryHost, error) {
				return []docker.RegistryHost{host(near), host(hides)}, nil
			}})
			_, desc, err := r.Resolve(t.Context(), "r.example/a/b:1")
			got := "nobody"
			switch {
			case err == nil && desc.Digest == h.Chosen.Digest:
				got = "mirror"
			case err == nil:
				got = "registry"
			}
			if got != c.want {
				t.Errorf("%s resolves it (%v), want %s", got, err, c.want)
			}
			if !c.besides {
				return
			}
			// By its digest, as of an entry that containerd chose from an index.
			if b, err := fetch(t.Context(), r, h); (err == nil && b == string(h.Manifest.Bytes)) != (c.want == "mirror") {
				t.Errorf("its manifest: %q, %v", b, err)
			}
		})
	}
}

// fetch gets the manifest of an image, as containerd does.
func fetch(ctx context.Context, r remotes.Resolver, h *pull.Header) (string, error) {
	f, err := r.Fetcher(ctx, "r.example/a/b:1")
	if err != nil {
		return "", err
	}
	body, err := f.Fetch(ctx, ocispec.Descriptor{MediaType: h.Manifest.MediaType, Digest: h.Manifest.Digest, Size: int64(len(h.Manifest.Bytes))})
	if err != nil {
		return "", err
	}
	defer body.Close()
	b, err := io.ReadAll(body)
	return string(b), err
}
