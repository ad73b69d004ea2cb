package bundles

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// TestMeanwhile: a worker hears from the server while work takes long; but not for ever.
func TestMeanwhile(t *testing.T) {
	for name, c := range map[string]struct {
		takes, silence time.Duration
		sections       int
	}{
		"at once":               {0, 0, 0},
		"less than an interval": {14 * time.Second, 14 * time.Second, 0},
		"many":                  {20*time.Minute + time.Second, 15 * time.Second, 80},
		"too long":              {3 * time.Hour, 2 * time.Hour, 240},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &Handler{o: Options{Alive: 15 * time.Second, AliveMost: time.Hour}}
				var b bytes.Buffer
				last, silence := time.Now(), time.Duration(0)
				p := &pull{h: h, charge: func(time.Duration) {}, w: bundle.NewWriter(&b), flush: func() error {
					silence, last = max(silence, time.Since(last)), time.Now()
					return nil
				}}
				if err := p.w.Hello(bundle.Hello{Version: 1, Stream: "s"}); err != nil {
					t.Fatal(err)
				}
				if err := p.w.Flush(); err != nil {
					t.Fatal(err)
				}
				hello := b.Len()
				p.meanwhile(t.Context(), func() { time.Sleep(c.takes) })
				if err := p.flush(); err != nil {
					t.Fatal(err)
				}
				if silence != c.silence || b.Len() != hello+6*c.sections {
					t.Errorf("silent for %v, %d bytes; want %v, %d sections", silence, b.Len()-hello, c.silence, c.sections)
				}
			})
		})
	}
}
