package workloads

import (
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name  string
		parse func([]byte) (Load, error)
		said  string
		want  Load
		fails bool
	}{
		{name: "redis", parse: parseRedis, said: `"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"
"SET","20000.00","1.000","0.2","0.9","2.0","3.500","9.000"
"GET","30000.00","2.000","0.2","0.9","2.0","2.500","12.000"
`, want: Load{Rate: 25000, Average: 1500 * time.Microsecond, P99: 3500 * time.Microsecond, Max: 12 * time.Millisecond}},
		{name: "redis, nobody there", parse: parseRedis, said: "Could not connect to Redis\n", fails: true},
		{name: "redis, no rows", parse: parseRedis, said: "\"test\",\"rps\"\n", fails: true},
		{name: "pgbench", parse: parsePgbench, said: "latency average = 0.250 ms\ninitial connection time = 5 ms\ntps = 15999.5 (without initial connection time)\n",
			want: Load{Rate: 15999.5, Average: 250 * time.Microsecond}},
		{name: "pgbench, nothing", parse: parsePgbench, said: "", fails: true},
		{name: "wrk", parse: parseWrk, said: `Running 1s test @ http://127.0.0.1:80/
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   350.00us  400.00us   9.50ms   92.00%
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
		} else if err == nil && got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestFor(t *testing.T) {
	if For("python", "stdout:hello") != nil {
		t.Error("a program that prints a line is put under load")
	}
}
