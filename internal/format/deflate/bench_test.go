package deflate

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"
)

// benchPlain is the file that FOIL_BENCH_PLAIN names, or as much of this program as there is.
func benchPlain(b *testing.B, limit int) []byte {
	name := os.Getenv("FOIL_BENCH_PLAIN")
	if name == "" {
		var err error
		if name, err = os.Executable(); err != nil {
			b.Fatal(err)
		}
	}
	plain, err := os.ReadFile(name)
	if err != nil {
		b.Fatal(err)
	}
	return plain[:min(len(plain), limit)]
}

// cpu reports what a benchmark costs in time of processors, whoever else they work for: what
// the clock says is of no use on a busy machine.
func cpu(b *testing.B, bytes int, run func()) {
	b.SetBytes(int64(bytes))
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	for b.Loop() {
		run()
	}
	took := used() - before
	b.ReportMetric(took.Seconds()*1000/float64(b.N), "cpu-ms/op")
	if bytes > 0 {
		b.ReportMetric(float64(bytes)*float64(b.N)/1e6/took.Seconds(), "MB/cpu-s")
	}
}

// BenchmarkEncoder compares one core of ours with one of compress/flate, and with what
// workers do that begin at restart points a MiB from each other.
func BenchmarkEncoder(b *testing.B) {
	plain := benchPlain(b, 16<<20)
	for _, level := range []int{1, 6} {
		b.Run(fmt.Sprintf("compressflate/level=%d", level), func(b *testing.B) {
			cpu(b, len(plain), func() {
				w, err := flate.NewWriter(io.Discard, level)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := w.Write(plain); err != nil {
					b.Fatal(err)
				}
				if err := w.Close(); err != nil {
					b.Fatal(err)
				}
			})
		})
		b.Run(fmt.Sprintf("ours/level=%d", level), func(b *testing.B) {
			cpu(b, len(plain), func() {
				e, err := NewEncoder(io.Discard, level)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := e.Write(plain); err != nil {
					b.Fatal(err)
				}
				if err := e.Close(); err != nil {
					b.Fatal(err)
				}
			})
		})
		_, x := recorded(b, level, plain, 1<<20)
		for workers := 1; workers <= 2; workers++ {
			b.Run(fmt.Sprintf("points/level=%d/workers=%d", level, workers), func(b *testing.B) {
				cpu(b, len(plain), func() {
					err := x.WriteRange(context.Background(), io.Discard, bytes.NewReader(plain), 0, x.Out, workers)
					if err != nil {
						b.Fatal(err)
					}
				})
				b.ReportMetric(float64(len(x.Append(nil)))/float64(max(len(x.Points), 1)), "B/point")
			})
		}
	}
}

// BenchmarkFirstByte is how long it takes until the first byte of a range in the middle of a
// stream comes, by the distance of points.
func BenchmarkFirstByte(b *testing.B) {
	plain := benchPlain(b, 100<<20)
	for _, level := range []int{1, 6} {
		for _, every := range []int64{256 << 10, 1 << 20, 4 << 20} {
			_, x := recorded(b, level, plain, every)
			b.Run(fmt.Sprintf("level=%d/every=%dKiB", level, every>>10), func(b *testing.B) {
				from := x.Out / 3
				cpu(b, 0, func() {
					err := x.WriteRange(context.Background(), first{}, bytes.NewReader(plain), from, x.Out, 1)
					if !errors.Is(err, errFirst) {
						b.Fatal(err)
					}
					from = (from + x.Out/7) % x.Out
				})
				b.ReportMetric(float64(len(x.Append(nil)))/float64(len(plain))*100, "%index")
			})
		}
	}
}

var errFirst = errors.New("that is enough")

// first wants one byte.
type first struct{}

func (first) Write([]byte) (int, error) { return 0, errFirst }
