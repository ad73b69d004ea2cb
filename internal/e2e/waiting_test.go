package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// away is longer than containerd lets a server be silent on a new connection: one second.
const away = 2 * time.Second

// What containerd asks while no daemon runs is answered by the next one: after a kill, and
// after an end as of an upgrade.
func TestContainerdWaitsForTheDaemon(t *testing.T) {
	onHosts(t, []host{{containerd2, ""}, {containerd1, kernel.GateFUSE}}, func(t *testing.T, v containerdVersion) {
		w := startWorker(t, workerRoot(t))
		c := startContainerd(t, v, w)
		prepare(t, c, "first")()
		for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "ended": syscall.SIGTERM} {
			w.signal(signal)
			<-w.done
			asked := prepare(t, c, name)
			time.Sleep(away)
			w = startWorker(t, w.root)
			asked()
		}
	})
}

// The same under systemd, by the unit of deploy/systemd.
func TestContainerdWaitsForTheUnit(t *testing.T) {
	root := workerRoot(t)
	units, _ := unitOf(t, root)
	unit := filepath.Join(units, "foil-node.service")
	b, err := os.ReadFile(unit)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(unit, []byte(strings.Replace(string(b), "RestartSec=200ms", "RestartSec="+away.String(), 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	sd := startSystemd(t, units)
	sd.must(t, "start", "foil-node")
	w := &worker{process: &process{t: t}, root: root, client: api.Dial(root)}
	t.Cleanup(w.client.Close)
	c := startContainerd(t, containerd2, w)
	prepare(t, c, "first")()
	sd.must(t, "kill", "--signal=SIGKILL", "--kill-who=main", "foil-node")
	prepare(t, c, "killed")()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = sd.ctl("restart", "foil-node")
	}()
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		prepare(t, c, key)()
	}
	<-done
	sd.must(t, "stop", "foil-node")
}

// prepare has containerd begin a snapshot, and returns a function that waits for it, which
// has to succeed.
func prepare(t *testing.T, c *containerd, key string) (wait func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := c.tryCtr("snapshots", "--snapshotter", "hydrofoil", "prepare", key)
		done <- err
	}()
	return func() {
		t.Helper()
		if err := <-done; err != nil {
			t.Errorf("a snapshot that was asked for while there was no daemon: %v", err)
		}
	}
}
