package serve_test

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/collect"
	"hydrofoil.dev/foil/internal/server/serve"
)

// BenchmarkDeletions deletes images of two megabytes one by one, has what nobody needs collected, and says how many
// of both were done in a second.
func BenchmarkDeletions(b *testing.B) {
	images := overlapping(b, 50, 9, 120_000)
	var deleting, collecting time.Duration
	var freed int64
	for b.Loop() {
		s := start(b, onDemand(b.TempDir()))
		for i, m := range images {
			m.pushTo(b, s.Addr(), repositoryOf(i))
			if _, err := pullBundle(s.Addr(), repositoryOf(i), "1"); err != nil {
				b.Fatal(err)
			}
		}
		began := time.Now()
		for i := range images {
			remove(b, s.Addr(), i)
		}
		deleting += time.Since(began)
		began = time.Now()
		freed += collectAll(b, s.Addr()).Bytes
		collecting += time.Since(began)
	}
	n := float64(b.N * len(images))
	b.ReportMetric(n/deleting.Seconds(), "deletions/s")
	b.ReportMetric(n/collecting.Seconds(), "images-collected/s")
	b.ReportMetric(float64(freed)/collecting.Seconds()/1e6, "MB-freed/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBesideCollector pushes and pulls images, by turns while a collector frees and compacts what was deleted before, at
// the default rate, and while none does. It says how much longer both take beside it: medians of pairs.
func BenchmarkBesideCollector(b *testing.B) {
	const each = 6 // images of a round
	rounds := max(5, b.N)
	images := overlapping(b, each*(2*rounds+4), 9, 120_000)
	s := start(b, serve.Options{Root: b.TempDir(), Lease: 1, Reserve: -1, Collect: collect.Options{Interval: -1, Leftover: 1}})
	number := 0
	push := func(n int) (pushes, pulls time.Duration) {
		for range n {
			began := time.Now()
			images[number].pushTo(b, s.Addr(), repositoryOf(number))
			pushes += time.Since(began)
			began = time.Now()
			if _, err := pullBundle(s.Addr(), repositoryOf(number), "1"); err != nil {
				b.Fatal(err)
			}
			pulls += time.Since(began)
			number++
		}
		return pushes, pulls
	}
	push(4 * each) // some to collect
	deleted := 0
	var pushes, pulls []float64
	var collected collect.Report
	for round := range rounds {
		var took [2][2]time.Duration
		for turn := range 2 {
			with := (round + turn) % 2
			if with == 0 {
				took[0][0], took[0][1] = push(each)
				continue
			}
			for ; deleted < number-2*each; deleted += 2 { // every second: packs are live in part
				remove(b, s.Addr(), deleted)
			}
			done := make(chan struct{})
			var work sync.WaitGroup
			work.Go(func() {
				for {
					var r collect.Report
					status, err := administer("http://"+s.Addr(), "POST", "gc", admin.GCRequest{Purge: true}, &r)
					if err != nil || status != http.StatusOK {
						b.Error(fmt.Errorf("gc now: %d, %w", status, err))
						return
					}
					collected.Packs, collected.Compacted, collected.Bytes = collected.Packs+r.Packs, collected.Compacted+r.Compacted, collected.Bytes+r.Bytes
					select {
					case <-done:
						return
					default:
					}
				}
			})
			took[1][0], took[1][1] = push(each)
			close(done)
			work.Wait()
		}
		pushes = append(pushes, took[1][0].Seconds()/took[0][0].Seconds())
		pulls = append(pulls, took[1][1].Seconds()/took[0][1].Seconds())
	}
	if collected.Packs+collected.Compacted == 0 {
		b.Fatal("nothing was collected beside them")
	}
	slices.Sort(pushes)
	slices.Sort(pulls)
	b.ReportMetric(pushes[len(pushes)/2], "pushes-beside/alone")
	b.ReportMetric(pulls[len(pulls)/2], "pulls-beside/alone")
	b.ReportMetric(float64(collected.Compacted), "packs-compacted")
	b.ReportMetric(0, "ns/op")
}
