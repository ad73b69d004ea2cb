// Package pods measures what a user of Kubernetes sees: how long a pod takes from the moment at which a kubelet has its
// manifest until its container runs, until the service answers, and until the kubelet says that it is ready.
//
// Each start is one on a node that has nothing: containerd with overlayfs, or with Hydrofoil's snapshotter and mirror, and
// a real kubelet that runs static pods on the host's network. Containerd has run one container and the kubelet one pod
// before, of other images. With Hydrofoil there are two nodes: of the first one's pod nobody has traced the image; the
// second one, which is another, comes when the server has learned from what the first reported.
//
// A pod may have arguments of its own (args:). Then it is another service than the image's. The server forgets all of an
// image's before each measurement, so that each is measured by itself.
//
// The kubelet asks a readiness probe once a second, and shows the answer when it next looks. So "ready" comes in steps,
// and up to two seconds after "answers", which is asked from outside every 2 ms.
package pods

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Kubelet  string   // the program
	Images   []string // declared, NAME:TAG
	Engines  []string // foilName, overlayName
	Args     []string // imageArgs, ownArgs
	RTTs     []time.Duration
	Rate     int64 // bits a second; 0: no limit
	Runs     int
	Timeout  time.Duration // of one start
	Cache    string        // directory on a disk
	Results  string        // file of Records, one a line, to which is added what it lacks
	Table    io.Writer
	Log      func(line string)
}

// The engines and the arguments that there are.
const (
	foilName    = "hydrofoil-cri"
	overlayName = "overlayfs-cri"
	imageArgs   = "image" // none but the image's
	ownArgs     = "own"
)

// Engines and Args are what can be measured.
var (
	Engines = []string{foilName, overlayName}
	Args    = []string{imageArgs, ownArgs}
)

// runtimes make workers.
var runtimes = map[string]*engines.CRI{foilName: {Snapshotter: "hydrofoil"}, overlayName: {Snapshotter: "overlayfs"}}

// nodes are those on which an engine starts a pod, one after the other.
func nodes(engine string) []string {
	if engine == foilName {
		return []string{"first", "second"}
	}
	return []string{"any"}
}

// Run measures what the results lack. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	for _, path := range []*string{&o.Cache, &o.Programs.Foil, &o.Kubelet, &o.Results} {
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	version, err := versions(ctx, o)
	if err != nil {
		return err
	}
	records, err := Read(o.Results)
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Version != version {
			return fmt.Errorf("bench: %s was measured with %s, and here is %s: name another --out", o.Results, r.Version, version)
		}
	}
	left := missing(o, records)
	if len(left) > 0 {
		if err := measure(ctx, o, version, left); err != nil {
			return err
		}
	}
	if records, err = Read(o.Results); err != nil {
		return err
	}
	if _, err := io.WriteString(o.Table, Table(records)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if left := missing(o, records); len(left) > 0 {
		return fmt.Errorf("bench: %d measurements failed, see their errors in %s; the same command makes them again", len(left), o.Results)
	}
	return nil
}

// measure makes the measurements that are left.
func measure(ctx context.Context, o Options, version string, left []Measurement) (err error) {
	images, err := engines.Services(ctx, o.Cache, o.Images, o.Log)
	if err != nil {
		return err
	}
	dir, err := site.Scratch(o.Cache, "pods-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	root := filepath.Join(dir, "serve")
	err = engines.At(ctx, dir, link.Options{}, o.Programs, root, func(s *site.Site) error {
		for _, im := range images {
			if err := engines.Push(ctx, s, im); err != nil {
				return err
			}
		}
		_, err := engines.Settle(ctx, root)
		return err
	})
	if err != nil {
		return err
	}
	b := &bench{Options: o, dir: dir, version: version, images: map[string]engines.Image{}}
	for _, im := range images {
		b.images[im.Name] = im
	}
	for _, rtt := range o.RTTs {
		var here []Measurement
		for _, m := range left {
			if m.RTT == rtt {
				here = append(here, m)
			}
		}
		if len(here) == 0 {
			continue
		}
		err := engines.At(ctx, dir, link.Options{RTT: rtt, Rate: o.Rate}, o.Programs, root, func(s *site.Site) error {
			for i, m := range here {
				records := b.measure(ctx, s, m)
				if ctx.Err() != nil {
					return fmt.Errorf("%w; the same command goes on where it was", context.Cause(ctx))
				}
				if err := add(o.Results, records); err != nil {
					return err
				}
				for _, r := range records {
					o.Log(fmt.Sprintf("%v: %d of %d: %s", rtt, i+1, len(here), r))
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

type bench struct {
	Options
	dir     string
	version string
	images  map[string]engines.Image
	made    int // nodes
}

// measure starts a pod on the nodes of an engine.
func (b *bench) measure(ctx context.Context, s *site.Site, m Measurement) (records []Record) {
	im, err := withArgs(b.images[m.Image], m.Args)
	if err == nil && m.Engine == foilName {
		err = engines.Forget(ctx, s, im)
	}
	for i, node := range nodes(m.Engine) {
		r := Record{Measurement: m, Node: node, Began: time.Now(), Version: b.version}
		if err == nil {
			err = b.start(ctx, s, im, i+1 < len(nodes(m.Engine)), &r)
		}
		if err != nil {
			r.Err = strings.TrimPrefix(err.Error(), "bench: ")
		}
		records = append(records, r)
	}
	return records
}
