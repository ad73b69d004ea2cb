package containers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/mounts"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/recorder"
	"hydrofoil.dev/foil/internal/worker/runner"
	"hydrofoil.dev/foil/internal/worker/start"
	"hydrofoil.dev/foil/internal/worker/store"
)

// A container that is traced has a mount of its image of its own in its
// directory, over the devices of a recorder, with read-ahead off: a new
// superblock, so nothing of it is in the page cache, and what others read of the
// image is not seen. Only with the FUSE gate there is also the mount of the
// recorder's filesystem.
const (
	tracedMount = "image"
	tracedGate  = "gate"
)

// tracing is what is read by a container that is traced.
type tracing struct {
	rec    *recorder.Recorder
	rootfs *store.Rootfs
	places *recorder.Places
	before *trace.Trace // whose pages were read in; nil: none
}

// startTracing mounts c's image for it alone, reads in the pages of an encoded trace that was
// taken before, if there is one, and records what else is read. It returns where the mount is.
//
// With a cold page cache a start takes several times as long as one whose pages are all there, as they
// are where a startup set has arrived: what its threads come to do depends on that.
// node read one page of its program in three cold starts of eight, and in every warm one. With
// the FUSE gate no start has its pages there, and the daemon must not read by way of itself: there
// the trace is that of two cold starts.
func (s *Set) startTracing(ctx context.Context, c *Container, r *store.Rootfs, encoded []byte) (mnt string, err error) {
	have, err := r.Read()
	if err != nil {
		return "", err
	}
	var before *trace.Trace
	if len(encoded) > 0 {
		if before, err = trace.Decode(encoded); err == nil {
			err = trace.Check(before.Runs(), have.TOC)
		}
		if err == nil && (before.ChainID != r.ChainID() || before.TOC != r.TOC()) {
			err = fmt.Errorf("it is of rootfs %s", before.ChainID)
		}
		if err != nil {
			return "", api.Errorf(api.CodeInvalid, "the trace that was taken of %s before: %w", c.Ref, err)
		}
	}
	offsets, arenas, err := s.opts.Store.Offsets(r, have)
	if err != nil {
		return "", err
	}
	mnt = filepath.Join(c.Dir, tracedMount)
	if err := os.MkdirAll(mnt, 0o700); err != nil {
		return "", err
	}
	o := recorder.Options{Root: filepath.Join(s.opts.Root, "rootfs"), Arenas: arenas, Logger: s.log}
	if s.opts.Gate.Kind() != (*gate.Fanotify)(nil).Kind() {
		o.FUSE = filepath.Join(c.Dir, tracedGate)
	}
	rec, err := recorder.Start(ctx, o)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	c.tracing = &tracing{rec: rec, rootfs: r, places: recorder.NewPlaces(have.TOC, have.Place, offsets, len(arenas)), before: before}
	s.mu.Unlock()
	none := 0
	err = kernel.MountErofs(kernel.Erofs{
		Image: r.MetaImage(), Devices: rec.Devices(), Target: mnt, Loop: s.opts.Loop, ReadAhead: &none,
	})
	if err != nil {
		return "", mounts.Explain(fmt.Errorf("mount image %s to trace it: %w", c.Ref, err))
	}
	if before != nil && o.FUSE == "" {
		start.ReadThrough(mnt, have, before.Runs())
	}
	return mnt, nil
}

// clear removes a container's directory, and ends its tracing.
func (s *Set) clear(c *Container) error {
	s.mu.Lock()
	tr := c.tracing
	c.tracing = nil
	s.mu.Unlock()
	err := clearDir(c.Dir)
	if tr != nil {
		// Last: reads through its devices may fail from now on.
		err = errors.Join(err, tr.rec.Close())
	}
	return err
}

// DropTraced removes what is left of containers that an earlier daemon made to
// be traced: what they read is not recorded any more. One that runs stays until
// it is removed.
func (s *Set) DropTraced(ctx context.Context) {
	runc := runner.Runner{StateRoot: launch.StateRoot(s.opts.Root)}
	for id, c := range maps.Clone(s.all) {
		if !c.Traced {
			continue
		}
		state, err := runc.State(ctx, id)
		if err == nil && state.Status != "stopped" {
			s.opts.Warn("container %s was traced when the daemon was restarted; its trace is lost: remove it with `foil rm --force %s` and trace again", id, id)
			continue
		}
		if err := s.remove(ctx, c); err != nil {
			s.opts.Warn("remove what is left of container %s, which was traced: %v", id, err)
			continue
		}
		delete(s.all, id)
	}
}

func (s *Set) traced(id string) (*Container, *tracing, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.all[id]
	switch {
	case c == nil:
		return nil, nil, api.Errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	case c.tracing == nil && c.Traced:
		return nil, nil, api.Errorf(api.CodeNotFound, "the daemon was restarted while container %s was traced: trace again", id)
	case c.tracing == nil:
		return nil, nil, api.Errorf(api.CodeNotFound, "container %s is not traced: `foil trace` runs one that is", id)
	}
	return c, c.tracing, nil
}

// TraceStatus says how much a traced container has read.
func (s *Set) TraceStatus(id string) (*api.TraceStatus, error) {
	_, tr, err := s.traced(id)
	if err != nil {
		return nil, err
	}
	v := new(api.TraceStatus)
	v.Pages, v.Last = tr.rec.Count()
	return v, nil
}

// Trace returns the trace of a container that is ready, and may send it to the
// image's server. The container's reads are recorded as long as it is there.
func (s *Set) Trace(ctx context.Context, id string, req api.TraceRequest) (*api.TraceResult, error) {
	if req.Until.IsZero() {
		req.Until = req.Ready
	}
	if req.Started.IsZero() || req.Ready.Before(req.Started) || req.Until.Before(req.Ready) {
		return nil, api.Errorf(api.CodeInvalid, "trace container %s: started at %v and ready at %v", id, req.Started, req.Ready)
	}
	if len(req.Args) > trace.MaxArgs {
		return nil, api.Errorf(api.CodeInvalid, "trace container %s: %d arguments, a trace has at most %d", id, len(req.Args), trace.MaxArgs)
	}
	c, tr, err := s.traced(id)
	if err != nil {
		return nil, err
	}
	reads, cut := tr.rec.Reads()
	t := &trace.Trace{
		Kind:    trace.Recorded,
		ChainID: tr.rootfs.ChainID(),
		TOC:     tr.rootfs.TOC(),
		Args:    req.Args,
		Ready:   req.Ready.Sub(req.Started),
	}
	for _, r := range reads {
		if r.At.After(req.Until) {
			break
		}
		t.Touched = tr.places.Touch(t.Touched, r, max(r.At.Sub(req.Started), 0))
	}
	if tr.before != nil {
		t.After(tr.before)
	}
	encoded, left := t.Fit()
	if len(encoded) > trace.MaxEncoded {
		return nil, api.Errorf(api.CodeUnsupported, "the arguments of container %s are too long for a trace, which has at most %d bytes: put them into a file of the image", id, trace.MaxEncoded)
	}
	res := &api.TraceResult{Trace: encoded, Cut: cut || left > 0, Left: left}
	if req.Send {
		if err := s.opts.Pulls.SendTrace(ctx, s.opts.Pulls.About(c.Ref, req.Credential), c.Digest, res.Trace); err != nil {
			res.SendError = pull.AsError(err).Message
		} else {
			res.Sent = true
		}
	}
	return res, nil
}
