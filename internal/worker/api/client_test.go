package api_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/api/apitest"
)

// dial starts d and returns a client of it.
func dial(t *testing.T, d apitest.Funcs) *api.Client {
	t.Helper()
	root := t.TempDir()
	stop, err := apitest.Start(root, d)
	if err != nil {
		t.Fatal(err)
	}
	c := api.Dial(root)
	t.Cleanup(func() {
		c.Close()
		stop()
	})
	return c
}

func TestRequests(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	images := []api.Image{{Ref: "r.example/a:1", State: "complete", Files: 3, Created: now}}
	container := api.Container{ID: "web 1", Ref: "r.example/a:1", Config: []byte(`{"os":"linux"}`), Created: now}
	var removed []string
	c := dial(t, apitest.Funcs{
		Images_:      func(context.Context) ([]api.Image, error) { return images, nil },
		RemoveImage_: func(_ context.Context, ref string) error { removed = append(removed, ref); return nil },
		CreateContainer_: func(_ context.Context, req api.ContainerRequest) (*api.Container, error) {
			if d := cmp.Diff(api.ContainerRequest{ID: "web 1", Ref: "r.example/a:1"}, req); d != "" {
				t.Error(d)
			}
			return &container, nil
		},
		Containers_:      func(context.Context) ([]api.Container, error) { return []api.Container{container}, nil },
		RemoveContainer_: func(_ context.Context, id string) error { removed = append(removed, id); return nil },
		Status_:          func(context.Context) (*api.Status, error) { return &api.Status{PID: 7, Gate: "fanotify"}, nil },
	})
	ctx := t.Context()

	gotImages, err := c.Images(ctx)
	if diff := cmp.Diff(images, gotImages); err != nil || diff != "" {
		t.Errorf("images: %v\n%s", err, diff)
	}
	gotContainer, err := c.CreateContainer(ctx, api.ContainerRequest{ID: "web 1", Ref: "r.example/a:1"})
	if diff := cmp.Diff(&container, gotContainer); err != nil || diff != "" {
		t.Errorf("create container: %v\n%s", err, diff)
	}
	gotContainers, err := c.Containers(ctx)
	if diff := cmp.Diff([]api.Container{container}, gotContainers); err != nil || diff != "" {
		t.Errorf("containers: %v\n%s", err, diff)
	}
	st, err := c.Status(ctx)
	if err != nil || st.PID != 7 {
		t.Errorf("status: %+v, %v", st, err)
	}
	if err := errors.Join(c.RemoveImage(ctx, "r.example/a@b:1?x=y"), c.RemoveContainer(ctx, "web 1/2")); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"r.example/a@b:1?x=y", "web 1/2"}, removed); diff != "" {
		t.Error(diff)
	}
}

func TestErrorKeepsItsCode(t *testing.T) {
	want := &api.Error{Code: api.CodeConflict, Message: "image r.example/a is used by container x"}
	c := dial(t, apitest.Funcs{RemoveImage_: func(context.Context, string) error { return want }})
	err := c.RemoveImage(t.Context(), "r.example/a")
	if got, ok := errors.AsType[*api.Error](err); !ok || *got != *want {
		t.Errorf("got %#v, want %#v", err, want)
	}
}

// A daemon that an upgrade has left running does not know what a newer command asks.
func TestOlderDaemon(t *testing.T) {
	c := dial(t, apitest.Funcs{RemoveImage_: func(context.Context, string) error {
		return &api.Error{Code: api.CodeInvalid, Message: `request body: json: unknown field "container"`}
	}})
	err := c.RemoveImage(t.Context(), "r.example/a")
	if e, ok := errors.AsType[*api.Error](err); !ok || e.Code != api.CodeInvalid || !strings.Contains(e.Message, "restart it") {
		t.Errorf("got %#v", err)
	}
}

func TestPull(t *testing.T) {
	resolved := api.Event{Event: api.Resolved, Digest: "sha256:1"}
	mounted := api.Event{Event: api.Mounted, BytesMoved: 10}
	complete := api.Event{Event: api.Complete, BytesMoved: 100}
	broken := &api.Error{Code: api.CodeUnavailable, Message: "pull r.example/a: connection reset"}
	tests := []struct {
		name   string
		until  api.EventKind
		events []api.Event
		err    error // of the daemon
		want   []api.EventKind
		code   string // of the client's error
	}{
		{"complete", "", []api.Event{resolved, mounted, complete}, nil, []api.EventKind{api.Resolved, api.Mounted, api.Complete}, ""},
		{"until mounted", api.Mounted, []api.Event{resolved, mounted, complete}, nil, []api.EventKind{api.Resolved, api.Mounted}, ""},
		{"complete comes for mounted", api.Mounted, []api.Event{complete}, nil, []api.EventKind{api.Complete}, ""},
		{"refused", "", nil, broken, []api.EventKind{""}, api.CodeUnavailable},
		{"fails midway", "", []api.Event{resolved}, broken, []api.EventKind{api.Resolved, api.Failed}, api.CodeUnavailable},
		{"cut off", "", []api.Event{resolved}, nil, []api.EventKind{api.Resolved, ""}, api.CodeUnavailable},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c := dial(t, apitest.Funcs{Pull_: func(_ context.Context, _ api.PullRequest, emit func(api.Event) error) error {
				for _, ev := range test.events {
					if err := emit(ev); err != nil {
						return err
					}
				}
				return test.err
			}})
			var got []api.EventKind
			var last error
			for ev, err := range c.Pull(t.Context(), api.PullRequest{Ref: "r.example/a:1", Until: test.until}) {
				if last != nil {
					t.Error("an event after an error")
				}
				got, last = append(got, ev.Event), err
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			var code string
			if e, ok := errors.AsType[*api.Error](last); ok {
				code = e.Code
			} else if last != nil {
				t.Errorf("not an *api.Error: %v", last)
			}
			if code != test.code {
				t.Errorf("error %v, want code %q", last, test.code)
			}
		})
	}
}

// A daemon that is in the middle of a pull must not keep the client from
// leaving: events arrive as they are sent, and the context ends the wait.
func TestPullStreams(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	left := make(chan struct{})
	c := dial(t, apitest.Funcs{Pull_: func(ctx context.Context, _ api.PullRequest, emit func(api.Event) error) error {
		if err := emit(api.Event{Event: api.Resolved}); err != nil {
			return err
		}
		<-ctx.Done()
		close(left)
		return ctx.Err()
	}})
	enough := errors.New("seen enough")
	var got error
	for ev, err := range c.Pull(ctx, api.PullRequest{Ref: "r.example/a:1"}) {
		if err == nil && ev.Event == api.Resolved {
			cancel(enough)
		}
		got = err
	}
	if !errors.Is(got, enough) {
		t.Errorf("got %v, want %v", got, enough)
	}
	<-left
}

func TestVerify(t *testing.T) {
	fail := &api.Error{Code: api.CodeNotFound, Message: "no image"}
	for _, test := range []struct {
		name string
		err  error
		want []api.VerifyEvent
	}{
		{"done", nil, []api.VerifyEvent{{Checked: 1, Total: 2}, {Bad: "etc/passwd"}, {Checked: 2, Total: 2, Done: true}}},
		{"fails", fail, []api.VerifyEvent{{}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := dial(t, apitest.Funcs{Verify_: func(_ context.Context, ref string, emit func(api.VerifyEvent) error) error {
				if ref != "r.example/a:1" {
					t.Errorf("ref %q", ref)
				}
				if test.err != nil {
					return test.err
				}
				for _, ev := range test.want {
					if err := emit(ev); err != nil {
						return err
					}
				}
				return nil
			}})
			var got []api.VerifyEvent
			var last error
			for ev, err := range c.Verify(t.Context(), "r.example/a:1") {
				got, last = append(got, ev), err
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if (last != nil) != (test.err != nil) {
				t.Errorf("error %v, want %v", last, test.err)
			}
		})
	}
}

// What is wrong with the way to the daemon must be said in words that lead on.
func TestNoAnswer(t *testing.T) {
	none := t.TempDir()

	dead := t.TempDir()
	if err := os.Mkdir(filepath.Join(dead, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", api.SocketPath(dead))
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()

	stranger := t.TempDir()
	if err := os.Mkdir(filepath.Join(stranger, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err = net.Listen("unix", api.SocketPath(stranger))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.NotFoundHandler()}
	go srv.Serve(l)
	defer srv.Close()

	for _, test := range []struct {
		name, path, want string
		none             bool
	}{
		{"never started", none, `start one with "foil node --root ` + none + `"`, true},
		{"killed", dead, `start one with "foil node --root ` + dead + `"`, true},
		{"by socket", api.SocketPath(none), `start one with "foil node --root DIR"`, true},
		{"long path", "/tmp/" + strings.Repeat("x", 120), "choose a shorter --root", false},
		{"something else", stranger, "answered 404 Not Found: 404 page not found", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := api.Dial(test.path)
			defer c.Close()
			_, err := c.Status(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q in it", err, test.want)
			}
			if _, ok := errors.AsType[*api.NoDaemonError](err); ok != test.none {
				t.Errorf("%v: is a NoDaemonError: %v, want %v", err, ok, test.none)
			}
		})
	}
}

func TestNormalRef(t *testing.T) {
	d := "sha256:" + strings.Repeat("0a", 32)
	for _, test := range []struct{ in, want, err string }{
		{"r.example/redis", "r.example/redis:latest", ""},
		{"localhost/redis:7", "localhost/redis:7", ""},
		{"127.0.0.1:5000/a/b/c:v1.2", "127.0.0.1:5000/a/b/c:v1.2", ""},
		{"[::1]:5000/a", "[::1]:5000/a:latest", ""},
		{"r.example/redis@" + d, "r.example/redis@" + d, ""},
		{"r.example/redis:7@" + d, "r.example/redis:7@" + d, ""},
		{"redis:7", "", "it has no registry host"},
		{"library/redis", "", "it has no registry host"},
		{d, "", "it has no registry host"},
		{"", "", "repository name must have at least one component"},
		{"r.example/Redis", "", "must be lowercase"},
		{"r.example/redis@sha256:0a", "", "invalid reference format"},
		{"r.example:65535/redis", "r.example:65535/redis:latest", ""},
		{"r.example:65536/redis", "", "ports are 1 to 65535"},
		{"[::1]:0/redis", "", "ports are 1 to 65535"},
		{"r.example:99999999999999999999999/redis", "", "ports are 1 to 65535"},
		{strings.Repeat("x", 300) + ".example/redis", "", "no host has such a long name"},
		{"r.example/" + strings.Repeat("x", 3000), "", "xxx...\": repository name must not be more than"},
	} {
		got, err := api.NormalRef(test.in)
		if got != test.want {
			t.Errorf("%q: got %q, want %q", test.in, got, test.want)
		}
		switch e, ok := errors.AsType[*api.Error](err); {
		case test.err == "" && err != nil, test.err != "" && !ok:
			t.Errorf("%q: error %v", test.in, err)
		case ok && (e.Code != api.CodeInvalid || !strings.Contains(e.Message, test.err)):
			t.Errorf("%q: error %+v, want %q", test.in, e, test.err)
		}
	}
}

// A normal form is its own normal form, and is never without a host.
func FuzzNormalRef(f *testing.F) {
	for _, s := range []string{"r.example/redis", "localhost/a:b", "[::1]:5000/a", "redis:7", "a.b/c@sha256:" + strings.Repeat("0a", 32)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		once, err := api.NormalRef(s)
		if err != nil {
			return
		}
		twice, err := api.NormalRef(once)
		if err != nil || twice != once {
			t.Errorf("%q: %q, then %q, %v", s, once, twice, err)
		}
	})
}
