// Package demo is Hydrofoil's demonstration: an unmodified image is pushed to a
// registry in the cloud and run at the edge: by a full pull of its layers, by foil
// run as it comes, and by foil run when the service was traced and the daemon has
// a connection to the server; then the image is updated, all ways again (nobody has traced the
// new version).
//
// Cloud and edge are network namespaces joined by an emulated link (package
// link). All runs inside mount and PID namespaces of its own (see Confine), so
// that nothing is left behind, however it ends.
//
// What is measured:
//
//   - time to ready: from the command until the container answers, as seen from
//     outside (a PING for redis), with the machine's page caches dropped before;
//     all daemons run already;
//   - bytes moved: what has arrived at the edge's device from the cloud, IP
//     headers included, when the container was ready, and when the image was
//     complete and the line silent;
//   - the floor T*: the fastest warm start of the same container, one round
//     trip, and the bytes that it touches before it is ready, compressed, at the
//     link's rate. For the update only bytes of files that are not in the first
//     version count.
//
// What is checked: the container answers, both sides have the digest that was
// built, and foil verify finds every byte right.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Options say what is shown.
type Options struct {
	Foil  string // path of the foil binary
	Cache string // directory on a disk; images are kept there
	// Images are the two versions, or one image that has no second one. Each is
	// NAME:TAG of the declared images, or, with From, a reference of a registry.
	Images []string
	From   bool
	// Probe tells when the container is ready; empty: the declared one.
	Probe   string
	Command []string // replaces the image's command
	RTT     time.Duration
	Rate    int64 // bits a second
	// SkipCheck does not try the link first, which takes some seconds.
	SkipCheck bool
	Out       io.Writer // the table
	Log       func(line string)
}

// demo is one run.
type demo struct {
	options Options
	dir     string // scratch, removed at the end
	link    *link.Link
	site    *site.Site
	ready   site.Readiness
}

// Run is the whole demonstration. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	if o.Foil, err = filepath.Abs(o.Foil); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	if o.Cache, err = filepath.Abs(o.Cache); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	d := &demo{options: o}
	versions, err := d.build(ctx)
	if err != nil {
		return err
	}
	if d.dir, err = site.Scratch(o.Cache, "demo-"); err != nil {
		return err
	}
	defer func() {
		// Mounts below are this namespace's own; what holds one open was stopped.
		err = errors.Join(err, site.RemoveTree(d.dir))
	}()
	// The link ends after the processes that use it.
	d.link, err = link.New(context.WithoutCancel(ctx), link.Options{RTT: o.RTT, Rate: o.Rate})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.link.Close()) }()
	if !o.SkipCheck {
		m, err := d.link.Check(ctx)
		if err != nil {
			return fmt.Errorf("%w (stop what else runs here, and try again)", err)
		}
		d.log("link: %v", m)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Minute, site.ErrTooLong)
	defer cancel()
	return d.compare(ctx, versions)
}

func (d *demo) log(format string, args ...any) {
	if d.options.Log != nil {
		d.options.Log(fmt.Sprintf(format, args...))
	}
}

// version is one version of the image.
type version = engines.Image

// build makes or fetches the images, and finds out how to tell that one is ready.
func (d *demo) build(ctx context.Context) ([]version, error) {
	catalogue, err := images.Declared()
	if err != nil {
		return nil, err
	}
	builder := images.Builder{Cache: filepath.Join(d.options.Cache, "images"), Log: d.options.Log}
	var versions []version
	for i, ref := range d.options.Images {
		var built *images.Built
		if d.options.From {
			built, err = builder.Fetch(ctx, ref)
		} else {
			built, err = builder.Build(ctx, catalogue, ref)
		}
		if err != nil {
			return nil, err
		}
		versions = append(versions, version{
			Name: ref, Ref: fmt.Sprintf("%s/demo:%d", engines.RegistryAddr, i+1), Built: built, Command: d.options.Command,
		})
		if d.options.Probe == "" {
			d.options.Probe = built.Probe
		}
	}
	if d.options.Probe == "" {
		d.options.Probe = "exit"
	}
	redis := strings.Contains(d.options.Images[0], "redis") && d.options.Probe == "tcp:6379"
	d.ready, err = site.ParseReadiness(d.options.Probe, redis)
	for i := range versions {
		versions[i].Ready = d.ready
	}
	return versions, err
}

// result is what one run came to.
type result struct {
	time    time.Duration // to ready
	atReady int64         // bytes moved by then
	moved   int64         // bytes moved in all
	waits   int64         // reads that had to wait before it was ready
	waited  time.Duration // their sum
}

// compare is the demonstration itself, once there are images and a link.
func (d *demo) compare(ctx context.Context, versions []version) (err error) {
	programs := engines.Programs{Foil: d.options.Foil}
	d.site = &site.Site{Dir: d.dir, Link: d.link}
	server, err := engines.Serve(ctx, d.site, d.options.Foil, filepath.Join(d.dir, "serve"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	for _, v := range versions {
		began := time.Now()
		if err := engines.Push(ctx, d.site, v); err != nil {
			return err
		}
		d.log("skopeo pushed %s as it is: %.1f MB in %d layers, %.1f s", v.Ref, mb(v.Built.LayerBytes()), len(v.Built.Manifest.Layers), time.Since(began).Seconds())
	}
	for _, v := range versions {
		if _, err := bare.Prepare(ctx, d.site, programs, v); err != nil {
			return err
		}
	}
	began := time.Now()
	if _, err := traced.Prepare(ctx, d.site, programs, versions[0]); err != nil {
		return err
	}
	d.log("foil trace noted what %s reads until it is ready, %.1f s", versions[0].Ref, time.Since(began).Seconds())
	workers := make([]engines.Worker, len(contestants))
	for i, c := range contestants {
		workers[i] = c.engine.Worker(d.site, programs, filepath.Join(d.dir, c.engine.Name()))
		if err := workers[i].Start(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, workers[i].Stop()) }()
	}

	t := table{rtt: d.options.RTT, rate: d.options.Rate, ready: d.options.Probe}
	var have *engines.Floor
	for i, v := range versions {
		row := comparison{name: "fresh", layers: v.Built.LayerBytes()}
		if i > 0 {
			row.name = "update"
		}
		for i, c := range contestants {
			r, err := d.measure(ctx, workers[i], v)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.name, row.name, err)
			}
			d.log("%s, %s: ready after %.2f s, %.1f MB moved, %.1f MB in all", c.name, row.name, r.time.Seconds(), mb(r.atReady), mb(r.moved))
			row.results = append(row.results, r)
		}
		row.floor, err = engines.MeasureFloor(ctx, d.site, workers[0].(engines.Mounter), v, have, filepath.Join(d.site.Dir, "floor.erofs"))
		if err != nil {
			return err
		}
		have = &row.floor
		t.rows = append(t.rows, row)
	}
	_, err = io.WriteString(d.options.Out, t.String())
	return err
}

// The contestants, in the order in which they run; the first unpacks the tree
// that the floor is measured on.
var contestants = []struct {
	name   string
	engine engines.Engine
}{
	{"containerd, full pull", &engines.Containerd{Snapshotter: "overlayfs"}},
	{"foil run", bare},
	{"foil run, traced", traced},
}

// bare is foil run as it comes: nobody has traced anything.
var bare = &engines.Hydrofoil{Variant: engines.Bare}

// traced has a trace of the first version's service, and a connection that the daemon made before.
var traced = &engines.Hydrofoil{}

// measure is one measured run: until the container is ready, and on until the
// image is complete and the line silent.
func (d *demo) measure(ctx context.Context, w engines.Worker, v version) (r result, err error) {
	if err := site.DropCaches(); err != nil {
		return r, err
	}
	t := engines.Begin(d.site, w.Processes())
	defer t.End()
	container, err := w.Provision(ctx, v, t)
	defer func() { err = errors.Join(err, container.Stop()) }()
	if err != nil {
		return r, err
	}
	if err := v.Ready.Wait(ctx, d.link, container.Process); err != nil {
		return r, err
	}
	ready := t.Now()
	if err := w.Complete(ctx, v, t); err != nil {
		return r, err
	}
	if err := t.Quiet(ctx, 50*time.Millisecond+2*d.options.RTT, engines.Quiet); err != nil {
		return r, err
	}
	if teller, ok := w.(engines.Teller); ok {
		if err := teller.Tell(ctx, t); err != nil {
			return r, err
		}
	}
	last, _ := t.At(engines.Quiet)
	waits, waited := t.Waited()
	r = result{time: ready.Time, atReady: ready.Down, moved: last.Down, waits: waits, waited: waited}
	return r, w.Check(ctx, v, true)
}

func mb(n int64) float64 { return float64(n) / 1e6 }
