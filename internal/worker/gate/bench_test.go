package gate_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/gate"
)

// BenchmarkPresent is the cost of one event on a present block, from the
// reader's read to its bytes; cpu-ns is the processor time of reader and gate
// in that, read-ns the whole without a gate.
func BenchmarkPresent(b *testing.B) {
	g := started(b, gate.Options{})
	defer g.Close()
	backing, f := guardedFile(b, g, 1<<20)
	if err := backing.Fill(0, 1<<20); err != nil {
		b.Fatal(err)
	}
	var buf [4096]byte
	read := func(n int) {
		for i := range n {
			if _, err := f.ReadAt(buf[:], int64(i%256)*4096); err != nil {
				b.Fatal(err)
			}
		}
	}
	n := 0
	before := cpu(b)
	for b.Loop() {
		read(1)
		n++
	}
	b.ReportMetric(float64(cpu(b)-before)/float64(n), "cpu-ns")
	if err := g.Release("arena"); err != nil {
		b.Fatal(err)
	}
	begin := time.Now()
	read(n)
	b.ReportMetric(float64(time.Since(begin).Nanoseconds())/float64(n), "read-ns")
}

// cpu is the processor time that this process has used.
func cpu(b *testing.B) time.Duration {
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		b.Fatal(err)
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// BenchmarkPresentParallel is the same with 16 readers at once.
func BenchmarkPresentParallel(b *testing.B) {
	g := started(b, gate.Options{})
	defer g.Close()
	backing, f := guardedFile(b, g, 1<<20)
	if err := backing.Fill(0, 1<<20); err != nil {
		b.Fatal(err)
	}
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		var buf [4096]byte
		for i := 0; pb.Next(); i++ {
			if _, err := f.ReadAt(buf[:], int64(i%256)*4096); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkTakeover clears 65,536 numbers of a gate with 100 reads that wait.
func BenchmarkTakeover(b *testing.B) {
	g := started(b, gate.Options{})
	backing, f := guardedFile(b, g, 1<<20)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() { f.ReadAt(make([]byte, 4096), int64(i)*4096) })
	}
	if err := backing.WaitNeeds(context.Background(), 100); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		held := hold(b, g)
		// As a daemon with the highest limit would have left it.
		gate.SetJournalLimit(g, 65536)
		if err := g.Close(); err != nil {
			b.Fatal(err)
		}
		var err error
		if g, err = gate.Takeover(context.Background(), gate.Options{Held: held}); err != nil {
			b.Fatal(err)
		}
	}
	if err := backing.Fill(0, 1<<20); err != nil {
		b.Fatal(err)
	}
	if err := g.Guard("arena", backing.File(), backing); err != nil {
		b.Fatal(err)
	}
	if err := g.Start(); err != nil {
		b.Fatal(err)
	}
	wg.Wait()
	g.Close()
}
