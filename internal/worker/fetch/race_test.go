//go:build race

package fetch

import (
	"flag"
	"os"
	"testing"
	"time"
)

// stallTimeout is what clients have for streams of a server that stalls: longer than it
// needs for a frame.
const stallTimeout = 250 * time.Millisecond

// TestMain draws fewer examples under the race detector, which makes each of them
// many times slower: what it looks for is in every one.
func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "20"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}
