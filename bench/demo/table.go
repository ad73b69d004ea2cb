package demo

import (
	"fmt"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
)

// table is the result of the demonstration.
type table struct {
	rtt   time.Duration
	rate  int64
	ready string
	rows  []comparison
}

// comparison is one image at one time: fresh, or as an update.
type comparison struct {
	name    string
	layers  int64    // compressed bytes of all layers
	results []result // of the contestants
	floor   engines.Floor
}

func (t table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%g Mbit/s, %v round trip, until %s\n\n", float64(t.rate)/1e6, t.rtt, t.ready)
	const line = "%-8s %-22s %14s %18s %14s %10s\n"
	fmt.Fprintf(&b, line, "", "", "time to ready", "moved when ready", "moved in all", "of floor")
	for _, c := range t.rows {
		floor := c.floor.At(t.rtt, t.rate)
		for i, who := range contestants {
			r := c.results[i]
			fmt.Fprintf(&b, line, c.name, who.name, seconds(r.time), megabytes(r.atReady), megabytes(r.moved),
				fmt.Sprintf("%.2f", r.time.Seconds()/floor.Seconds()))
		}
		fmt.Fprintf(&b, line, c.name, "floor T*", seconds(floor), megabytes(c.floor.Compressed), "", "1.00")
	}
	b.WriteString("\n")
	for _, c := range t.rows {
		full := c.results[0]
		for i, foil := range c.results[1:] {
			fmt.Fprintf(&b, "%s, %s: %.1f times as fast; %.0f%% of the bytes in all (layers: %.1f MB); %d reads waited %.2f s in sum\n",
				c.name, contestants[i+1].name, full.time.Seconds()/foil.time.Seconds(), 100*float64(foil.moved)/float64(full.moved), mb(c.layers),
				foil.waits, foil.waited.Seconds())
		}
		fmt.Fprintf(&b, "  T*: warm start %.2f s, a round trip, and %.2f MB touched before ready (%.2f MB new, compressed)\n",
			c.floor.Warm.Seconds(), mb(c.floor.Touched), mb(c.floor.Compressed))
	}
	return b.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
func megabytes(n int64) string       { return fmt.Sprintf("%.2f MB", mb(n)) }
