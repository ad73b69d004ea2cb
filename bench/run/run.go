// Package run runs the matrix of a benchmark: engines, images, links and
// repetitions.
//
// First, over a link without limits, each version of each image is pushed, each
// engine prepares it, and its floor T* is measured. Then, for each repetition
// and link, a new link is made and tried, and every image is provisioned by
// every engine, in an order that is shuffled anew each time (by a seed), so that
// no engine always follows the same other one. Before the first engine the warm start
// of the image is measured again, so that T* is of the same minutes as the runs.
//
// Two builds of foil are measured in turns: each session is made with both, one right
// after the other, and the one that comes first changes with each repetition. Each has
// a link and a server of its own, which are both there during a whole round.
//
// A session is a worker of one engine that is given one image fresh, and then
// its next version as an update. Between the two its daemons are stopped and
// started; before each, the page caches of the whole machine are dropped. What a
// session left on the disk is removed before the next begins.
//
// Each run is written as a file when it has ended (package results). What is
// there is not run again: an interrupted matrix goes on when it is started
// again.
package run

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

// Options are a matrix.
type Options struct {
	Programs engines.Programs
	// Against, if not nil, are the programs of another build. The results are then
	// below Out, in Before (of Against) and After (of Programs).
	Against *engines.Programs
	Engines []string // by name
	Images  []string // names of declared ones, without tags
	RTTs    []time.Duration
	Rates   []int64 // bits a second, 0 is no limit
	// ImageRates are for images that are measured at other rates than Rates.
	ImageRates map[string][]int64
	Runs       int
	Load       time.Duration // how long a ready server is put under load; 0: not at all
	Out        string        // result directory
	Cache      string        // directory on a disk: images are kept there, and workers live there
	Seed       uint64
	Command    []string // of the caller, for the record
	Commit     string   // the same
	Note       string   // the same
	// CompleteAt are the round-trip times at which completion is waited for; nil is
	// all of them. Elsewhere a run ends after ready and load, but for full pulls,
	// which are complete before. The worker of an update is given the version before
	// whole, at any round-trip time.
	CompleteAt []time.Duration
	// SkipUpdates leaves out second versions.
	SkipUpdates bool
	// Cut makes resumed runs, and no others: each begins with nothing, and its connections
	// are cut once, after this share of the bytes of the image's layers. 0: none.
	Cut float64
	// SkipCheck does not try each link first, which takes some seconds.
	SkipCheck bool
	// RetryFailed makes those runs again that failed.
	RetryFailed bool
	// RetryStolen makes those runs again of which more than results.MuchStolen of the
	// processors' time was stolen.
	RetryStolen bool
	// Forecast says how long it would take, and runs nothing.
	Forecast bool
	// Timeout ends a run; 10 minutes if 0.
	Timeout time.Duration
	Log     func(line string)
}

// Where the results of two builds are, below Options.Out.
const (
	Before = "before"
	After  = "after"
)

// matrix is a benchmark of one build, under way.
type matrix struct {
	Options
	side     string // Before or After; empty: there is no other
	out      results.Dir
	dir      string // scratch
	state    state
	kernel   string
	engines  []engines.Engine
	versions map[string]string // of engines, by name
	images   [][]engines.Image // by image, its versions
	progress *progress
}

// series is one matrix, or two of different builds that are measured in turns.
type series []*matrix

// Run runs what of a matrix has not been run yet. It must run inside
// site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Minute
	}
	paths := []*string{&o.Out, &o.Cache, &o.Programs.Foil, &o.Programs.Server}
	if o.Against != nil {
		against := *o.Against
		o.Against = &against
		paths = append(paths, &against.Foil, &against.Server)
	}
	for _, path := range paths {
		if *path == "" {
			continue
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	for image := range o.ImageRates {
		if !slices.Contains(o.Images, image) {
			return fmt.Errorf("bench: there is a rate for %s, which is not among the images", image)
		}
	}
	s := seriesOf(o)
	for _, m := range s {
		if err := m.record(ctx); err != nil {
			return err
		}
		if err := m.build(ctx); err != nil {
			return err
		}
	}
	return s.measure(ctx)
}

func seriesOf(o Options) series {
	if o.Against == nil {
		return series{{Options: o, out: results.Dir(o.Out)}}
	}
	before := o
	before.Programs = *o.Against
	return series{
		{Options: before, side: Before, out: results.Dir(filepath.Join(o.Out, Before))},
		{Options: o, side: After, out: results.Dir(filepath.Join(o.Out, After))},
	}
}

// measure is everything that comes after the images.
func (s series) measure(ctx context.Context) (err error) {
	dir, err := site.Scratch(s[0].Cache, "run-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	rounds := s.plan()
	if len(rounds) == 0 {
		s[0].log("all of it has been run already")
		return nil
	}
	var states []state
	var unpushed []engines.Image
	for _, m := range s {
		m.dir = dir
		if m.state, err = stateOf(m.Cache, m.Programs.Serves()); err != nil {
			return err
		}
		states, unpushed = append(states, m.state), append(unpushed, m.unpushed()...)
	}
	s[0].log("%s", s[0].forecast(rounds, unpushed))
	if s[0].Forecast {
		return nil
	}
	unlock, err := open(states...)
	if err != nil {
		return err
	}
	defer unlock()
	for _, m := range s {
		if err := m.prepare(ctx); err != nil {
			return err
		}
	}
	for _, r := range rounds {
		if err := s.round(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func (m *matrix) log(format string, args ...any) {
	if m.Log == nil {
		return
	}
	line := fmt.Sprintf(format, args...)
	if m.side != "" {
		line = m.side + ": " + line
	}
	m.Log(line)
}
