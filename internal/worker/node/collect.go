package node

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
)

// collect frees what nothing needs. A rootfs that no image, container or pull
// names is unmounted and becomes a lender; a lender gives back what nobody
// borrows; one without borrowers goes. What the kernel or a process of the host
// has in use stays until the next time.
func (n *Node) collect() {
	n.layout.Lock()
	defer n.layout.Unlock()
	n.collectLocked()
}

// collectLocked is collect with layout held. It returns the bytes that it freed.
func (n *Node) collectLocked() (freed int64) {
	n.mu.Lock()
	live := n.named()
	var unnamed []*rootfs
	for _, r := range n.rootfs {
		if live[r] == "" {
			unnamed = append(unnamed, r)
		}
	}
	n.mu.Unlock()
	sortByChain(unnamed)
	inUse := false
	for _, r := range unnamed {
		if !n.unmounted(r) {
			continue
		}
		// A container that the daemon does not know, or a process that has just
		// copied the host's mounts. Unlinking harms neither; but while it lasts
		// what the rootfs refers to must be known.
		if (len(n.borrowers(r)) > 0 || r.borrows()) && r.inUse() {
			inUse = true
			continue
		}
		before, _ := usage(r.dir)
		if ok, err := n.becomeLender(n.ctx, r, n.borrowers(r)); err != nil {
			n.log.Warn("a rootfs that nothing names stays", "rootfs", r.rec.ChainID, "error", err)
		} else if ok && len(n.borrowers(r)) == 0 {
			n.drop(r)
			freed += before
		}
	}
	// Every rootfs that can be mounted now is still in n.rootfs: what those do
	// not refer to, nobody does.
	n.mu.Lock()
	var lent []*rootfs
	for _, r := range n.lent {
		lent = append(lent, r)
	}
	n.mu.Unlock()
	sortByChain(lent)
	for _, r := range lent {
		borrowers := n.borrowers(r)
		if len(borrowers) == 0 {
			before, _ := usage(r.dir)
			if n.drop(r) {
				freed += before
			}
			continue
		}
		if why := n.unknown(); why != "" {
			n.log.Debug("nothing is punched", "why", why)
			continue
		}
		got, err := n.shrink(r, borrowers)
		if err != nil {
			n.log.Warn("an arena keeps what nobody may need any more", "rootfs", r.rec.ChainID, "error", err)
		} else if got > 0 {
			n.log.Info("what only removed images needed was freed", "rootfs", r.rec.ChainID, "bytes", got)
		}
		freed += got
	}
	n.collectLater(inUse)
	return freed
}

// borrows reports whether a rootfs has contents in the arena of another.
func (r *rootfs) borrows() bool {
	return slices.ContainsFunc(r.rec.Arenas, func(id digest.Digest) bool { return id != r.id() })
}

// collectLater tries again, again and again while something is in use that
// nothing names: nobody says when that ends.
func (n *Node) collectLater(inUse bool) {
	const first, last = 100 * time.Millisecond, time.Minute
	n.mu.Lock()
	defer n.mu.Unlock()
	if !inUse {
		n.pause = 0
		return
	}
	if n.closing || n.later {
		return
	}
	n.later = true
	n.pause = min(max(first, 2*n.pause), last)
	pause := n.pause
	n.work.Go(func() {
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(pause):
		}
		n.mu.Lock()
		n.later = false
		n.mu.Unlock()
		n.collect()
	})
}

// unmounted reports whether a rootfs is not mounted any more. Called with
// Node.layout held.
func (n *Node) unmounted(r *rootfs) bool {
	n.mu.Lock()
	mounted := r.mounted
	n.mu.Unlock()
	if !mounted {
		return true
	}
	err := n.unmount(r)
	if err == nil {
		return true
	}
	n.log.Warn("unmount a rootfs that nothing uses", "rootfs", r.rec.ChainID, "error", err)
	// Nobody brings what it lacks.
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.arena != nil && r.filling == nil {
		r.arena.Fail(errRemoved)
	}
	return false
}

// drop removes a lender without borrowers. Called with Node.layout held.
func (n *Node) drop(r *rootfs) bool {
	n.mu.Lock()
	free := r.users == 0
	if free {
		delete(n.lent, r.id())
	}
	n.mu.Unlock()
	if free {
		n.discard(r)
	}
	return free
}

// borrowers returns the rootfs that can be mounted, or are, and have contents in
// the arena of r, oldest first.
func (n *Node) borrowers(r *rootfs) []*rootfs {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.borrowersLocked(r)
}

func (n *Node) borrowersLocked(r *rootfs) []*rootfs {
	var list []*rootfs
	for _, b := range n.rootfs {
		if b != r && slices.Contains(b.rec.Arenas, r.id()) {
			list = append(list, b)
		}
	}
	slices.SortFunc(list, func(a, b *rootfs) int {
		if c := a.rec.Created.Compare(b.rec.Created); c != 0 {
			return c
		}
		return strings.Compare(string(a.rec.ChainID), string(b.rec.ChainID))
	})
	return list
}

// unknown says why it is not known which blocks a rootfs refers to that may be
// in use; empty when that is known of all.
func (n *Node) unknown() string {
	n.mu.Lock()
	var list []*rootfs
	for _, r := range n.rootfs {
		if r.rec.Version == 0 {
			list = append(list, r)
		}
	}
	n.mu.Unlock()
	for _, r := range list {
		if r.mounted || r.inUse() {
			return fmt.Sprintf("the record of rootfs %s cannot be read, and the rootfs is in use", r.rec.ChainID)
		}
	}
	return ""
}

func sortByChain(list []*rootfs) {
	slices.SortFunc(list, func(a, b *rootfs) int { return strings.Compare(string(a.id()), string(b.id())) })
}

// named returns the rootfs that an image, a container, containerd or a pull
// names, and which of them. Called with Node.mu held.
func (n *Node) named() map[*rootfs]string {
	live := make(map[*rootfs]string)
	name := func(chain digest.Digest, format string, args ...any) {
		if r := n.rootfs[chain]; r != nil && live[r] == "" {
			live[r] = fmt.Sprintf(format, args...)
		}
	}
	for _, img := range n.images {
		name(img.ChainID, "image %s", img.Ref)
	}
	for _, c := range n.containers {
		name(c.ChainID, "container %s", c.ID)
	}
	for chain := range n.holds {
		name(chain, "containerd")
	}
	for chain, r := range n.rootfs {
		if r.users > 0 || r.filling != nil {
			name(chain, "a pull or a verification")
		}
	}
	return live
}
