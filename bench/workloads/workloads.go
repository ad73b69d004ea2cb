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
	"encoding/csv"
	"fmt"
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
	P99     time.Duration `json:"p99_ns,omitempty"`
	Max     time.Duration `json:"max_ns,omitempty"`
	Err     string        `json:"error,omitempty"`
}

// kind is one tool.
type kind struct {
	tool  string
	args  func(period time.Duration, port string) []string // the program first
	parse func(out []byte) (Load, error)
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
		args := k.args(period, port)
		cmd := l.Command(ctx, link.Edge, args[0], args[1:]...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.WaitDelay = time.Second
		err := cmd.Run()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
		}
		var load Load
		if err == nil {
			load, err = k.parse(stdout.Bytes())
		}
		load.Tool, load.Time = k.tool, time.Since(began)
		if err != nil {
			load.Err = err.Error()
		}
		return &load
	}
}

// redis-benchmark counts requests, not seconds: some 20,000 a second, as one
// core does under its fifty clients, come near to the period.
var redis = kind{
	tool: "redis-benchmark",
	args: func(period time.Duration, port string) []string {
		return []string{"redis-benchmark", "-h", "127.0.0.1", "-p", port, "-t", "set,get", "-n", strconv.Itoa(int(10000 * period.Seconds())), "-r", "100000", "-d", "100", "--csv"}
	},
	parse: parseRedis,
}

// parseRedis reads the table of --csv, one line a command: "test", "rps" and
// latencies in milliseconds.
func parseRedis(out []byte) (l Load, err error) {
	r := csv.NewReader(bytes.NewReader(out))
	r.FieldsPerRecord = -1
	rows, err := r.ReadAll()
	if err != nil {
		return l, fmt.Errorf("redis-benchmark's table: %w", err)
	}
	if len(rows) < 2 {
		return l, fmt.Errorf("redis-benchmark said %q", out)
	}
	n := 0
	for _, row := range rows[1:] {
		if len(row) != len(rows[0]) {
			continue
		}
		var values [4]float64
		for i, name := range rows[0] {
			for j, want := range []string{"rps", "avg_latency_ms", "p99_latency_ms", "max_latency_ms"} {
				if name == want {
					if values[j], err = strconv.ParseFloat(row[i], 64); err != nil {
						return l, fmt.Errorf("redis-benchmark's %s: %w", name, err)
					}
				}
			}
		}
		n++
		l.Rate += values[0]
		l.Average += milliseconds(values[1])
		l.P99 = max(l.P99, milliseconds(values[2]))
		l.Max = max(l.Max, milliseconds(values[3]))
	}
	if n == 0 {
		return l, fmt.Errorf("redis-benchmark's table has no rows: %q", out)
	}
	l.Rate /= float64(n)
	l.Average /= time.Duration(n)
	return l, nil
}

// seconds are whole ones, at least one, as most tools want them.
func seconds(d time.Duration) int { return max(1, int(d.Seconds())) }

func milliseconds(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// pgbench with its select-only script. It makes its tables first, on a new server.
var postgres = kind{
	tool: "pgbench",
	args: func(period time.Duration, port string) []string {
		at := "-h 127.0.0.1 -p " + port + " -U postgres"
		return []string{"sh", "-c", fmt.Sprintf("pgbench %s -i -q postgres >&2 && pgbench %s -S -n -c 4 -T %d postgres", at, at, seconds(period))}
	},
	parse: parsePgbench,
}

var (
	pgTPS     = regexp.MustCompile(`tps = ([0-9.]+)`)
	pgLatency = regexp.MustCompile(`latency average = ([0-9.]+) ms`)
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

var web = kind{
	tool: "wrk",
	args: func(period time.Duration, port string) []string {
		return []string{"wrk", "--threads", "1", "--connections", "8", "--duration", fmt.Sprintf("%ds", seconds(period)), "--latency", "http://127.0.0.1:" + port + "/"}
	},
	parse: parseWrk,
}

var (
	wrkRate    = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	wrkP99     = regexp.MustCompile(`99%\s+(\S+)`)
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
