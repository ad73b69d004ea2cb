// Package workloads puts servers under load that have just become ready, while
// the rest of a lazily pulled image may still be on its way: late reads show as
// latency (Slacker, FAST'16, section 6.2; Starlight, NSDI'22, section 5.3).
//
// The load comes from the edge itself, by the tools that everybody uses:
// redis-benchmark, pgbench and wrk, if they are on PATH. What they say is read
// here, and kept as throughput and latencies.
package workloads

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/link"
)

// Load is what a server did under load.
type Load struct {
	Tool    string        `json:"tool"`
	Time    time.Duration `json:"time_ns"` // how long the tool ran
	Rate    float64       `json:"rate"`    // operations a second
	Average time.Duration `json:"average_ns,omitempty"`
	P99     time.Duration `json:"p99_ns,omitempty"` // of the worst command or second, if the tool tells
	Max     time.Duration `json:"max_ns,omitempty"`
	Seconds []Second      `json:"seconds,omitempty"` // one after the other, as far as the tool tells
	Err     string        `json:"error,omitempty"`
}

// Second is what a server did in one second, or in what the tool takes for one.
type Second struct {
	End     time.Duration `json:"end_ns"` // since the load began
	Rate    float64       `json:"rate"`
	Average time.Duration `json:"average_ns"`
}

// kind is one tool.
type kind struct {
	tool  string
	args  func(period time.Duration, port string) []string // the program first
	parse func(out []byte) (Load, error)
	// progress reads a line that the tool writes while it runs; nil if it writes
	// none, and is run for one second after the other instead.
	progress func(line []byte) (rate float64, average time.Duration, ok bool)
}

// For is the load for an image, by its name and probe; nil if there is none.
func For(image, probe string) func(ctx context.Context, l *link.Link, period time.Duration) *Load {
	scheme, rest, _ := strings.Cut(probe, ":")
	port, _, _ := strings.Cut(rest, "/")
	var k kind
	switch {
	case image == "redis":
		k, port = redis, "6379"
	case image == "postgres":
		k, port = postgres, "5432"
	case scheme == "http":
		k = web
	default:
		return nil
	}
	if _, err := exec.LookPath(k.tool); err != nil {
		return nil
	}
	return func(ctx context.Context, l *link.Link, period time.Duration) *Load {
		began := time.Now()
		// A tool that waits for a server without end is ended.
		ctx, cancel := context.WithTimeout(ctx, 10*period+20*time.Second)
		defer cancel()
		load, err := k.run(ctx, l, period, port)
		load.Tool, load.Time = k.tool, time.Since(began)
		if err != nil {
			load.Err = err.Error()
		}
		return &load
	}
}

func (k kind) run(ctx context.Context, l *link.Link, period time.Duration, port string) (load Load, err error) {
	if k.progress != nil {
		out := &lines{began: time.Now(), read: k.progress}
		err := command(ctx, l, k.args(period, port), out)
		if err == nil {
			load, err = k.parse(out.text.Bytes())
		}
		load.Seconds = bySecond(out.samples)
		return load, err
	}
	began := time.Now()
	for range seconds(period) {
		var out bytes.Buffer
		if err := command(ctx, l, k.args(time.Second, port), &out); err != nil {
			return load, err
		}
		one, err := k.parse(out.Bytes())
		if err != nil {
			return load, err
		}
		load.Seconds = append(load.Seconds, Second{time.Since(began), one.Rate, one.Average})
		load.P99, load.Max = max(load.P99, one.P99), max(load.Max, one.Max)
	}
	load.Rate, load.Average = mean(load.Seconds)
	return load, nil
}

// command runs a tool at the edge; both its outputs go to out.
func command(ctx context.Context, l *link.Link, args []string, out io.Writer) error {
	cmd := l.Command(ctx, link.Edge, args[0], args[1:]...)
	var said bytes.Buffer
	both := io.MultiWriter(out, &said)
	cmd.Stdout, cmd.Stderr = both, both
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		text := bytes.TrimSpace(said.Bytes())
		return fmt.Errorf("%w: %s", err, text[max(0, len(text)-500):])
	}
	return nil
}

// lines takes what a tool writes, and notes when it reports progress. Tools end
// such lines by a carriage return.
type lines struct {
	began   time.Time
	read    func(line []byte) (rate float64, average time.Duration, ok bool)
	text    bytes.Buffer
	rest    []byte // of a line that has not ended
	samples []Second
}

func (w *lines) Write(b []byte) (int, error) {
	w.text.Write(b)
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexAny(w.rest, "\r\n")
		if i < 0 {
			return len(b), nil
		}
		if rate, average, ok := w.read(w.rest[:i]); ok {
			w.samples = append(w.samples, Second{time.Since(w.began), rate, average})
		}
		w.rest = w.rest[i+1:]
	}
}

// bySecond makes one of the samples of each second.
func bySecond(samples []Second) (all []Second) {
	for len(samples) > 0 {
		n := 1
		for n < len(samples) && samples[n].End/time.Second == samples[0].End/time.Second {
			n++
		}
		one := Second{End: samples[n-1].End}
		one.Rate, one.Average = mean(samples[:n])
		all, samples = append(all, one), samples[n:]
	}
	return all
}

// mean is the rate over some samples of equal length, and the average latency of
// what was done in them.
func mean(samples []Second) (rate float64, average time.Duration) {
	var done, waited float64
	for _, s := range samples {
		done += s.Rate
		waited += s.Rate * float64(s.Average)
	}
	if done == 0 {
		return 0, 0
	}
	return done / float64(len(samples)), time.Duration(waited / done)
}

// redis-benchmark counts requests, not seconds: some 20,000 a second, as one
// core does under its fifty clients, come near to the period.
var redis = kind{
	tool: "redis-benchmark",
	args: func(period time.Duration, port string) []string {
		return []string{"redis-benchmark", "-h", "127.0.0.1", "-p", port, "-t", "set,get", "-n", strconv.Itoa(int(10000 * period.Seconds())), "-r", "100000", "-d", "100"}
	},
	parse:    parseRedis,
	progress: redisProgress,
}

var (
	redisRate    = regexp.MustCompile(`throughput summary: ([0-9.]+) requests per second`)
	redisLatency = regexp.MustCompile(`latency summary \(msec\):\s+avg\s+min\s+p50\s+p95\s+p99\s+max\s+([0-9.]+)\s+\S+\s+\S+\s+\S+\s+([0-9.]+)\s+([0-9.]+)`)
	redisNow     = regexp.MustCompile(`rps=([0-9.]+) \(overall: \S+\) avg_msec=([0-9.]+)`)
)

// parseRedis reads the summaries, one a command.
func parseRedis(out []byte) (l Load, err error) {
	rates, latencies := redisRate.FindAllSubmatch(out, -1), redisLatency.FindAllSubmatch(out, -1)
	if len(rates) == 0 || len(rates) != len(latencies) {
		return l, fmt.Errorf("redis-benchmark said %q", out[max(0, len(out)-500):])
	}
	for i := range rates {
		values, err := numbers(rates[i][1], latencies[i][1], latencies[i][2], latencies[i][3])
		if err != nil {
			return l, fmt.Errorf("redis-benchmark: %w", err)
		}
		l.Rate += values[0]
		l.Average += milliseconds(values[1])
		l.P99 = max(l.P99, milliseconds(values[2]))
		l.Max = max(l.Max, milliseconds(values[3]))
	}
	l.Rate /= float64(len(rates))
	l.Average /= time.Duration(len(rates))
	return l, nil
}

// redisProgress reads what redis-benchmark writes four times a second.
func redisProgress(line []byte) (float64, time.Duration, bool) { return progress(redisNow, line) }

func progress(form *regexp.Regexp, line []byte) (rate float64, average time.Duration, ok bool) {
	found := form.FindSubmatch(line)
	if found == nil {
		return 0, 0, false
	}
	values, err := numbers(found[1], found[2])
	if err != nil {
		return 0, 0, false
	}
	return values[0], milliseconds(values[1]), true
}

func numbers(texts ...[]byte) (values []float64, err error) {
	for _, text := range texts {
		value, err := strconv.ParseFloat(string(text), 64)
		if err != nil {
			return nil, err
		}
		values = append(values, value)
	}
	return values, nil
}

// seconds are whole ones, at least one, as most tools want them.
func seconds(d time.Duration) int { return max(1, int(d.Seconds())) }

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// pgbench with its select-only script. It makes its tables first, on a new server.
var postgres = kind{
	tool: "pgbench",
	args: func(period time.Duration, port string) []string {
		at := "-h 127.0.0.1 -p " + port + " -U postgres"
		return []string{"sh", "-c", fmt.Sprintf("pgbench %s -i -q postgres >&2 && pgbench %s -S -n -c 4 -P 1 -T %d postgres", at, at, seconds(period))}
	},
	parse:    parsePgbench,
	progress: func(line []byte) (float64, time.Duration, bool) { return progress(pgNow, line) },
}

var (
	pgTPS     = regexp.MustCompile(`tps = ([0-9.]+)`)
	pgLatency = regexp.MustCompile(`latency average = ([0-9.]+) ms`)
	pgNow     = regexp.MustCompile(`^progress: [0-9.]+ s, ([0-9.]+) tps, lat ([0-9.]+) ms`)
)

// parsePgbench reads what pgbench says at its end.
func parsePgbench(out []byte) (l Load, err error) {
	tps, latency := pgTPS.FindSubmatch(out), pgLatency.FindSubmatch(out)
	if tps == nil || latency == nil {
		return l, fmt.Errorf("pgbench said %q", out)
	}
	if l.Rate, err = strconv.ParseFloat(string(tps[1]), 64); err != nil {
		return l, err
	}
	ms, err := strconv.ParseFloat(string(latency[1]), 64)
	l.Average = milliseconds(ms)
	return l, err
}

// wrk tells nothing before its end.
var web = kind{
	tool: "wrk",
	args: func(period time.Duration, port string) []string {
		return []string{"wrk", "--threads", "1", "--connections", "8", "--duration", fmt.Sprintf("%ds", seconds(period)), "--latency", "http://127.0.0.1:" + port + "/"}
	},
	parse: parseWrk,
}

var (
	wrkRate    = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	wrkP99     = regexp.MustCompile(`(?m)^\s+99%\s+(\S+)`) // not the share of who is within the standard deviation, above it
	wrkLatency = regexp.MustCompile(`Latency\s+(\S+)\s+\S+\s+(\S+)`)
)

// parseWrk reads wrk's report with --latency.
func parseWrk(out []byte) (l Load, err error) {
	rate, p99, latency := wrkRate.FindSubmatch(out), wrkP99.FindSubmatch(out), wrkLatency.FindSubmatch(out)
	if rate == nil || p99 == nil || latency == nil {
		return l, fmt.Errorf("wrk said %q", out)
	}
	if l.Rate, err = strconv.ParseFloat(string(rate[1]), 64); err != nil {
		return l, err
	}
	for _, field := range []struct {
		to   *time.Duration
		text []byte
	}{{&l.P99, p99[1]}, {&l.Average, latency[1]}, {&l.Max, latency[2]}} {
		if *field.to, err = time.ParseDuration(string(field.text)); err != nil {
			return l, fmt.Errorf("wrk's latency: %w", err)
		}
	}
	return l, nil
}
