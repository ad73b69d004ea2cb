package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// connected waits until the daemon keeps connections to so many servers, and returns them.
func (h *host) connected(n int) []api.ServerStatus {
	h.t.Helper()
	for range 3000 {
		status, err := h.n.Status(h.t.Context())
		if err != nil {
			h.t.Fatal(err)
		}
		warm := 0
		for _, s := range status.Servers {
			if s.Warm {
				warm++
			}
		}
		if warm == n {
			return status.Servers
		}
		time.Sleep(10 * time.Millisecond)
	}
	h.t.Fatalf("there are never connections to %d servers", n)
	return nil
}

// A daemon that is started again connects to the server that the one before it used, without being
// told, and before it pulls.
func TestServersAreRemembered(t *testing.T) {
	s := newFakeServer(t)
	img := newFakeImage(t, some(1, 30, 20_000))
	ref := s.Serve("app:1", img)
	h := newHost(t)
	record := filepath.Join(h.root, "servers.json")
	h.mustPull(ref, api.Complete)
	h.stop()
	if _, err := os.Stat(record); err == nil {
		t.Error("a daemon that is to remember no servers has written which it used")
	}
	h.servers = 2
	h.start()
	h.mustPull(ref, api.Complete)
	first := h.connected(1)
	h.restart()
	if again := h.connected(1); again[0].URL != first[0].URL {
		t.Errorf("connected to %s, before that to %s", again[0].URL, first[0].URL)
	}
	b, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), "app") {
		t.Errorf("the record names an image: %s", b)
	}
}
