// Package proofs measures what it costs to prove images against the diff IDs of their layers, and what that
// does to others' starts.
//
// For each image a worker that has nothing pulls it whole, and then proves it at once, without the rests that a proof in the
// background has: seconds, processor time of the daemons, and bytes over the link, both ways, of the pull and
// of the proof. The proof has begun a moment before it is asked for, when the pull ended; what it did by then counts.
//
// With Beside an image is started, until its service is ready, on a worker that has another image, whole: once while that one
// is being proven in the background, at any moment of its first second, and once when it is. The two are a pair; which comes
// first alternates. Both come after the pause that a daemon makes before a proof: a connection that has just been used is quicker
// than one that was idle.
package proofs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/internal/worker/api"
)

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Images   []string // NAME:TAG of the declared ones
	// Beside is an image that is started, Rounds times, while While is being proven and while it is not; "" for none.
	Beside, While string
	Rounds        int
	Link          link.Options
	Cache         string // directory on a disk
	Out           io.Writer
	JSON          string // file for the result; "" for none
	Log           func(line string)
}

// Result is what was measured.
type Result struct {
	RTT    time.Duration `json:"rtt_ns"`
	Rate   int64         `json:"rate"`
	Proofs []Proof       `json:"proofs"`
	Beside *Beside       `json:"beside,omitempty"`
}

// Cost is what a pull or a proof took: on the clock, of the processors by the daemons, and bytes over the link.
type Cost struct {
	Time  time.Duration `json:"time_ns"`
	CPU   time.Duration `json:"cpu_ns"`
	Moved int64         `json:"moved"`
}

// Proof is one image.
type Proof struct {
	Image    string `json:"image"`
	Contents int64  `json:"contents"` // bytes of files
	Layers   int64  `json:"layers"`   // bytes, compressed, as they were pushed
	Pull     Cost   `json:"pull"`
	Proof    Cost   `json:"proof"`
}

// Beside are starts of one image, in seconds until ready, beside a running proof of another one and alone. Those of
// one round have one index.
type Beside struct {
	Image  string    `json:"image"`
	While  string    `json:"while"`
	Proven []bool    `json:"proven"` // the proof had ended before the start was ready
	During []float64 `json:"during"`
	Alone  []float64 `json:"alone"`
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
	if b.dir, err = site.Scratch(o.Cache, "proofs-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(b.dir)) }()
	result := Result{RTT: o.Link.RTT, Rate: o.Link.Rate}
	for _, name := range o.Images {
		p, err := b.proof(ctx, name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		result.Proofs = append(result.Proofs, p)
	}
	if o.Beside != "" {
		if result.Beside, err = b.beside(ctx); err != nil {
			return fmt.Errorf("%s beside the proof of %s: %w", o.Beside, o.While, err)
		}
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
	ready, err := site.ParseReadiness(built.Probe, false)
	return engines.Image{Name: name, Ref: engines.RegistryAddr + "/" + name, Built: built, Ready: ready, Command: built.Args}, err
}

// at calls fn at a site with a link and a registry of its own, which has ingested images.
func (b *bench) at(ctx context.Context, list []engines.Image, fn func(*site.Site) error) (err error) {
	dir, err := os.MkdirTemp(b.dir, "site-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	l, err := link.New(context.WithoutCancel(ctx), b.Link)
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
	for _, im := range list {
		if err := engines.Push(ctx, s, im); err != nil {
			return err
		}
	}
	if _, err := engines.Settle(ctx, filepath.Join(dir, "serve")); err != nil {
		return err
	}
	return fn(s)
}

// fresh calls fn with a worker that has nothing, and a client of its daemon.
func (b *bench) fresh(ctx context.Context, s *site.Site, fn func(w engines.Worker, root string, c *api.Client) error) (err error) {
	root, err := os.MkdirTemp(s.Dir, "worker-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(root)) }()
	w := (&engines.Hydrofoil{}).Worker(s, b.Programs, root)
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	c := api.Dial(root)
	defer c.Close()
	return fn(w, root, c)
}

// measure is what fn costs.
func measure(s *site.Site, w engines.Worker, fn func() error) (c Cost, err error) {
	t := engines.Begin(s, w.Processes())
	err = fn()
	p := t.Now()
	return Cost{Time: p.Time, Moved: p.Down + p.Up, CPU: t.End().CPU}, err
}

// pull pulls an image whole.
func (b *bench) pull(ctx context.Context, s *site.Site, root string, im engines.Image) error {
	_, err := s.Run(ctx, link.Edge, b.Programs.Foil, "pull", "--root", root, "--plain-http", "--interval", "1h", im.Ref)
	return err
}

// prove has an image proven now, and waits for it.
func prove(ctx context.Context, c *api.Client, im engines.Image) error {
	for _, err := range c.Prove(ctx, im.Ref) {
		if err != nil {
			return fmt.Errorf("bench: prove %s: %w", im.Ref, err)
		}
	}
	return nil
}

// proving waits until an image is being proven, in the background, which a daemon puts off until its worker is calm; with
// ended until it is proven.
func proving(ctx context.Context, c *api.Client, im engines.Image, ended bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 5*time.Minute, site.ErrTooLong)
	defer cancel()
	for {
		list, err := c.Images(ctx)
		if err != nil {
			return fmt.Errorf("bench: wait for the proof of %s: %w", im.Ref, err)
		}
		for _, image := range list {
			if image.Ref == im.Ref && image.Proof != "served" && (!ended || image.Proof == "proven") {
				return nil
			}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("bench: wait for the proof of %s: %w", im.Ref, context.Cause(ctx))
		}
	}
}

func (b *bench) proof(ctx context.Context, name string) (r Proof, err error) {
	im, err := b.image(ctx, name)
	if err != nil {
		return r, err
	}
	r = Proof{Image: name, Layers: im.Built.LayerBytes()}
	err = b.at(ctx, []engines.Image{im}, func(s *site.Site) error {
		return b.fresh(ctx, s, func(w engines.Worker, root string, c *api.Client) error {
			if err := site.DropCaches(); err != nil {
				return err
			}
			if r.Pull, err = measure(s, w, func() error { return b.pull(ctx, s, root, im) }); err != nil {
				return err
			}
			if r.Proof, err = measure(s, w, func() error { return prove(ctx, c, im) }); err != nil {
				return err
			}
			list, err := c.Images(ctx)
			for _, image := range list {
				r.Contents += image.ContentTotal
			}
			return err
		})
	})
	b.log("%s: pulled in %.2f s, %.1f MB; proven in %.2f s, %.2f s of the processors, %.2f MB", name, r.Pull.Time.Seconds(), mb(r.Pull.Moved),
		r.Proof.Time.Seconds(), r.Proof.CPU.Seconds(), mb(r.Proof.Moved))
	return r, err
}

func (b *bench) beside(ctx context.Context) (*Beside, error) {
	im, err := b.image(ctx, b.Beside)
	if err != nil {
		return nil, err
	}
	other, err := b.image(ctx, b.While)
	if err != nil {
		return nil, err
	}
	r := &Beside{Image: b.Beside, While: b.While}
	err = b.at(ctx, []engines.Image{im, other}, func(s *site.Site) error {
		if _, err := (&engines.Hydrofoil{}).Prepare(ctx, s, b.Programs, im); err != nil {
			return err
		}
		for round := range b.Rounds {
			for i := range 2 {
				during := (round+i)%2 == 0
				ready, proven, err := b.start(ctx, s, im, other, during)
				if err != nil {
					return err
				}
				if during {
					r.During, r.Proven = append(r.During, ready.Seconds()), append(r.Proven, proven)
				} else {
					r.Alone = append(r.Alone, ready.Seconds())
				}
				b.log("round %d: %s ready after %.3f s, beside a proof: %v (which had ended by then: %v)", round+1, b.Beside, ready.Seconds(), during, proven)
			}
		}
		return nil
	})
	return r, err
}

// start starts an image on a worker that has another one, whole: while that is being proven, or when it is. proven says
// whether it was, when the start was ready.
func (b *bench) start(ctx context.Context, s *site.Site, im, other engines.Image, during bool) (ready time.Duration, proven bool, err error) {
	err = b.fresh(ctx, s, func(w engines.Worker, root string, c *api.Client) error {
		if err := b.pull(ctx, s, root, other); err != nil {
			return err
		}
		if err := proving(ctx, c, other, !during); err != nil {
			return err
		}
		// A proof begins with what it needs of the server, the same in each round.
		time.Sleep(rand.N(time.Second))
		t := engines.Begin(s, w.Processes())
		defer t.End()
		container, err := w.Provision(ctx, im, t)
		defer func() { err = errors.Join(err, container.Stop()) }()
		if err != nil {
			return err
		}
		if err := im.Ready.Wait(ctx, s.Link, container.Process); err != nil {
			return err
		}
		ready = t.Now().Time
		list, err := c.Images(ctx)
		for _, image := range list {
			proven = proven || image.Ref == other.Ref && image.Proof == "proven"
		}
		return err
	})
	return ready, proven, err
}

func (b *bench) log(format string, args ...any) {
	if b.Log != nil {
		b.Log(fmt.Sprintf(format, args...))
	}
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// print writes tables for people.
func (r Result) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	rate := "no limit"
	if r.Rate > 0 {
		rate = fmt.Sprintf("%g Mbit/s", float64(r.Rate)/1e6)
	}
	if len(r.Proofs) > 0 {
		fmt.Fprintf(out, "proofs (round trip %v, %s)\n", r.RTT, rate)
		fmt.Fprint(w, "image\tcontents\tlayers\tpull\tprocessors\tmoved\tproof\tprocessors\tmoved\tof the pull\t\n")
		for _, p := range r.Proofs {
			fmt.Fprintf(w, "%s\t%.1f MB\t%.1f MB\t%.2f s\t%.2f s\t%.1f MB\t%.2f s\t%.2f s\t%.2f MB\t%.2f%%\t\n", p.Image, mb(p.Contents), mb(p.Layers),
				p.Pull.Time.Seconds(), p.Pull.CPU.Seconds(), mb(p.Pull.Moved),
				p.Proof.Time.Seconds(), p.Proof.CPU.Seconds(), mb(p.Proof.Moved), 100*float64(p.Proof.Moved)/float64(p.Pull.Moved))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if b := r.Beside; b != nil {
		ended := 0
		for _, p := range b.Proven {
			if p {
				ended++
			}
		}
		ratio, interval := b.ratio()
		fmt.Fprintf(out, "start of %s beside the proof of %s: %.3f s, alone %.3f s (medians of %d); ratio %.3f (95%%: %.3f to %.3f); the proof had ended before ready in %d\n",
			b.Image, b.While, stats.Median(b.During), stats.Median(b.Alone), len(b.During), ratio, interval.Low, interval.High, ended)
	}
	return nil
}

// ratio is the geometric mean of the rounds' ratios, with its interval.
func (b *Beside) ratio() (float64, stats.Interval) {
	ratios := make([]float64, len(b.During))
	for i := range ratios {
		ratios[i] = b.During[i] / b.Alone[i]
	}
	return stats.GeometricMean(ratios), stats.Bootstrap(ratios, stats.GeometricMean)
}
