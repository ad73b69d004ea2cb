package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// maxArenas bounds the devices of one mount. The format allows 65,535; each
// costs the mount an open file.
const maxArenas = 1000

// Wanted is a rootfs that a pull wants.
type Wanted struct {
	// Registry is the origin of the image; Named the rootfs that its reference names by now, if any.
	Registry string
	Named    origin.Key
	Image    *bundle.Image
	TOC      *toc.TOC // nil when the server left it out
	// Weak names the server, and says why nothing shows that it is this one; empty: it was authenticated.
	Weak string
	// Made says that it is made on this worker, and no server knows it.
	Made bool
	// By fills the rootfs, unless another one does.
	By Filler
	// Leases keep the rootfs, and those that lend to it.
	Leases *Leases
	// Observe, when not nil, makes what is told of reads of a rootfs that is laid
	// out now. It may return nil.
	Observe func(r *Rootfs) Observer
}

// Open finds the rootfs of an image, or lays it out: then made is not nil, and
// says where its contents are; frames can be written to its arena, and
// MountFirst does the rest. It finds what came for the image's origin by the same TOC, and nothing else: another
// TOC of the same chain ID is told, and has a rootfs of its own.
//
// Errors: api.CodeCorrupt when what is here is broken and in use, api.CodeUnsupported when its metadata
// would take too much, a *Shortage.
func (s *Store) Open(w Wanted) (r *Rootfs, made Placement, err error) {
	s.layout.Lock()
	defer s.layout.Unlock()
	if r := s.find(w); r != nil {
		if err := s.clearBroken(r); err != nil {
			return nil, nil, err
		}
	}
	if r, err = s.found(w); r != nil || err != nil {
		return r, nil, err
	}
	if w.TOC == nil {
		return nil, nil, fmt.Errorf("the server sent no TOC of rootfs %s, which is not here", w.Image.ChainID)
	}
	s.TellConflict(w.Registry, w.Named, w.Image)
	if r, made, err = s.layOut(w); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rootfs[r.Key()] = r
	w.Leases.Take(r)
	return r, made, nil
}

func (s *Store) find(w Wanted) *Rootfs {
	return s.Find(w.Registry, w.Named, w.Image.ChainID, w.Image.TOCDigest)
}

// TellConflict tells of an image whose TOC is not the one by which the chain ID is known in the same origin. Both cannot be
// what the image's layers make, unless the server has changed its format. named is the rootfs that the image's
// reference names by now, if any.
func (s *Store) TellConflict(registry string, named origin.Key, img *bundle.Image) {
	for _, r := range s.List() {
		if r.ChainID() == img.ChainID && r.TOC() != img.TOCDigest && (s.mayServe(r, registry) || r.Key() == named) {
			s.log.Warn("conflict: the server describes a rootfs by another TOC than before; each image keeps the one that it was pulled by", "registry", registry,
				"chain", img.ChainID, "toc", img.TOCDigest, "before", r.TOC(), "image", s.opts.Names.Image(r.Key()))
			s.opts.Conflict()
			return
		}
	}
}

// found returns the rootfs of an image that is here, or nil. Called with
// Store.layout held.
func (s *Store) found(w Wanted) (*Rootfs, error) {
	r := s.find(w)
	if r == nil {
		return nil, nil
	}
	s.mu.Lock()
	w.Leases.Take(r) // nobody removes it: Store.layout is held
	for _, id := range r.Arenas() {
		if other := s.ownerLocked(id); other != nil {
			w.Leases.Take(other)
		}
	}
	s.mu.Unlock()
	if f := r.Filler(); f != nil && f != w.By && !f.Claimed() {
		f.Yield() // this one goes on with what it has made
	}
	if r.Claim(w.By) {
		if err := s.Fits(r); err != nil {
			return r, err
		}
	}
	// One that is not mounted is being made, or was kept for its arena only.
	if !r.Mount().Mounted() && r.IsReady() {
		return r, s.mount(r)
	}
	return r, nil
}

// newDir returns the directory for a new rootfs: its key, in hex, with a
// number after a dot while a lender has that name.
func (s *Store) newDir(key origin.Key) string {
	taken := make(map[string]bool)
	for _, r := range s.lenders() {
		taken[r.Dir()] = true
	}
	dir := filepath.Join(s.dir(), key.Encoded())
	for i, first := 2, dir; taken[dir]; i++ {
		dir = fmt.Sprintf("%s.%d", first, i)
	}
	return dir
}

// layOut lays out the arena of a rootfs that is not here yet, and puts it behind the
// gate. A content that another arena holds whole is used in place. Called with
// Store.layout held.
func (s *Store) layOut(w Wanted) (_ *Rootfs, _ Placement, err error) {
	img, t := w.Image, w.TOC
	if name := trusted(t); name != "" {
		return nil, nil, api.Errorf(api.CodeCorrupt, "the server says that a file of rootfs %s has the attribute %s, which no layer gives: its server lies, or is damaged", img.ChainID, name)
	}
	r := rootfs.New(s.each, s.newDir(origin.KeyOf(w.Registry, img.ChainID, img.TOCDigest)))
	rec := rootfs.Record{
		Version: rootfs.RecordVersion,
		Origin:  w.Registry,
		ChainID: img.ChainID,
		TOC:     img.TOCDigest,
		Files:   len(t.Inodes),
		Created: time.Now().UTC(),
		Weak:    w.Weak,
		Made:    w.Made,
	}
	rec.Since = rec.Created
	for i := range t.Contents {
		rec.Contents += t.Contents[i].Size
	}
	// What is there can only be a leftover: nothing refers to it.
	if err := os.RemoveAll(r.Dir()); err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(r.Mountpoint(), 0o700); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			s.discard(r)
		}
	}()
	if err := os.WriteFile(r.Path(rootfs.TOCName), img.TOC, 0o600); err != nil {
		return nil, nil, err
	}
	s.opts.At("toc")

	var place Placement
	place, rec.Arenas = s.place(r.ID(), t, w)
	r.LayOut(rec, w.By)
	have := &Files{TOC: t, Place: place}
	layout, err := r.Layout(have)
	if err != nil {
		return nil, nil, err
	}
	planned, err := s.planMeta(r, have, layout)
	if err != nil {
		return nil, nil, err
	}
	if err := cmp.Or(tooLarge(t, planned.Size()), s.fits(r, r.PendingMeta(planned.Size())+lengths(layout))); err != nil {
		return nil, nil, err
	}
	meta := begin(func() (string, error) {
		defer r.PendingMeta(0)
		return writeMeta(r, planned)
	})
	enc := place.Encode()
	if err := os.WriteFile(r.Path(rootfs.PlacementName), enc, 0o600); err != nil {
		return nil, nil, errors.Join(err, wait(meta))
	}
	if err := contents.Write(r.Path(rootfs.ContentsName), t, layout); err != nil {
		return nil, nil, errors.Join(err, wait(meta))
	}
	list, err := contents.Map(r.Path(rootfs.ContentsName))
	if err != nil {
		return nil, nil, errors.Join(err, wait(meta))
	}
	r.SetLayout(rootfs.Sum(enc), list, meta)
	r.SetLent(t, place)
	if r.Own() < 0 {
		return r, place, nil
	}
	a, err := arena.Create(r.Dir(), layout)
	if err != nil {
		return nil, nil, err
	}
	s.opts.At("arena")
	var o Observer
	if w.Observe != nil {
		o = w.Observe(r)
	}
	// Before anything opens it for reading.
	if err := s.opts.Gate.Guard(r.Name(), a.File(), r.Backing(a, o)); err != nil {
		return nil, nil, err
	}
	s.opts.At("guarded")
	return r, place, nil
}

// trusted returns an attribute of the tree that means something to overlayfs, which would follow it, or "". Layers have
// none, so no tree that is made of layers has.
func trusted(t *toc.TOC) string {
	for _, set := range t.Xattrs {
		for _, x := range set {
			if strings.HasPrefix(x.Name, "trusted.") {
				return x.Name
			}
		}
	}
	return ""
}

// wait waits for what begin has begun, whatever comes of it.
func wait[T any](begun func() (T, error)) error {
	_, _ = begun()
	return nil
}

// begin runs fn in the background; what it returns waits for its results.
func begin[T any](fn func() (T, error)) (wait func() (T, error)) {
	var v T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		v, err = fn()
	}()
	return func() (T, error) {
		<-done
		return v, err
	}
}

// place decides where each content lies: in the first arena that holds it whole, and may lend it, else
// in the rootfs's own, which has an ID. A content of several segments is lent when it was hashed whole: their
// IDs say nothing of the content's. place returns the IDs of the arenas as well, and
// has w.Leases keep them.
func (s *Store) place(own digest.Digest, t *toc.TOC, w Wanted) (place Placement, arenas []digest.Digest) {
	const unplaced = ^uint16(0)
	place = make(Placement, len(t.Contents))
	left := make([]int32, len(t.Contents))
	for i := range place {
		place[i], left[i] = unplaced, int32(i)
	}
	id, size := contents.Of(t)
	lenders := s.mayLend(w)
	if len(lenders) > 0 {
		segment.Sort(left, id)
	}
	for _, other := range lenders {
		if len(left) == 0 || len(arenas) == maxArenas-1 {
			break
		}
		src := other.Contents()
		if src == nil {
			continue
		}
		device, found, hashed := uint16(len(arenas)), false, other.Hashed()
		src.List.Join(left, id, size, func(c int32, off int64, kind contents.Kind) {
			if (kind == contents.Whole || kind == contents.Composed && hashed) && src.Verified(off, t.Contents[c].Size) {
				place[c], found = device, true
			}
		})
		if !found {
			continue
		}
		arenas = append(arenas, other.ID())
		left = slices.DeleteFunc(left, func(c int32) bool { return place[c] != unplaced })
	}
	if len(left) > 0 {
		for _, c := range left {
			place[c] = uint16(len(arenas))
		}
		arenas = append(arenas, own)
	}
	return place, arenas
}

// mayLend returns the rootfs of the same origin whose arenas may be used in place, those first that
// hold the most, and has w.Leases keep them. One that a new daemon would not find
// again lends nothing.
func (s *Store) mayLend(w Wanted) []*Rootfs {
	type lending struct {
		r    *Rootfs
		size int
	}
	var list []lending
	s.mu.Lock()
	for _, r := range append(sorted(s.rootfs), sorted(s.lent)...) {
		if n := r.Lends(); n >= 0 && s.mayServe(r, w.Registry) {
			w.Leases.Take(r)
			list = append(list, lending{r, n})
		}
	}
	s.mu.Unlock()
	slices.SortStableFunc(list, func(a, b lending) int {
		return cmp.Or(cmp.Compare(b.size, a.size), cmp.Compare(a.r.ID(), b.r.ID()))
	})
	rootfs := make([]*Rootfs, len(list))
	for i := range list {
		rootfs[i] = list[i].r
	}
	return rootfs
}

// CopyShared fills r's arena with the segments that other arenas hold inside
// contents that are not the same: what stayed of a large file that changed. The
// server does not send them. It returns how many bytes it copied.
func (s *Store) CopyShared(ctx context.Context, r *Rootfs, from *Leases) (copied int64) {
	a := r.Arena()
	if a == nil {
		return 0
	}
	l := a.Layout()
	absent := make([]int, 0, l.Segments())
	for i := range l.Segments() {
		if s := l.Segment(i); !s.ID.IsHole() && !a.HasSegment(i) {
			absent = append(absent, i)
		}
	}
	others := slices.DeleteFunc(from.List(), func(o *Rootfs) bool { return o == r || !s.mayServe(o, r.Origin()) })
	if len(absent) == 0 || len(others) == 0 {
		return 0
	}
	want, id, length := l.ByID(absent)
	buf := make([]byte, segment.MaxLength)
	for _, other := range others {
		src := other.Contents()
		if src == nil {
			continue
		}
		var err error
		src.List.Join(want, id, length, func(i int32, off int64, _ contents.Kind) {
			s := l.Segment(int(i))
			if err != nil || ctx.Err() != nil || a.HasSegment(int(i)) || !src.Holds(off, int64(s.Length)) {
				return
			}
			if err = src.CopySegment(a, int(i), off, buf); err == nil {
				copied += int64(s.Length)
			}
		})
		if closed := src.Close(); err == nil {
			err = closed
		}
		if err != nil {
			s.log.Warn("copy segments from another arena; what is missing is pulled", "from", other.ChainID(), "to", r.ChainID(), "error", err)
		}
	}
	return copied
}

// clearBroken makes way for a rootfs in the place of one that cannot be served.
// Called with Store.layout held.
func (s *Store) clearBroken(r *Rootfs) error {
	if r.Broken() == nil || !r.IsReady() {
		return nil
	}
	key := r.Key()
	bad := func(format string, args ...any) error {
		return api.Errorf(api.CodeCorrupt, "rootfs %s cannot be served: %w; %s", r.ChainID(), r.Broken(), fmt.Sprintf(format, args...))
	}
	if on := s.opts.Names.ContainersOn(key); len(on) > 0 {
		return bad("remove container %s with `foil rm --force %s` and pull again", on[0], on[0])
	}
	borrowers := s.borrowers(r)
	if len(borrowers) > 0 && (!r.Complete() || r.Contents() == nil) {
		user := s.opts.Names.Image(borrowers[0].Key())
		return bad("image %s uses contents in its arena: remove that with `foil rm %s`, and pull both again", user, user)
	}
	if s.opts.Names.Held(key) {
		return bad("containerd uses it: remove its containers and images there, and pull again")
	}
	if r.Used() {
		return bad("it is in use just now: pull again in a moment")
	}
	if r.Mount().Mounted() {
		if err := s.unmount(r, false); err != nil {
			return bad("and it is in use: %v", err)
		}
	}
	if r.IsOpen() {
		return bad("and a container that the daemon does not know uses it: end it, and pull again")
	}
	switch ok, err := s.becomeLender(s.ctx, r, borrowers); {
	case err != nil:
		return bad("and it cannot be put out of the way: %v", err)
	case !ok:
		return bad("it is in use just now: pull again in a moment")
	}
	if len(borrowers) == 0 {
		s.drop(r)
	}
	return nil
}
