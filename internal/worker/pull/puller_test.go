package pull

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"hydrofoil.dev/foil/internal/worker/images"
)

// What is remembered of pulls that have ended is bounded.
func TestWaitsOfOldPullsAreForgotten(t *testing.T) {
	s := &Puller{}
	for range 3 * keptWaits {
		s.keepWaits(&Pull{})
	}
	if len(s.finished) != keptWaits {
		t.Errorf("%d pulls are remembered", len(s.finished))
	}
}

// So it is of those of names of which nothing came.
func TestPullsOfNamesThatFailAreForgotten(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	here, err := images.Load(root, slog.New(slog.DiscardHandler), t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	s := &Puller{images: here, pulls: make(map[string]*Pull)}
	for i := range 3 * keptPulls {
		for range 2 { // it is tried again
			p := &Pull{ref: Ref{Name: fmt.Sprint("registry.test/made-up:", i)}}
			s.pulls[p.ref.Name] = p
			s.keepEnded(p)
		}
	}
	if len(s.pulls) != keptPulls || len(s.ended) > keptPulls {
		t.Errorf("%d pulls are remembered, in %d places", len(s.pulls), len(s.ended))
	}
	if last := fmt.Sprint("registry.test/made-up:", 3*keptPulls-1); s.pulls[last] == nil {
		t.Error("the last one is not")
	}
}
