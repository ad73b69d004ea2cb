package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
)

// Options say what is measured.
type Options struct {
	Foil   string
	Rounds int
	Batch  int // requests of a round, of bench access
	// Parallel is how many of these are under way at a time. A server that sleeps between requests wakes threads for each of them, which
	// takes as long as the requests.
	Parallel int
	Period   time.Duration // of honest pulls, of bench attacks
	Clients  int           // at once, of an attack
	// Addresses is from how many addresses they come. Anonymous: none of them has a token.
	Addresses int
	Anonymous bool
	Attacks   []string // names; empty: all
	Rate      float64  // of the honest client's link, Mbit/s; 0: as fast as it goes
	Cache     string   // directory on a disk
	Out       io.Writer
	JSON      string // file for the result; "" for none
	Log       func(line string)
}

// Cost is what one kind of request takes of the server.
type Cost struct {
	Request string          `json:"request"`
	Open    []time.Duration `json:"open_ns"`  // processor time a request, by round, of the open server
	Token   []time.Duration `json:"token_ns"` // the same of the one with rules
	Ratio   float64         `json:"ratio"`    // the median of the rounds' ratios
	Bounds  stats.Interval  `json:"bounds"`
}

// scratch makes a directory, and calls fn with it.
func scratch(o *Options, name string, fn func(dir string) error) (err error) {
	for _, path := range []*string{&o.Cache, &o.Foil} {
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	dir, err := site.Scratch(o.Cache, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	return fn(dir)
}

// RunCost measures what tokens cost.
func RunCost(ctx context.Context, o Options) error {
	return scratch(&o, "access-", func(dir string) error {
		open, err := start(ctx, o.Foil, filepath.Join(dir, "open"), true, "")
		if err != nil {
			return err
		}
		guarded, err := start(ctx, o.Foil, filepath.Join(dir, "guarded"), false, beyondReach)
		if err != nil {
			return errors.Join(err, open.stop())
		}
		costs, err := measureCost(ctx, o, open, guarded)
		if err := errors.Join(err, open.stop(), guarded.stop()); err != nil {
			return err
		}
		fmt.Fprintf(o.Out, "| request | open server, µs | with a token, µs | ratio | 95%% bounds |\n| --- | ---: | ---: | ---: | --- |\n")
		for _, c := range costs {
			fmt.Fprintf(o.Out, "| %s | %.1f | %.1f | %.3f | %.3f to %.3f |\n", c.Request, micros(c.Open), micros(c.Token), c.Ratio, c.Bounds.Low, c.Bounds.High)
		}
		return o.save(costs)
	})
}

func (o Options) save(v any) error {
	if o.JSON == "" {
		return nil
	}
	text, err := json.MarshalIndent(v, "", "\t")
	if err == nil {
		err = os.WriteFile(o.JSON, append(text, '\n'), 0o644)
	}
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

func micros(all []time.Duration) float64 {
	var x []float64
	for _, d := range all {
		x = append(x, float64(d)/1e3)
	}
	return stats.Median(x)
}

func measureCost(ctx context.Context, o Options, open, guarded *server) ([]Cost, error) {
	small := noise(4 << 10)
	var paths []string
	for _, s := range []*server{open, guarded} {
		m, _, err := s.artifact(ctx, s.token, "honest/app", nil, "", small)
		if err != nil {
			return nil, err
		}
		paths = []string{"/v2/honest/app/manifests/1", "/v2/honest/app/blobs/" + m.Layers[0].Digest.String()}
	}
	costs := []Cost{{Request: "GET a manifest by tag"}, {Request: "GET a blob of 4 KiB"}}
	for n := range costs {
		c := &costs[n]
		batch := func(s *server) (time.Duration, error) {
			before, err := s.use()
			if err != nil {
				return 0, err
			}
			var all sync.WaitGroup
			failed := make([]error, o.Parallel)
			for i := range failed {
				all.Go(func() {
					for range o.Batch / o.Parallel {
						if _, failed[i] = s.must(ctx, http.StatusOK, s.token, "GET", paths[n], "", nil); failed[i] != nil {
							return
						}
					}
				})
			}
			all.Wait()
			if err := errors.Join(failed...); err != nil {
				return 0, err
			}
			after, err := s.use()
			return (after.cpu - before.cpu) / time.Duration(o.Batch/o.Parallel*o.Parallel), err
		}
		var ratios []float64
		for round := range o.Rounds + 1 {
			var took [2]time.Duration
			for turn := range 2 {
				which := (turn + round) % 2
				var err error
				if took[which], err = batch([]*server{open, guarded}[which]); err != nil {
					return nil, err
				}
			}
			if round == 0 {
				continue // caches are cold
			}
			c.Open, c.Token = append(c.Open, took[0]), append(c.Token, took[1])
			ratios = append(ratios, float64(took[1])/float64(took[0]))
		}
		c.Ratio, c.Bounds = stats.Median(ratios), stats.Bootstrap(ratios, stats.Median)
		o.Log(fmt.Sprintf("%s: %.3f", c.Request, c.Ratio))
	}
	return costs, nil
}
