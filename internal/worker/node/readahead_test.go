package node

import (
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
)

// TestHoldFor: the server holds back what follows a startup set only for who is about
// to start a container, and longer when it will be said that it is ready.
func TestHoldFor(t *testing.T) {
	for name, c := range map[string]struct {
		pull  *pull
		ready bool
		want  time.Duration
	}{
		"pull":            {pull: &pull{}},
		"run":             {pull: &pull{req: api.PullRequest{Probed: true}}, want: holdProbed},
		"run, ready":      {pull: &pull{req: api.PullRequest{Probed: true}}, ready: true},
		"snapshotter":     {pull: &pull{req: api.PullRequest{Until: api.Mounted}}, want: holdStarted},
		"resolved before": {pull: &pull{early: &early{}}, want: holdStarted},
		"complete":        {pull: &pull{req: api.PullRequest{Until: api.Complete}}},
	} {
		c.pull.ready = make(chan struct{})
		if c.ready {
			close(c.pull.ready)
		}
		if got := c.pull.hold(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
