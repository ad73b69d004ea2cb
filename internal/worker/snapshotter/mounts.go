package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
)

// ready makes sure that a snapshot, and what it is made on, can be mounted: the
// rootfs is, and nothing virtual is on top of it.
func (s *Snapshotter) ready(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	ids, err := s.chain(ctx, name)
	if err != nil {
		return err
	}
	var virtual []*record
	s.mu.Lock()
	for _, id := range ids {
		r := s.records[id]
		switch {
		case r == nil || r.Role == roleUnpacked:
			continue
		case r.Role == roleLayer:
			virtual = append(virtual, r)
			continue
		case r.Role == roleUnknown:
			err = fmt.Errorf("the record %s cannot be read: remove the image and pull it again: %w", s.lazy(r.ID), errdefs.ErrUnavailable)
		case r.held == nil:
			err = s.holdAgain(ctx, r)
		}
		break
	}
	s.mu.Unlock()
	if err != nil || len(virtual) == 0 {
		return err
	}
	slices.Reverse(virtual)
	return s.unpack(ctx, virtual)
}

// chain returns the IDs of a snapshot and of those it is made on.
func (s *Snapshotter) chain(ctx context.Context, name string) (ids []string, err error) {
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		for name != "" {
			id, info, _, err := storage.GetInfo(ctx, name)
			if err != nil {
				return err
			}
			ids = append(ids, id)
			name = info.Parent
		}
		return nil
	})
	return ids, err
}

// holdAgain brings a rootfs back that could not be had when the daemon started.
// Called with mu held, which it lets go of meanwhile.
func (s *Snapshotter) holdAgain(ctx context.Context, r *record) error {
	s.mu.Unlock()
	wait, cancel := context.WithTimeout(ctx, s.opts.HeaderTimeout)
	held, err := s.opts.Node.Hold(wait, r.Image)
	cancel()
	s.mu.Lock()
	if err != nil {
		return fmt.Errorf("rootfs %s of image %s: %w", r.Chain, r.Image, errors.Join(err, errdefs.ErrUnavailable))
	}
	if held.ChainID != r.Chain {
		s.opts.Node.Release(held.ChainID)
		return fmt.Errorf("image %s has become rootfs %s, the snapshot is of %s: %w", r.Image, held.ChainID, r.Chain, errdefs.ErrUnavailable)
	}
	if r.held != nil || s.records[r.ID] != r || s.closed {
		s.opts.Node.Release(held.ChainID)
		return nil
	}
	r.held = held
	return nil
}

// rewrite puts the rootfs in the place of its snapshot's directory, and takes
// away what would lie below it.
func (s *Snapshotter) rewrite(mounts []mount.Mount) []mount.Mount {
	out := slices.Clone(mounts)
	for i := range out {
		m := &out[i]
		m.Options = slices.Clone(m.Options)
		if m.Type == "bind" {
			if at := s.mounted(m.Source); at != "" {
				m.Source = at
			}
			continue
		}
		upper := false
		for j, o := range m.Options {
			if strings.HasPrefix(o, "upperdir=") {
				upper = true
			}
			list, ok := strings.CutPrefix(o, "lowerdir=")
			if !ok {
				continue
			}
			lower := strings.Split(list, ":")
			for k, dir := range lower {
				if at := s.mounted(dir); at != "" {
					lower = append(lower[:k:k], at)
					break
				}
			}
			m.Options[j] = "lowerdir=" + strings.Join(lower, ":")
			if len(lower) == 1 && !upper && !slices.ContainsFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "upperdir=") }) {
				*m = readOnly(lower[0], m.Options)
				break
			}
		}
	}
	return out
}

// readOnly is the mount of one directory: overlayfs takes no single lower one
// without an upper one. Of the options those stay that map IDs.
func readOnly(dir string, options []string) mount.Mount {
	m := mount.Mount{Type: "bind", Source: dir}
	for _, o := range options {
		if strings.HasPrefix(o, "uidmap=") || strings.HasPrefix(o, "gidmap=") {
			m.Options = append(m.Options, o)
		}
	}
	m.Options = append(m.Options, "ro", "rbind")
	return m
}

// mounted returns where the rootfs is mounted whose snapshot's fs directory dir
// is, or "".
func (s *Snapshotter) mounted(dir string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.records[s.idOf(dir)]
	if r == nil || r.Role != roleRootfs || r.held == nil {
		return ""
	}
	return r.held.Mount
}

// likeParent gives the directory dir the owner of another, as containerd does.
func likeParent(parent, dir string) error {
	uid, gid, err := ownerOf(parent)
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, gid)
}
