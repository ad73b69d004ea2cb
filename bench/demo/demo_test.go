package demo

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/bench/engines"
)

var update = flag.Bool("update", false, "write the golden files")

func TestTable(t *testing.T) {
	table := table{
		rtt: 100 * time.Millisecond, rate: 100e6, ready: "tcp:6379",
		rows: []comparison{
			{
				name: "fresh", layers: 45e6,
				floor: engines.Floor{Warm: 100 * time.Millisecond, Touched: 6e6, Compressed: 2e6},
				results: []result{
					{time: 9 * time.Second, atReady: 47e6, moved: 47e6},
					{time: time.Second, atReady: 4e6, moved: 40e6, waits: 80, waited: 600 * time.Millisecond},
					{time: 400 * time.Millisecond, atReady: 2e6, moved: 42e6},
				},
			},
			{
				name: "update", layers: 45e6,
				floor: engines.Floor{Warm: 100 * time.Millisecond, Touched: 6e6, Compressed: 1e6},
				results: []result{
					{time: 9 * time.Second, atReady: 47e6, moved: 47e6},
					{time: time.Second / 2, atReady: 1e6, moved: 4e6, waits: 8, waited: 60 * time.Millisecond},
					{time: 300 * time.Millisecond, atReady: 1e6, moved: 4e6},
				},
			},
		},
	}
	// 100 ms warm, 100 ms round trip, 2 MB at 12.5 MB/s.
	if got, want := table.rows[0].floor.At(table.rtt, table.rate), 360*time.Millisecond; got != want {
		t.Errorf("floor %v, want %v", got, want)
	}
	golden := filepath.Join("testdata", "table.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(table.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(table.String(), "\n")); diff != "" {
		t.Errorf("table (-want +got; -update writes it anew):\n%s", diff)
	}
}
