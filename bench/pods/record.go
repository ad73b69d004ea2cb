package pods

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/stats"
)

// Measurement is what is made at once: a start on each node of an engine.
type Measurement struct {
	Image  string        `json:"image"`
	Args   string        `json:"args"` // image or own
	Engine string        `json:"engine"`
	RTT    time.Duration `json:"rtt_ns"`
	Rate   int64         `json:"rate"` // bits a second; 0: no limit
	Run    int           `json:"run"`  // from 1 on
}

// Record is one start, a line of the results.
type Record struct {
	Measurement
	Node    string    `json:"node"` // first, second or any
	Began   time.Time `json:"began"`
	Version string    `json:"version"` // of all programs
	// Seconds from the manifest on.
	Running float64 `json:"running"`
	Answers float64 `json:"answers"`
	Ready   float64 `json:"ready"`
	Down    int64   `json:"down"` // bytes that had come to the node when it was ready
	Err     string  `json:"error,omitempty"`
}

// String is a record for people.
func (r Record) String() string {
	what := fmt.Sprintf("%s, %s arguments, %s, %s node, run %d: ", r.Image, r.Args, r.Engine, r.Node, r.Run)
	if r.Err != "" {
		return what + r.Err
	}
	return what + fmt.Sprintf("runs after %.2f s, answers after %.2f s, ready after %.2f s", r.Running, r.Answers, r.Ready)
}

// Read reads the results; there may be none. A last line that is not whole was being written when its writer ended.
func Read(path string) (all []Record, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	lines := bufio.NewScanner(bytes.NewReader(text[:bytes.LastIndexByte(text, '\n')+1]))
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		var r Record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("bench: line %d of %s: %w (remove it, and the measurement is made again)", n, path, err)
		}
		all = append(all, r)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("bench: %s: %w", path, err)
	}
	return all, nil
}

// add adds the records of one measurement, in place of a last line that is not whole.
func add(path string, records []Record) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	var lines []byte
	for _, r := range records {
		line, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		lines = append(append(lines, line...), '\n')
	}
	whole := int64(bytes.LastIndexByte(text, '\n') + 1)
	if err := f.Truncate(whole); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if _, err := f.WriteAt(lines, whole); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// missing lists the measurements that the records lack, in the order in which they are made: engines in turns. One that
// failed on any node, or was made on some only, is lacking.
func missing(o Options, records []Record) (left []Measurement) {
	made := make(map[Measurement][]string)
	for _, r := range records {
		if r.Err == "" {
			made[r.Measurement] = append(made[r.Measurement], r.Node)
		}
	}
	for _, rtt := range o.RTTs {
		for run := range o.Runs {
			for _, image := range o.Images {
				for _, args := range o.Args {
					turns := slices.Clone(o.Engines)
					if run%2 == 1 {
						slices.Reverse(turns)
					}
					for _, engine := range turns {
						m := Measurement{image, args, engine, rtt, o.Rate, run + 1}
						if slices.ContainsFunc(nodes(engine), func(node string) bool { return !slices.Contains(made[m], node) }) {
							left = append(left, m)
						}
					}
				}
			}
		}
	}
	return left
}

// column is a column of a table.
type column struct{ engine, node, title string }

var columns = []column{
	{overlayName, "any", "overlayfs"},
	{foilName, "first", "foil, first node"},
	{foilName, "second", "foil, second node"},
}

// Table has the medians in Markdown, a table for each link.
func Table(records []Record) string {
	type where struct {
		rtt  time.Duration
		rate int64
	}
	type row struct{ image, args string }
	var links []where
	cells := make(map[where]map[row]map[column][]Record)
	rows := make(map[where][]row)
	for _, r := range records {
		at, pod := where{r.RTT, r.Rate}, row{r.Image, r.Args}
		if cells[at] == nil {
			cells[at] = make(map[row]map[column][]Record)
			links = append(links, at)
		}
		if cells[at][pod] == nil {
			cells[at][pod] = make(map[column][]Record)
			rows[at] = append(rows[at], pod)
		}
		for _, c := range columns {
			if c.engine == r.Engine && c.node == r.Node && r.Err == "" {
				cells[at][pod][c] = append(cells[at][pod][c], r)
			}
		}
	}
	slices.SortStableFunc(links, func(a, b where) int { return int(a.rtt - b.rtt) })
	var b strings.Builder
	for _, at := range links {
		rate := "no limit of the rate"
		if at.rate > 0 {
			rate = fmt.Sprintf("%g Mbit/s", float64(at.rate)/1e6)
		}
		fmt.Fprintf(&b, "\nRound trip %v, %s. Seconds until the container runs / the service answers / the pod is ready, medians of runs (their number).\n\n| pod |", at.rtt, rate)
		for _, c := range columns {
			fmt.Fprintf(&b, " %s |", c.title)
		}
		b.WriteString("\n| --- |" + strings.Repeat(" --- |", len(columns)) + "\n")
		for _, pod := range rows[at] {
			name := pod.image
			if pod.args == ownArgs {
				name += ", own arguments"
			}
			fmt.Fprintf(&b, "| %s |", name)
			for _, c := range columns {
				fmt.Fprintf(&b, " %s |", cell(cells[at][pod][c]))
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// cell is the medians of some starts.
func cell(records []Record) string {
	if len(records) == 0 {
		return "–"
	}
	var figures [3][]float64
	for _, r := range records {
		for i, seconds := range []float64{r.Running, r.Answers, r.Ready} {
			figures[i] = append(figures[i], seconds)
		}
	}
	return fmt.Sprintf("%.2f / %.2f / %.2f (%d)", stats.Median(figures[0]), stats.Median(figures[1]), stats.Median(figures[2]), len(records))
}
