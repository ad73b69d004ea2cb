package e2e

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Two images with the same base that are pulled at once move hardly more than what is in either.
func TestWhatTwoPullsShareComesOnce(t *testing.T) {
	s := startServer(t, t.TempDir())
	one, two := manyFiles(t, 400, 20_000, 1, 0), manyFiles(t, 400, 20_000, 2, 0.2)
	ref1, ref2 := s.push("one", "1", one), s.push("two", "1", two)

	moved := func(events []api.Event) int64 { return events[len(events)-1].BytesMoved }
	apart := startWorker(t, workerRoot(t))
	union := moved(apart.mustPull(ref1, api.Complete)) + moved(apart.mustPull(ref2, api.Complete))

	w := startWorker(t, workerRoot(t))
	out, err := exec.CommandContext(t.Context(), foil, "pull", "--root", w.root, "--json", ref1, ref2).Output()
	if err != nil {
		t.Fatalf("foil pull %s %s: %v", ref1, ref2, err)
	}
	complete := make(map[string]int64) // bytes moved
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var ev api.Event
		if err := dec.Decode(&ev); err != nil {
			t.Fatal(err)
		}
		if ev.Event == api.Complete {
			complete[ev.Ref] = ev.BytesMoved
		}
	}
	if len(complete) != 2 {
		t.Fatalf("complete: %v\n%s", complete, out)
	}
	together := complete[ref1] + complete[ref2]
	t.Logf("bytes moved: one after the other %d, at once %d and %d", union, complete[ref1], complete[ref2])
	if float64(together) > 1.05*float64(union) {
		t.Errorf("at once they moved %d bytes, one after the other %d", together, union)
	}
	for ref, img := range map[string]image{ref1: one, ref2: two} {
		if diff := differs(t, img, w.mountOf(ref)); diff != "" {
			t.Errorf("%s:\n%s", ref, diff)
		}
		if last, bad := w.verify(ref); len(bad) > 0 || last.Checked != last.Total {
			t.Errorf("verify %s: %+v, bad %v", ref, last, bad)
		}
	}
}
