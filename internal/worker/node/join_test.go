package node

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
)

// asked returns the images of all requests.
func asked(s *fakeServer) (list []bundle.ImageRequest) {
	for _, r := range s.Requests() {
		list = append(list, r.Image)
	}
	return list
}

func (h *host) pullFor(req api.PullRequest) {
	h.t.Helper()
	req.Until = api.Mounted
	if err := h.n.Pull(h.t.Context(), req, func(api.Event) error { return nil }); err != nil {
		h.t.Fatal(err)
	}
}

// TestAResumedPullAsksForItsService restarts the daemon in the middle of pulls: each
// goes on with the startup set that it was begun with, also when the record of the image is
// of a daemon that noted none.
func TestAResumedPullAsksForItsService(t *testing.T) {
	for name, c := range map[string]struct {
		req   api.PullRequest
		older bool
		want  bundle.ImageRequest
	}{
		"service":    {req: api.PullRequest{Entrypoint: []string{"/bin/app"}, Args: []string{"-v", "x y"}}, want: bundle.ImageRequest{Startup: true, Entrypoint: []string{"/bin/app"}, Args: []string{"-v", "x y"}}},
		"arguments":  {req: api.PullRequest{Args: []string{"-v"}}, want: bundle.ImageRequest{Startup: true, Args: []string{"-v"}}},
		"image's":    {want: bundle.ImageRequest{Startup: true}},
		"no startup": {req: api.PullRequest{NoStartup: true, Args: []string{"-v"}}, want: bundle.ImageRequest{Args: []string{"-v"}}},
		"older":      {req: api.PullRequest{Args: []string{"-v"}}, older: true, want: bundle.ImageRequest{Startup: true}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFakeServer(t)
			m := newFakeImage(t, some(1, 8, 5000))
			c.req.Ref = s.Serve("app:1", m)
			s.SetLimit(2)
			h := newHost(t)
			h.pullFor(c.req)
			before := len(asked(s))
			h.stop()
			if path := h.imagePath(c.req.Ref); c.older {
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, regexp.MustCompile(`,"args":\[[^]]*\]`).ReplaceAll(b, nil), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			h.start()
			eventually(t, "the pull goes on", func() error {
				if len(asked(s)) == before {
					return fmt.Errorf("%d requests", before)
				}
				return nil
			})
			got := asked(s)[before]
			if got.Startup != c.want.Startup || !slices.Equal(got.Entrypoint, c.want.Entrypoint) || !slices.Equal(got.Args, c.want.Args) ||
				got.Reference != m.Manifest.Digest.String() || got.Header {
				t.Errorf("asked for %+v, want %+v", got, c.want)
			}
			s.SetLimit(-1)
			h.mustPull(c.req.Ref, api.Complete)
			h.same(m)
		})
	}
}

// TestServicesJoin starts services of an image whose pull runs: each other one
// is asked for, once; also by another name of the image, whose pull waits for the
// first, and after a restart of the daemon.
func TestServicesJoin(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 12, 5000))
	ref, other := s.Serve("app:1", m), s.Serve("other:1", m)
	s.SetLimit(2)
	h := newHost(t)
	service := func(name string) api.PullRequest { return api.PullRequest{Ref: ref, Args: []string{name}} }
	// joins waits for the n-th service that joins since from.
	joins := func(what string, from, n int, args ...string) {
		t.Helper()
		var got []bundle.ImageRequest
		eventually(t, what, func() error {
			got = slices.DeleteFunc(asked(s)[from:], func(r bundle.ImageRequest) bool { return !r.Header })
			if len(got) < n {
				return fmt.Errorf("%+v", got)
			}
			return nil
		})
		if len(got) != n || !got[n-1].Startup || !slices.Equal(got[n-1].Args, args) {
			t.Errorf("%s: asked for %+v", what, got)
		}
	}
	h.pullFor(service("first"))
	h.pullFor(service("first"))
	h.pullFor(service("second"))
	joins("the second service", 0, 1, "second")
	h.pullFor(service("second"))
	h.pullFor(api.PullRequest{Ref: ref, NoStartup: true, Args: []string{"without"}})
	h.pullFor(api.PullRequest{Ref: ref, Entrypoint: []string{"first"}})
	joins("the third service", 0, 2)
	by := service("fourth")
	by.Ref = other
	h.pullFor(by)
	joins("a service by another name", 0, 3, "fourth")
	by.Args = []string{"fifth"}
	h.pullFor(by)
	joins("another one", 0, 4, "fifth")
	for _, r := range []string{ref, other} {
		if img := h.image(r); img.State != "pulling" {
			t.Errorf("%s: %+v", r, img)
		}
	}
	h.remove(other)
	from := len(asked(s))
	h.restart()
	h.pullFor(service("sixth"))
	joins("a service after a restart", from, 1, "sixth")
	s.SetLimit(-1)
	eventually(t, "the image is complete", func() error {
		if img := h.image(ref); img.State != "complete" {
			return fmt.Errorf("%+v", img)
		}
		return nil
	})
	h.same(m)
	h.pullFor(service("seventh"))
	joins("what is complete lacks nothing", from, 1, "sixth")
	h.remove(ref)
	h.empty()
}

// TestContainersOfContainerd starts containers that containerd makes on an image whose pull runs: the
// set of each one's own arguments is asked for, and who fills nothing asks nobody.
func TestContainersOfContainerd(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 12, 5000))
	ref := s.Serve("app:1", m)
	s.SetLimit(2)
	h := newHost(t)
	h.pullFor(api.PullRequest{Ref: ref, Entrypoint: []string{"/app"}, Args: []string{"-v"}})
	key, questions := h.key(m), 0
	starts := func(id string, args ...string) {
		h.n.ContainerMade(key, id)
		h.n.ContainerStarts(key, id, func() Process { questions++; return Process{Args: args} })
	}
	starts("one", "/app", "-v") // comes already
	starts("two", "sleep", "1000")
	starts("three", "sleep", "1000")
	starts("four", "/app", "--other")
	starts("five") // nobody knows
	var got [][]string
	eventually(t, "the sets of two services are asked for", func() error {
		got = nil
		for _, r := range asked(s) {
			if r.Header {
				got = append(got, slices.Concat(r.Entrypoint, r.Args))
			}
		}
		if len(got) < 2 {
			return fmt.Errorf("%q", got)
		}
		return nil
	})
	slices.SortFunc(got, slices.Compare) // they are asked for side by side
	if diff := cmp.Diff([][]string{{"/app", "--other"}, {"sleep", "1000"}}, got); diff != "" {
		t.Errorf("asked for (-want +got):\n%s", diff)
	}
	if questions != 5 {
		t.Errorf("%d questions of what runs, want 5", questions)
	}
	s.SetLimit(-1)
	h.mustPull(ref, api.Complete)
	eventually(t, "nobody fills the rootfs", func() error {
		questions = 0
		if starts("six", "sleep", "1000"); questions > 0 {
			return errors.New("somebody wants to know what runs")
		}
		return nil
	})
}
