// Package startup measures startup sets: how large they are, what the second and
// third service of an image still move, how fast workers become that learn
// from each other, with no trace taken by hand, and what a start takes of a worker's
// memory. It follows FlacIO (FAST'25, table 3, sections 5.2.6 and 5.2.7) and Starlight (NSDI'22, section 4.4).
package startup

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
)

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Images   []string // NAMEs of the declared ones
	// Service is the image, NAME:TAG, of which the Services are run, each a
	// command that ends.
	Service  string
	Services [][]string
	Workers  int // that learn, one after the other; 0: none
	Updates  bool
	Rounds   int // of updates; 0: one
	Memory   bool
	RTT      time.Duration
	Rate     int64  // bits a second
	Cache    string // directory on a disk
	Out      io.Writer
	JSON     string // file for the result; "" for none
	Log      func(line string)
}

// Result is what was measured.
type Result struct {
	RTT      time.Duration `json:"rtt_ns"`
	Rate     int64         `json:"rate"`
	Sizes    []Size        `json:"sizes"`
	Services []Start       `json:"services"`
	Learning []Start       `json:"learning"`
	Updates  []Start       `json:"updates"`
	Memory   []Memory      `json:"memory"`
}

// Size is the startup set of one service.
type Size struct {
	Image  string `json:"image"`
	Pages  int64  `json:"pages"`
	Bytes  int64  `json:"bytes"`
	Stored int64  `json:"stored"` // compressed
	Of     int64  `json:"image_bytes"`
	Layers int64  `json:"layer_bytes"` // compressed, as they were pushed
}

// Start is one provisioning.
type Start struct {
	What   string        `json:"what"`
	Ready  time.Duration `json:"ready_ns"`
	Moved  int64         `json:"moved"`   // bytes that had come when it was ready
	Pages  int64         `json:"startup"` // bytes of these that were startup sets
	Origin string        `json:"origin"`
	Waits  int64         `json:"waits"`
	Waited time.Duration `json:"waited_ns"`
	// Mounted and Started are when a container could be started, and when its process was.
	Mounted time.Duration `json:"mounted_ns"`
	Started time.Duration `json:"started_ns"`
	// Of several, this is the one with the median of the times until ready; these are the
	// number, and the least and the most.
	Runs  int           `json:"runs,omitempty"`
	Least time.Duration `json:"least_ns,omitempty"`
	Most  time.Duration `json:"most_ns,omitempty"`
}

type bench struct {
	Options
	catalogue images.Catalogue
	builder   images.Builder
	dir       string
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
	b := &bench{Options: o, builder: images.Builder{Cache: filepath.Join(o.Cache, "images"), Log: o.Log}}
	if b.catalogue, err = images.Declared(); err != nil {
		return err
	}
	if b.dir, err = site.Scratch(o.Cache, "startup-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(b.dir)) }()
	result := Result{RTT: o.RTT, Rate: o.Rate}
	for _, name := range o.Images {
		if o.Workers == 0 {
			break
		}
		starts, err := b.learning(ctx, name)
		result.Learning = append(result.Learning, starts...)
		if err != nil {
			return fmt.Errorf("learning, %s: %w", name, err)
		}
	}
	for _, name := range o.Images {
		if !o.Updates {
			break
		}
		starts, err := b.updates(ctx, name)
		result.Updates = append(result.Updates, starts...)
		if err != nil {
			return fmt.Errorf("updates, %s: %w", name, err)
		}
	}
	if len(o.Services) > 0 {
		if result.Services, err = b.services(ctx); err != nil {
			return fmt.Errorf("services of %s: %w", o.Service, err)
		}
	}
	for _, name := range o.Images {
		if !o.Memory {
			break
		}
		list, err := b.memory(ctx, name)
		if err != nil {
			return fmt.Errorf("memory, %s: %w", name, err)
		}
		result.Memory = append(result.Memory, list...)
	}
	for _, name := range o.Images {
		size, err := b.size(ctx, name+":1")
		if err != nil {
			return fmt.Errorf("size of %s: %w", name, err)
		}
		result.Sizes = append(result.Sizes, size)
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
	return result.print(o.Out)
}

// image builds an image, if need be.
func (b *bench) image(ctx context.Context, name string) (engines.Image, error) {
	built, err := b.builder.Build(ctx, b.catalogue, name)
	if err != nil {
		return engines.Image{}, err
	}
	ready, err := site.ParseReadiness(built.Probe, strings.HasPrefix(name, "redis:"))
	return engines.Image{Name: name, Ref: engines.RegistryAddr + "/" + name, Built: built, Ready: ready, Command: built.Args}, err
}

// at calls fn at a site with a link and a registry of its own, empty but for images.
func (b *bench) at(ctx context.Context, o link.Options, images []engines.Image, fn func(*site.Site) error) (err error) {
	dir, err := os.MkdirTemp(b.dir, "site-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	l, err := link.New(context.WithoutCancel(ctx), o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	s := &site.Site{Dir: dir, Link: l}
	server, err := engines.Serve(ctx, s, b.Programs.Foil, filepath.Join(dir, "serve"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	for _, im := range images {
		if err := b.push(ctx, s, im); err != nil {
			return err
		}
	}
	return fn(s)
}

// push pushes an image and waits until the server has ingested it.
func (b *bench) push(ctx context.Context, s *site.Site, im engines.Image) error {
	if err := engines.Push(ctx, s, im); err != nil {
		return err
	}
	_, err := engines.Settle(ctx, filepath.Join(s.Dir, "serve"))
	return err
}

// start provisions an image with a worker whose daemon runs.
func (b *bench) start(ctx context.Context, s *site.Site, w engines.Worker, im engines.Image, what string) (r Start, err error) {
	if err := site.DropCaches(); err != nil {
		return r, err
	}
	t := engines.Begin(s, w.Processes())
	defer t.End()
	c, err := w.Provision(ctx, im, t)
	defer func() { err = errors.Join(err, c.Stop()) }()
	if err != nil {
		return r, err
	}
	if err := im.Ready.Wait(ctx, s.Link, c.Process); err != nil {
		return r, err
	}
	now := t.Now()
	set, err := w.(engines.Startups).Startup(ctx)
	r = Start{What: what, Ready: now.Time, Moved: now.Down, Pages: set.Bytes, Origin: set.Origin, Waits: set.Waits, Waited: set.Waited}
	if p, ok := t.At(engines.Pulled); ok {
		r.Mounted = p.Time
	}
	if p, ok := t.At(engines.Started); ok {
		r.Started = p.Time
	}
	b.log("%s: mounted after %.2f s, started %.2f s, ready %.2f s, %.1f MB moved, %.1f MB of startup set (%s), %d reads waited %.2f s",
		what, r.Mounted.Seconds(), r.Started.Seconds(), r.Ready.Seconds(), mb(r.Moved), mb(r.Pages), r.Origin, r.Waits, r.Waited.Seconds())
	return r, err
}

// fresh calls fn with a worker that has nothing.
func (b *bench) fresh(ctx context.Context, s *site.Site, e *engines.Hydrofoil, fn func(engines.Worker) error) (err error) {
	dir, err := os.MkdirTemp(s.Dir, "worker-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	w := e.Worker(s, b.Programs, dir)
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	return fn(w)
}

// versions returns both versions of a declared image.
func (b *bench) versions(ctx context.Context, name string) (first, second engines.Image, err error) {
	if first, err = b.image(ctx, name+":1"); err != nil {
		return first, second, err
	}
	second, err = b.image(ctx, name+":2")
	return first, second, err
}

// learning has workers start an image one after the other, each with nothing
// but what the server has learned from those before it; then the next version of
// the image.
func (b *bench) learning(ctx context.Context, name string) (starts []Start, err error) {
	first, second, err := b.versions(ctx, name)
	if err != nil {
		return nil, err
	}
	err = b.at(ctx, link.Options{RTT: b.RTT, Rate: b.Rate}, []engines.Image{first}, func(s *site.Site) error {
		for i := range b.Workers {
			err := b.fresh(ctx, s, &engines.Hydrofoil{Variant: engines.Learning}, func(w engines.Worker) error {
				r, err := b.start(ctx, s, w, first, fmt.Sprintf("%s, worker %d", first.Name, i+1))
				if err != nil {
					return err
				}
				starts = append(starts, r)
				// The report comes some seconds after ready; the set is made then.
				return w.(engines.Startups).Reported(ctx, first)
			})
			if err != nil {
				return err
			}
		}
		if err := b.push(ctx, s, second); err != nil {
			return err
		}
		return b.fresh(ctx, s, &engines.Hydrofoil{Variant: engines.Learning}, func(w engines.Worker) error {
			r, err := b.start(ctx, s, w, second, fmt.Sprintf("%s, a worker with nothing", second.Name))
			starts = append(starts, r)
			return err
		})
	})
	return starts, err
}

// services starts some services of one image on one worker, one right after the other, each
// traced before.
func (b *bench) services(ctx context.Context) (starts []Start, err error) {
	im, err := b.image(ctx, b.Service)
	if err != nil {
		return nil, err
	}
	if im.Ready, err = site.ParseReadiness("exit", false); err != nil {
		return nil, err
	}
	err = b.at(ctx, link.Options{RTT: b.RTT, Rate: b.Rate}, []engines.Image{im}, func(s *site.Site) error {
		e := &engines.Hydrofoil{}
		for _, command := range b.Services {
			im.Command = command
			if _, err := e.Prepare(ctx, s, b.Programs, im); err != nil {
				return err
			}
		}
		return b.fresh(ctx, s, e, func(w engines.Worker) error {
			before := int64(0)
			for _, command := range b.Services {
				im.Command = command
				r, err := b.start(ctx, s, w, im, im.Name+" "+strings.Join(command, " "))
				if err != nil {
					return err
				}
				// A pull counts what it brings for all services that join it.
				if r.Pages >= before {
					r.Pages, before = r.Pages-before, r.Pages
				}
				starts = append(starts, r)
			}
			return nil
		})
	})
	return starts, err
}

// size traces a service and asks for its set.
func (b *bench) size(ctx context.Context, name string) (r Size, err error) {
	im, err := b.image(ctx, name)
	if err != nil {
		return r, err
	}
	err = b.at(ctx, link.Options{}, []engines.Image{im}, func(s *site.Site) error {
		e := &engines.Hydrofoil{}
		if _, err := e.Prepare(ctx, s, b.Programs, im); err != nil {
			return err
		}
		return b.fresh(ctx, s, e, func(w engines.Worker) error {
			set, of, err := w.(engines.Startups).Set(ctx, im)
			r = Size{im.Name, set.Pages, set.Bytes, set.Stored, of, im.Built.LayerBytes()}
			return err
		})
	})
	return r, err
}

func (b *bench) log(format string, args ...any) {
	if b.Log != nil {
		b.Log(fmt.Sprintf(format, args...))
	}
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// print writes tables for people.
func (r Result) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	rate := "no limit"
	if r.Rate > 0 {
		rate = fmt.Sprintf("%g Mbit/s", float64(r.Rate)/1e6)
	}
	starts := func(title string, list []Start) {
		if len(list) == 0 {
			return
		}
		fmt.Fprintf(w, "%s (round trip %v, %s)\tready\tmoved\tstartup set\tfrom\treads that waited\n", title, r.RTT, rate)
		for _, s := range list {
			ready := fmt.Sprintf("%.2f s", s.Ready.Seconds())
			if s.Runs > 1 {
				ready = fmt.Sprintf("%.2f s (%.2f to %.2f)", s.Ready.Seconds(), s.Least.Seconds(), s.Most.Seconds())
			}
			fmt.Fprintf(w, "  %s\t%s\t%.1f MB\t%.1f MB\t%s\t%d, %.2f s\n", s.What, ready, mb(s.Moved), mb(s.Pages), s.Origin, s.Waits, s.Waited.Seconds())
		}
		fmt.Fprintln(w)
	}
	starts("learning", r.Learning)
	starts("updates", r.Updates)
	starts("services", r.Services)
	if len(r.Memory) > 0 {
		fmt.Fprint(w, "memory of a start\tpage cache when ready\twhen complete\tdaemons\n")
		for _, m := range r.Memory {
			fmt.Fprintf(w, "  %s, %s\t%.1f MB\t%.1f MB\t%.1f MB\n", m.Image, m.Engine, mb(m.Ready), mb(m.Complete), mb(m.Daemons))
		}
		fmt.Fprintln(w)
	}
	if len(r.Sizes) > 0 {
		fmt.Fprint(w, "startup sets\tpages\tbytes\tof the image\tcompressed\tof the layers\n")
		for _, s := range r.Sizes {
			fmt.Fprintf(w, "  %s\t%d\t%.1f MB\t%.1f%%\t%.1f MB\t%.1f%%\n", s.Image, s.Pages, mb(s.Bytes), 100*float64(s.Bytes)/float64(s.Of),
				mb(s.Stored), 100*float64(s.Stored)/float64(s.Layers))
		}
	}
	return w.Flush()
}
