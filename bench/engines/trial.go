package engines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/worker/api"
)

// Mark names a moment of a trial.
type Mark string

const (
	Pulled   Mark = "pulled"   // the engine says that a container can be started
	Started  Mark = "started"  // the container's process exists
	Ready    Mark = "ready"    // the probe says so
	Complete Mark = "complete" // nothing of the image is missing
	Quiet    Mark = "quiet"    // the line is silent; its time is that of the last packet
	Cut      Mark = "cut"      // the worker's connections were cut
)

// Point is what had happened at a moment. Bytes and packets are those that had
// arrived at the other side, IP headers included.
type Point struct {
	Time        time.Duration `json:"time_ns"` // since the command
	Down        int64         `json:"down"`    // bytes from the cloud to the edge
	Up          int64         `json:"up"`      // and back
	DownPackets int64         `json:"down_packets"`
	UpPackets   int64         `json:"up_packets"`
	// Connections that were opened, requests, and round trips, see link.Capture.
	link.Capture
}

// Trial measures one provisioning of one image, from the command on.
type Trial struct {
	site  *site.Site
	began time.Time
	base  Point // of the link, at the beginning
	cpu   time.Duration
	pids  []int

	mu      sync.Mutex
	marks   map[Mark]Point
	waits   int64
	waited  time.Duration
	longest *Wait
	over    int64
	reads   []Read
	arena   int64

	quit, gone chan struct{}
	line       []Point // what moved, every tick
}

// How often the line is looked at.
const tick = 20 * time.Millisecond

// Begin begins a trial of a worker whose daemons are pids.
func Begin(s *site.Site, pids []int) *Trial {
	t := &Trial{site: s, pids: pids, marks: map[Mark]Point{}, quit: make(chan struct{}), gone: make(chan struct{})}
	for _, pid := range pids {
		// 5 resets the peak of the resident set, see proc(5). Without it the peak
		// is the daemon's since its start, which is no worse than too much.
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
	}
	t.cpu = t.spent(nil)
	t.base = t.now()
	t.began = time.Now()
	go t.watch()
	return t
}

// Join adds daemons that were started during the trial, if it does not know them.
func (t *Trial) Join(pids ...int) {
	for _, pid := range pids {
		if !slices.Contains(t.pids, pid) {
			t.pids = append(t.pids, pid)
		}
	}
}

// now is the state of the link, since its own beginning.
func (t *Trial) now() Point {
	down, up := t.site.Link.Stats(link.Cloud), t.site.Link.Stats(link.Edge)
	return Point{Down: down.Bytes, Up: up.Bytes, DownPackets: down.Packets, UpPackets: up.Packets, Capture: t.site.Link.Capture()}
}

// Now is what has happened so far.
func (t *Trial) Now() Point {
	p := t.now()
	return Point{
		Time: time.Since(t.began),
		Down: p.Down - t.base.Down, Up: p.Up - t.base.Up,
		DownPackets: p.DownPackets - t.base.DownPackets, UpPackets: p.UpPackets - t.base.UpPackets,
		Capture: p.Capture.Sub(t.base.Capture),
	}
}

// Mark notes that now is a moment to remember; the first time counts.
func (t *Trial) Mark(m Mark) { t.mark(m, t.Now()) }

func (t *Trial) mark(m Mark, p Point) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.marks[m]; !known {
		t.marks[m] = p
	}
}

// At is what had happened at a moment that was marked.
func (t *Trial) At(m Mark) (Point, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p, ok := t.marks[m]
	return p, ok
}

// Waits notes how many reads had to wait, and how long in sum.
func (t *Trial) Waits(n int64, sum time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waits, t.waited = n, sum
}

// Reads notes which reads had to wait, of those that did the first ones: what began
// before the trial is none of it.
func (t *Trial) Reads(reads []api.Read) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reads = nil
	for _, r := range reads {
		began := r.Began.Sub(t.began)
		if began < 0 {
			continue
		}
		t.reads = append(t.reads, Read{Began: began, Took: seconds(r.Took), Bound: seconds(r.Bound), Path: r.Path, Page: r.Page, Pages: r.Pages, Planned: r.Planned})
	}
}

// Longest notes the longest wait of a read in the whole run, what it should have been at
// most, and how many reads waited longer than twice that; the last two are 0 if the engine
// does not tell.
func (t *Trial) Longest(took, bound time.Duration, over int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.longest, t.over = &Wait{took, bound}, over
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// waitsUntilReady takes the number and sum of waits from the reads that are noted.
func (t *Trial) waitsUntilReady() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waits, t.waited = 0, 0
	for _, r := range t.reads {
		if ready, ok := t.marks[Ready]; ok && r.Began+r.Took <= ready.Time {
			t.waits++
			t.waited += r.Took
		}
	}
}

// ArenaReady notes how many bytes of contents had been written to the worker's
// disk when the container was ready.
func (t *Trial) ArenaReady(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.arena = n
}

// Waited is what Waits was told.
func (t *Trial) Waited() (n int64, sum time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.waits, t.waited
}

func (t *Trial) watch() {
	defer close(t.gone)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		p := t.Now()
		t.mu.Lock()
		t.line = append(t.line, p)
		t.mu.Unlock()
		select {
		case <-t.quit:
			return
		case <-ticker.C:
		}
	}
}

// CutAfter cuts the worker's connections to the cloud, once, when so many bytes have come
// down the line. End, called once, ends that, and returns an error if it has not happened.
func (t *Trial) CutAfter(ctx context.Context, bytes int64) (end func() error) {
	ctx, cancel := context.WithCancel(ctx)
	result := make(chan error, 1)
	go func() {
		ticker := time.NewTicker(tick / 10)
		defer ticker.Stop()
		for t.Now().Down < bytes {
			select {
			case <-ctx.Done():
				result <- fmt.Errorf("bench: cut the connections after %d bytes: only %d have come", bytes, t.Now().Down)
				return
			case <-ticker.C:
			}
		}
		t.Mark(Cut)
		result <- t.site.Link.Cut(ctx)
	}()
	return func() error {
		cancel()
		return <-result
	}
}

// Quiet waits until less than a packet has come down the line for a period, and
// marks when the last one came.
func (t *Trial) Quiet(ctx context.Context, period time.Duration, m Mark) error {
	last := t.Now()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("bench: wait until the line is silent: %w", context.Cause(ctx))
		case <-time.After(tick):
		}
		now := t.Now()
		// A connection that is kept open says something now and then.
		if now.Down-last.Down >= 1500 {
			last = now
		}
		if now.Time-last.Time >= period {
			t.mark(m, last)
			return nil
		}
	}
}

// Outcome is what a trial came to.
type Outcome struct {
	Marks  map[Mark]Point `json:"marks"`
	CPU    time.Duration  `json:"cpu_ns"` // processor time of the engine's processes
	Memory int64          `json:"memory"` // bytes, the sum of the peaks of its daemons' resident sets
	Waits  int64          `json:"waits"`  // reads that had to wait until ready, if the engine tells
	Waited time.Duration  `json:"waited_ns"`
	// Longest is the longest wait of a read in the whole run, also after ready. Over is how
	// many reads waited longer than twice what they should have. Ask LongestWait, which
	// knows results of before 2026-11-23 as well.
	Longest *Wait `json:"longest_wait,omitempty"`
	Over    int64 `json:"waits_over,omitempty"`
	// ArenaReady is how many bytes of contents were on the worker's disk at ready
	// that were not there before, decompressed, if the engine tells; over
	// Floor.Touched, how much more was written than read.
	ArenaReady int64   `json:"arena_bytes_ready,omitempty"`
	Timeline   []Point `json:"timeline,omitempty"`
	// Reads are the first that had to wait, at most 256, in the order in which they
	// began to, also after ready, if the engine tells; results of before 2026-11-22 have none.
	Reads []Read `json:"reads,omitempty"`
}

// Wait is how long a read waited, and what that should have been at most; 0 if the engine
// does not tell.
type Wait struct {
	Took  time.Duration `json:"took_ns"`
	Bound time.Duration `json:"bound_ns,omitempty"`
}

// LongestWait is the longest wait of a read in the whole run; false if no read waited, or
// nobody told.
func (o Outcome) LongestWait() (w Wait, ok bool) {
	if o.Longest != nil {
		return *o.Longest, true
	}
	for _, r := range o.Reads {
		if r.Took >= w.Took {
			w, ok = Wait{r.Took, r.Bound}, true
		}
	}
	return w, ok
}

// Read is one read that had to wait.
type Read struct {
	Began time.Duration `json:"began_ns"` // since the command, as Point.Time
	Took  time.Duration `json:"took_ns"`
	Bound time.Duration `json:"bound_ns,omitempty"` // what Took should have been at most
	// Path is a file of the image, Page the first of the Pages of 4 KiB of it that
	// were read.
	Path  string `json:"path,omitempty"`
	Page  int64  `json:"page"`
	Pages int64  `json:"pages"`
	// Planned: what it waited for was in no startup set.
	Planned bool `json:"planned,omitempty"`
}

// End ends a trial. Clients are the IDs of commands that still run.
func (t *Trial) End(clients ...int) Outcome {
	o := Outcome{CPU: t.spent(clients) - t.cpu, Memory: peak(t.pids)}
	close(t.quit)
	<-t.gone
	o.Marks, o.Waits, o.Waited, o.ArenaReady = t.marks, t.waits, t.waited, t.arena
	o.Timeline, o.Reads = thin(t.line, 400), t.reads
	o.Longest, o.Over = t.longest, t.over
	return o
}

// thin keeps the points of a line at which something has moved, and of those
// not many more than n.
func thin(line []Point, n int) []Point {
	if len(line) == 0 {
		return nil
	}
	step := max(1, (line[len(line)-1].Down+1)/int64(n))
	out := line[:1:1]
	for i, p := range line[1:] {
		last := out[len(out)-1]
		if p.Down-last.Down < step && i+1 != len(line)-1 {
			continue
		}
		// A pause is two points, or it looks like a slow transfer.
		if before := line[i]; before.Time-last.Time > 2*tick {
			out = append(out, before)
		}
		out = append(out, p)
	}
	return out
}

// spent is the processor time of what has ended at the edge, of the daemons and
// of the clients that still run.
func (t *Trial) spent(clients []int) time.Duration {
	sum := t.site.Spent()
	for _, pid := range append(append([]int(nil), t.pids...), clients...) {
		if d, err := processorTime(pid); err == nil { // else it is gone, and counted
			sum += d
		}
	}
	return sum
}

// processorTime is that of a process and of those children that it has waited
// for: fields 14 to 17 of /proc/PID/stat, in ticks of 10 ms (see proc(5)).
func processorTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 15 {
		return 0, errors.New("short stat")
	}
	var sum int64
	for _, field := range fields[11:15] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return time.Duration(sum) * 10 * time.Millisecond, nil
}

// ProcessorTime is that of a process, of its children, and of those that they have
// waited for. What cannot be read counts as none.
func ProcessorTime(pid int) time.Duration {
	sum, err := processorTime(pid)
	if err != nil {
		return 0
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return sum
	}
	for _, field := range strings.Fields(string(children)) {
		if child, err := strconv.Atoi(field); err == nil {
			sum += ProcessorTime(child)
		}
	}
	return sum
}

// peak is the sum of the largest resident sets that processes had.
func peak(pids []int) (sum int64) {
	for _, pid := range pids {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(status)) {
			if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
				if err == nil {
					sum += n << 10
				}
			}
		}
	}
	return sum
}
