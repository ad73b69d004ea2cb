// Package many measures many starts at once from one server (FlacIO, FAST'25, 5.3.3; Slacker, FAST'16,
// 6.4): some workers, each of which starts some services, all at the same moment. What counts is how many
// starts there are a second, and how long the slowest takes.
//
// A worker is a daemon of its own with nothing on its disk: foil node, or containerd with overlayfs. All are
// behind one link, that of the server. Each service has a network namespace of its own, so that
// many of one image can run on a worker; whether it is ready is asked from outside, every
// 50 ms, in the same way for all. The machine is one: its processors are shared by the server, the
// workers and the services, and bound the starts where the link does not.
package many

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
)

// Scale is how many start at once.
type Scale struct{ Workers, Services int }

func (s Scale) String() string { return fmt.Sprintf("%dx%d", s.Workers, s.Services) }

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Images   []string // declared, NAME:TAG; a worker's services have them in turns
	Engines  []string // hydrofoil, overlayfs
	Scales   []Scale
	Link     link.Options
	Rounds   int
	Timeout  time.Duration // of all starts of one measurement
	Cache    string        // directory on a disk
	Out      io.Writer
	JSON     string // file for the result; "" for none
	Log      func(line string)
}

// Result is what was measured.
type Result struct {
	Images  []string  `json:"images"`
	RTT     string    `json:"rtt"`
	Rate    int64     `json:"rate"` // bits a second; 0: no limit
	Batches []Batches `json:"batches"`
}

// Batches are the measurements of one engine at one scale.
type Batches struct {
	Engine   string      `json:"engine"`
	Workers  int         `json:"workers"`
	Services int         `json:"services"`
	Ready    [][]float64 `json:"ready"` // for each round, seconds until each was ready, in their order
}

// pick is the median over rounds of what a batch has.
func (b Batches) pick(of func([]float64) float64) float64 {
	var x []float64
	for _, ready := range b.Ready {
		x = append(x, of(ready))
	}
	return stats.Median(x)
}

// share is the time by which a share of a batch was ready.
func share(s float64) func([]float64) float64 {
	return func(ready []float64) float64 { return ready[int(s*float64(len(ready)-1)+0.5)] }
}

// Run measures. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	for _, path := range []*string{&o.Cache, &o.Programs.Foil} {
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	ims, err := engines.Services(ctx, o.Cache, o.Images, o.Log)
	if err != nil {
		return err
	}
	dir, err := site.Scratch(o.Cache, "many-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	// The images are pushed and traced over a link without limits.
	root := filepath.Join(dir, "serve")
	m := &measurer{Options: o, images: ims, dir: dir}
	if err := m.at(ctx, link.Options{}, root, func(s *site.Site) error { return m.prepare(ctx, s) }); err != nil {
		return err
	}
	result := Result{Images: o.Images, RTT: o.Link.RTT.String(), Rate: o.Link.Rate}
	if err := m.at(ctx, o.Link, root, func(s *site.Site) error {
		result.Batches, err = m.measure(ctx, s)
		return err
	}); err != nil {
		return err
	}
	if o.JSON != "" {
		text, err := json.MarshalIndent(result, "", "\t")
		if err == nil {
			err = os.WriteFile(o.JSON, append(text, '\n'), 0o644)
		}
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return result.Write(o.Out)
}

type measurer struct {
	Options
	images []engines.Image
	dir    string
	made   int // workers, and namespaces, so far
}

// at calls fn with a site that has the server.
func (m *measurer) at(ctx context.Context, o link.Options, root string, fn func(*site.Site) error) error {
	return engines.At(ctx, m.dir, o, m.Programs, root, fn)
}

func (m *measurer) prepare(ctx context.Context, s *site.Site) error {
	engine, err := engines.Named("hydrofoil")
	if err != nil {
		return err
	}
	for _, im := range m.images {
		if err := engines.Push(ctx, s, im); err != nil {
			return err
		}
		if _, err := engine.Prepare(ctx, s, m.Programs, im); err != nil {
			return err
		}
		m.Log(im.Name + " is pushed and traced")
	}
	return nil
}

// measure measures in rounds, engines in turns.
func (m *measurer) measure(ctx context.Context, s *site.Site) (all []Batches, err error) {
	for _, scale := range m.Scales {
		for _, engine := range m.Engines {
			all = append(all, Batches{Engine: engine, Workers: scale.Workers, Services: scale.Services})
		}
	}
	for round := range m.Rounds {
		for i := range all {
			if round%2 == 1 { // the other engine first
				i ^= 1
				i = min(i, len(all)-1)
			}
			b := &all[i]
			ready, err := m.batch(ctx, s, b.Engine, Scale{b.Workers, b.Services})
			if err != nil {
				return nil, fmt.Errorf("%s, %dx%d: %w", b.Engine, b.Workers, b.Services, err)
			}
			slices.Sort(ready)
			b.Ready = append(b.Ready, ready)
			m.Log(fmt.Sprintf("round %d: %s %dx%d: %.2f s, the slowest %.2f s", round+1, b.Engine, b.Workers, b.Services, stats.Median(ready), ready[len(ready)-1]))
		}
	}
	return all, nil
}

// batch makes workers, has all services start at once, and returns when each was ready, in seconds.
func (m *measurer) batch(ctx context.Context, s *site.Site, name string, scale Scale) (ready []float64, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
	defer cancel()
	var workers []starter
	defer func() {
		for _, w := range workers {
			err = errors.Join(err, w.stop())
		}
	}()
	var services []*service
	for range scale.Workers {
		m.made++
		w, err := newStarter(ctx, s, m.Programs, name, filepath.Join(m.dir, fmt.Sprintf("worker-%d", m.made)))
		if err != nil {
			return nil, err
		}
		workers = append(workers, w)
		for i := range scale.Services {
			m.made++
			namespace, err := newNamespace(ctx, fmt.Sprintf("service-%d", m.made))
			if err != nil {
				return nil, err
			}
			services = append(services, &service{id: fmt.Sprintf("many-%d", m.made), image: m.images[i%len(m.images)], namespace: namespace, worker: w})
		}
	}
	ready = make([]float64, len(services))
	errs := make([]error, len(services))
	var starting sync.WaitGroup
	began := time.Now()
	for i, one := range services {
		starting.Go(func() {
			if errs[i] = one.start(ctx); errs[i] != nil {
				cancel()
			}
			ready[i] = time.Since(began).Seconds()
		})
	}
	starting.Wait()
	err = errors.Join(errs...)
	for _, one := range services {
		err = errors.Join(err, one.stop())
	}
	return ready, err
}

// Write writes a result as a table.
func (r Result) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	rate := "no limit"
	if r.Rate > 0 {
		rate = fmt.Sprintf("%g Mbit/s", float64(r.Rate)/1e6)
	}
	fmt.Fprintf(t, "\nStarts at once of %s, round trip %s, %s for all; seconds until ready, medians of rounds\n\nworkers x services\tengine\trounds\tstarts a second\tfirst\tmedian\t90%%\tslowest\n", strings.Join(r.Images, ", "), r.RTT, rate)
	for _, b := range r.Batches {
		n := float64(b.Workers * b.Services)
		last := b.pick(share(1))
		fmt.Fprintf(t, "%dx%d\t%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\n", b.Workers, b.Services, b.Engine, len(b.Ready), n/last,
			b.pick(share(0)), b.pick(share(0.5)), b.pick(share(0.9)), last)
	}
	return t.Flush()
}
