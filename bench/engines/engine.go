// Package engines holds the ways of getting an image from a registry and running
// it that are compared, each behind the interface Engine:
//
//	hydrofoil     foil node and foil run; the service traced, the server connected
//	hydrofoil-untraced, -unconnected, -bare: without one of these, or both;
//	              the server has neither sets nor traces of what is untraced
//	hydrofoil-containerd  the same daemon as containerd's snapshotter and mirror, and ctr
//	hydrofoil-cri         the same through containerd's CRI, as a kubelet uses it
//	hydrofoil-proving     foil run, where no container begins before its image is proven
//	overlayfs     containerd, full pull, its overlayfs snapshotter
//	overlayfs-cri the same through containerd's CRI
//	erofs         containerd, full pull, its erofs snapshotter and differ
//	stargz        containerd and stargz-snapshotter, images converted and traced
//	soci          containerd and the SOCI snapshotter, images indexed, with a prefetch list
//	starlight     containerd and Starlight, with its proxy, images converted and traced
//	nydus         containerd and Nydus' snapshotter and nydusd (FUSE), images converted, with a prefetch table
//	curl          a plain download of the compressed layers, run by nobody
//
// and T*, the floor, which is no engine: see MeasureFloor and WarmStarts.
//
// The same is equal for all: the registry (one foil serve, which is an OCI
// registry to whoever asks as a client of one), containerd, runc, the link, the
// machine. Each run has a worker of its own, with nothing on its disk and no
// connection open when it begins (see Worker); Trial times it.
package engines

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/format/bundle"
)

// Image is an image in the cloud's registry, and how to tell that it is ready.
type Image struct {
	Name    string // as it is declared, NAME:TAG
	Ref     string // in the registry, HOST:PORT/NAME:TAG
	Built   *images.Built
	Ready   site.Readiness
	Command []string // replaces the image's, if not empty
	// Touched are the files, by path from the root, of which pages are read
	// before it is ready, for engines that take such a list.
	Touched []string
}

// args are the container's entrypoint and command, as they run.
func (im Image) args() []string {
	if len(im.Command) > 0 {
		return slices.Concat(im.Built.Config.Config.Entrypoint, im.Command)
	}
	return slices.Concat(im.Built.Config.Config.Entrypoint, im.Built.Config.Config.Cmd)
}

// Programs say where the engines' programs are, where that is not PATH.
type Programs struct {
	Foil string
	// Server is the foil that serves; empty: Foil.
	Server     string
	Containerd string // its ctr and shim are beside it, or on PATH
	Peers      string // a directory of peers' programs, looked into before PATH
}

// Serves is the foil that serves.
func (p Programs) Serves() string { return cmp.Or(p.Server, p.Foil) }

// Preparation is what an engine needs done to an image before it can be pulled.
type Preparation struct {
	Version string        `json:"version"` // of the engine, as Find tells it
	What    string        `json:"what"`    // in words
	Time    time.Duration `json:"time_ns"`
	Storage int64         `json:"storage"` // bytes on the server, beyond the pushed layers
}

// Engine is a way of getting images to workers and running them.
type Engine interface {
	Name() string
	// Find says which of its programs, of which version, were found. An error
	// says what is missing here.
	Find(ctx context.Context, p Programs) (version string, err error)
	// Prepare prepares an image that has been pushed to the registry.
	Prepare(ctx context.Context, s *site.Site, p Programs, im Image) (Preparation, error)
	// Worker makes an empty worker that keeps everything below dir.
	Worker(s *site.Site, p Programs, dir string) Worker
}

// Converter is an engine that pushes other images to the registry when it prepares
// one.
type Converter interface {
	Engine
	// Converted are their names in the registry.
	Converted(im Image) []string
	// Foresee is how long Prepare takes for an image with compressed layers of so
	// many bytes, on an idle machine with two cores.
	Foresee(layers int64) time.Duration
}

// pace is some time for each image, and one for its bytes at a rate in bytes a
// second.
func pace(each time.Duration, layers int64, rate float64) time.Duration {
	return each + time.Duration(float64(layers)/rate*float64(time.Second))
}

// Worker is one machine's worth of an engine, at the edge. The order of calls is
// Start, then Provision, Complete and Check for each image, then Stop; Start
// again after Stop finds what was there.
type Worker interface {
	// Start starts the engine's daemons; they answer when it returns.
	Start(ctx context.Context) error
	// Provision pulls an image and starts its container, and marks Pulled and
	// Started on the trial. The container is nil if the engine runs none.
	Provision(ctx context.Context, im Image, t *Trial) (*Container, error)
	// Complete waits until nothing of the image is missing.
	Complete(ctx context.Context, im Image, t *Trial) error
	// Check compares what is on the worker with what was pushed: every byte, where
	// that can be done, if it is complete.
	Check(ctx context.Context, im Image, complete bool) error
	// Processes are the IDs of the daemons.
	Processes() []int
	// Stop ends the daemons.
	Stop() error
}

// Forgetful is a worker that fetches again what it has when its daemons are
// started again. So that this does not count against its updates, its daemons go
// on between a fresh provisioning and an update; connections that it keeps open
// meanwhile are to its advantage.
type Forgetful interface{ Forgets() }

// Cloud is an engine that needs a server of its own beside the registry.
type Cloud interface {
	// Serve starts it in the cloud; it keeps everything below root, and finds it
	// there again when it is started anew.
	Serve(ctx context.Context, s *site.Site, p Programs, root string) (stop func() error, err error)
}

// Whole is an engine whose images are complete before they are started.
type Whole interface{ Whole() }

// Teller is a worker that says how a start went.
type Teller interface {
	// Tell notes on the trial which reads waited, and what was written until ready.
	Tell(ctx context.Context, t *Trial) error
}

// Unlearner is a worker of an engine that may be there to start what nobody has traced.
type Unlearner interface {
	// Unlearn has the server forget what it knows of an image's services, where the
	// worker is such a one. It is called before each provisioning.
	Unlearn(ctx context.Context, im Image) error
}

// Startups is a worker that knows of startup sets.
type Startups interface {
	// Startup is what the last provisioning had of one when it was ready.
	Startup(ctx context.Context) (StartupResult, error)
	// Set is what the server has for an image's service, and the bytes of all contents of the image.
	Set(ctx context.Context, im Image) (set bundle.Service, of int64, err error)
	// Reported waits until the server has learned from the last provisioning.
	Reported(ctx context.Context, im Image) error
}

// StartupResult is what came of startup sets until ready.
type StartupResult struct {
	Origin string
	Bytes  int64 // on the wire
	Waits  int64 // reads
	Waited time.Duration
}

// Container is a running container.
type Container struct {
	*site.Process // the command that runs it in the foreground
	stop          func() error
}

// Stop ends the container, if it has not ended.
func (c *Container) Stop() error {
	if c == nil {
		return nil
	}
	return c.stop()
}

// All are the engines that there are, in the order of reports.
func All() []Engine {
	return []Engine{
		&Hydrofoil{},
		&Hydrofoil{Untraced},
		&Hydrofoil{Unconnected},
		&Hydrofoil{Bare},
		&Hydrofoil{Used},
		&Hydrofoil{Proving},
		&HydrofoilContainerd{},
		&CRI{Snapshotter: hostedName},
		&Containerd{Snapshotter: "overlayfs"},
		&FullCRI{CRI{Snapshotter: "overlayfs"}},
		&Containerd{Snapshotter: "erofs"},
		&Stargz{},
		&SOCI{},
		&Starlight{},
		&Nydus{},
		&Curl{},
	}
}

// Named finds an engine.
func Named(name string) (Engine, error) {
	var known []string
	for _, e := range All() {
		if e.Name() == name {
			return e, nil
		}
		known = append(known, e.Name())
	}
	return nil, fmt.Errorf("bench: no engine is called %q; there are %v", name, known)
}

// find is the path of a program that is in dir, or else on PATH.
func find(dir, name string) (string, error) {
	if dir != "" {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return filepath.Abs(path)
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("bench: %s is neither on PATH nor where an option says", name)
	}
	return path, nil
}

// started waits, for half a minute, until a daemon answers.
func started(ctx context.Context, daemon *site.Process, what string, answers func(ctx context.Context) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, site.ErrTooLong)
	defer cancel()
	return daemon.Until(ctx, "start "+what, func() bool { return answers(ctx) })
}
