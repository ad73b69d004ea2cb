package node

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/erofs"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// rootfs is one flattened filesystem on the worker, in a directory of its own,
// <root>/rootfs/<hex of its chain ID>:
//
//	rootfs.json  its record; written last: a directory without one is a
//	             leftover of a crash, and is removed
//	toc          the TOC as the server sent it
//	placement    for each content the arena it lies in
//	contents     what its own arena holds, sorted (derived)
//	meta.erofs   the metadata image (derived); meta.erofs.old: see lender.go
//	arena, presence, durable
//	             package arena
//	gated        there while it is mounted by way of a FUSE gate: see gated.go
//	readahead    there while its mount has no read-ahead: see readahead.go
//	bdi          where the read-ahead of its mount is set
//	mnt          where it is mounted, once for all containers
//
// A rootfs that nothing names, but for others that use contents in its arena,
// becomes a lender: see lender.go.
type rootfs struct {
	dir string
	rec rootfsRecord

	// contents lists what its own arena holds; nil when that is not known. It is
	// not written to before the rootfs is discarded.
	contents *contents
	// lender is what it is when it is one, and nil before.
	lender *lender
	// kept is the descriptor of an arena that could not be opened again but may
	// be marked still: no other one can be read.
	kept *os.File
	// ready is closed when the mount that made it has ended, well or not.
	ready chan struct{}
	// meta waits until the metadata image has been written that createRootfs began, and
	// returns its SHA-256; nil for a rootfs that was found on the disk.
	meta func() (string, error)

	// The rest, and rec.Complete, is guarded by Node.mu.
	arena     *arena.Arena  // its own, open while it is incomplete
	retired   *arena.Arena  // the same after that, while somebody may read it
	present   func() []byte // while incomplete: bundle.Have.Present of it
	committed bool          // its record is on the disk: a new daemon will know it
	mounted   bool
	gated     bool  // its mount reads by files of the gate: see gated.go
	direct    bool  // its mount reads past the page cache of arenas: see direct.go
	starting  bool  // its mount is to be made without read-ahead: see readahead.go
	filling   *pull // that fills it now
	waiting   map[*waiter]struct{}
	// readAheadFile sets the read-ahead of its mount, if it can be set; starts are
	// those of services that have joined, for which it has none.
	readAheadFile string
	starts        int

	// learning notices what the first container on it reads; nil: nothing does.
	learning *learner
	users    int   // pulls and others that use it; it is not removed while there are any
	broken   error // why nothing may be served from it

	warmUntil time.Time // when its mount may become direct
}

// isReady reports whether nobody is making its first mount.
func (r *rootfs) isReady() bool {
	select {
	case <-r.ready:
		return true
	default:
		return false
	}
}

// letGo ends what made users grow. Called with Node.mu held.
func (r *rootfs) letGo() {
	if r.users--; r.users == 0 {
		r.closeRetired()
	}
}

// closeRetired closes what was kept open for those that used the rootfs: the
// arena of a complete one, lists that were replaced. Called with Node.mu held.
func (r *rootfs) closeRetired() {
	if r.lender != nil {
		for _, c := range r.lender.old {
			c.close()
		}
		r.lender.old = nil
	}
	if r.retired != nil {
		_ = r.retired.Close()
		r.retired = nil
	}
}

// holder returns what tells whether [off, off+size) of the rootfs's own arena is
// here. Called with Node.mu held; it may be used while the rootfs is.
func (r *rootfs) holder() func(off, size int64) bool {
	switch {
	case r.rec.Complete || r.lender != nil:
		return func(int64, int64) bool { return true }
	case r.arena != nil:
		return r.arena.Present
	}
	return func(int64, int64) bool { return false }
}

// reader returns what reads the rootfs's own arena: one behind the gate through
// the descriptor that the gate leaves alone, which stays open while the rootfs
// is used; a complete one as any file is read. Called with Node.mu held.
func (r *rootfs) reader() *arenaReader {
	a := r.arena
	if a == nil {
		a = r.retired
	}
	if a != nil {
		return &arenaReader{file: a.File()}
	}
	return &arenaReader{path: r.path("arena")}
}

// arenaReader opens its file at the first read.
type arenaReader struct {
	path string   // empty: file is the arena's own
	file *os.File // nil until it is open
}

func (a *arenaReader) open() (f *os.File, err error) {
	if a.file == nil {
		if f, err = os.Open(a.path); err != nil {
			return nil, err
		}
		a.file = f
	}
	return a.file, nil
}

func (a *arenaReader) ReadAt(b []byte, off int64) (int, error) {
	f, err := a.open()
	if err != nil {
		return 0, err
	}
	return f.ReadAt(b, off)
}

func (a *arenaReader) Close() error {
	if a.file == nil || a.path == "" {
		return nil
	}
	return a.file.Close()
}

// rootfsRecord is rootfs.json.
type rootfsRecord struct {
	Version int           `json:"version"`
	ChainID digest.Digest `json:"chain_id"`
	TOC     digest.Digest `json:"toc"` // of the file toc
	// Arenas are the IDs of the rootfs whose arenas hold its contents, in the
	// order of the EROFS devices. Its own is among them unless it is empty.
	Arenas []digest.Digest `json:"arenas"`
	// Placement is the SHA-256 of the file placement.
	Placement string `json:"placement"`
	// Meta is the SHA-256 of meta.erofs.
	Meta     string    `json:"meta"`
	Files    int       `json:"files"`
	Contents int64     `json:"contents"` // bytes
	Complete bool      `json:"complete"` // all of its own arena is here, and durable
	Created  time.Time `json:"created"`
}

const rootfsVersion = 1

// id names the rootfs's arena, for the gate, the keeper and other rootfs: its
// chain ID, or that of its directory's name while there is a lender that was a
// rootfs of the same chain ID.
func (r *rootfs) id() digest.Digest {
	name := filepath.Base(r.dir)
	if hex, _, again := strings.Cut(name, "."); !again {
		return digest.NewDigestFromEncoded(digest.SHA256, hex)
	}
	return digest.FromString(name)
}

func (r *rootfs) path(name string) string { return filepath.Join(r.dir, name) }

// newDir returns the directory for a new rootfs: its chain ID, in hex, with a
// number after a dot while a lender has that name.
func (n *Node) newDir(chain digest.Digest) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	taken := make(map[string]bool)
	for _, r := range n.lent {
		taken[r.dir] = true
	}
	dir := filepath.Join(n.opts.Root, "rootfs", chain.Encoded())
	for i, first := 2, dir; taken[dir]; i++ {
		dir = fmt.Sprintf("%s.%d", first, i)
	}
	return dir
}

// placement says for every content of a TOC which arena holds it: an index into
// rootfsRecord.Arenas. On disk: 2 bytes a content, little-endian.
type placement []uint16

// in lists the contents in one arena.
func (p placement) in(arena int) []int32 {
	var list []int32
	for c, d := range p {
		if int(d) == arena {
			list = append(list, int32(c))
		}
	}
	return list
}

func (p placement) encode() []byte {
	b := make([]byte, 0, 2*len(p))
	for _, d := range p {
		b = binary.LittleEndian.AppendUint16(b, d)
	}
	return b
}

func decodePlacement(b []byte, t *toc.TOC, arenas int) (placement, error) {
	if len(b) != 2*len(t.Contents) {
		return nil, fmt.Errorf("placement of %d bytes for %d contents", len(b), len(t.Contents))
	}
	p := make(placement, len(t.Contents))
	for i := range p {
		p[i] = binary.LittleEndian.Uint16(b[2*i:])
		if int(p[i]) >= arenas {
			return nil, fmt.Errorf("placement of content %d in arena %d of %d", i, p[i], arenas)
		}
	}
	return p, nil
}

// own returns the index in rec.Arenas of the rootfs's own arena, or -1.
func (r *rootfs) own() int { return slices.Index(r.rec.Arenas, r.id()) }

// save replaces the record on the disk, by writeFileAtomic or replaceFile.
func (r *rootfs) save(rec *rootfsRecord, write func(path string, data []byte) error) error {
	b, err := json.MarshalIndent(rec, "", "\t")
	if err != nil {
		return err
	}
	return write(r.path("rootfs.json"), b)
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// createRootfs lays out the arena of a rootfs that is not here yet, and puts it
// behind the gate. From then on frames can be written to it. mountRootfs does
// the rest. t is the TOC that came with img.
//
// A content that another arena holds whole is used in place. Called with
// Node.layout held.
func (n *Node) createRootfs(img *bundle.Image, t *toc.TOC, p *pull) (_ *rootfs, _ placement, err error) {
	r := &rootfs{dir: n.newDir(img.ChainID), filling: p, starting: p.wantsStartup(), ready: make(chan struct{})}
	r.rec = rootfsRecord{
		Version: rootfsVersion,
		ChainID: img.ChainID,
		TOC:     img.TOCDigest,
		Files:   len(t.Inodes),
		Created: time.Now().UTC(),
	}
	for i := range t.Contents {
		r.rec.Contents += t.Contents[i].Size
	}
	// What is there can only be a leftover: nothing refers to it.
	if err := os.RemoveAll(r.dir); err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(r.path("mnt"), 0o700); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			n.discard(r)
		}
	}()
	if err := os.WriteFile(r.path("toc"), img.TOC, 0o600); err != nil {
		return nil, nil, err
	}
	n.at("toc")

	place := n.place(r, t, p)
	own := r.own()
	layout, err := arena.NewLayout(t, func(c int) bool { return own >= 0 && int(place[c]) == own })
	if err != nil {
		return nil, nil, err
	}
	r.meta = begin(func() (string, error) { return n.writeMeta(r, t, place, layout) })
	enc := place.encode()
	r.rec.Placement = sum(enc)
	if err := os.WriteFile(r.path("placement"), enc, 0o600); err != nil {
		return nil, nil, err
	}
	if err := writeContents(r.path("contents"), t, layout); err != nil {
		return nil, nil, err
	}
	if r.contents, err = mapContents(r.path("contents")); err != nil {
		return nil, nil, err
	}
	r.setPresence(t, place)
	if own < 0 {
		return r, place, nil
	}
	if r.arena, err = arena.Create(r.dir, layout); err != nil {
		return nil, nil, err
	}
	n.at("arena")
	// Before anything opens it for reading.
	if err := n.gate.Guard(r.name(), r.arena.File(), &backing{n: n, r: r, arena: r.arena, learn: n.learn(r, p)}); err != nil {
		return nil, nil, err
	}
	n.at("guarded")
	return r, place, nil
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

// place decides where each content lies: in the first arena that holds it
// whole, else in the rootfs's own. It fills rec.Arenas, and marks the arenas
// used for p.
func (n *Node) place(r *rootfs, t *toc.TOC, p *pull) placement {
	const unplaced = ^uint16(0)
	place := make(placement, len(t.Contents))
	left := make([]int32, len(t.Contents))
	for i := range place {
		place[i], left[i] = unplaced, int32(i)
	}
	id := func(c int32) *segment.ID { return &t.Contents[c].ID }
	lenders := n.lenders(p)
	if len(lenders) > 0 {
		segment.Sort(left, id)
	}
	for _, other := range lenders {
		if len(left) == 0 || len(r.rec.Arenas) == maxArenas-1 {
			break
		}
		n.mu.Lock()
		holds := other.holder()
		n.mu.Unlock()
		device, found := uint16(len(r.rec.Arenas)), false
		other.contents.join(left, id, func(c int32, off int64, piece bool) {
			if !piece && holds(off, t.Contents[c].Size) {
				place[c], found = device, true
			}
		})
		if !found {
			continue
		}
		r.rec.Arenas = append(r.rec.Arenas, other.id())
		rest := left[:0]
		for _, c := range left {
			if place[c] == unplaced {
				rest = append(rest, c)
			}
		}
		left = rest
	}
	if len(left) > 0 {
		own := uint16(len(r.rec.Arenas))
		r.rec.Arenas = append(r.rec.Arenas, r.id())
		for _, c := range left {
			place[c] = own
		}
	}
	return place
}

// lenders returns the rootfs whose arenas p may use in place, those first that
// hold the most, and keeps them for it. One that a new daemon would not find
// again lends nothing.
func (n *Node) lenders(p *pull) []*rootfs {
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []*rootfs
	for _, r := range n.rootfs {
		if r.contents != nil && r.broken == nil && r.committed {
			list = append(list, r)
		}
	}
	for _, r := range n.lent {
		if r.contents != nil && r.broken == nil && r.lender.exact {
			list = append(list, r)
		}
	}
	for _, r := range list {
		p.use(r)
	}
	slices.SortFunc(list, func(a, b *rootfs) int {
		if c := cmp.Compare(b.contents.len(), a.contents.len()); c != 0 {
			return c
		}
		return cmp.Compare(a.id(), b.id())
	})
	return list
}

// maxArenas bounds the devices of one mount. The format allows 65,535; each
// costs the mount an open file.
const maxArenas = 1000

// name is what gate and keeper know the arena by.
func (r *rootfs) name() string { return r.id().Encoded() }

// mountRootfs mounts a rootfs that createRootfs made. After it the rootfs is committed: a
// new daemon goes on with it.
func (n *Node) mountRootfs(r *rootfs) error {
	meta, err := r.meta()
	if err != nil {
		return fmt.Errorf("metadata image of rootfs %s: %w", r.rec.ChainID, err)
	}
	r.rec.Meta = meta
	n.at("meta")
	// Not durable, and neither is what it describes: a rootfs that a power cut takes
	// so early is pulled again. finish, and that of one that uses contents of it, sync it.
	if err := r.save(&r.rec, replaceFile); err != nil {
		return err
	}
	n.at("saved")
	n.mu.Lock()
	r.committed = true
	n.mu.Unlock()
	return n.mount(r)
}

// unmount takes the mount of a rootfs away, unless somebody uses it.
func (n *Node) unmount(r *rootfs) error {
	if err := kernel.Unmount(r.path("mnt"), false); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // EINVAL: not mounted
		return err
	}
	n.mu.Lock()
	r.mounted = false
	n.mu.Unlock()
	return nil
}

// mount mounts what is on the disk.
func (n *Node) mount(r *rootfs) error {
	devices, gated := n.devices(r)
	if err := r.setGated(gated); err != nil {
		return err
	}
	if err := n.mountErofs(r, devices, false); err != nil {
		return mountError(fmt.Errorf("mount rootfs %s: %w", r.rec.ChainID, err))
	}
	n.mu.Lock()
	r.mounted, r.gated, r.direct = true, gated, false
	n.mu.Unlock()
	n.readArenasDirectly(r)
	return nil
}

// writeMeta writes meta.erofs and returns its SHA-256. The file is derived: it
// need not be durable, its digest is compared before it is believed. It replaces
// what is there, which an old mount may go on using. layout is that of the rootfs's own
// arena while that is made; nil: it is there.
func (n *Node) writeMeta(r *rootfs, t *toc.TOC, place placement, layout *arena.Layout) (string, error) {
	opts := erofs.Options{}
	offsets, err := n.offsets(r, t, place, layout, func(_ int, other *rootfs) error {
		if other == r && layout != nil {
			opts.Devices = append(opts.Devices, erofs.Device{Blocks: uint32(layout.Blocks())})
			return nil
		}
		fi, err := os.Stat(other.path("arena"))
		if err != nil {
			return err
		}
		opts.Devices = append(opts.Devices, erofs.Device{Blocks: uint32(fi.Size() / arena.BlockSize)})
		return nil
	})
	if err != nil {
		return "", err
	}
	opts.Place = func(c int) erofs.Extent {
		return erofs.Extent{Device: int(place[c]), Block: uint32(offsets[c] / arena.BlockSize)}
	}
	f, err := os.Create(r.path("meta.erofs.new"))
	if err != nil {
		return "", err
	}
	h := sha256.New()
	err = erofs.Write(io.MultiWriter(f, h), t, opts)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	if isOpen(r.path("meta.erofs")) {
		// An old mount lives on somewhere: what it refers to stays (see inUse).
		if err := os.Rename(r.path("meta.erofs"), r.path(oldMeta)); err != nil {
			return "", err
		}
	}
	if err := os.Rename(f.Name(), r.path("meta.erofs")); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// offsets returns where each content of a rootfs lies in the arena in which it
// is placed. visit is called for each arena, in their order, with whose it is. layout is
// as for writeMeta.
func (n *Node) offsets(r *rootfs, t *toc.TOC, place placement, layout *arena.Layout, visit func(i int, other *rootfs) error) ([]int64, error) {
	offsets := make([]int64, len(t.Contents))
	for i, c := range r.rec.Arenas {
		other := r
		if c != r.id() {
			other = n.arenaOf(c)
		}
		made := other == r && layout != nil
		if other == nil || !made && other.contents == nil {
			return nil, fmt.Errorf("the arena of rootfs %s, which holds some of its contents, is gone: pull the image again", c)
		}
		if err := visit(i, other); err != nil {
			return nil, err
		}
		here := place.in(i)
		own := layout
		if other == r && own == nil {
			n.mu.Lock()
			if r.arena != nil {
				own = r.arena.Layout()
			}
			n.mu.Unlock()
		}
		if other == r && own != nil {
			for _, c := range here {
				off, ok := own.Offset(int(c))
				if !ok {
					return nil, fmt.Errorf("the arena of rootfs %s has no place for content %d", r.rec.ChainID, c)
				}
				offsets[c] = off
			}
			continue
		}
		id := func(c int32) *segment.ID { return &t.Contents[c].ID }
		segment.Sort(here, id)
		found := 0
		other.contents.join(here, id, func(c int32, off int64, piece bool) {
			if !piece {
				offsets[c] = off
				found++
			}
		})
		if found != len(here) {
			return nil, fmt.Errorf("the arena of rootfs %s holds %d of the %d contents placed in it: pull the image again", c, found, len(here))
		}
	}
	return offsets, nil
}

// discard removes a rootfs that came to nothing: it is not mounted, nothing
// refers to it, and it is in no map. Called with Node.layout held.
func (n *Node) discard(r *rootfs) {
	// The record first: what a crash leaves is a leftover.
	for _, name := range []string{"rootfs.json", lenderRecord} {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			n.log.Warn("remove what is left of a rootfs", "rootfs", r.rec.ChainID, "error", err)
		}
	}
	n.at("discarding")
	if r.meta != nil {
		_, _ = r.meta() // it writes into the directory
	}
	r.learning.stop()
	if r.arena != nil {
		if err := n.gate.Release(r.name()); err != nil {
			n.log.Debug("release a discarded arena", "rootfs", r.rec.ChainID, "error", err)
		}
		_ = r.arena.Close()
		r.arena = nil
	}
	n.dropKept(r)
	r.closeRetired()
	r.contents.close()
	if err := os.RemoveAll(r.dir); err != nil {
		n.log.Warn("remove what is left of a rootfs", "rootfs", r.rec.ChainID, "error", err)
	}
}

// backing answers the gate for one arena: from its presence map, and through
// the pull that fills it now. Without one, a read waits for the next pull.
type backing struct {
	n     *Node
	r     *rootfs
	arena *arena.Arena
	learn *learner // nil: nobody wants to know what is read
}

// Present is asked once for each read that meets the gate.
func (b *backing) Present(off, n int64) bool {
	needed := b.arena.Touch(off, n)
	present := b.arena.Present(off, n)
	if b.learn != nil && needed {
		b.learn.read(off, n, !present)
	}
	return present
}

func (b *backing) Need(ctx context.Context, off, n int64) error {
	begin := time.Now()
	defer func() { b.n.metrics.wait.Observe(time.Since(begin).Seconds()) }()
	for {
		if err := b.need(ctx, off, n); !errors.Is(err, fetch.ErrAnother) {
			return err
		}
	}
}

// waiter is a read that waits.
type waiter struct {
	by   *fetch.Pull // that brings what it needs; nil: none does yet
	stop context.CancelCauseFunc
}

// need waits by the fetch that fills the rootfs now, or by none. It returns
// fetch.ErrAnother, wrapped, when there is another one.
func (b *backing) need(ctx context.Context, off, n int64) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	w := &waiter{stop: stop}
	b.n.mu.Lock()
	p := b.r.filling
	if p != nil {
		p.mu.Lock()
		w.by = p.fetch
		p.mu.Unlock()
	}
	if b.r.waiting == nil {
		b.r.waiting = make(map[*waiter]struct{})
	}
	b.r.waiting[w] = struct{}{}
	b.n.mu.Unlock()
	defer func() {
		b.n.mu.Lock()
		delete(b.r.waiting, w)
		b.n.mu.Unlock()
	}()
	if w.by != nil {
		return w.by.Need(ctx, b.arena, off, n)
	}
	if p == nil {
		b.n.wanted(b.r)
	}
	return b.arena.Wait(ctx, off, n)
}

// complete answers for an arena that has everything.
type complete struct{}

func (complete) Present(off, n int64) bool                    { return true }
func (complete) Need(ctx context.Context, off, n int64) error { return nil }
