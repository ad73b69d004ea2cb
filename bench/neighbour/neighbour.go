// Package neighbour measures what a service that has just become ready loses while the rest of its own image arrives
// (Starlight, NSDI'22, section 5.3), and how much later the image arrives.
//
// In each round, in turns:
//
//	overlayfs           containerd has the whole image; nothing arrives
//	download            the same, while the image's layers are downloaded and thrown away
//	foil                the service is traced, and its image arrives
//	against             the same, by another build of the worker
//
// each under the load of package workloads, of which the seconds count in which the image arrives. Then foil and
// against once more without load: when the image is complete on a node that has nothing else to do.
//
// Server, link and the tools of the load run on the same machine, and take from the service what they would not take
// on a worker. The row download says how much that is.
//
// With Options.Connection it measures what another connection has of the link meanwhile, in place of services.
package neighbour

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/bench/workloads"
)

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Against  string   // another foil, for the worker; empty: none
	Images   []string // NAME:TAG of the declared ones
	Link     link.Options
	Period   time.Duration // of the load
	Rounds   int
	// Connection measures what another connection has of the link, in place of services.
	Connection bool
	Cache      string // directory on a disk
	Out        io.Writer
	JSON       string // file for the result; "" for none
	Log        func(line string)
}

// Names of rows.
const (
	overlayfs = "overlayfs"
	download  = "download"
	foil      = "foil"
	against   = "against"
)

// Result is what was measured of one image.
type Result struct {
	Image string `json:"image"`
	Link  string `json:"link"`
	Rows  []Row  `json:"rows"`
}

// Row is one way to have the image, by round.
type Row struct {
	Name  string    `json:"name"`
	Rates []float64 `json:"rates"` // operations a second, while the image arrives
	// Shares are those of overlayfs's rate in the same round.
	Shares []float64 `json:"shares"`
	// Loaded and Idle are seconds from the command until the image was complete, under load and without.
	Loaded []float64 `json:"loaded_seconds,omitempty"`
	Idle   []float64 `json:"idle_seconds,omitempty"`
}

// Run measures. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	for _, path := range []*string{&o.Cache, &o.Programs.Foil, &o.Against} {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	dir, err := site.Scratch(o.Cache, "neighbour-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	l, err := link.New(context.WithoutCancel(ctx), o.Link)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	m := &measurement{Options: o, site: &site.Site{Dir: dir, Link: l}}
	server, err := engines.Serve(ctx, m.site, o.Programs.Serves(), filepath.Join(dir, "serve"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	catalogue, err := images.Declared()
	if err != nil {
		return err
	}
	builder := images.Builder{Cache: filepath.Join(o.Cache, "images"), Log: o.Log}
	var all []table
	for _, name := range o.Images {
		built, err := builder.Build(ctx, catalogue, name)
		if err != nil {
			return err
		}
		if err := m.prepare(ctx, name, built); err != nil {
			return err
		}
		var r table
		if o.Connection {
			r, err = m.connections(ctx, name)
		} else {
			r, err = m.services(ctx, name)
		}
		if err != nil {
			return err
		}
		all = append(all, r)
	}
	return deliver(o, all)
}

// table is a result.
type table interface{ Write(io.Writer) error }

type measurement struct {
	Options
	site *site.Site
	runs int
	im   engines.Image
	load func(ctx context.Context, l *link.Link, period time.Duration) *workloads.Load
}

// describe is a link in words.
func describe(l link.Options) string {
	rate := "an unlimited link"
	if l.Rate > 0 {
		rate = fmt.Sprintf("%.0f Mbit/s", float64(l.Rate)/1e6)
	}
	return fmt.Sprintf("%s, %v", rate, l.RTT)
}

// prepare pushes an image, and traces it.
func (m *measurement) prepare(ctx context.Context, name string, built *images.Built) error {
	short, _, _ := strings.Cut(name, ":")
	ready, err := site.ParseReadiness(built.Probe, short == "redis")
	if err != nil {
		return err
	}
	if m.load = workloads.For(short, built.Probe); m.load == nil && !m.Connection {
		return fmt.Errorf("bench: %s has no load, or its tool is not on PATH", name)
	}
	m.im = engines.Image{Name: name, Ref: engines.RegistryAddr + "/" + name, Built: built, Ready: ready, Command: built.Args}
	if err := engines.Push(ctx, m.site, m.im); err != nil {
		return err
	}
	_, err = (&engines.Hydrofoil{}).Prepare(ctx, m.site, m.Programs, m.im)
	return err
}

// services measures the service of one image.
func (m *measurement) services(ctx context.Context, name string) (r Result, err error) {
	r = Result{Image: name, Link: describe(m.Link)}
	builds := map[string]string{foil: m.Programs.Foil}
	names := []string{overlayfs, download, foil}
	if m.Against != "" {
		builds[against] = m.Against
		names = append(names, against)
	}
	r.Rows = make([]Row, len(names))
	for i, name := range names {
		r.Rows[i].Name = name
	}
	for round := range m.Rounds {
		for i := range names {
			i = (i + round) % len(names)
			row := &r.Rows[i]
			rate, complete, err := m.once(ctx, row.Name, builds[row.Name], true)
			if err != nil {
				return r, fmt.Errorf("%s, %s: %w", name, row.Name, err)
			}
			row.Rates = append(row.Rates, rate)
			if builds[row.Name] != "" {
				_, idle, err := m.once(ctx, row.Name, builds[row.Name], false)
				if err != nil {
					return r, fmt.Errorf("%s, %s without load: %w", name, row.Name, err)
				}
				row.Loaded, row.Idle = append(row.Loaded, complete.Seconds()), append(row.Idle, idle.Seconds())
			}
			if m.Log != nil {
				m.Log(fmt.Sprintf("measured %s, %s, round %d: %.0f a second", name, row.Name, round+1, rate))
			}
		}
		for i := range r.Rows {
			r.Rows[i].Shares = append(r.Rows[i].Shares, r.Rows[i].Rates[round]/r.Rows[0].Rates[round])
		}
	}
	return r, nil
}

// once runs the image on a worker of its own, and returns the rate of its service while the image arrives, and when it
// was complete.
func (m *measurement) once(ctx context.Context, name, build string, loaded bool) (rate float64, complete time.Duration, err error) {
	m.runs++
	dir := filepath.Join(m.site.Dir, fmt.Sprintf("run-%d", m.runs))
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	var engine engines.Engine = &engines.Containerd{Snapshotter: overlayfs}
	programs := m.Programs
	if build != "" {
		engine, programs.Foil = &engines.Hydrofoil{}, build
	}
	w := engine.Worker(m.site, programs, dir)
	if err := w.Start(ctx); err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	t := engines.Begin(m.site, w.Processes())
	defer t.End()
	c, err := w.Provision(ctx, m.im, t)
	defer func() { err = errors.Join(err, c.Stop()) }()
	if err != nil {
		return 0, 0, err
	}
	if err := m.im.Ready.Wait(ctx, m.site.Link, c.Process); err != nil {
		return 0, 0, err
	}
	began := t.Now().Time
	var load *workloads.Load
	if loaded {
		stop := func() error { return nil }
		if name == download {
			stop = m.downloads(ctx, dir)
		}
		load = m.load(ctx, m.site.Link, m.Period)
		if err := stop(); err != nil {
			return 0, 0, err
		}
	}
	if err := w.Complete(ctx, m.im, t); err != nil {
		return 0, 0, err
	}
	at, _ := t.At(engines.Complete)
	if load == nil {
		return 0, at.Time, nil
	}
	if load.Err != "" {
		return 0, 0, fmt.Errorf("bench: the load: %s", load.Err)
	}
	until := time.Duration(-1) // to the end
	if build != "" {
		until = at.Time - began
	}
	rate, err = rateUntil(load.Seconds, until)
	return rate, at.Time, err
}

// downloads downloads the image's layers over and over, until stop is called.
func (m *measurement) downloads(ctx context.Context, dir string) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			w := (&engines.Curl{}).Worker(m.site, m.Programs, dir)
			t := engines.Begin(m.site, nil)
			_, err := w.Provision(ctx, m.im, t)
			t.End()
			if err != nil && ctx.Err() == nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	return func() error {
		cancel()
		return <-failed
	}
}

// rateUntil is the mean rate of the seconds that had ended by then; less than 0: of all.
func rateUntil(seconds []workloads.Second, until time.Duration) (float64, error) {
	sum, n := 0.0, 0
	for _, s := range seconds {
		if until < 0 || s.End <= until {
			sum, n = sum+s.Rate, n+1
		}
	}
	if n == 0 {
		return 0, fmt.Errorf("bench: the image was complete before a second of load had passed: have it arrive over a slower link, --rate")
	}
	return sum / float64(n), nil
}

// deliver writes results to where the options say.
func deliver(o Options, all []table) error {
	if o.JSON != "" {
		text, err := json.MarshalIndent(all, "", "\t")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := os.WriteFile(o.JSON, append(text, '\n'), 0o644); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	for _, r := range all {
		if err := r.Write(o.Out); err != nil {
			return err
		}
	}
	return nil
}

// Write writes a result as a table, of medians.
func (r Result) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "\nA service of %s while its image arrives over %s; medians of %d\n\n", r.Image, r.Link, len(r.Rows[0].Rates))
	fmt.Fprintln(t, "\toperations a second\tof overlayfs's\tcomplete\twithout load")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%.0f\t%.2f", row.Name, stats.Median(row.Rates), stats.Median(row.Shares))
		for _, s := range [][]float64{row.Loaded, row.Idle} {
			if len(s) == 0 {
				fmt.Fprint(t, "\t-")
				continue
			}
			fmt.Fprintf(t, "\t%.1f s", stats.Median(s))
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}
