package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/site"
)

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
