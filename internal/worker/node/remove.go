package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"hydrofoil.dev/foil/internal/worker/api"
)

// RemoveImage forgets a reference, and stops its pull. Its rootfs goes when
// nothing else names it, and its arena when no other rootfs has contents in it.
func (n *Node) RemoveImage(ctx context.Context, name string) error {
	name, err := api.NormalRef(name)
	if err != nil {
		return err
	}
	leave, err := n.enter()
	if err != nil {
		return err
	}
	defer leave()
	p, err := n.beginRemoval(name)
	if err != nil {
		return err
	}
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.removing, name)
	}()
	if p != nil {
		p.stop(errRemoved)
		if err := p.wait(ctx); err != nil {
			return err
		}
	}
	n.mu.Lock()
	img := n.images[name]
	n.mu.Unlock()
	if err := n.forgetImage(name); err != nil {
		return err
	}
	n.mu.Lock()
	var again []*image // whose rootfs the stopped pull was filling
	for _, other := range n.images {
		if img != nil && other.ChainID == img.ChainID {
			again = append(again, other)
		}
	}
	n.mu.Unlock()
	n.collect()
	if p != nil {
		n.goOn(again, true)
	}
	return nil
}

// forgetImage removes an image's record. Its rootfs stays until collect.
func (n *Node) forgetImage(name string) error {
	if err := os.Remove(n.imagePath(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := syncDir(filepath.Join(n.opts.Root, "images")); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.images, name)
	delete(n.pulls, name)
	delete(n.retries, name)
	return nil
}

// beginRemoval checks that an image can be removed, and makes sure that until
// the end of the removal no pull of it and no container on it begins. It returns
// its pull, if one runs.
func (n *Node) beginRemoval(name string) (*pull, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.removing[name] {
		return nil, errorf(api.CodeConflict, "image %s is just being removed", name)
	}
	img, p := n.images[name], n.pulls[name]
	if p != nil && p.ended() {
		p = nil
	}
	if img == nil && p == nil {
		return nil, errorf(api.CodeNotFound, "no image %s here: `foil images` lists them", name)
	}
	if img != nil {
		last := true
		for _, other := range n.images {
			if other != img && other.ChainID == img.ChainID && !n.removing[other.Ref] {
				last = false
			}
		}
		if last && n.holds[img.ChainID] > 0 {
			return nil, errorf(api.CodeConflict, "image %s is used by containerd: remove it there", name)
		}
		for _, c := range n.containers {
			if last && c.ChainID == img.ChainID {
				return nil, errorf(api.CodeConflict, "image %s is used by container %s: remove it first, with `foil rm %s`", name, c.ID, c.ID)
			}
		}
	}
	n.removing[name] = true
	return p, nil
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
		r.letGo()
		n.mu.Unlock()
		n.collect()
	}, nil
}
