package snapshotter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/worker/node"
)

// The roles of lazy snapshots.
const (
	roleRootfs   = "rootfs"   // of the last layer: it is the image's rootfs
	roleLayer    = "layer"    // of a layer below it: it is virtual
	roleUnpacked = "unpacked" // of a layer that was virtual and is not any more
	roleUnknown  = "unknown"  // its record cannot be read
)

// record is the file <dir>/snapshots/ID/lazy, JSON. It is written before the
// snapshot exists in the metadata, in a directory that is removed when it never
// does.
type record struct {
	Version int `json:"version"`
	// ID, Name and Parent are the snapshot's in the metadata; Parent is a name.
	ID     string `json:"id"`
	Name   string `json:"name"`
	Parent string `json:"parent,omitempty"`
	Role   string `json:"role"`
	// Chain is the chain ID of the layers up to this one.
	Chain digest.Digest `json:"chain_id"`
	// Image is the name by which the node knows the image.
	Image string `json:"image"`
	// Layer and DiffID are what materialising it takes.
	Layer  ocispec.Descriptor `json:"layer"`
	DiffID digest.Digest      `json:"diff_id"`
	// Full: every byte of the image was here already when containerd asked for it.
	Full bool `json:"full,omitempty"`
	// Size and Inodes are what it takes on the disk since it was unpacked.
	Size   int64 `json:"size,omitempty"`
	Inodes int64 `json:"inodes,omitempty"`

	// expected: it was made for an image's header, and nobody has asked for it;
	// guarded by mu.
	expected bool

	held *node.Held // of a rootfs, nil while it could not be had; guarded by mu

	// healed is how often the image came anew since the daemon started because its rootfs was not what its layers make, or
	// damaged, and healAt when it may again; guarded by mu.
	healed int
	healAt time.Time
}

const recordVersion = 1

// path says how the image came, and why that way, for people.
func (r *record) path() (path, why string) {
	switch {
	case r.Role == roleUnpacked:
		return PathPlain, "it became the parent of something that is not in the image"
	case r.Full:
		return PathFull, "every byte of the image was here before containerd asked for it"
	}
	return PathLazy, "its server sends it as a bundle"
}

func (s *Snapshotter) dir(id string) string   { return filepath.Join(s.opts.Dir, "snapshots", id) }
func (s *Snapshotter) fsDir(id string) string { return filepath.Join(s.dir(id), "fs") }
func (s *Snapshotter) lazy(id string) string  { return filepath.Join(s.dir(id), "lazy") }

// idOf returns the ID of the snapshot whose fs directory a path is, or "".
func (s *Snapshotter) idOf(path string) string {
	if filepath.Base(path) != "fs" || filepath.Dir(filepath.Dir(path)) != filepath.Join(s.opts.Dir, "snapshots") {
		return ""
	}
	return filepath.Base(filepath.Dir(path))
}

// lazyName is the name of a lazy snapshot. The names that containerd gives begin
// with a namespace.
func lazyName(chain digest.Digest, id string) string { return chain.String() + "/" + id }

func isLazyName(name, id string) bool {
	chain, ok := strings.CutSuffix(name, "/"+id)
	return ok && digest.Digest(chain).Validate() == nil
}

// named returns the record of a lazy snapshot, or nil. Called with mu held.
func (s *Snapshotter) named(name string) *record {
	for _, r := range s.records {
		if r.Name == name {
			return r
		}
	}
	return nil
}

func (s *Snapshotter) recordOf(name string) *record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.named(name)
}

// letGo ends a record's hold. Called with mu held.
func (s *Snapshotter) letGo(r *record) {
	if r.held != nil {
		s.opts.Node.Release(r.held.Rootfs)
		r.held = nil
	}
}

// load reads the records of the snapshots that are there, and removes images
// that were pulled for snapshots that are not.
func (s *Snapshotter) load(ctx context.Context) error {
	var ids map[string]string
	err := s.meta.WithTransaction(ctx, false, func(ctx context.Context) (err error) {
		if ids, err = storage.IDMap(ctx); errdefs.IsNotFound(err) {
			return nil // there has been no snapshot yet
		}
		return err
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, name := range ids {
		r, err := s.readRecord(id)
		if errors.Is(err, fs.ErrNotExist) && !isLazyName(name, id) {
			continue
		}
		if err == nil && (r.ID != id || r.Name != name) {
			err = fmt.Errorf("it is the record of snapshot %s, %s", r.ID, r.Name)
		}
		if err != nil {
			// Its directory is empty: without the record it would be taken for an
			// empty layer.
			s.log.Error("a lazy snapshot cannot be used", "snapshot", name, "record", s.lazy(id), "error", err)
			s.records[id] = &record{ID: id, Name: name, Role: roleUnknown}
			continue
		}
		s.records[id] = r
		if r.Role == roleRootfs && s.opts.Node != nil && s.opts.Node.Has(r.Image) {
			// One that is mounted is held; for another, whose pull this starts, the
			// daemon does not wait.
			now, cancel := context.WithCancel(ctx)
			cancel()
			if r.held, err = s.opts.Node.Hold(now, r.Image); err != nil {
				s.log.Warn("the rootfs of a snapshot is not mounted; it is tried again when a container needs it", "snapshot", name, "image", r.Image, "error", err)
			}
		}
	}
	s.dropExpected(ctx)
	s.dropLeftovers(ctx)
	return nil
}

func (s *Snapshotter) readRecord(id string) (*record, error) {
	b, err := os.ReadFile(s.lazy(id))
	if err != nil {
		return nil, err
	}
	r := new(record)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("version %d, this foil reads %d", r.Version, recordVersion)
	}
	return r, r.Chain.Validate()
}

// commitLazy makes the committed snapshots of an image's layers from number first
// on, which lies on parent, as far as they are not there. containerd asks for one
// layer after the other, and finds them: one transaction is one wait for the disk.
// What it has never asked for, its garbage collection removes like any snapshot
// that it does not know.
//
// rootfs is the record of the last layer, and has held, if it was made. Called
// with mu held.
func (s *Snapshotter) commitLazy(ctx context.Context, key, parent, image string, p *pulled, first int, held *node.Held, labels map[string]string) (rootfs *record, err error) {
	made, err := s.makeLazy(ctx, key, parent, image, p, first, held, labels)
	if err != nil {
		return nil, err
	}
	if n := len(made); n > 0 && made[n-1].Role == roleRootfs {
		rootfs = made[n-1]
		rootfs.held = held
	}
	return rootfs, nil
}

// makeLazy is commitLazy, and returns all records that it made. Without a held
// they are expected. Called with mu held.
func (s *Snapshotter) makeLazy(ctx context.Context, key, parent, image string, p *pulled, first int, held *node.Held, labels map[string]string) (made []*record, err error) {
	err = s.meta.WithTransaction(ctx, true, func(ctx context.Context) error {
		for i := first; i < len(p.chains); i++ {
			chain := p.chains[i]
			if there := s.find(chain, parent); there != nil {
				parent = there.Name
				continue
			}
			r := &record{Version: recordVersion, Parent: parent, Role: roleLayer, Chain: chain, Image: image, Layer: p.layers[i], DiffID: p.diffIDs[i], Full: held != nil && p.held.Complete, expected: held == nil}
			if i == len(p.chains)-1 {
				r.Role = roleRootfs
			}
			sn, err := storage.CreateSnapshot(ctx, snapshots.KindActive, key, parent)
			if err != nil {
				return err
			}
			r.ID, r.Name = sn.ID, lazyName(chain, sn.ID)
			made = append(made, r)
			if err := s.makeDir(r, held); err != nil {
				return err
			}
			_, err = storage.CommitActive(ctx, key, r.Name, snapshots.Usage{}, snapshots.WithLabels(labelsOf(r, i == first && held != nil, labels)), snapshots.WithParent(parent))
			if err != nil {
				return err
			}
			parent = r.Name
		}
		if held == nil {
			if err := s.noteExpected(image, made); err != nil {
				return err
			}
		}
		// Before the transaction ends: what it names is on the disk.
		return s.syncDirs(made, s.marker(image))
	})
	if err != nil {
		for _, r := range made {
			_ = os.RemoveAll(s.dir(r.ID))
		}
		if errdefs.IsAlreadyExists(err) {
			// To containerd this would mean that the layer is there.
			err = fmt.Errorf("%w: %w", errdefs.ErrFailedPrecondition, errors.New(err.Error()))
		}
		return nil, fmt.Errorf("commit the snapshot of layer %s: %w", p.chains[first], err)
	}
	for _, r := range made {
		s.records[r.ID] = r
	}
	return made, nil
}

// labelsOf are the labels of a layer's snapshot, by those that containerd gave
// with one of the image's layers; asked says whether with this one.
func labelsOf(r *record, asked bool, given map[string]string) map[string]string {
	if asked {
		return given
	}
	labels := maps.Clone(given)
	labels[snapshots.LabelSnapshotRef] = r.Chain.String()
	labels[snapshotters.TargetLayerDigestLabel] = r.Layer.Digest.String()
	delete(labels, snapshotters.TargetImageLayersLabel)
	return labels
}

// makeDir makes the directory of a lazy snapshot, with its record in it. No
// snapshot has its ID yet: what is there is a leftover of a crash, and what a crash
// leaves of this is one.
func (s *Snapshotter) makeDir(r *record, held *node.Held) error {
	if err := os.RemoveAll(s.dir(r.ID)); err != nil {
		return err
	}
	if err := os.MkdirAll(s.fsDir(r.ID), 0o755); err != nil {
		return err
	}
	if r.Role == roleRootfs && held != nil {
		// Those on it get their root directory's owner from here.
		if err := likeParent(held.Mount, s.fsDir(r.ID)); err != nil {
			return err
		}
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(s.lazy(r.ID), b, 0o600)
}

// syncDirs makes directories durable that makeDir has made, and the marker of an
// image that is expected only. All is synced at once,
// which the disk makes one write of: there is no order in it, since a snapshot's
// directory counts for nothing before the transaction has ended.
func (s *Snapshotter) syncDirs(made []*record, marker string) error {
	if len(made) == 0 {
		return nil
	}
	var all errgroup.Group
	all.Go(func() error { return durable.Sync(filepath.Join(s.opts.Dir, "snapshots")) })
	if made[0].expected {
		for _, path := range []string{marker, filepath.Dir(marker)} {
			all.Go(func() error { return durable.Sync(path) })
		}
	}
	for _, r := range made {
		for _, path := range []string{s.lazy(r.ID), s.dir(r.ID)} {
			all.Go(func() error { return durable.Sync(path) })
		}
	}
	return all.Wait()
}

// writeDurably makes a file hold b, or what it held before, after a crash. Its
// directory and that one's may be new.
func writeDurably(path string, b []byte) error {
	if err := durable.Replace(path, b); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	for d := filepath.Dir(path); filepath.Base(d) != "snapshots" && filepath.Base(d) != "images"; {
		d = filepath.Dir(d)
		if err := durable.Sync(d); err != nil {
			return err
		}
	}
	return nil
}
