package node

import (
	"context"
	"errors"
	"os"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
)

// RemoveImage forgets a reference. Its rootfs goes when nothing else names it,
// and its arena when no other rootfs has contents in it.
func (n *Node) RemoveImage(ctx context.Context, name string) error {
	name, err := api.NormalRef(name)
	if err != nil {
		return err
	}
	n.mu.Lock()
	img := n.images[name]
	if img == nil {
		n.mu.Unlock()
		return errorf(api.CodeNotFound, "no image %s here: `foil images` lists them", name)
	}
	last := true
	for _, other := range n.images {
		if other != img && other.ChainID == img.ChainID {
			last = false
		}
	}
	for _, c := range n.containers {
		if last && c.ChainID == img.ChainID {
			n.mu.Unlock()
			return errorf(api.CodeConflict, "image %s is used by container %s: remove it first, with `foil rm %s`", name, c.ID, c.ID)
		}
	}
	p := n.pulls[name]
	n.mu.Unlock()
	if p != nil && !p.ended() {
		p.stop()
		if err := p.wait(ctx); err != nil {
			return err
		}
	}
	if err := os.Remove(n.imagePath(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	n.mu.Lock()
	delete(n.images, name)
	delete(n.pulls, name)
	n.mu.Unlock()
	n.collect()
	return nil
}

// wait returns when the pull has ended, well or not.
func (p *pull) wait(ctx context.Context) error {
	for {
		p.mu.Lock()
		over, changed := p.over, p.changed
		p.mu.Unlock()
		if over {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// collect unmounts every rootfs that no image, container or pull names, and
// removes those whose arenas nothing else uses.
func (n *Node) collect() {
	n.mu.Lock()
	live := make(map[digest.Digest]bool) // named
	for _, img := range n.images {
		live[img.ChainID] = true
	}
	for _, c := range n.containers {
		live[c.ChainID] = true
	}
	for chain, r := range n.rootfs {
		if r.users > 0 || r.filling != nil {
			live[chain] = true
		}
	}
	lent := make(map[digest.Digest]bool) // their arenas are used by live ones
	for chain := range live {
		if r := n.rootfs[chain]; r != nil {
			for _, c := range r.rec.Arenas {
				lent[c] = true
			}
		}
	}
	var unmount, drop []*rootfs
	for chain, r := range n.rootfs {
		if live[chain] {
			continue
		}
		if r.mounted {
			unmount = append(unmount, r)
			r.mounted = false
		}
		if !lent[chain] {
			drop = append(drop, r)
			delete(n.rootfs, chain)
		}
	}
	n.mu.Unlock()
	for _, r := range unmount {
		if err := kernel.Unmount(r.path("mnt"), false); err != nil {
			n.log.Warn("unmount a rootfs that nothing uses", "rootfs", r.rec.ChainID, "error", err)
		}
	}
	for _, r := range drop {
		n.discard(r)
	}
}

// lookup returns an image's rootfs, kept from being removed until release.
func (n *Node) lookup(name string) (r *rootfs, release func(), err error) {
	name, err = api.NormalRef(name)
	if err != nil {
		return nil, nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	img := n.images[name]
	if img == nil {
		return nil, nil, errorf(api.CodeNotFound, "no image %s here: `foil images` lists them", name)
	}
	r = n.rootfs[img.ChainID]
	if r == nil {
		return nil, nil, errorf(api.CodeCorrupt, "image %s: its rootfs is gone: pull it again", name)
	}
	r.users++
	return r, func() {
		n.mu.Lock()
		r.users--
		n.mu.Unlock()
		n.collect()
	}, nil
}
