package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/gate"
)

// restore finds again what an earlier daemon left, in this order, because each
// step relies on the one before:
//
//  1. Records of rootfs. A directory without one is a leftover of a crash.
//  2. Arenas that are incomplete: through the descriptor that the keeper holds,
//     where there is one, since a new one would wait for itself. Each goes
//     behind the gate.
//  3. Mounts. Those that are there stay: containers use them. Those over
//     incomplete arenas whose gate was lost (daemon and keeper died together)
//     are taken away and made anew (invariant 3), and reported: what ran on
//     them may have read zeros. After a reboot none is there and all are made.
//  4. The gate answers again.
//  5. Pulls go on, by digest: a tag may have moved.
//
// A rootfs that cannot be restored harms only itself.
func (n *Node) restore(held map[string]*os.File) error {
	mounts, err := kernel.Mounts(n.opts.Root)
	if err != nil {
		return err
	}
	mounted := make(map[string]bool)
	for _, m := range mounts {
		mounted[m.Target] = true
	}
	if err := n.loadRootfs(mounted); err != nil {
		return err
	}
	lost := make(map[digest.Digest]bool)
	read := make(map[digest.Digest]*restored)
	for chain, r := range n.rootfs {
		if r.rec.Complete {
			n.releaseLeft(r, held)
			if r.gated && n.gateLost && r.broken == nil {
				lost[chain] = true
			}
			continue
		}
		if r.broken == nil {
			if err := n.reopen(r, held, read); err != nil {
				r.broken = err
				n.Warn("rootfs %s cannot be restored: %v", chain, err)
			}
		}
		if r.broken != nil && !r.mounted {
			// Nobody reads what is absent from it, but others may have contents
			// in its arena.
			n.releaseLeft(r, held)
		}
		if r.broken == nil && r.mounted && n.gateLost {
			lost[chain] = true
		}
	}
	switch {
	case !n.gateLost:
		n.began = beganTakeover
	case len(lost) > 0:
		n.began = beganLost
	}
	n.checkLent(read)
	for _, r := range n.lent {
		n.releaseLeft(r, held)
	}
	n.dropLeft(held)
	n.remount(lost, read)
	if err := n.gate.Start(); err != nil {
		return err
	}
	n.mu.Lock()
	n.restored = true
	n.mu.Unlock()
	n.collect()
	n.passGate()
	n.readDirectly()
	n.mu.Lock()
	var again []*image
	named := make(map[digest.Digest]bool)
	for _, img := range n.images {
		named[img.ChainID] = true
		if r := n.rootfs[img.ChainID]; r == nil || !r.rec.Complete || r.broken != nil {
			again = append(again, img)
		}
	}
	for chain, r := range n.rootfs {
		if r.arena != nil && !named[chain] {
			// A container may be on it all the same: a tag has moved since.
			r.arena.Fail(errors.New("no image names this rootfs any more, so nothing brings what it lacks"))
		}
	}
	n.mu.Unlock()
	n.goOn(again, true)
	return nil
}

// goOn starts the pulls of images that are not complete, by digest: a tag may
// have moved. first is for pull.goesOn. It returns the last pull, nil if that could
// not be started.
func (n *Node) goOn(images []*image, first bool) (p *pull) {
	for _, img := range images {
		n.log.Info("going on with the pull of an image", "ref", img.Ref, "digest", img.Digest)
		req := api.PullRequest{
			Ref: img.Ref, Platform: img.Platform, PlainHTTP: img.Plain,
			Entrypoint: img.Entrypoint, Args: img.Args, NoStartup: img.NoStartup,
		}
		var err error
		if p, err = n.startPull(n.ctx, req, img.Digest, first); err != nil {
			n.log.Warn("go on with the pull of an image", "ref", img.Ref, "error", err)
		}
	}
	return p
}

// restored is what is read of an incomplete rootfs, for as long as it is needed.
type restored struct {
	toc   *toc.TOC
	place placement
}

// loadRootfs reads the records, and removes leftovers.
func (n *Node) loadRootfs(mounted map[string]bool) error {
	dir := filepath.Join(n.opts.Root, "rootfs")
	names, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	bad := make(map[*rootfs]error)
	for _, e := range names {
		r := &rootfs{dir: filepath.Join(dir, e.Name()), ready: make(chan struct{}), committed: true}
		close(r.ready)
		if _, err := os.Stat(r.path(lenderRecord)); err == nil {
			err := r.loadLender()
			if newer := (*newerError)(nil); errors.As(err, &newer) {
				return errorf(api.CodeUnsupported, "%w", err)
			}
			if err != nil {
				// Who borrowed of it can be mounted all the same.
				r.broken = err
				n.Warn("the list of what is kept of rootfs %s cannot be used: %v; it stays until no image uses contents of it", e.Name(), err)
			}
			n.lent[r.id()] = r
			continue
		}
		r.mounted = mounted[r.path("mnt")]
		r.gated = r.mounted && r.isGated()
		err := r.load()
		if newer := (*newerError)(nil); errors.As(err, &newer) {
			return errorf(api.CodeUnsupported, "%w", err)
		}
		if err == nil && n.rootfs[r.rec.ChainID] != nil {
			err = fmt.Errorf("there are two of it: %s is the other", n.rootfs[r.rec.ChainID].dir)
		}
		if err == nil {
			n.rootfs[r.rec.ChainID] = r
		} else {
			bad[r] = err
		}
	}
	lends := make(map[digest.Digest]bool)
	for _, r := range n.rootfs {
		for _, c := range r.rec.Arenas {
			lends[c] = true
		}
	}
	for r, err := range bad {
		hex, _, _ := strings.Cut(filepath.Base(r.dir), ".")
		chain := digest.NewDigestFromEncoded(digest.SHA256, hex)
		if n.rootfs[chain] == nil && (lends[r.id()] || !r.mounted && r.inUse()) {
			// Others need its arena, or a container that the daemon does not know
			// its mount.
			if r.rec.ChainID != chain {
				r.rec = rootfsRecord{ChainID: chain}
			}
			r.broken = err
			n.rootfs[chain] = r
			n.Warn("rootfs %s cannot be used, but others use it: %v", chain, err)
			continue
		}
		r.contents.close()
		if !errors.Is(err, os.ErrNotExist) {
			n.Warn("rootfs %s cannot be used and is removed: %v; pull its image again", chain, err)
		}
		if r.mounted {
			if err := kernel.Unmount(r.path("mnt"), true); err != nil {
				n.Warn("unmount what is left of a rootfs: %v", err)
				continue
			}
		}
		if err := os.RemoveAll(r.dir); err != nil {
			n.Warn("remove what is left of a rootfs: %v", err)
		}
	}
	return nil
}

// readRecord reads a rootfs's record.
func (r *rootfs) readRecord(name string) error {
	b, err := os.ReadFile(r.path(name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &r.rec); err != nil {
		return fmt.Errorf("%s: it is damaged: %w", r.path(name), err)
	}
	if err := checkVersion(r.path(name), r.rec.Version, rootfsVersion); err != nil {
		return err
	}
	if err := errors.Join(r.rec.ChainID.Validate(), r.rec.TOC.Validate()); err != nil {
		return err
	}
	if hex, _, _ := strings.Cut(filepath.Base(r.dir), "."); r.rec.ChainID.Encoded() != hex {
		return fmt.Errorf("it is the record of %s", r.rec.ChainID)
	}
	return nil
}

// load reads a rootfs's record, and maps its contents file.
func (r *rootfs) load() error {
	if err := r.readRecord("rootfs.json"); err != nil {
		return err
	}
	var err error
	if r.contents, err = openContents(r.path("contents")); err == nil {
		return nil
	}
	// It is derived: make it again.
	have, err := r.read()
	if err != nil {
		return err
	}
	l, err := r.layout(have.toc, have.place)
	if err != nil {
		return err
	}
	if err := writeContents(r.path("contents"), have.toc, l); err != nil {
		return err
	}
	r.contents, err = openContents(r.path("contents"))
	return err
}

// reopen opens the arena of an incomplete rootfs and puts it behind the gate.
func (n *Node) reopen(r *rootfs, held map[string]*os.File, read map[digest.Digest]*restored) error {
	have, err := r.read()
	if err != nil {
		return err
	}
	read[r.rec.ChainID] = have
	r.setPresence(have.toc, have.place)
	if r.own() < 0 {
		return nil
	}
	l, err := r.layout(have.toc, have.place)
	if err != nil {
		return err
	}
	var a *arena.Arena
	if f := held[gate.KeptArena+r.name()]; f != nil {
		a, err = arena.OpenFile(r.dir, f, l)
	} else if n.fromStore {
		// It is marked still: a new descriptor would wait for itself.
		return errorf(api.CodeUnavailable, "keeper and daemon died together, and the service manager has not kept the descriptor of its arena (see FileDescriptorStoreMax= of the unit, and its log): end the containers on it, remove the image and pull it again")
	} else {
		a, err = arena.Open(r.dir, l)
	}
	if err != nil {
		return err
	}
	if why := a.Doubt(); why != "" {
		n.Warn("arena of rootfs %s: %s; what is missing is pulled again", r.rec.ChainID, why)
	}
	if err := n.gate.Guard(r.name(), a.File(), &backing{n: n, r: r, arena: a}); err != nil {
		delete(held, gate.KeptArena+r.name())
		return errors.Join(err, a.Close())
	}
	r.arena = a
	return nil
}

// releaseLeft takes an arena from behind the gate from which nobody reads what
// is absent. Most often that finishes what finish had begun: the rootfs is
// complete and recorded so, but its arena was still behind the gate when the
// daemon died.
func (n *Node) releaseLeft(r *rootfs, held map[string]*os.File) {
	name := r.name()
	f := held[gate.KeptArena+name]
	if f == nil {
		return
	}
	err := n.gate.Guard(name, f, complete{})
	if err == nil {
		err = errors.Join(n.gate.Release(name), f.Close())
		delete(held, gate.KeptArena+name)
	}
	if err != nil {
		n.Warn("take the arena of rootfs %s from behind the gate: %v; reads of it go through the daemon until it is", r.rec.ChainID, err)
	}
}

// checkLent finds rootfs that use contents in place which are not there any
// more: a reboot took what was not durable from an arena that lends, or a damage.
// Such a rootfs is made anew when nobody uses it, else it is reported.
func (n *Node) checkLent(read map[digest.Digest]*restored) {
	for chain, r := range n.rootfs {
		if r.rec.Complete || r.broken != nil {
			continue
		}
		err := n.lentAbsent(r, read[chain])
		if err == nil {
			continue
		}
		used := r.mounted || r.inUse()
		for other, o := range n.rootfs {
			used = used || other != chain && slices.Contains(o.rec.Arenas, r.id())
		}
		if used {
			r.broken = err
			n.Warn("rootfs %s cannot be restored: %v", chain, err)
			continue
		}
		n.log.Info("a rootfs is laid out anew", "rootfs", chain, "why", err)
		delete(n.rootfs, chain)
		n.discard(r)
	}
}

// remount mounts what is named and not mounted, and mounts anew what lost its
// gate.
func (n *Node) remount(lost map[digest.Digest]bool, read map[digest.Digest]*restored) {
	live := n.named()
	for chain, r := range n.rootfs {
		if r.broken != nil {
			continue
		}
		if lost[chain] {
			users := ""
			for _, c := range n.containers {
				if c.ChainID == chain {
					users += " " + c.ID
				}
			}
			if users != "" && r.gated {
				n.Warn("the gate of rootfs %s was lost (daemon and keeper died together): reads of containers on it fail; remove and start again:%s", chain, users)
			} else if users != "" {
				n.Warn("the gate of rootfs %s was lost (daemon and keeper died together): containers on it may have read zeros for bytes that were absent; remove and start again:%s", chain, users)
			}
			if err := kernel.Unmount(r.path("mnt"), true); err != nil {
				r.broken = err
				n.Warn("rootfs %s cannot be mounted again: %v", chain, err)
				continue
			}
			r.mounted = false
		}
		if r.mounted {
			r.findReadAhead()
			n.endStart(r) // nobody knows any more how far the start has come
		}
		if r.mounted || live[r] == "" {
			continue
		}
		if err := n.mountAgain(r, read[chain]); err != nil {
			r.broken = err
			n.Warn("rootfs %s cannot be mounted again: %v", chain, err)
		}
	}
}

// mountAgain mounts a rootfs from what is on the disk. The metadata image is
// believed by its digest, or else written anew.
func (n *Node) mountAgain(r *rootfs, have *restored) error {
	got, err := fileSum(r.path("meta.erofs"))
	if err != nil || got != r.rec.Meta {
		if have == nil {
			if have, err = r.read(); err != nil {
				return err
			}
		}
		if got, err = n.writeMeta(r, have.toc, have.place, nil); err != nil {
			return err
		}
		if got != r.rec.Meta {
			r.rec.Meta = got
			if err := r.save(&r.rec, writeFileAtomic); err != nil {
				return err
			}
		}
	}
	return n.mount(r)
}

// setPresence makes r able to say which of its TOC's segments are here: those
// of its own arena that have arrived, and all that it uses in place.
func (r *rootfs) setPresence(t *toc.TOC, place placement) {
	own := r.own()
	lent := make([]byte, (len(t.Segments)+7)/8)
	for i := range t.Contents {
		if int(place[i]) == own {
			continue
		}
		c := &t.Contents[i]
		for s := c.First; s < c.First+c.Segments; s++ {
			lent[s/8] |= 1 << (s % 8)
		}
	}
	r.present = func() []byte {
		if r.arena == nil {
			return lent
		}
		b := r.arena.PresentBitmap()
		for i := range b {
			b[i] |= lent[i]
		}
		return b
	}
}
