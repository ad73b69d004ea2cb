package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/gate"
)

// lender is what is left of a rootfs that nothing names any more while other
// rootfs use contents in its arena: those contents, and nothing else. It is
// never mounted, and its arena only shrinks. Its directory has:
//
//	lender.json  the record that was rootfs.json. Renaming it is what makes a
//	             rootfs a lender: it takes no room on a full disk, and from then
//	             on the rootfs cannot be mounted
//	kept         what of the arena is kept, as package contents says. Without it:
//	             contents, and nothing was punched yet
//	borrowers    the IDs of the rootfs for which it was punched, one a line. A
//	             cache: without it that is found out again
//	arena        as it was, with holes in it
//
// A block is punched only when no rootfs that can be mounted refers to it, and
// the kernel has no mount of one that cannot, in whatever namespace (see
// inUse). What was kept is made durable before, so that after a crash at any
// instant everything that is listed is here.
type lender struct {
	// exact: contents lists only what is here. A rootfs that was incomplete
	// lists what never arrived until it is punched, and lends nothing new.
	exact bool
	// borrowers are those for which it was punched, sorted; nil: not known.
	borrowers []digest.Digest
	old       []*contents // that somebody may read still
}

const (
	lenderRecord  = "lender.json"
	keptName      = "kept"
	borrowersName = "borrowers"
)

// arenaOf returns the rootfs or lender whose arena has an ID, or nil.
func (n *Node) arenaOf(id digest.Digest) *rootfs {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.arenaLocked(id)
}

// arenaLocked is arenaOf with mu held.
func (n *Node) arenaLocked(id digest.Digest) *rootfs {
	if r := n.lent[id]; r != nil {
		return r
	}
	if r := n.rootfs[id]; r != nil && r.id() == id {
		return r
	}
	for _, r := range n.rootfs {
		if r.id() == id {
			return r
		}
	}
	return nil
}

// inUse reports whether the kernel has the metadata image of a rootfs mounted,
// in whatever namespace, below whatever overlay: a lease for writing is granted
// only on a file that nobody has open. Without an answer it is in use.
func (r *rootfs) inUse() bool { return isOpen(r.path("meta.erofs")) || isOpen(r.path(oldMeta)) }

// oldMeta is a metadata image that was damaged on the disk, and in use, when it
// was written anew.
const oldMeta = "meta.erofs.old"

func isOpen(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err != nil {
		return true
	}
	_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	return false
}

// becomeLender makes a rootfs that nothing names one that cannot be mounted. It
// reports whether it is one now. Called with Node.layout held.
func (n *Node) becomeLender(ctx context.Context, r *rootfs, borrowers []*rootfs) (bool, error) {
	if !r.rec.Complete && len(borrowers) > 0 {
		// What it lends must be found again when nothing but the list says that
		// it is here.
		if r.arena == nil || r.contents == nil {
			return false, nil
		}
		keep, err := r.needed(borrowers)
		if err != nil {
			return false, err
		}
		for _, k := range keep {
			if !r.arena.Present(k.Off, k.Len) {
				return false, fmt.Errorf("rootfs %s lends what is not here any more", r.rec.ChainID)
			}
		}
		if err := r.arena.Sync(ctx); err != nil {
			return false, err
		}
	}
	n.mu.Lock()
	if r.users > 0 || r.mounted || !r.isReady() {
		n.mu.Unlock()
		return false, nil
	}
	// From here on no pull counts on it.
	delete(n.rootfs, r.rec.ChainID)
	r.lender = &lender{exact: r.rec.Complete}
	broken := r.broken
	if r.rec.Complete && r.contents != nil {
		r.broken = nil // whatever it is, it is nothing with its contents
	}
	n.lent[r.id()] = r
	n.mu.Unlock()
	err := os.Rename(r.path("rootfs.json"), r.path(lenderRecord))
	if err == nil {
		err = syncDir(r.dir)
	}
	if errors.Is(err, os.ErrNotExist) {
		err = nil // its record was lost: nobody would find it again
	}
	if err != nil {
		n.mu.Lock()
		delete(n.lent, r.id())
		r.lender, r.broken = nil, broken
		n.rootfs[r.rec.ChainID] = r
		n.mu.Unlock()
		return false, fmt.Errorf("rootfs %s, which nothing names any more: %w", r.rec.ChainID, err)
	}
	n.at("lender")
	return true, nil
}

// needed returns what borrowers use of a lender's arena, in the order of its
// places. No borrower can be removed meanwhile: Node.layout is held.
func (r *rootfs) needed(borrowers []*rootfs) ([]arena.Range, error) {
	var keep []arena.Range
	for _, b := range borrowers {
		have, err := b.read()
		if err != nil {
			return nil, fmt.Errorf("what rootfs %s uses of it is not known: %w", b.rec.ChainID, err)
		}
		t := have.toc
		here := have.place.in(slices.Index(b.rec.Arenas, r.id()))
		id := func(c int32) *segment.ID { return &t.Contents[c].ID }
		segment.Sort(here, id)
		found := 0
		r.contents.join(here, id, func(c int32, off int64, piece bool) {
			if !piece {
				found++
				keep = append(keep, arena.Range{Off: off, Len: t.Contents[c].Size})
			}
		})
		if found != len(here) {
			return nil, fmt.Errorf("it holds %d of %d contents that rootfs %s uses", found, len(here), b.rec.ChainID)
		}
	}
	slices.SortFunc(keep, func(a, b arena.Range) int { return int(min(max(a.Off-b.Off, -1), 1)) })
	return slices.Compact(keep), nil
}

// shrink takes from a lender's arena what none of its borrowers needs, unless
// that was done for them before. It returns the bytes that it freed. Called with
// Node.layout held.
func (n *Node) shrink(r *rootfs, borrowers []*rootfs) (freed int64, err error) {
	ids := make([]digest.Digest, len(borrowers))
	for i, b := range borrowers {
		ids[i] = b.id()
	}
	slices.Sort(ids)
	n.mu.Lock()
	busy, done := r.users > 0, r.shrunkFor(ids)
	n.mu.Unlock()
	if busy || done || r.contents == nil || r.inUse() {
		return 0, nil
	}
	keep, err := r.needed(borrowers)
	if err != nil {
		return 0, err
	}
	before, _ := usage(r.dir)
	if r.arena != nil {
		// Nobody waits for what it lacks: it is not mounted.
		if err := n.gate.Release(r.name()); err != nil {
			return 0, err
		}
		n.mu.Lock()
		r.retired, r.arena, r.present = r.arena, nil, nil
		if r.users == 0 {
			r.closeRetired()
		}
		n.mu.Unlock()
	}
	if r.kept != nil {
		return 0, errors.New("it may be behind the gate still")
	}
	// Derived, or of use for a mount only. They make room for the list.
	for _, name := range []string{"meta.erofs", "meta.erofs.new", oldMeta, "toc", "placement", gatedName, readAheadName, bdiName, borrowersName} {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
	}
	if err := os.Remove(r.path("mnt")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	kept, err := r.contents.only(keep)
	if err != nil {
		return 0, err
	}
	if err := writeFileAtomic(r.path(keptName), kept); err != nil {
		return 0, err
	}
	n.at("kept")
	list, err := openContents(r.path(keptName))
	if err != nil {
		return 0, err
	}
	n.mu.Lock()
	r.lender.old = append(r.lender.old, r.contents)
	r.contents, r.lender.exact = list, true
	if r.users == 0 {
		r.closeRetired()
	}
	n.mu.Unlock()
	if err := os.Remove(r.path("contents")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	if _, err := arena.Punch(r.dir, keep); err != nil {
		return 0, err
	}
	n.at("punched")
	n.mu.Lock()
	r.lender.borrowers = ids
	n.mu.Unlock()
	var lines bytes.Buffer
	for _, id := range ids {
		fmt.Fprintln(&lines, id)
	}
	if err := writeFileAtomic(r.path(borrowersName), lines.Bytes()); err != nil {
		n.log.Debug("note for whom an arena was punched", "rootfs", r.rec.ChainID, "error", err)
	}
	after, _ := usage(r.dir)
	return max(0, before-after), nil
}

// shrunkFor reports whether a lender has nothing that borrowers, sorted, do not
// need: nobody for whom it was punched has gone. Who came later uses only what
// was left. Called with Node.mu held.
func (r *rootfs) shrunkFor(borrowers []digest.Digest) bool {
	if r.lender.borrowers == nil {
		return false
	}
	for _, id := range r.lender.borrowers {
		if _, ok := slices.BinarySearch(borrowers, id); !ok {
			return false
		}
	}
	return true
}

// loadLender reads a lender's directory.
func (r *rootfs) loadLender() error {
	r.lender = &lender{exact: true}
	if err := r.readRecord(lenderRecord); err != nil {
		return err
	}
	var err error
	if r.contents, err = openContents(r.path(keptName)); errors.Is(err, os.ErrNotExist) {
		r.lender.exact = r.rec.Complete
		r.contents, err = openContents(r.path("contents"))
	}
	if err != nil {
		return err
	}
	b, err := os.ReadFile(r.path(borrowersName))
	if err != nil {
		return nil // it is found out again
	}
	ids := []digest.Digest{}
	for _, line := range strings.Fields(string(b)) {
		id, err := digest.Parse(line)
		if err != nil {
			return nil
		}
		ids = append(ids, id)
	}
	if slices.IsSorted(ids) {
		r.lender.borrowers = ids
	}
	return nil
}

// close lets go of a lender's files; the node is closing.
func (r *rootfs) close() {
	if r.arena != nil {
		_ = r.arena.Close()
		r.arena = nil
	}
	r.closeRetired()
	if r.kept != nil {
		_ = r.kept.Close()
		r.kept = nil
	}
	r.contents.close()
}

// dropKept takes an arena's descriptor from the keeper that no gate needs.
func (n *Node) dropKept(r *rootfs) {
	if r.kept == nil {
		return
	}
	if err := n.holders().Drop(n.ctx, gate.KeptArena+r.name()); err != nil {
		n.log.Warn("take a descriptor from the keeper", "rootfs", r.rec.ChainID, "error", err)
	}
	_ = r.kept.Close()
	r.kept = nil
}

// usage returns what the files of a directory take on the disk, bytes, and how
// many there are. What is mounted in it does not count.
func usage(dir string) (size, inodes int64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0
	}
	for _, e := range entries {
		var st unix.Stat_t
		if e.Type().IsRegular() && unix.Stat(filepath.Join(dir, e.Name()), &st) == nil {
			size += st.Blocks * 512
			inodes++
		}
	}
	return size, inodes
}
