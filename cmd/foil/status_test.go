package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/worker/api"
)

func TestStatusOfServers(t *testing.T) {
	lines := statusLines(&api.Status{Version: "v", PID: 1, Started: time.Unix(0, 0), Gate: "fanotify", Servers: []api.ServerStatus{
		{URL: "http://gone:1"},
		{URL: "http://old:2", Warm: true},
		{URL: "http://here:3", Warm: true, WarmUp: 8 << 20, Rate: 12e6},
	}}, 0)
	want := []string{
		"no connection to http://gone:1",
		"connected to http://old:2",
		"connected to http://here:3, warmed up with 8.4 MB at 12.0 MB/s",
		"no pulls",
	}
	if diff := cmp.Diff(want, lines[1:]); diff != "" {
		t.Error(diff)
	}
}

// While the daemon tries again, everything that shows a pull says why.
func TestTroubleIsShown(t *testing.T) {
	ev := api.Event{Event: api.Progress, Ref: "r.example/a:1", Elapsed: 20, Trouble: "Post http://r.example: unexpected EOF"}
	for _, test := range []struct{ got, want string }{
		{pullLine(api.PullStatus{Event: ev}, 0), "r.example/a:1 trying again: Post http://r.example: unexpected EOF  0 B"},
		{eventLine(ev), "r.example/a:1: 20.0s, 0 B moved, trying again: Post http://r.example: unexpected EOF"},
	} {
		if test.got != test.want {
			t.Errorf("got %q, want %q", test.got, test.want)
		}
	}
}
