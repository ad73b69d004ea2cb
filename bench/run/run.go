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
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/workloads"
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

// build makes the images that are not there yet, and looks at their probes.
func (m *matrix) build(ctx context.Context) error {
	catalogue, err := images.Declared()
	if err != nil {
		return err
	}
	builder := images.Builder{Cache: filepath.Join(m.Cache, "images"), Log: m.Log}
	for _, name := range m.Images {
		var versions []engines.Image
		for _, image := range catalogue.Images {
			if image.Name != name || m.SkipUpdates && len(versions) > 0 {
				continue
			}
			ref := image.Name + ":" + image.Tag
			ready, err := site.ParseReadiness(image.Probe, name == "redis")
			if err != nil {
				return fmt.Errorf("%s: %w", ref, err)
			}
			built, err := builder.Build(ctx, catalogue, ref)
			if err != nil {
				return err
			}
			versions = append(versions, engines.Image{
				Name: ref, Ref: engines.RegistryAddr + "/" + ref, Built: built, Ready: ready, Command: image.Args,
			})
		}
		if len(versions) == 0 {
			return fmt.Errorf("bench: no image is called %q; `bench images` lists those that are declared", name)
		}
		m.images = append(m.images, versions)
	}
	return nil
}

// prepare pushes images, measures floors, and has every engine prepare them, as
// far as that has not been done.
func (m *matrix) prepare(ctx context.Context) (err error) {
	var todo [][]engines.Image
	for _, versions := range m.images {
		ready, err := m.recall(versions)
		if err != nil {
			return err
		}
		if !ready {
			todo = append(todo, versions)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	return m.at(ctx, link.Options{}, func(s *site.Site) error {
		full := (&engines.Containerd{Snapshotter: "overlayfs"}).Worker(s, m.Programs, filepath.Join(s.Dir, "full"))
		if err := full.Start(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, full.Stop()) }()
		for _, versions := range todo {
			// The floor of an update needs the contents of the version before,
			// which are not kept: all floors of an image are measured, or none.
			floors := slices.ContainsFunc(versions, m.lacksFloor)
			var earlier *engines.Floor
			for _, im := range versions {
				done, err := m.prepareImage(ctx, s, full, im, floors, earlier)
				if err != nil {
					return fmt.Errorf("prepare %s: %w", im.Name, err)
				}
				earlier = &done.Floor
			}
		}
		// What was pushed last is still being ingested, which is no part of a run.
		_, err = engines.Settle(ctx, m.state.registry())
		return err
	})
}

// recall writes down what earlier matrices have prepared, and reports whether that
// is everything: all versions of an image are in the registry, have floors, and
// all engines have prepared them, or have failed in this matrix.
func (m *matrix) recall(versions []engines.Image) (all bool, err error) {
	all = true
	for _, im := range versions {
		if m.lacks(im) {
			return false, nil
		}
		p := m.known(im)
		all = all && len(m.unprepared(p)) == 0
		if err := m.out.PutImage(p); err != nil {
			return false, err
		}
	}
	return all, nil
}

// known is what was pushed and prepared of an image, and who failed to prepare it
// in this matrix.
func (m *matrix) known(im engines.Image) results.Image {
	p, _ := m.state.image(im.Name, im.Built.Digest.String())
	if before, err := m.out.Image(im.Name); err == nil && !m.RetryFailed {
		p.PrepareErr = before.PrepareErr
	}
	return p
}

// lacks reports whether an image has not been pushed, or has no floor.
func (m *matrix) lacks(im engines.Image) bool {
	_, pushed := m.state.image(im.Name, im.Built.Digest.String())
	return !pushed || m.lacksFloor(im)
}

// lacksFloor reports whether the floor of an image has not been measured.
func (m *matrix) lacksFloor(im engines.Image) bool {
	f, ok := m.state.floor(im.Name, im.Built.Digest.String())
	if !ok || f.Kernel != m.kernel || f.Way != floorWay || f.Floor.Warm == 0 && (f.Err == "" || m.RetryFailed) {
		return true
	}
	_, err := os.Stat(m.state.tree(im.Name))
	return err != nil && f.Err == ""
}

// unpushed are the versions of images that lack a floor or are not on the server.
func (m *matrix) unpushed() (all []engines.Image) {
	for _, versions := range m.images {
		if slices.ContainsFunc(versions, m.lacks) {
			all = append(all, versions...)
		}
	}
	return all
}

// unprepared are the engines that have not prepared an image, in this version.
func (m *matrix) unprepared(p results.Image) (left []engines.Engine) {
	for _, e := range m.engines {
		if done, ok := p.Prepared[e.Name()]; (!ok || done.Version != m.versions[e.Name()]) && p.PrepareErr[e.Name()] == "" {
			left = append(left, e)
		}
	}
	return left
}

func (m *matrix) prepareImage(ctx context.Context, s *site.Site, full engines.Worker, im engines.Image, floors bool, earlier *engines.Floor) (results.Image, error) {
	p, pushed := m.state.image(im.Name, im.Built.Digest.String())
	if !pushed {
		p = results.Image{Name: im.Name, Digest: im.Built.Digest.String(), Probe: im.Ready.Probe}
		for _, layer := range im.Built.Manifest.Layers {
			p.Layers = append(p.Layers, layer.Size)
		}
		if err := m.push(ctx, s, im, &p); err != nil {
			return p, err
		}
	}
	p.PrepareErr = map[string]string{}
	if err := m.state.put(p); err != nil {
		return p, err
	}
	var measured engines.Floor
	if floors {
		var err error
		if measured, err = m.measureFloor(ctx, s, full, im, earlier); err != nil {
			return p, err
		}
	}
	f, _ := m.state.floor(im.Name, im.Built.Digest.String())
	p.Floor, p.FloorErr, im.Touched = f.Floor, f.Err, f.Touched
	if floors { // with the contents, which are not kept
		p.Floor = measured
	}
	for _, e := range m.unprepared(p) {
		done, err := m.prepareBy(ctx, s, e, im)
		if ctx.Err() != nil {
			return p, context.Cause(ctx)
		}
		if err != nil {
			p.PrepareErr[e.Name()] = err.Error()
			m.log("%s cannot prepare %s: %v", e.Name(), im.Name, err)
			continue
		}
		if _, ok := e.(*engines.Hydrofoil); ok {
			done.Time += p.Ingested
			done.Storage += p.Storage - im.Built.LayerBytes()
		}
		p.Prepared[e.Name()] = done
		if err := m.state.put(p); err != nil {
			return p, err
		}
	}
	return p, m.out.PutImage(p)
}

// prepareBy has an engine prepare an image, unless it has done so before.
func (m *matrix) prepareBy(ctx context.Context, s *site.Site, e engines.Engine, im engines.Image) (done engines.Preparation, err error) {
	converter, converts := e.(engines.Converter)
	if converts {
		before, ok, err := m.state.restore(ctx, s, converter, im, m.versions[e.Name()])
		if ok || ctx.Err() != nil {
			return before, err
		}
		if err != nil {
			m.log("what %s has made of %s before is made anew: %v", e.Name(), im.Name, err)
		}
	}
	if done, err = e.Prepare(ctx, s, m.Programs, im); err != nil {
		return done, err
	}
	done.Version = m.versions[e.Name()]
	if done.Time > 0 {
		m.log("%s prepared %s: %.1f s, %.1f MB", e.Name(), im.Name, done.Time.Seconds(), float64(done.Storage)/1e6)
	}
	if converts {
		if err := m.state.keep(ctx, s, converter, im, done); err != nil {
			m.log("what %s has made of %s is not kept for another foil: %v", e.Name(), im.Name, err)
		}
	}
	return done, nil
}

// push pushes an image, and waits until it is ingested.
func (m *matrix) push(ctx context.Context, s *site.Site, im engines.Image, p *results.Image) error {
	before, err := engines.Settle(ctx, m.state.registry())
	if err != nil {
		return err
	}
	began := time.Now()
	if err := engines.Push(ctx, s, im); err != nil {
		return err
	}
	p.Push = time.Since(began)
	after, err := engines.Settle(ctx, m.state.registry())
	if err != nil {
		return err
	}
	p.Storage, p.Ingested = after-before, time.Since(began)-p.Push
	p.Prepared = map[string]engines.Preparation{}
	m.log("pushed %s: %.1f MB, %.1f s", im.Name, float64(im.Built.LayerBytes())/1e6, p.Push.Seconds())
	return nil
}

// measureFloor notes T* of an image, or why there is none, and gives it.
func (m *matrix) measureFloor(ctx context.Context, s *site.Site, full engines.Worker, im engines.Image, earlier *engines.Floor) (engines.Floor, error) {
	f := floor{Digest: im.Built.Digest.String(), Kernel: m.kernel, Way: floorWay}
	limited, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
	defer cancel()
	if err := os.MkdirAll(m.state.of(im.Name), 0o711); err != nil {
		return f.Floor, fmt.Errorf("bench: %w", err)
	}
	err := pullForFloor(limited, full, im)
	if err == nil {
		f.Floor, err = engines.MeasureFloor(limited, s, full.(engines.Mounter), im, earlier, m.state.tree(im.Name))
	}
	if ctx.Err() != nil {
		return f.Floor, context.Cause(ctx)
	}
	if err != nil {
		f.Err = err.Error()
		m.log("no floor of %s: %v", im.Name, err)
	} else {
		f.Touched = f.Floor.Files
		m.log("floor of %s: warm start %.2f s, %.2f MB touched", im.Name, f.Floor.Warm.Seconds(), float64(f.Floor.Touched)/1e6)
	}
	return f.Floor, m.state.putFloor(im.Name, f)
}

func pullForFloor(ctx context.Context, full engines.Worker, im engines.Image) error {
	return full.(interface {
		Pull(ctx context.Context, ref string) error
	}).Pull(ctx, im.Ref)
}

// at calls fn at a site with a new link, at which the registry serves.
func (m *matrix) at(ctx context.Context, o link.Options, fn func(s *site.Site) error) (err error) {
	dir, err := os.MkdirTemp(m.dir, "site-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	// The link ends after the processes that use it.
	l, err := link.New(context.WithoutCancel(ctx), o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	s := &site.Site{Dir: dir, Link: l}
	server, err := engines.Serve(ctx, s, m.Programs.Serves(), m.state.registry())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	for _, e := range m.engines {
		if cloud, ok := e.(engines.Cloud); ok {
			stop, err := cloud.Serve(ctx, s, m.Programs, m.state.peer(e.Name()))
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, stop()) }()
		}
	}
	return fn(s)
}

// session is one engine's turn with one image, in one build.
type session struct {
	of       *matrix
	engine   engines.Engine
	versions []engines.Image
	keys     []results.Key // of the versions
}

// round is one repetition over one link.
type round struct {
	rtt      time.Duration
	rate     int64
	rep      int
	sessions []session
}

// plan is what is left to do, in order. Of two builds both are measured again if one has
// not been: they are compared pair by pair.
func (s series) plan() (rounds []round) {
	m, left := s[0], &progress{}
	for _, m := range s {
		m.progress = left
	}
	for rep := 1; rep <= m.Runs; rep++ {
		for _, rate := range m.rates() {
			for _, rtt := range m.RTTs {
				r := round{rtt: rtt, rate: rate, rep: rep}
				dice := rand.New(rand.NewPCG(m.Seed, uint64(rep)<<32|uint64(rtt.Milliseconds())))
				for _, i := range dice.Perm(len(m.images)) {
					for _, j := range dice.Perm(len(m.engines)) {
						var turns []session
						for _, m := range s {
							turns = append(turns, m.session(m.engines[j], m.images[i], r))
						}
						if !slices.Contains(m.ratesOf(turns[0].keys[0].Image), rate) || !slices.ContainsFunc(turns, session.open) {
							continue
						}
						if (rep+i+j)%2 == 1 {
							slices.Reverse(turns)
						}
						for _, turn := range turns {
							r.sessions = append(r.sessions, turn)
							left.left++
							left.rest += turn.of.foresee(turn)
						}
					}
				}
				if len(r.sessions) > 0 {
					rounds = append(rounds, r)
				}
			}
		}
	}
	return rounds
}

// ratesOf are the rates at which an image is measured.
func (m *matrix) ratesOf(image string) []int64 {
	if own, ok := m.ImageRates[image]; ok {
		return own
	}
	return m.Rates
}

// rates are those of any image.
func (m *matrix) rates() (all []int64) {
	for _, versions := range m.images {
		name, _, _ := strings.Cut(versions[0].Name, ":")
		all = union(all, m.ratesOf(name))
	}
	slices.Sort(all)
	return all
}

func (m *matrix) session(e engines.Engine, versions []engines.Image, r round) session {
	s := session{of: m, engine: e, versions: versions}
	for i := range versions {
		kind := results.Fresh
		if i > 0 {
			kind = results.Update
		}
		name, _, _ := strings.Cut(versions[i].Name, ":")
		s.keys = append(s.keys, results.Key{Engine: e.Name(), Image: name, Kind: kind, RTT: r.rtt, Rate: r.rate, Rep: r.rep})
	}
	// Versions beyond the second are not measured.
	n := min(len(s.keys), 2)
	if m.Cut > 0 {
		n, s.keys[0].Kind = 1, results.Resumed
	}
	s.keys, s.versions = s.keys[:n], s.versions[:n]
	return s
}

// stops reports whether a run of a session ends at ready: completion is not asked
// for there, it takes time, and neither an update nor a cut needs the whole image.
func (m *matrix) stops(s session, i int) bool {
	return i == len(s.keys)-1 && !m.completes(s, i)
}

// hurries reports whether what comes after ready in a run of a session comes at the
// machine's rate instead of the link's: the update needs the first version whole, and
// nobody asked how long that takes.
func (m *matrix) hurries(s session, i int) bool {
	return i < len(s.keys)-1 && !m.completes(s, i)
}

// completes reports whether the time until a run is complete is a figure of it.
func (m *matrix) completes(s session, i int) bool {
	_, whole := s.engine.(engines.Whole)
	return whole || s.keys[i].Kind == results.Resumed || m.CompleteAt == nil || slices.Contains(m.CompleteAt, s.keys[i].RTT)
}

// open reports whether a run of a session is not there.
func (s session) open() bool {
	return slices.ContainsFunc(s.keys, func(k results.Key) bool {
		r, err := s.of.out.Run(k)
		return err != nil || r.Err != "" && s.of.RetryFailed || r.Stolen > results.MuchStolen && s.of.RetryStolen
	})
}

func (s series) round(ctx context.Context, r round) error {
	return s.at(ctx, link.Options{RTT: r.rtt, Rate: r.rate}, func(sites map[*matrix]*site.Site) error {
		for _, m := range s {
			if m.SkipCheck {
				continue
			}
			if err := m.check(ctx, sites[m], r); err != nil {
				return err
			}
		}
		for i, session := range r.sessions {
			began, m := time.Now(), session.of
			if i == 0 || session.keys[0].Image != r.sessions[i-1].keys[0].Image {
				if err := s.warm(ctx, sites[m], session); err != nil {
					return err
				}
			}
			if err := m.run(ctx, sites[m].Link, session); err != nil {
				return err
			}
			m.progress.ended(m.foresee(session), time.Since(began))
		}
		return nil
	})
}

// at calls fn at the sites of all builds; those that one server serves share one.
func (s series) at(ctx context.Context, o link.Options, fn func(map[*matrix]*site.Site) error) error {
	sites := map[*matrix]*site.Site{}
	var from func(i int) error
	from = func(i int) error {
		if i == len(s) {
			return fn(sites)
		}
		for _, m := range s[:i] {
			if m.state.dir == s[i].state.dir {
				sites[s[i]] = sites[m]
				return from(i + 1)
			}
		}
		return s[i].at(ctx, o, func(at *site.Site) error {
			sites[s[i]] = at
			return from(i + 1)
		})
	}
	return from(0)
}

// warm measures the warm starts of a session's images for its round, for all builds, as
// far as that has not been done. One that fails is told, and no error: the image's first
// floor stands in for it.
func (s series) warm(ctx context.Context, at *site.Site, se session) error {
	m := se.of
	for i, im := range se.versions {
		k := se.keys[i]
		lacks := slices.DeleteFunc(slices.Clone(s), func(m *matrix) bool {
			_, err := m.out.Warm(k)
			return err == nil
		})
		if len(lacks) == 0 {
			continue
		}
		if f, ok := m.state.floor(im.Name, im.Built.Digest.String()); !ok || f.Floor.Warm == 0 {
			continue
		}
		w := results.Warm{Image: k.Image, Kind: k.Kind, RTT: k.RTT, Rate: k.Rate, Rep: k.Rep, Began: time.Now().UTC()}
		limited, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
		var err error
		w.All, err = engines.WarmStarts(limited, at, im, m.state.tree(im.Name))
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			m.log("no warm start of %s: %v", im.Name, err)
			continue
		}
		w.Time = slices.Min(w.All)
		for _, m := range lacks {
			if err := m.out.PutWarm(w); err != nil {
				return err
			}
		}
		m.log("%s, %s: warm start %.3f s", k.Image, k.Kind, w.Time.Seconds())
	}
	return nil
}

// check tries the link, twice if need be. A machine that does not hold it is
// recorded, and the runs are made all the same: the report says so.
func (m *matrix) check(ctx context.Context, s *site.Site, r round) error {
	c := results.Check{RTT: r.rtt, Rate: r.rate, Rep: r.rep, Load1: loadAverage()}
	measured, err := s.Link.Check(ctx)
	if err != nil && ctx.Err() == nil {
		measured, err = s.Link.Check(ctx)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c.Measured = measured.String()
	if err != nil {
		c.Err = err.Error()
	}
	m.log("link %v, %s, round %d: %s%s", r.rtt, rateText(r.rate), r.rep, c.Measured, strings.TrimPrefix("; "+c.Err, "; "))
	return m.out.PutCheck(c)
}

// run is one session: what of it fails is recorded, and is no error.
func (m *matrix) run(ctx context.Context, l *link.Link, se session) error {
	dir, err := os.MkdirTemp(m.dir, "session-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	// What a daemon of a peer leaves behind does not end a matrix of hours: its
	// processes end with the namespaces, and its files go when the next begins.
	after := func(what string, err error) {
		if err != nil {
			m.log("after %s: %s: %v", se.keys[0], what, err)
		}
	}
	defer func() { after("remove the worker", site.RemoveTree(dir)) }()
	s := &site.Site{Dir: dir, Link: l}
	home := filepath.Join(dir, "w") // short: sockets below it have paths of at most 100 bytes
	if err := os.Mkdir(home, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	w := &turn{Worker: se.engine.Worker(s, m.Programs, home)}
	defer func() { after("stop its daemons", w.end()) }()
	var failed error
	for i, im := range se.versions {
		r := results.Run{Key: se.keys[i], Began: time.Now().UTC(), Stopped: m.stops(se, i)}
		if p, ok := m.state.image(im.Name, im.Built.Digest.String()); ok {
			r.Touched = p.Floor.Touched
		}
		if failed == nil {
			failed = m.provision(ctx, s, w, im, home, m.hurries(se, i), &r)
		} else {
			failed = fmt.Errorf("not run, since the run before it failed: %w", failed)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failed != nil {
			r.Err = failed.Error()
			if err := keepLogs(dir, m.out.Logs(r.Key)); err != nil {
				return err
			}
		}
		if err := m.out.PutRun(r); err != nil {
			return err
		}
		m.log("%s%s", m.progress.String(), tell(r))
	}
	return nil
}

// turn is a worker whose daemons are stopped and started between two runs, unless
// that would make it fetch again what it has.
type turn struct {
	engines.Worker
	runs bool
}

func (t *turn) Start(ctx context.Context) error {
	if t.runs {
		return nil
	}
	err := t.Worker.Start(ctx)
	t.runs = err == nil
	return err
}

func (t *turn) Stop() error {
	if _, forgets := t.Worker.(engines.Forgetful); forgets {
		return nil
	}
	return t.end()
}

// end stops the daemons if they run.
func (t *turn) end() error {
	if !t.runs {
		return nil
	}
	t.runs = false
	return t.Worker.Stop()
}

// provision is one run. With hurry the link's rate is lifted after ready, until the image
// is complete, and the run has no figures of that.
func (m *matrix) provision(ctx context.Context, s *site.Site, w *turn, im engines.Image, home string, hurry bool, r *results.Run) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, m.Timeout, site.ErrTooLong)
	defer cancel()
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	if u, ok := w.Worker.(engines.Unlearner); ok {
		if err := u.Unlearn(ctx, im); err != nil {
			return err
		}
	}
	// What a worker does on its own when it is started is no part of the run.
	if err := site.DropCaches(); err != nil {
		return err
	}
	var container *engines.Container
	defer quiet()()
	before, own := processorTime(), ownTime()
	defer func() {
		if r.Own == 0 { // it was not ready
			r.Stolen, r.Own = before.stolenSince(), ownTime()-own
		}
	}()
	t := engines.Begin(s, w.Processes())
	whole := !r.Stopped
	defer func() {
		var clients []int
		if container != nil {
			clients = append(clients, container.PID())
		}
		r.Outcome = t.End(clients...)
		if r.Stopped {
			delete(r.Marks, engines.Complete)
			delete(r.Marks, engines.Quiet)
		}
		err = errors.Join(err, container.Stop())
	}()
	if r.Kind == results.Resumed {
		end := t.CutAfter(ctx, int64(m.Cut*float64(im.Built.LayerBytes())))
		defer func() { err = errors.Join(err, end()) }()
	}
	if container, err = w.Provision(ctx, im, t); err != nil {
		return err
	}
	if container != nil {
		if err := im.Ready.Wait(ctx, s.Link, container.Process); err != nil {
			return err
		}
		t.Mark(engines.Ready)
		r.Stolen, r.Own = before.stolenSince(), ownTime()-own
		if load := workloads.For(r.Image, im.Ready.Probe); load != nil && m.Load > 0 && !im.Ready.Ends() {
			r.Load = load(ctx, s.Link, m.Load)
		}
	}
	if whole {
		if hurry {
			r.Stopped = true
			s.Link.Free(true)
			defer s.Link.Free(false)
		}
		if err := w.Complete(ctx, im, t); err != nil {
			return err
		}
		if err := t.Quiet(ctx, 50*time.Millisecond+2*r.RTT, engines.Quiet); err != nil {
			return err
		}
	}
	if teller, ok := w.Worker.(engines.Teller); ok {
		if err := teller.Tell(ctx, t); err != nil {
			return err
		}
	}
	r.Late = max(s.Link.Stats(link.Cloud).Late, s.Link.Stats(link.Edge).Late)
	if err := w.Check(ctx, im, whole); err != nil || r.Stopped {
		return err
	}
	r.Disk, err = site.DiskBytes(home)
	return err
}

// keepLogs copies what the processes of a failed session have said.
func keepLogs(from, to string) error {
	logs, err := filepath.Glob(filepath.Join(from, "*.log"))
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(log)), text, 0o644)
		}
		if err != nil {
			return fmt.Errorf("bench: keep a log: %w", err)
		}
	}
	return nil
}
