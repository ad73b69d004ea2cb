package pull

import "testing"

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
