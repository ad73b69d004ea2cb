package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// pull brings one image here. Its story: resolved, mounted, complete; or failed
// at any point. Pull starts it, run is its goroutine, and when that ends what is
// here stays: a later pull of the same image goes on with it.
type pull struct {
	n     *Node
	ref   ref
	req   api.PullRequest
	begun time.Time
	ctx   context.Context // ends with the node, or with stop
	stop  context.CancelFunc

	mu         sync.Mutex
	fetch      *fetch.Pull
	digest     string
	image      *image
	rootfs     *rootfs
	milestones []api.Event
	changed    chan struct{} // closed, and made anew, when milestones grow
	over       bool
	mounting   chan struct{} // closed when the mount has ended, well or not; nil before it began
	mountErr   error         // valid then
	copying    chan struct{} // closed when copyLocal has ended; nil before it began

	used []*rootfs // whose arenas it uses; guarded by Node.mu
}

// Pull starts the pull of an image, or joins the one that runs, and emits its
// events.
func (n *Node) Pull(ctx context.Context, req api.PullRequest, emit func(api.Event) error) error {
	p, err := n.startPull(req, "")
	if err != nil {
		return err
	}
	until := req.Until
	if until == "" {
		until = api.Complete
	}
	return p.follow(ctx, until, req.Interval, emit)
}

// startPull starts a pull unless one of the same reference runs. A digest asks
// for that manifest, whatever the reference's tag names by now.
func (n *Node) startPull(req api.PullRequest, manifest digest.Digest) (*pull, error) {
	r, err := parseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	if _, err := parsePlatform(req.Platform); err != nil {
		return nil, err
	}
	switch req.Until {
	case "", api.Resolved, api.Mounted, api.Complete:
	default:
		return nil, errorf(api.CodeInvalid, "until %q: use mounted or complete", req.Until)
	}
	if manifest != "" {
		r.reference = manifest.String()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return nil, errorf(api.CodeUnavailable, "the daemon is stopping: try again in a moment")
	}
	if p := n.pulls[r.name]; p != nil && !p.ended() {
		return p, nil
	}
	p := &pull{n: n, ref: r, req: req, begun: time.Now(), changed: make(chan struct{})}
	p.ctx, p.stop = context.WithCancel(n.ctx)
	n.pulls[r.name] = p
	n.work.Go(p.run)
	return p, nil
}

func (p *pull) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.over
}

// use keeps r's arena from being removed until the pull has ended. Called with
// Node.mu held.
func (p *pull) use(r *rootfs) {
	r.users++
	p.used = append(p.used, r)
}

func (p *pull) run() {
	err := p.bring(p.ctx)
	p.stop()
	n := p.n
	n.mu.Lock()
	for _, r := range p.used {
		r.users--
	}
	p.used = nil
	if p.rootfs != nil && p.rootfs.filling == p {
		p.rootfs.filling = nil
	}
	if img := n.images[p.ref.name]; img != nil {
		img.Why = ""
		if err != nil {
			img.Why = asError(err).Message
		}
	}
	n.mu.Unlock()
	if err != nil {
		p.happened(api.Failed, err)
	} else {
		p.happened(api.Complete, nil)
	}
	n.collect()
}

// errShared ends the stream of a pull whose rootfs another pull fills already.
var errShared = errors.New("another pull fills this rootfs")

func (p *pull) bring(ctx context.Context) error {
	n := p.n
	platform, err := parsePlatform(p.req.Platform)
	if err != nil {
		return err
	}
	client, err := n.client(p.ref.server(p.req.PlainHTTP))
	if err != nil {
		return err
	}
	have := p.haves()
	for range 2 {
		f := fetch.Start(ctx, fetch.Options{
			Client: client,
			Name:   p.ref.name,
			Request: bundle.Request{
				Versions: []int{bundle.Version},
				Images:   []bundle.ImageRequest{{Repository: p.ref.repository, Reference: p.ref.reference, Platform: platform}},
				Have:     have,
			},
			Open:   p.open,
			TOC:    p.encodedTOC,
			GiveUp: n.opts.GiveUp,
			Logger: n.log,
		})
		p.mu.Lock()
		p.fetch = f
		p.mu.Unlock()
		err = f.Wait()
		if errors.Is(err, errShared) {
			err = nil
		}
		p.mu.Lock()
		mounting, copying, r := p.mounting, p.copying, p.rootfs
		p.mu.Unlock()
		if mounting != nil {
			<-mounting
			if p.mountErr != nil {
				return p.mountErr
			}
			<-copying
		}
		if err != nil {
			return err
		}
		if r == nil {
			return fmt.Errorf("pull %s: the server ended the bundle before it named the image", p.ref)
		}
		n.mu.Lock()
		a, shared := r.arena, r.filling != p
		n.mu.Unlock()
		if a == nil || a.Complete() || shared {
			return n.finish(ctx, r)
		}
		// Something that the server left out, because this worker said that it
		// has it, was not found here: damaged, or removed just now. Once more,
		// and this time without counting on other images.
		n.log.Warn("not all that was to be taken from other images is here; asking for it", "ref", p.ref, "segments", a.Missing())
		n.mu.Lock()
		have = []bundle.Have{{ChainID: r.rec.ChainID, TOC: r.rec.TOC, Present: r.present()}}
		n.mu.Unlock()
		p.ref.reference = p.image.Digest.String()
	}
	return errorf(api.CodeCorrupt, "pull %s: the server ended the bundle, but bytes are missing; remove the image with `foil rm` and pull it again", p.ref)
}

// encodedTOC reads the TOC of a rootfs that is here.
func (p *pull) encodedTOC(_ context.Context, img *bundle.Image) ([]byte, error) {
	return os.ReadFile(filepath.Join(p.n.rootfsDir(img.ChainID), "toc"))
}

// haves names every rootfs that is here, wholly or in part, and keeps their
// arenas for the pull: what the server leaves out because of them must still be
// here when its place is looked for.
func (p *pull) haves() []bundle.Have {
	n := p.n
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []bundle.Have
	for _, r := range n.rootfs {
		if r.broken != nil {
			continue
		}
		h := bundle.Have{ChainID: r.rec.ChainID, TOC: r.rec.TOC}
		if !r.rec.Complete {
			if r.present == nil {
				continue
			}
			h.Present = r.present()
		}
		p.use(r)
		list = append(list, h)
	}
	return list
}

// open is called with an image's header: it lays out the arena at once, so that
// frames can be written, and mounts in the background.
func (p *pull) open(ctx context.Context, img *bundle.Image, t *toc.TOC) (*arena.Arena, error) {
	n := p.n
	p.mu.Lock()
	p.digest = img.Manifest.Digest.String()
	p.image = &image{
		Version:  imageVersion,
		Ref:      p.ref.name,
		Platform: p.req.Platform,
		Plain:    p.req.PlainHTTP,
		Digest:   img.Manifest.Digest,
		Manifest: img.Manifest.Bytes,
		Config:   img.Config.Bytes,
		ChainID:  img.ChainID,
		Created:  time.Now().UTC(),
	}
	again := p.rootfs
	p.mu.Unlock()
	if again != nil { // the second stream of bring
		n.mu.Lock()
		defer n.mu.Unlock()
		return again.arena, nil
	}
	p.happened(api.Resolved, nil)

	n.mu.Lock()
	r := n.rootfs[img.ChainID]
	if r != nil && r.broken != nil {
		if err := r.broken; r.users > 0 || r.mounted {
			n.mu.Unlock()
			return nil, errorf(api.CodeCorrupt, "rootfs %s cannot be served: %w; remove its containers and images with `foil rm` and pull again", img.ChainID, err)
		}
		delete(n.rootfs, img.ChainID)
		n.discard(r)
		r = nil
	}
	if r != nil {
		shared := r.filling != nil && r.filling != p
		if !shared && !r.rec.Complete {
			r.filling = p
		}
		p.use(r)
		n.mu.Unlock()
		return p.reuse(ctx, r, shared)
	}
	n.mu.Unlock()

	if t == nil {
		return nil, fmt.Errorf("pull %s: the server sent no TOC of rootfs %s, which is not here", p.ref, img.ChainID)
	}
	r, place, err := n.createRootfs(img.ChainID, img.TOC, t, p)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.rootfs[img.ChainID] = r
	p.use(r)
	n.mu.Unlock()
	p.mu.Lock()
	p.rootfs = r
	p.mounting, p.copying = make(chan struct{}), make(chan struct{})
	p.mu.Unlock()
	n.work.Go(func() {
		defer close(p.copying)
		p.mountErr = n.mountRootfs(r, t, place)
		if p.mountErr == nil {
			p.mountErr = p.commit()
		}
		if p.mountErr != nil {
			n.mu.Lock()
			r.broken = p.mountErr
			n.mu.Unlock()
			p.stop()
		}
		close(p.mounting)
		if p.mountErr != nil {
			return
		}
		p.happened(api.Mounted, nil)
		n.copyLocal(p.ctx, r, t, p)
		debug.FreeOSMemory() // what the mount of a large image took
	})
	return r.arena, nil
}

// reuse takes a rootfs that is here already.
func (p *pull) reuse(ctx context.Context, r *rootfs, shared bool) (*arena.Arena, error) {
	n := p.n
	p.mu.Lock()
	p.rootfs = r
	p.mu.Unlock()
	if shared {
		n.mu.Lock()
		other := r.filling
		n.mu.Unlock()
		if other != nil {
			if err := other.waitMounted(ctx); err != nil {
				return nil, err
			}
		}
	} else if !r.isMounted(n) {
		if err := n.mount(r); err != nil {
			return nil, err
		}
	}
	if err := p.commit(); err != nil {
		return nil, err
	}
	p.happened(api.Mounted, nil)
	if shared {
		return nil, errShared
	}
	n.mu.Lock()
	a := r.arena
	n.mu.Unlock()
	return a, nil
}

func (r *rootfs) isMounted(n *Node) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return r.mounted
}

// waitMounted waits until another pull's rootfs can be used.
func (p *pull) waitMounted(ctx context.Context) error {
	p.mu.Lock()
	mounting := p.mounting
	p.mu.Unlock()
	if mounting == nil {
		return nil
	}
	select {
	case <-mounting:
		return p.mountErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commit records the image: from now on its reference names this rootfs.
func (p *pull) commit() error {
	n := p.n
	if err := n.saveImage(p.image); err != nil {
		return err
	}
	n.mu.Lock()
	n.images[p.ref.name] = p.image
	n.mu.Unlock()
	return nil
}

// finish makes a rootfs durable and complete, and takes its arena from behind
// the gate.
func (n *Node) finish(ctx context.Context, r *rootfs) error {
	n.mu.Lock()
	a, complete := r.arena, r.rec.Complete
	var lent []*arena.Arena
	for _, c := range r.rec.Arenas {
		if other := n.rootfs[c]; other != nil && other != r && other.arena != nil {
			lent = append(lent, other.arena)
		}
	}
	n.mu.Unlock()
	if complete {
		return nil
	}
	if a != nil {
		// Another pull may fill it; and segments may still be copied from other
		// arenas.
		select {
		case <-a.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := a.Failure(); err != nil {
			return err
		}
		lent = append(lent, a)
	}
	// What it uses in place must survive a power cut as well.
	for _, a := range lent {
		if err := a.Sync(ctx); err != nil {
			return fmt.Errorf("make rootfs %s durable: %w", r.rec.ChainID, err)
		}
	}
	for _, name := range []string{"toc", "placement", "contents", "meta.erofs"} {
		if err := syncFile(r.path(name)); err != nil {
			return err
		}
	}
	n.mu.Lock()
	if r.rec.Complete { // the other pull that shared it was first
		n.mu.Unlock()
		return nil
	}
	r.rec.Complete = true
	n.mu.Unlock()
	if err := r.save(); err != nil {
		return err
	}
	return n.retire(r)
}

// retire takes a complete arena from behind the gate.
func (n *Node) retire(r *rootfs) error {
	n.mu.Lock()
	a := r.arena
	r.arena, r.present = nil, nil
	n.mu.Unlock()
	if a == nil {
		return nil
	}
	return errors.Join(n.gate.Release(r.name()), a.Close())
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return errors.Join(fmt.Errorf("sync %s: %w", path, err), f.Close())
	}
	return f.Close()
}

// copyLocal fills r's arena with the segments that other arenas hold inside
// contents that are not the same: what stayed of a large file that changed. The
// server does not send them.
func (n *Node) copyLocal(ctx context.Context, r *rootfs, t *toc.TOC, p *pull) {
	a := r.arena
	if a == nil {
		return
	}
	l := a.Layout()
	want := make([]int32, 0, l.Segments())
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() && !a.Present(s.Offset, int64(s.Length)) {
			want = append(want, int32(i))
		}
	}
	ids := make([]segment.ID, l.Segments())
	for _, i := range want {
		ids[i] = l.Segment(int(i)).ID
	}
	id := func(i int32) *segment.ID { return &ids[i] }
	sortByID(want, id)
	n.mu.Lock()
	others := append([]*rootfs(nil), p.used...)
	n.mu.Unlock()
	buf := make([]byte, segment.MaxLength)
	for _, other := range others {
		if other == r || other.contents == nil {
			continue
		}
		var file *os.File
		var err error
		other.contents.join(want, id, func(i int32, off int64, _ bool) {
			if err != nil || ctx.Err() != nil {
				return
			}
			s := l.Segment(int(i))
			n.mu.Lock()
			ok, exempt := other.holds(off, int64(s.Length)), other.arena
			n.mu.Unlock()
			if !ok || a.Present(s.Offset, int64(s.Length)) {
				return
			}
			// A complete arena is read as any file is; one that is not, through
			// the descriptor that the gate leaves alone. It may become complete
			// at this moment.
			if exempt != nil {
				_, err = exempt.File().ReadAt(buf[:s.Length], off)
			}
			if exempt == nil || errors.Is(err, os.ErrClosed) {
				if file == nil {
					if file, err = os.Open(other.path("arena")); err != nil {
						return
					}
				}
				_, err = file.ReadAt(buf[:s.Length], off)
			}
			if err == nil {
				err = a.WriteSegment(int(i), buf[:s.Length])
			}
		})
		if file != nil {
			_ = file.Close()
		}
		if err != nil {
			n.log.Warn("copy segments from another arena", "from", other.rec.ChainID, "to", r.rec.ChainID, "error", err)
		}
	}
}
