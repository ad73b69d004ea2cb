package node

import (
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
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/erofs"
)

// rootfs is one flattened filesystem on the worker, in a directory of its own,
// <root>/rootfs/<hex of its chain ID>:
//
//	rootfs.json  its record; written last: a directory without one is a
//	             leftover of a crash, and is removed
//	toc          the TOC as the server sent it
//	placement    for each content the arena it lies in
//	contents     what its own arena holds, sorted (derived)
//	meta.erofs   the metadata image (derived)
//	arena, presence, durable
//	             package arena
//	mnt          where it is mounted, once for all containers
type rootfs struct {
	dir string
	rec rootfsRecord

	// The rest is guarded by Node.mu.
	arena    *arena.Arena  // its own, open while it is incomplete
	present  func() []byte // while incomplete: bundle.Have.Present of it
	contents *contents
	mounted  bool
	filling  *pull // that fills it now
	users    int   // pulls that use its arena; it is not removed while there are any
	broken   error // why nothing may be served from it
}

// rootfsRecord is rootfs.json.
type rootfsRecord struct {
	Version int           `json:"version"`
	ChainID digest.Digest `json:"chain_id"`
	TOC     digest.Digest `json:"toc"` // of the file toc
	// Arenas are the chain IDs of the rootfs whose arenas hold its contents, in
	// the order of the EROFS devices. Its own is among them unless it is empty.
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

func (r *rootfs) path(name string) string { return filepath.Join(r.dir, name) }

func (n *Node) rootfsDir(chain digest.Digest) string {
	return filepath.Join(n.opts.Root, "rootfs", chain.Encoded())
}

// placement says for every content of a TOC which arena holds it: an index into
// rootfsRecord.Arenas. On disk: 2 bytes a content, little-endian.
type placement []uint16

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

// own returns the index of the rootfs's own arena, or -1.
func (r *rootfsRecord) own() int {
	for i, c := range r.Arenas {
		if c == r.ChainID {
			return i
		}
	}
	return -1
}

func (r *rootfs) save() error {
	b, err := json.MarshalIndent(r.rec, "", "\t")
	if err != nil {
		return err
	}
	return writeFileAtomic(r.path("rootfs.json"), b)
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// createRootfs lays out the arena of a rootfs that is not here yet, and puts it
// behind the gate. From then on frames can be written to it. mountRootfs does
// the rest. encoded is the TOC as it came.
//
// A content that another arena holds whole is used in place.
func (n *Node) createRootfs(chain digest.Digest, encoded []byte, t *toc.TOC, p *pull) (_ *rootfs, _ placement, err error) {
	r := &rootfs{dir: n.rootfsDir(chain), filling: p}
	r.rec = rootfsRecord{
		Version: rootfsVersion,
		ChainID: chain,
		TOC:     digest.FromBytes(encoded),
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
	if err := os.WriteFile(r.path("toc"), encoded, 0o600); err != nil {
		return nil, nil, err
	}

	place := n.place(r, t, p)
	own := r.rec.own()
	layout, err := arena.NewLayout(t, func(c int) bool { return own >= 0 && int(place[c]) == own })
	if err != nil {
		return nil, nil, err
	}
	enc := place.encode()
	r.rec.Placement = sum(enc)
	if err := os.WriteFile(r.path("placement"), enc, 0o600); err != nil {
		return nil, nil, err
	}
	if err := writeContents(r.path("contents"), t, layout); err != nil {
		return nil, nil, err
	}
	if r.contents, err = openContents(r.path("contents")); err != nil {
		return nil, nil, err
	}
	r.setPresence(t, place)
	if own < 0 {
		return r, place, nil
	}
	if r.arena, err = arena.Create(r.dir, layout); err != nil {
		return nil, nil, err
	}
	// Before anything opens it for reading.
	if err := n.gate.Guard(r.name(), r.arena.File(), &backing{n: n, r: r, arena: r.arena}); err != nil {
		return nil, nil, err
	}
	return r, place, nil
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
	sortByID(left, id)
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, other := range n.rootfs {
		if len(left) == 0 || len(r.rec.Arenas) == maxArenas {
			break
		}
		if other.contents == nil || other.broken != nil {
			continue
		}
		device, found := uint16(len(r.rec.Arenas)), false
		other.contents.join(left, id, func(c int32, off int64, piece bool) {
			if !piece && other.holds(off, t.Contents[c].Size) {
				place[c], found = device, true
			}
		})
		if !found {
			continue
		}
		r.rec.Arenas = append(r.rec.Arenas, other.rec.ChainID)
		p.use(other)
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
		r.rec.Arenas = append(r.rec.Arenas, r.rec.ChainID)
		for _, c := range left {
			place[c] = own
		}
	}
	return place
}

// maxArenas bounds the devices of one mount. The format allows 65,535; each
// costs the mount an open file.
const maxArenas = 1000

// holds reports whether [off, off+size) of the rootfs's own arena is here.
// Called with Node.mu held.
func (r *rootfs) holds(off, size int64) bool {
	if r.rec.Complete {
		return true
	}
	return r.arena != nil && r.arena.Present(off, size)
}

// name is what gate and keeper know the arena by.
func (r *rootfs) name() string { return r.rec.ChainID.Encoded() }

// mountRootfs writes the metadata image of a rootfs and mounts it. After it the
// rootfs is committed: a new daemon goes on with it.
func (n *Node) mountRootfs(r *rootfs, t *toc.TOC, place placement) error {
	meta, err := n.writeMeta(r, t, place)
	if err != nil {
		return fmt.Errorf("metadata image of rootfs %s: %w", r.rec.ChainID, err)
	}
	r.rec.Meta = meta
	if err := r.save(); err != nil {
		return err
	}
	return n.mount(r)
}

// mount mounts what is on the disk.
func (n *Node) mount(r *rootfs) error {
	devices := make([]string, len(r.rec.Arenas))
	for i, c := range r.rec.Arenas {
		devices[i] = filepath.Join(n.rootfsDir(c), "arena")
	}
	if err := kernel.MountErofs(kernel.Erofs{Image: r.path("meta.erofs"), Devices: devices, Target: r.path("mnt")}); err != nil {
		return fmt.Errorf("mount rootfs %s: %w; `foil doctor` says what this host lacks", r.rec.ChainID, err)
	}
	n.mu.Lock()
	r.mounted = true
	n.mu.Unlock()
	return nil
}

// writeMeta writes meta.erofs and returns its SHA-256. The file is derived: it
// need not be durable, its digest is compared before it is believed.
func (n *Node) writeMeta(r *rootfs, t *toc.TOC, place placement) (string, error) {
	offsets := make([]int64, len(t.Contents))
	opts := erofs.Options{}
	for i, c := range r.rec.Arenas {
		other := r
		if c != r.rec.ChainID {
			n.mu.Lock()
			other = n.rootfs[c]
			n.mu.Unlock()
		}
		if other == nil || other.contents == nil {
			return "", fmt.Errorf("the arena of rootfs %s, which holds some of its contents, is gone: pull the image again", c)
		}
		fi, err := os.Stat(other.path("arena"))
		if err != nil {
			return "", err
		}
		opts.Devices = append(opts.Devices, erofs.Device{Blocks: uint32(fi.Size() / arena.BlockSize)})
		here := make([]int32, 0, len(t.Contents))
		for k, d := range place {
			if int(d) == i {
				here = append(here, int32(k))
			}
		}
		id := func(c int32) *segment.ID { return &t.Contents[c].ID }
		sortByID(here, id)
		found := 0
		other.contents.join(here, id, func(c int32, off int64, piece bool) {
			if !piece {
				offsets[c] = off
				found++
			}
		})
		if found != len(here) {
			return "", fmt.Errorf("the arena of rootfs %s holds %d of the %d contents placed in it: pull the image again", c, found, len(here))
		}
	}
	opts.Place = func(c int) erofs.Extent {
		return erofs.Extent{Device: int(place[c]), Block: uint32(offsets[c] / arena.BlockSize)}
	}
	f, err := os.Create(r.path("meta.erofs"))
	if err != nil {
		return "", err
	}
	h := sha256.New()
	err = erofs.Write(io.MultiWriter(f, h), t, opts)
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// discard removes a rootfs that came to nothing.
func (n *Node) discard(r *rootfs) {
	if r.arena != nil {
		if err := n.gate.Release(r.name()); err != nil {
			n.log.Debug("release a discarded arena", "rootfs", r.rec.ChainID, "error", err)
		}
		_ = r.arena.Close()
		r.arena = nil
	}
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
}

func (b *backing) Present(off, n int64) bool { return b.arena.Present(off, n) }

func (b *backing) Need(ctx context.Context, off, n int64) error {
	b.n.mu.Lock()
	p := b.r.filling
	b.n.mu.Unlock()
	if p != nil {
		p.mu.Lock()
		f := p.fetch
		p.mu.Unlock()
		if f != nil {
			return f.Need(ctx, b.arena, off, n)
		}
	}
	return b.arena.Wait(ctx, off, n)
}

// complete answers for an arena that has everything.
type complete struct{}

func (complete) Present(off, n int64) bool                    { return true }
func (complete) Need(ctx context.Context, off, n int64) error { return nil }
