package progress

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/term"
)

// Terminal reports whether w is a terminal, and how wide it is.
func Terminal(w io.Writer) (width int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil || width <= 0 {
		width = 80
	}
	return width, true
}

// Display owns the last lines of a terminal and redraws them. It is safe for
// concurrent use.
type Display struct {
	w io.Writer
	// Width gives the terminal's width at each redraw; nil: as Terminal says.
	Width func() int

	mu    sync.Mutex
	shown int // lines on the terminal that belong to the display
}

// NewDisplay returns a display that draws on w.
func NewDisplay(w io.Writer) *Display { return &Display{w: w} }

// Show replaces what is displayed by the lines of ts.
func (d *Display) Show(ts ...Transfer) error {
	width := d.width()
	lines := make([]string, len(ts))
	for i, t := range ts {
		// One column stays free: a full line would wrap on some terminals.
		lines[i] = t.Line(width - 1)
	}
	return d.draw(lines)
}

// Lines replaces what is displayed by lines of text, cut to the width.
func (d *Display) Lines(lines ...string) error {
	width := d.width()
	cut := make([]string, len(lines))
	for i, l := range lines {
		cut[i] = clip(l, width-1)
	}
	return d.draw(cut)
}

// Clear takes the display off the terminal.
func (d *Display) Clear() error { return d.draw(nil) }

// Keep leaves the lines as they are; what is shown next comes below.
func (d *Display) Keep() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.shown = 0
}

func (d *Display) width() int {
	if d.Width != nil {
		return d.Width()
	}
	if width, ok := Terminal(d.w); ok {
		return width
	}
	return 80
}

func (d *Display) draw(lines []string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var b bytes.Buffer
	if d.shown > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", d.shown) // up to the first line
	}
	b.WriteString("\r\x1b[J") // erase to the end of the screen
	for _, l := range lines {
		b.WriteString(l)
		b.WriteByte('\n')
	}
	d.shown = len(lines)
	_, err := d.w.Write(b.Bytes()) // one write: no half-drawn frame
	return err
}
