// Package progress shows on a terminal how far transfers are: one line each,
// redrawn in place.
package progress

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Transfer is what one line shows.
type Transfer struct {
	Name  string
	Phase string // "resolved", "mounted", ...; shown as it is
	Moved int64  // bytes over the network so far
	Total int64  // bytes in all; 0 while unknown
	Rate  float64
	// Waits counts reads that had to wait for absent blocks, Waited is their
	// summed time.
	Waits  int64
	Waited time.Duration
	// Trouble is why nothing comes; empty: all is well.
	Trouble string
	Done    bool
}

// minBar is the narrowest bar that says more than its percentage.
const minBar = 8

// Line renders t in at most width columns. A narrow terminal loses the bar
// first, then the end of the line.
func (t Transfer) Line(width int) string {
	facts := t.facts()
	switch bar := width - utf8.RuneCountInString(t.Name+facts) - len(" [] "); {
	case t.Total > 0 && bar >= minBar:
		return fmt.Sprintf("%s [%s] %s", t.Name, t.bar(min(bar, 40)), facts)
	default:
		return clip(t.Name+" "+facts, width)
	}
}

// String renders t for a log: no bar, as wide as it is.
func (t Transfer) String() string { return t.Name + " " + t.facts() }

func (t Transfer) facts() string {
	var f []string
	if t.Phase != "" {
		f = append(f, t.Phase)
	}
	if t.Trouble != "" && !t.Done {
		// Before the rest, so that a narrow terminal has some of it.
		f = append(f, "trying again: "+OneLine(t.Trouble))
	}
	switch {
	case t.Done || t.Total == 0:
		f = append(f, Bytes(t.Moved))
	default:
		f = append(f, fmt.Sprintf("%d%%", int(100*t.share())), Bytes(t.Moved)+" of "+Bytes(t.Total))
	}
	if !t.Done && t.Rate > 0 {
		f = append(f, Bytes(int64(t.Rate))+"/s")
		if left, ok := t.left(); ok {
			f = append(f, Duration(left)+" left")
		}
	}
	switch {
	case t.Waits == 1:
		f = append(f, fmt.Sprintf("1 wait (%s)", Duration(t.Waited)))
	case t.Waits > 1:
		f = append(f, fmt.Sprintf("%d waits (%s)", t.Waits, Duration(t.Waited)))
	}
	return strings.Join(f, "  ")
}

// share is the part that has moved, 0 to 1. A total is an upper bound, which
// what moved can reach and no more.
func (t Transfer) share() float64 {
	if t.Total <= 0 {
		return 0
	}
	if t.Done {
		return 1
	}
	return min(1, max(0, float64(t.Moved)/float64(t.Total)))
}

func (t Transfer) left() (time.Duration, bool) {
	if t.Total <= t.Moved || t.Rate <= 0 {
		return 0, false
	}
	s := float64(t.Total-t.Moved) / t.Rate
	if s > 100*3600 {
		return 0, false // a stall, not an estimate
	}
	return time.Duration(s * float64(time.Second)), true
}

func (t Transfer) bar(width int) string {
	n := int(math.Round(t.share() * float64(width)))
	return strings.Repeat("=", n) + strings.Repeat(" ", width-n)
}

// OneLine makes a line for terminals of what a server or the system may have said.
func OneLine(s string) string {
	return strings.Join(strings.Fields(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)), " ")
}

// clip cuts s to width columns.
func clip(s string, width int) string {
	if width <= 0 || utf8.RuneCountInString(s) <= width {
		return s
	}
	r := []rune(s)
	return string(r[:width])
}

// Bytes writes a number of bytes for people, in decimal units as links and
// disks are sold: 999 B, 1.0 kB, 36.1 MB.
func Bytes(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	v, units := float64(n), []string{"kB", "MB", "GB", "TB", "PB", "EB"}
	for i, u := range units {
		v /= 1000
		// 999.95 would print as 1000.0.
		if v < 999.95 || i == len(units)-1 {
			return fmt.Sprintf("%.1f %s", v, u)
		}
	}
	panic("unreachable")
}

// Duration writes a time span for people: 0.25s, 12.3s, 4m05s, 2h10m.
func Duration(d time.Duration) string {
	switch s := d.Seconds(); {
	case s < 9.995:
		return fmt.Sprintf("%.2fs", s)
	case s < 59.95:
		return fmt.Sprintf("%.1fs", s)
	}
	d = d.Round(time.Second)
	if d < time.Hour {
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}

// Rate estimates bytes a second from a growing count, over about the last two
// seconds: short enough to follow a link, long enough to be read.
type Rate struct {
	points []point
}

type point struct {
	at time.Time
	n  int64
}

const rateWindow = 2 * time.Second

// Add tells the count at a time and returns the rate; 0 until two counts are
// known.
func (r *Rate) Add(at time.Time, n int64) float64 {
	r.points = append(r.points, point{at, n})
	// Keep one point that is older than the window: the rate spans it.
	for len(r.points) > 2 && at.Sub(r.points[1].at) >= rateWindow {
		r.points = r.points[1:]
	}
	first := r.points[0]
	span := at.Sub(first.at).Seconds()
	if span <= 0 {
		return 0
	}
	return max(0, float64(n-first.n)/span)
}
