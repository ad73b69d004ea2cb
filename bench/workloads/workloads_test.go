package workloads

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name  string
		parse func([]byte) (Load, error)
		said  string
		want  Load
		fails bool
	}{
		{name: "redis", parse: parseRedis, said: "SET: rps=19000.0 (overall: 19000.0) avg_msec=1.100 (overall: 1.100)\r====== SET ======\n" + redisSummary("20000.00", "    1.000     0.200     0.900     2.000     3.500     9.000") +
			"====== GET ======\n" + redisSummary("30000.00", "    2.000     0.200     0.900     2.000     2.500    12.000"),
			want: Load{Rate: 25000, Average: 1500 * time.Microsecond, P99: 3500 * time.Microsecond, Max: 12 * time.Millisecond}},
		{name: "redis, nobody there", parse: parseRedis, said: "Could not connect to Redis\n", fails: true},
		{name: "redis, cut", parse: parseRedis, said: "  throughput summary: 20000.00 requests per second\n", fails: true},
		{name: "pgbench", parse: parsePgbench, said: "latency average = 0.250 ms\ninitial connection time = 5 ms\ntps = 15999.5 (without initial connection time)\n",
			want: Load{Rate: 15999.5, Average: 250 * time.Microsecond}},
		{name: "pgbench, nothing", parse: parsePgbench, said: "", fails: true},
		{name: "wrk", parse: parseWrk, said: `Running 1s test @ http://127.0.0.1:80/
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   350.00us  400.00us   9.50ms   94.99%
    Req/Sec    25.00k     1.20k   27.00k    70.00%
  Latency Distribution
     50%  280.00us
     99%    2.10ms
  25000 requests in 1.00s, 20.00MB read
Requests/sec:  24985.10
`, want: Load{Rate: 24985.1, Average: 350 * time.Microsecond, P99: 2100 * time.Microsecond, Max: 9500 * time.Microsecond}},
		{name: "wrk, refused", parse: parseWrk, said: "unable to connect\n", fails: true},
	} {
		got, err := c.parse([]byte(c.said))
		if (err != nil) != c.fails {
			t.Errorf("%s: error %v", c.name, err)
		} else if diff := cmp.Diff(c.want, got); err == nil && diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

func redisSummary(rate, latencies string) string {
	return "Summary:\n  throughput summary: " + rate + " requests per second\n  latency summary (msec):\n" +
		"          avg       min       p50       p95       p99       max\n" + latencies + "\n"
}

// Progress is read however it is cut into writes, and from nothing else.
func TestProgress(t *testing.T) {
	for _, c := range []struct {
		kind kind
		said string
		want []Second
	}{
		{redis, "        \rSET: rps=20000.0 (overall: 19950.2) avg_msec=1.250 (overall: 1.3)\rSET: rps=10000.0 (overall: 1) avg_msec=0.500 (overall: 1)\r====== SET ======\n",
			[]Second{{Rate: 20000, Average: 1250 * time.Microsecond}, {Rate: 10000, Average: 500 * time.Microsecond}}},
		{postgres, "done in 0.96 s\nprogress: 1.0 s, 4943.4 tps, lat 0.693 ms stddev 1.353, 0 failed\ntps = 5642.7 (without initial connection time)\n",
			[]Second{{Rate: 4943.4, Average: 693 * time.Microsecond}}},
	} {
		for _, n := range []int{1, 7, 1000} {
			w := &lines{began: time.Now(), read: c.kind.progress}
			for rest := []byte(c.said); len(rest) > 0; rest = rest[min(n, len(rest)):] {
				w.Write(rest[:min(n, len(rest))])
			}
			if diff := cmp.Diff(c.want, w.samples, cmpopts.IgnoreFields(Second{}, "End")); diff != "" {
				t.Errorf("%s, %d bytes at a time (-want +got):\n%s", c.kind.tool, n, diff)
			}
			if w.text.String() != c.said {
				t.Errorf("%s: %q is left of %q", c.kind.tool, w.text.String(), c.said)
			}
		}
	}
}

func TestBySecond(t *testing.T) {
	ms := time.Millisecond
	got := bySecond([]Second{{250 * ms, 100, 2 * ms}, {750 * ms, 300, 4 * ms}, {1200 * ms, 50, ms}, {3100 * ms, 0, 0}})
	want := []Second{{750 * ms, 200, 3500 * time.Microsecond}, {1200 * ms, 50, ms}, {3100 * ms, 0, 0}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestFor(t *testing.T) {
	if For("python", "stdout:hello") != nil {
		t.Error("a program that prints a line is put under load")
	}
}
