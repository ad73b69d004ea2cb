package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

// pullInto pulls with container c, and calls seen for each event.
func (h *host) pullInto(ctx context.Context, ref string, seen func(api.Event) error) error {
	return h.n.Pull(ctx, api.PullRequest{Ref: ref, Container: "c"}, seen)
}

func TestAContainerIsMadeWithItsImage(t *testing.T) {
	s := newFakeServer(t)
	m := newFakeImage(t, some(1, 3, 100))
	ref := s.Serve("app:1", m)
	s.SetHeader(false) // until there is a directory
	h := newHost(t)
	var kinds []api.EventKind
	err := h.pullInto(t.Context(), ref, func(ev api.Event) error {
		kinds = append(kinds, ev.Event)
		switch c := ev.Container; ev.Event {
		case api.Reserved:
			if c == nil || c.ID != "c" || c.Config != nil {
				t.Errorf("reserved: %+v", c)
			}
			if err := os.WriteFile(filepath.Join(c.Dir, "config.json"), nil, 0o600); err != nil {
				t.Error(err)
			}
			if list, _ := h.n.Containers(t.Context()); len(list) != 0 {
				t.Errorf("containers, while one is reserved: %+v", list)
			}
			if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); codeOfErr(err) != api.CodeConflict {
				t.Errorf("the same ID again: %v", err)
			}
			s.SetHeader(true)
		case api.Mounted:
			if c == nil || c.Ref != ref || c.Config == nil {
				t.Fatalf("mounted: %+v", c)
			}
			for name, want := range m.Files {
				if b, err := os.ReadFile(filepath.Join(c.Rootfs, name)); err != nil || string(b) != want {
					t.Errorf("%s: %d bytes, %v", name, len(b), err)
				}
			}
			if _, err := os.Stat(filepath.Join(c.Dir, "config.json")); err != nil {
				t.Error(err)
			}
		default:
			if c != nil {
				t.Errorf("%s: %+v", ev.Event, c)
			}
		}
		return nil
	})
	if want := []api.EventKind{api.Reserved, api.Resolved, api.Mounted, api.Complete}; err != nil || len(kinds) != len(want) {
		t.Fatalf("events %v, %v", kinds, err)
	}
	if err := h.n.RemoveImage(t.Context(), ref); codeOfErr(err) != api.CodeConflict {
		t.Errorf("remove an image in use: %v", err)
	}
	// A daemon that comes next knows it.
	h.restart()
	if list, _ := h.n.Containers(t.Context()); len(list) != 1 {
		t.Errorf("containers: %+v", list)
	}
	// The image is here: the same at once, and the ID is taken.
	if err := h.pullInto(t.Context(), ref, func(api.Event) error { return nil }); codeOfErr(err) != api.CodeConflict {
		t.Errorf("the same ID again: %v", err)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.remove(ref)
	h.empty()
}

// What keeps a reserved container from getting its image leaves nothing of it, and its ID is
// free again.
func TestNothingIsLeftOfAReservedContainer(t *testing.T) {
	gone := errors.New("gone")
	for _, test := range []struct {
		name   string
		header bool // the server answers
		// then happens at the event at.
		at   api.EventKind
		then func(h *host, ref string, cancel func()) error
		want func(err error) bool
	}{
		{"no such image", true, "", nil, func(err error) bool { return err == nil }}, // an event says so
		{"the client goes", false, api.Reserved, func(_ *host, _ string, cancel func()) error { cancel(); return nil },
			func(err error) bool { return errors.Is(err, context.Canceled) }},
		{"the client does not listen", true, api.Mounted, func(*host, string, func()) error { return gone },
			func(err error) bool { return errors.Is(err, gone) }},
		{"it is removed", false, api.Reserved, func(h *host, _ string, _ func()) error {
			removed := make(chan error, 1)
			go func() { removed <- h.n.RemoveContainer(context.Background(), "c") }()
			h.t.Cleanup(func() {
				if err := <-removed; err != nil {
					h.t.Errorf("remove: %v", err)
				}
			})
			return nil
		}, func(err error) bool { return codeOfErr(err) == api.CodeConflict }},
		{"the image is removed", false, api.Reserved, func(h *host, ref string, _ func()) error { return h.n.RemoveImage(h.t.Context(), ref) },
			func(err error) bool { return err == nil }}, // an event says so
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newFakeServer(t)
			ref := s.Addr + "/app:1"
			if test.at != "" {
				s.Serve("app:1", newFakeImage(t, some(1, 3, 100)))
			}
			s.SetHeader(test.header)
			h := newHost(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var last api.Event
			err := h.pullInto(ctx, ref, func(ev api.Event) error {
				last = ev
				if ev.Event == test.at {
					return test.then(h, ref, cancel)
				}
				return nil
			})
			if !test.want(err) || err == nil && last.Event != api.Failed {
				t.Errorf("error %v, last event %+v", err, last)
			}
			if _, err := os.Stat(filepath.Join(h.root, "containers", "c")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its directory: %v", err)
			}
			if n := h.n.containers.Len(); n != 0 {
				t.Errorf("%d containers", n)
			}
			s.SetHeader(true)
			_ = h.n.RemoveImage(t.Context(), ref) // if it came to that
			h.empty()
		})
	}
}

// A daemon that stops while a container is reserved ends, and so does who waits for it.
func TestCloseWhileAContainerIsReserved(t *testing.T) {
	s := newFakeServer(t)
	ref := s.Serve("app:1", newFakeImage(t, some(1, 3, 100)))
	s.SetHeader(false)
	h := newHost(t)
	reserved, ended := make(chan struct{}), make(chan error, 1)
	n := h.n
	go func() {
		ended <- n.Pull(context.Background(), api.PullRequest{Ref: ref, Container: "c"}, func(ev api.Event) error {
			if ev.Event == api.Reserved {
				close(reserved)
			}
			return nil
		})
	}()
	<-reserved
	h.stop()
	<-ended
	h.start()
	if list, err := h.n.Containers(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("containers: %+v, %v", list, err)
	}
	if _, err := os.Stat(filepath.Join(h.root, "containers", "c")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
}
