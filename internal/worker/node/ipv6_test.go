package node

import (
	"net"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

// An image of a server that is named by its IPv6 address: pulled, begun again by a new
// daemon, run, removed.
func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("this host has no IPv6: %v", err)
	}
	_ = l.Close()
	s := newFakeServer(t)
	s.Stop()
	s.Listen("[::1]:0")
	m := newFakeImage(t, some(1, 10, 5000))
	ref := s.Serve("app:1", m)
	if !strings.HasPrefix(ref, "[::1]:") {
		t.Fatalf("the image is %s", ref)
	}
	s.SetLimit(2)
	h := newHost(t)
	h.mustPull(ref, api.Mounted)
	h.restart()
	s.SetLimit(-1)
	h.complete(ref)
	h.same(m)
	if _, err := h.n.CreateContainer(t.Context(), api.ContainerRequest{ID: "c", Ref: ref}); err != nil {
		t.Fatal(err)
	}
	if err := h.n.RemoveContainer(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	h.remove(ref)
	h.empty()
}
