package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"

	"hydrofoil.dev/foil/internal/kernel"
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
	for _, r := range virtual {
		if err := s.onForeign(ctx, r.Image, r.Parent); err != nil {
			return err
		}
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
		s.opts.Node.Release(held.Rootfs)
		return fmt.Errorf("image %s has become rootfs %s, the snapshot is of %s: %w", r.Image, held.ChainID, r.Chain, errdefs.ErrUnavailable)
	}
	if r.held != nil || s.records[r.ID] != r || s.closed {
		s.opts.Node.Release(held.Rootfs)
		return nil
	}
	r.held = held
	return nil
}

// rewrite puts the rootfs in the place of its snapshot's directory, and takes
// away what would lie below it.
func (s *Snapshotter) rewrite(ctx context.Context, key string, mounts []mount.Mount) ([]mount.Mount, error) {
	out := slices.Clone(mounts)
	for i := range out {
		m := &out[i]
		m.Options = slices.Clone(m.Options)
		if slices.ContainsFunc(m.Options, mapsIDs) {
			changed, err := s.ownersChanged(ctx, key)
			if err != nil {
				return nil, err
			}
			if changed {
				m.Options = slices.DeleteFunc(m.Options, mapsIDs)
			}
		}
		if m.Type == "bind" {
			if at := s.mounted(m.Source); at != "" {
				m.Source = at
			}
			continue
		}
		for j, o := range m.Options {
			list, ok := strings.CutPrefix(o, "lowerdir=")
			if !ok {
				continue
			}
			lower := strings.Split(list, ":")
			onRootfs := false
			for k, dir := range lower {
				if at := s.mounted(dir); at != "" {
					lower, onRootfs = append(lower[:k:k], at), true
					break
				}
			}
			m.Options[j] = "lowerdir=" + strings.Join(lower, ":")
			if len(lower) == 1 && !slices.ContainsFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "upperdir=") }) {
				*m = readOnly(lower[0], m.Options)
				break
			}
			if onRootfs && len(lower) > 1 && slices.ContainsFunc(m.Options, mapsIDs) {
				if err := mappable(lower); err != nil {
					return nil, fmt.Errorf("mounts of snapshot %s: %w", key, err)
				}
			}
		}
	}
	return out, nil
}

// mapsIDs reports whether an option of a mount maps IDs.
func mapsIDs(o string) bool {
	return strings.HasPrefix(o, "uidmap=") || strings.HasPrefix(o, "gidmap=")
}

// ownersChanged reports whether a snapshot is made on one whose files have the
// owners already that a mapping of IDs would show: see Commit.
func (s *Snapshotter) ownersChanged(ctx context.Context, key string) (bool, error) {
	info, err := s.plain.Stat(ctx, key)
	if err == nil && info.Parent != "" {
		info, err = s.plain.Stat(ctx, info.Parent)
	}
	return info.Labels[LabelOwners] == ownersChanged, err
}

// mappable reports why containerd cannot map the IDs of several lower
// directories. It maps those of a copy of the mounts below the directory that
// they have in common, all or none; and there are mounts that have no mapping.
func mappable(lower []string) error {
	common := lower[0]
	for _, dir := range lower[1:] {
		for !strings.HasPrefix(dir+"/", strings.TrimSuffix(common, "/")+"/") {
			common = filepath.Dir(common)
		}
	}
	mounts, err := kernel.Mounts(common)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Type == "overlay" || strings.HasPrefix(m.Type, "fuse") {
			return fmt.Errorf("a container in a user namespace, on an image of which some layers are of a lazy rootfs and others came the plain way, cannot be had while %s (%s) is mounted, for which the kernel maps no IDs: pull the whole image from a server that sends bundles, or end that mount: %w",
				m.Target, m.Type, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// readOnly is the mount of one directory: overlayfs takes no single lower one
// without an upper one. Of the options those stay that map IDs.
func readOnly(dir string, options []string) mount.Mount {
	m := mount.Mount{Type: "bind", Source: dir}
	for _, o := range options {
		if mapsIDs(o) {
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
