package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/recorder"
	"hydrofoil.dev/foil/internal/worker/runner"
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
	rootfs *rootfs
	places *places
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
func (n *Node) startTracing(ctx context.Context, c *container, r *rootfs, encoded []byte) (mnt string, err error) {
	have, err := r.read()
	if err != nil {
		return "", err
	}
	var before *trace.Trace
	if len(encoded) > 0 {
		if before, err = trace.Decode(encoded); err == nil {
			err = trace.Check(before.Runs(), have.toc)
		}
		if err == nil && (before.ChainID != r.rec.ChainID || before.TOC != r.rec.TOC) {
			err = fmt.Errorf("it is of rootfs %s", before.ChainID)
		}
		if err != nil {
			return "", errorf(api.CodeInvalid, "the trace that was taken of %s before: %w", c.Ref, err)
		}
	}
	var arenas []string
	offsets, err := n.offsets(r, have.toc, have.place, nil, func(_ int, other *rootfs) error {
		arenas = append(arenas, other.path("arena"))
		return nil
	})
	if err != nil {
		return "", err
	}
	mnt = filepath.Join(c.Dir, tracedMount)
	if err := os.MkdirAll(mnt, 0o700); err != nil {
		return "", err
	}
	o := recorder.Options{Root: filepath.Join(n.opts.Root, "rootfs"), Arenas: arenas, Logger: n.log}
	if n.gate.Kind() != (*gate.Fanotify)(nil).Kind() {
		o.FUSE = filepath.Join(c.Dir, tracedGate)
	}
	rec, err := recorder.Start(ctx, o)
	if err != nil {
		return "", err
	}
	n.mu.Lock()
	c.tracing = &tracing{rec: rec, rootfs: r, places: newPlaces(have.toc, have.place, offsets, len(arenas)), before: before}
	n.mu.Unlock()
	none := 0
	err = kernel.MountErofs(kernel.Erofs{
		Image: r.path("meta.erofs"), Devices: rec.Devices(), Target: mnt, Loop: n.loop, ReadAhead: &none,
	})
	if err != nil {
		return "", mountError(fmt.Errorf("mount image %s to trace it: %w", c.Ref, err))
	}
	if before != nil && o.FUSE == "" {
		named := namesOf(have.toc)
		m := mounted{laid: &laid{dir: mnt, toc: have.toc, names: func() *names { return named }}}
		defer m.close()
		for _, run := range trace.Merge(before.Runs()) {
			m.read(run, nil)
		}
	}
	return mnt, nil
}

// clearTraced is clearContainer for one that may be traced.
func (n *Node) clearTraced(c *container) error {
	n.mu.Lock()
	tr := c.tracing
	c.tracing = nil
	n.mu.Unlock()
	err := n.clearContainer(c.Dir)
	if tr != nil {
		// Last: reads through its devices may fail from now on.
		err = errors.Join(err, tr.rec.Close())
	}
	return err
}

// dropTraced removes what is left of containers that an earlier daemon made to
// be traced: what they read is not recorded any more. One that runs stays until
// it is removed.
func (n *Node) dropTraced() {
	runc := runner.Runner{StateRoot: launch.StateRoot(n.opts.Root)}
	for id, c := range n.containers {
		if !c.Traced {
			continue
		}
		state, err := runc.State(n.ctx, id)
		if err == nil && state.Status != "stopped" {
			n.Warn("container %s was traced when the daemon was restarted; its trace is lost: remove it with `foil rm --force %s` and trace again", id, id)
			continue
		}
		if err := n.removeContainer(n.ctx, c); err != nil {
			n.Warn("remove what is left of container %s, which was traced: %v", id, err)
			continue
		}
		delete(n.containers, id)
	}
}

func (n *Node) traced(id string) (*container, *tracing, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.containers[id]
	switch {
	case c == nil:
		return nil, nil, errorf(api.CodeNotFound, "no container %s: `foil ps -a` lists them", id)
	case c.tracing == nil && c.Traced:
		return nil, nil, errorf(api.CodeNotFound, "the daemon was restarted while container %s was traced: trace again", id)
	case c.tracing == nil:
		return nil, nil, errorf(api.CodeNotFound, "container %s is not traced: `foil trace` runs one that is", id)
	}
	return c, c.tracing, nil
}

// TraceStatus says how much a traced container has read.
func (n *Node) TraceStatus(_ context.Context, id string) (*api.TraceStatus, error) {
	_, tr, err := n.traced(id)
	if err != nil {
		return nil, err
	}
	s := new(api.TraceStatus)
	s.Pages, s.Last = tr.rec.Count()
	return s, nil
}

// Trace returns the trace of a container that is ready, and may send it to the
// image's server. The container's reads are recorded as long as it is there.
func (n *Node) Trace(ctx context.Context, id string, req api.TraceRequest) (*api.TraceResult, error) {
	if req.Until.IsZero() {
		req.Until = req.Ready
	}
	if req.Started.IsZero() || req.Ready.Before(req.Started) || req.Until.Before(req.Ready) {
		return nil, errorf(api.CodeInvalid, "trace container %s: started at %v and ready at %v", id, req.Started, req.Ready)
	}
	if len(req.Args) > trace.MaxArgs {
		return nil, errorf(api.CodeInvalid, "trace container %s: %d arguments, a trace has at most %d", id, len(req.Args), trace.MaxArgs)
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	c, tr, err := n.traced(id)
	if err != nil {
		return nil, err
	}
	reads, cut := tr.rec.Reads()
	t := &trace.Trace{
		Kind:    trace.Recorded,
		ChainID: tr.rootfs.rec.ChainID,
		TOC:     tr.rootfs.rec.TOC,
		Args:    req.Args,
		Ready:   req.Ready.Sub(req.Started),
	}
	for _, r := range reads {
		if r.At.After(req.Until) {
			break
		}
		t.Touched = tr.places.touch(t.Touched, r, max(r.At.Sub(req.Started), 0))
	}
	if tr.before != nil {
		t.After(tr.before)
	}
	encoded, left := t.Fit()
	if len(encoded) > trace.MaxEncoded {
		return nil, errorf(api.CodeUnsupported, "the arguments of container %s are too long for a trace, which has at most %d bytes: put them into a file of the image", id, trace.MaxEncoded)
	}
	res := &api.TraceResult{Trace: encoded, Cut: cut || left > 0, Left: left}
	if req.Send {
		if err := n.sendTrace(ctx, n.again(c.Ref, req.Credential), c.Digest, res.Trace); err != nil {
			res.SendError = asError(err).Message
		} else {
			res.Sent = true
		}
	}
	return res, nil
}

// places finds the content that lies at a place of an arena.
type places struct {
	toc    *toc.TOC
	arenas [][]placedContent // by arena, sorted by offset
}

type placedContent struct {
	off     int64
	content uint32
}

func newPlaces(t *toc.TOC, place placement, offsets []int64, arenas int) *places {
	p := &places{toc: t, arenas: make([][]placedContent, arenas)}
	for c := range t.Contents {
		a := place[c]
		p.arenas[a] = append(p.arenas[a], placedContent{offsets[c], uint32(c)})
	}
	for _, list := range p.arenas {
		slices.SortFunc(list, func(a, b placedContent) int { return cmp.Compare(a.off, b.off) })
	}
	return p
}

// touch appends the pages of a read, by content. What lies in no content of the
// TOC belongs to another image that has contents in the same arena.
func (p *places) touch(dst []trace.Touch, r recorder.Read, at time.Duration) []trace.Touch {
	list := p.arenas[r.Arena]
	end := r.Off + r.N
	i, found := slices.BinarySearchFunc(list, r.Off, func(c placedContent, off int64) int { return cmp.Compare(c.off, off) })
	if !found {
		i--
	}
	for i = max(i, 0); i < len(list) && list[i].off < end; i++ {
		c := list[i]
		pages := int64(trace.Pages(p.toc.Contents[c.content].Size))
		first := max(r.Off-c.off, 0) / trace.BlockSize
		last := min((end-c.off+trace.BlockSize-1)/trace.BlockSize, pages)
		if first >= last {
			continue
		}
		dst = append(dst, trace.Touch{At: at, Run: trace.Run{Content: c.content, First: uint32(first), Blocks: uint32(last - first)}})
	}
	return dst
}

// sendTrace sends an encoded trace to the server of an image.
func (n *Node) sendTrace(ctx context.Context, req api.PullRequest, manifest string, encoded []byte) error {
	return n.atServer(ctx, req, manifest, func(c *fetch.Client, query url.Values) error {
		return c.Send(ctx, bundle.TracePath, query, bundle.MediaTypeTrace, encoded)
	})
}

// atServer calls fn for the hosts of an image's registry, with the query that
// names the image, until one knows the path. A manifest's digest takes the place
// of the tag.
func (n *Node) atServer(ctx context.Context, req api.PullRequest, manifest string, fn func(c *fetch.Client, query url.Values) error) error {
	r, err := parseRef(req.Ref)
	if err != nil {
		return err
	}
	if manifest != "" {
		r.reference = manifest
	}
	ask, err := n.hosts.For(ctx, n.want(r, req))
	if err != nil {
		return errorf(api.CodeInvalid, "%s: %w", r, err)
	}
	for i, host := range ask {
		err = fn(host.Client, url.Values{"repository": {host.Repository}, "reference": {r.reference}})
		if err == nil || i == len(ask)-1 || ctx.Err() != nil {
			break
		}
		n.log.Debug("this host does not answer for the image; asking the next one", "ref", r.name, "host", host.Client.Base(), "error", err)
	}
	return err
}

// again is how an image is asked for that may be here.
func (n *Node) again(name string, credential credentials.Credential) api.PullRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	img := n.images[name]
	return api.PullRequest{Ref: name, PlainHTTP: img != nil && img.Plain, Credential: credential}
}
