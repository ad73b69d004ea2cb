package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/launch"
)

// eachReport shows what foil each does: on a terminal what runs, and of each image that has ended how, and its output.
type eachReport struct {
	stdout, stderr io.Writer
	display        *progress.Display // nil: no terminal
	f              *eachFlags
	refs           []string
	files          []string // of logs, by image; nil: they are printed
	begun          time.Time

	mu    sync.Mutex // guards all below, and serializes what is printed
	rows  []eachRow  // by image
	drawn time.Time
	err   error // the first of printing
}

// eachRow is what is known of one image.
type eachRow struct {
	log  *eachLog
	last api.Event // the zero value: it has not begun
	end  *launch.Outcome
}

func newEachReport(stdout, stderr io.Writer, f *eachFlags, refs []string) *eachReport {
	r := &eachReport{stdout: stdout, stderr: stderr, f: f, refs: refs, begun: time.Now(), rows: make([]eachRow, len(refs))}
	if _, ok := progress.Terminal(stderr); ok {
		r.display = progress.NewDisplay(stderr)
	}
	if f.logs != "" {
		r.files = logNames(f.logs, refs)
	}
	return r
}

// logNames are the names of files for the outputs of images: what these are called, as far as files can be.
func logNames(dir string, refs []string) []string {
	names := make([]string, len(refs))
	taken := make(map[string]int)
	for i, ref := range refs {
		name := strings.NewReplacer("/", "_", ":", "_", "@", "_").Replace(ref)
		if taken[name]++; taken[name] > 1 {
			name += fmt.Sprintf("~%d", taken[name]) // no image's name has that sign
		}
		names[i] = filepath.Join(dir, name+".log")
	}
	return names
}

func (r *eachReport) live() bool { return r.display != nil }

// output makes the file that an image's container writes to.
func (r *eachReport) output(i int) (io.WriteCloser, error) {
	var file *os.File
	var err error
	if r.files != nil {
		file, err = os.Create(r.files[i])
	} else if file, err = os.CreateTemp("", "foil-each-"); err == nil {
		// Nobody else needs its name, and nothing is left of it whatever happens.
		err = os.Remove(file.Name())
	}
	if err != nil {
		return nil, err
	}
	log := &eachLog{file: file, most: r.f.maxLog}
	r.mu.Lock()
	r.rows[i].log = log
	r.mu.Unlock()
	return log, nil
}

func (r *eachReport) event(i int, ev api.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows[i].last = ev
	r.draw(false)
}

func (r *eachReport) ended(i int, end launch.Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows[i].end = &end
	if r.live() {
		r.fail(r.display.Clear())
	}
	if r.f.json {
		r.fail(r.printObject(i, end))
	} else {
		r.fail(r.printBlock(i, end))
	}
	if log := r.rows[i].log; log != nil {
		r.fail(log.file.Close())
	}
	r.draw(true)
}

// eachObject is a line of foil each --json.
type eachObject struct {
	launch.Outcome
	// Log is the file that has the output; without --logs Output is the end of that. Cut says that there was more.
	Log    string `json:"log,omitempty"`
	Output string `json:"output,omitempty"`
	Cut    bool   `json:"output_cut,omitempty"`
}

// mostShown is how much of an output a line of JSON has, bytes.
const mostShown = 64 << 10

func (r *eachReport) printObject(i int, end launch.Outcome) error {
	o := eachObject{Outcome: end}
	if log := r.rows[i].log; log != nil {
		o.Cut = log.cut
		if r.files != nil {
			o.Log = r.files[i]
		} else {
			from := max(0, log.written-mostShown)
			b := make([]byte, log.written-from)
			if _, err := log.file.ReadAt(b, from); err != nil {
				return err
			}
			o.Output, o.Cut = string(b), o.Cut || from > 0
		}
	}
	return printJSON(r.stdout, o)
}

func (r *eachReport) printBlock(i int, end launch.Outcome) error {
	w := r.stdout
	if _, err := fmt.Fprintf(w, "==> %s  %s  %s\n", end.Ref, how(end), progress.Duration(seconds(end.Ended))); err != nil {
		return err
	}
	if log := r.rows[i].log; log != nil && r.files == nil {
		if err := log.print(w); err != nil {
			return err
		}
	}
	if end.Err != "" {
		if _, err := fmt.Fprintln(w, progress.OneLine(end.Err)); err != nil {
			return err
		}
	}
	return nil
}

// how says how an image ended.
func how(end launch.Outcome) string {
	if end.End == launch.EndExited {
		return fmt.Sprintf("exit %d", *end.Code)
	}
	return end.End
}

func (r *eachReport) removing(images int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live() {
		r.fail(r.display.Lines(fmt.Sprintf("removing %d images", images)))
	}
}

// mostRows is how many images the table on a terminal has at most.
const mostRows = 16

// draw shows what runs. Called with mu held.
func (r *eachReport) draw(now bool) {
	if !r.live() || !now && time.Since(r.drawn) < 100*time.Millisecond {
		return
	}
	r.drawn = time.Now()
	count := r.count()
	lines := []string{fmt.Sprintf("%d of %d images  %d failed  %d running  %s moved  %s",
		count.ended, len(r.refs), count.bad, count.running, progress.Bytes(count.moved), progress.Duration(time.Since(r.begun)))}
	for i := range r.rows {
		row := &r.rows[i]
		if row.last.Event == "" || row.end != nil {
			continue
		}
		if len(lines) == mostRows {
			lines = append(lines, "...")
			break
		}
		s := "  " + r.refs[i] + "  " + string(row.last.Event) + "  " + progress.Bytes(row.last.BytesMoved)
		if t := row.last.Trouble; t != "" {
			s += "  trying again: " + progress.OneLine(t)
		}
		lines = append(lines, s)
	}
	r.fail(r.display.Lines(lines...))
}

// eachCount counts images.
type eachCount struct {
	ended, bad, running int
	moved               int64
}

// count is called with mu held.
func (r *eachReport) count() (c eachCount) {
	for i := range r.rows {
		row := &r.rows[i]
		switch {
		case row.end != nil:
			c.ended++
			if !row.end.OK() {
				c.bad++
			}
			c.moved += row.end.BytesMoved
		case row.last.Event != "":
			c.running++
			c.moved += row.last.BytesMoved
		}
	}
	return c
}

// bad is how many images did not end with 0.
func (r *eachReport) bad() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count().bad
}

func (r *eachReport) fail(err error) { r.err = cmp.Or(r.err, err) }

// eachTotals is the last line of foil each --json.
type eachTotals struct {
	launch.EachTotals
	Images     int            `json:"images"`
	Ends       map[string]int `json:"ends"` // how many ended how: "exit 0", "failed", ...
	BytesMoved int64          `json:"bytes_moved"`
}

// close prints what all took.
func (r *eachReport) close(totals launch.EachTotals) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live() {
		r.fail(r.display.Clear())
	}
	t := eachTotals{EachTotals: totals, Images: len(r.refs), Ends: make(map[string]int), BytesMoved: r.count().moved}
	refs := make(map[string][]string) // that ended so
	for _, row := range r.rows {
		if row.end != nil {
			t.Ends[how(*row.end)]++
			refs[how(*row.end)] = append(refs[how(*row.end)], row.end.Ref)
		}
	}
	if r.f.json {
		r.fail(printJSON(r.stdout, struct {
			Totals eachTotals `json:"totals"`
		}{t}))
		return r.err
	}
	var ends []string
	for end := range t.Ends {
		ends = append(ends, end)
	}
	slices.Sort(ends)
	var b bytes.Buffer
	fmt.Fprintf(&b, "%d images, %s moved, %s", t.Images, progress.Bytes(t.BytesMoved), progress.Duration(seconds(t.Elapsed)))
	if t.Removed > 0 {
		fmt.Fprintf(&b, ", the last %s of it removing images (%d in all)", progress.Duration(seconds(t.Removing)), t.Removed)
	}
	b.WriteByte('\n')
	for _, end := range ends {
		fmt.Fprintf(&b, "%5d %s", t.Ends[end], end)
		if end != "exit 0" {
			fmt.Fprintf(&b, ": %s", strings.Join(refs[end], " "))
		}
		b.WriteByte('\n')
	}
	_, err := r.stderr.Write(b.Bytes())
	r.fail(err)
	return r.err
}

// eachLog is the output of one container, as much of it as may be kept. The container is the one that writes;
// it is read when that has ended.
type eachLog struct {
	file *os.File
	most int64

	mu      sync.Mutex // a container has two outputs
	written int64
	cut     bool
}

// Write takes all, and keeps what it may: a container does not end for that.
func (l *eachLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep := b[:min(int64(len(b)), l.most-l.written)]
	l.cut = l.cut || len(keep) < len(b)
	n, err := l.file.Write(keep)
	l.written += int64(n)
	if err != nil {
		return n, err
	}
	return len(b), nil
}

// Close leaves the file open: what it has is still to be shown.
func (l *eachLog) Close() error { return nil }

// print writes the output to w, and ends its last line.
func (l *eachLog) print(w io.Writer) error {
	if _, err := io.Copy(w, io.NewSectionReader(l.file, 0, l.written)); err != nil {
		return err
	}
	last := make([]byte, 1)
	if l.written > 0 {
		if _, err := l.file.ReadAt(last, l.written-1); err != nil {
			return err
		}
	}
	var s string
	if l.written > 0 && last[0] != '\n' {
		s = "\n"
	}
	if l.cut {
		s += fmt.Sprintf("(there was more: --max-log %d keeps this much)\n", l.most)
	}
	_, err := io.WriteString(w, s)
	return err
}
