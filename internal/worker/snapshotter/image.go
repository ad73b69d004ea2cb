package snapshotter

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/node"
)

// pulled is an image whose layers containerd is asking for. It is kept until
// the last one has its snapshot, or containerd has not asked for a while.
type pulled struct {
	held    *node.Held      // nil of one that is expected only
	chains  []digest.Digest // of the layers, lowest first
	layers  []ocispec.Descriptor
	diffIDs []digest.Digest
	timer   *time.Timer // ends it
}

// refusal is an image that could not be had as a bundle. The next layers of the
// same image go the plain way without asking again.
type refusal struct {
	why   string
	until time.Time
}

const (
	// patience is how long containerd may take from one layer to the next: it
	// unpacks those that it has to between them.
	patience = 10 * time.Minute
	// refusedFor is how long an image that could not be had is not asked for
	// again. A pull takes about that long.
	refusedFor = time.Minute
)

// skip makes the snapshot of a layer without its bytes: then the error is
// ErrAlreadyExists, with which containerd goes on to the next layer. Without an
// error, why says why the layer has to go the plain way.
func (s *Snapshotter) skip(ctx context.Context, key, target, parent string, labels map[string]string) (why string, err error) {
	chain, err := digest.Parse(target)
	if err != nil {
		return s.plainly(parent == "", target, "no_name", "the target "+target+" is not a chain ID"), nil
	}
	exists := fmt.Errorf("the snapshot of layer %s: %w", target, errdefs.ErrAlreadyExists)
	s.mu.Lock()
	here := s.find(chain, parent)
	if here != nil && here.expected {
		here = nil // it is nobody's before its image is here
	}
	name, unnamed := imageName(labels)
	if here != nil {
		err = s.foreign(here, name)
	}
	if err == nil && here != nil && here.Role == roleRootfs {
		s.forget(here.Image) // the last layer: containerd asks for no more
	}
	s.mu.Unlock()
	if err != nil {
		return "", fmt.Errorf("the snapshot of layer %s: %w", target, err)
	}
	if here != nil {
		return "", exists
	}
	if s.opts.Node == nil {
		return s.plainly(parent == "", target, "off", "nothing pulls images as bundles"), nil
	}
	if unnamed != "" {
		return s.plainly(parent == "", labels[snapshotters.TargetRefLabel], "no_name", unnamed), nil
	}
	if other := s.besides(name); other != "" && !s.opts.Claims {
		return s.plainly(true, name, "another_origin", fmt.Sprintf("%s came lazily from another registry, and without --mirror-listen it cannot be seen which image has whose layers: "+
			"set that and name the mirror in hosts.toml, or name both registries in --origin-group of foil node", other)), nil
	}
	defer s.settled(ctx, name)
	p, refused, err := s.pull(ctx, name)
	if p == nil {
		return refused, err
	}
	i := slices.Index(p.chains, chain)
	if i < 0 {
		return s.plainly(parent == "", name, "not_in_image", fmt.Sprintf("image %s has no layer with chain ID %s", name, chain)), nil
	}
	held, err := s.opts.Node.Hold(ctx, name)
	if err != nil {
		return s.plainly(true, name, codeOf(err), fmt.Sprintf("image %s: %v", name, err)), ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.claims(name, p.chains[len(p.chains)-1]); err != nil {
		s.opts.Node.Release(held.Rootfs)
		s.forget(name)
		s.dropImage(ctx, name)
		return "", fmt.Errorf("the snapshot of layer %s: %w", target, err)
	}
	rootfs := s.claim(ctx, name, parent, p, i, held)
	if rootfs == nil {
		rootfs, err = s.commitLazy(ctx, key, parent, name, p, i, held, labels)
	}
	if rootfs == nil { // it failed, or was there
		s.opts.Node.Release(held.Rootfs)
	}
	if i == len(p.chains)-1 {
		s.forget(name)
	}
	if err != nil {
		s.dropImage(ctx, name)
		return s.plainly(true, name, codeOf(err), err.Error()), ctx.Err()
	}
	if rootfs != nil {
		path, why := rootfs.path()
		s.paths.WithLabelValues(path, path).Inc()
		s.log.Info("containerd has an image", "image", name, "path", path, "reason", why, "digest", held.Digest, "rootfs", held.ChainID, "layers", len(p.chains))
	}
	return "", exists
}

// find returns the record of a layer on a parent, or nil. Called with mu held.
func (s *Snapshotter) find(chain digest.Digest, parent string) *record {
	for _, r := range s.records {
		if r.Chain == chain && r.Parent == parent {
			return r
		}
	}
	return nil
}

// imageName returns the name by which to ask the node for the image of a layer:
// HOST/REPOSITORY@DIGEST, since a tag may have moved since containerd resolved
// it; or why there is none.
func imageName(labels map[string]string) (name, why string) {
	ref := labels[snapshotters.TargetRefLabel]
	if ref == "" {
		return "", "containerd did not say which image the layer is of: see deploy/containerd/README.md for its configuration"
	}
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return "", fmt.Sprintf("image reference %q: %v", ref, err)
	}
	if d := labels[snapshotters.TargetManifestDigestLabel]; d != "" {
		manifest, err := digest.Parse(d)
		if err != nil {
			return "", fmt.Sprintf("manifest digest %q of image %s: %v", d, ref, err)
		}
		canonical, err := reference.WithDigest(reference.TrimNamed(named), manifest)
		if err != nil {
			return "", fmt.Sprintf("image reference %q: %v", ref, err)
		}
		named = canonical
	}
	return reference.TagNameOnly(named).String(), ""
}

// pull brings an image here until its rootfs is mounted, or says why it cannot.
func (s *Snapshotter) pull(ctx context.Context, name string) (_ *pulled, why string, err error) {
	s.mu.Lock()
	if p := s.pulls[name]; p != nil {
		p.timer.Reset(patience)
		s.mu.Unlock()
		return p, "", nil
	}
	if r, ok := s.refused[name]; ok && time.Now().Before(r.until) {
		s.mu.Unlock()
		return nil, r.why, nil
	}
	delete(s.refused, name)
	s.asking[name]++
	e := s.expected[name]
	if e != nil {
		e.asked = true // from here on it is the caller's
		e.timer.Stop()
	}
	s.mu.Unlock()
	defer s.answered(name)

	if e != nil {
		<-e.done
	}
	if !s.opts.Node.Has(name) {
		if err := s.mark(name); err != nil {
			return nil, "", err
		}
	}
	wait, cancel := context.WithTimeoutCause(ctx, s.opts.HeaderTimeout, fmt.Errorf("no header within %v", s.opts.HeaderTimeout))
	defer cancel()
	held, err := s.opts.Node.Hold(wait, name)
	if err != nil && context.Cause(wait) != nil {
		err = context.Cause(wait)
	}
	p := new(pulled)
	if err == nil {
		if p, err = layersOf(held.Manifest, held.Config); err == nil {
			p.held = held
			err = p.check()
		}
		if err != nil {
			s.opts.Node.Release(held.Rootfs)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unexpect(ctx, name)
		s.dropImage(ctx, name)
		if ctx.Err() != nil {
			return nil, "", ctx.Err()
		}
		code := codeOf(err)
		if wait.Err() != nil {
			code = "timeout"
		}
		why = s.plainly(true, name, code, fmt.Sprintf("image %s: %v", name, err))
		s.refused[name] = refusal{why, time.Now().Add(refusedFor)}
		for other, r := range s.refused {
			if time.Now().After(r.until) {
				delete(s.refused, other)
			}
		}
		return nil, why, nil
	}
	if other := s.pulls[name]; other != nil || s.closed {
		s.opts.Node.Release(p.held.Rootfs)
		if s.closed {
			return nil, "", fmt.Errorf("the daemon is stopping: %w", errdefs.ErrUnavailable)
		}
		return other, "", nil
	}
	p.timer = time.AfterFunc(patience, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.pulls[name] == p {
			s.forget(name)
			s.dropImage(context.Background(), name)
		}
	})
	s.pulls[name] = p
	return p, "", nil
}

// answered says that the node has answered who asked for an image.
func (s *Snapshotter) answered(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asking[name]--; s.asking[name] == 0 {
		delete(s.asking, name)
	}
}

// shorten keeps a reason within what containerd allows for a label, and makes it
// text: gRPC sends no snapshot that has a label which is not UTF-8.
func shorten(why string) string {
	const limit = 2048
	if len(why) > limit {
		why = why[:limit] + "..."
	}
	return strings.ToValidUTF8(why, "\uFFFD")
}

// layersOf finds the layers of an image in its manifest and config.
func layersOf(manifest, config []byte) (*pulled, error) {
	var m ocispec.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	var c ocispec.Image
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	p := &pulled{layers: m.Layers, diffIDs: c.RootFS.DiffIDs}
	if len(p.layers) != len(p.diffIDs) {
		return nil, fmt.Errorf("the manifest has %d layers, the config %d", len(p.layers), len(p.diffIDs))
	}
	p.chains = identity.ChainIDs(slices.Clone(p.diffIDs))
	return p, nil
}

// check reports an image whose layers do not make the rootfs that is held.
func (p *pulled) check() error {
	if len(p.chains) == 0 || p.chains[len(p.chains)-1] != p.held.ChainID {
		return fmt.Errorf("its layers do not make rootfs %s", p.held.ChainID)
	}
	return nil
}

// forget ends the hold of an image that containerd is done with pulling. Called
// with mu held.
func (s *Snapshotter) forget(name string) {
	if p := s.pulls[name]; p != nil {
		p.timer.Stop()
		s.opts.Node.Release(p.held.Rootfs)
		delete(s.pulls, name)
	}
}

// marker is the file that says that an image was pulled for containerd.
func (s *Snapshotter) marker(name string) string {
	h := sha256.Sum256([]byte(name))
	return filepath.Join(s.opts.Dir, "images", hex.EncodeToString(h[:]))
}

// mark makes the marker of an image. It is made before the image is pulled: one
// that nothing here knows of would stay.
func (s *Snapshotter) mark(name string) error {
	if _, err := os.Stat(s.marker(name)); err == nil {
		return nil
	}
	return writeDurably(s.marker(name), []byte(name))
}

// rootfsOf returns the record of an image's rootfs, or nil. Called with mu held.
func (s *Snapshotter) rootfsOf(image string) *record {
	for _, r := range s.records {
		if r.Role == roleRootfs && r.Image == image {
			return r
		}
	}
	return nil
}

// dropImage removes an image that was pulled for containerd and that no
// snapshot needs. Called with mu held.
func (s *Snapshotter) dropImage(ctx context.Context, name string) {
	if _, err := os.Stat(s.marker(name)); err != nil || s.opts.Node == nil || s.pulls[name] != nil {
		return
	}
	if s.rootfsOf(name) != nil {
		return
	}
	err := s.opts.Node.RemoveImage(context.WithoutCancel(ctx), name)
	if e, ok := errors.AsType[*api.Error](err); ok && e.Code == api.CodeNotFound {
		err = nil
	}
	if err == nil {
		err = os.Remove(s.marker(name))
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.log.Warn("an image that containerd does not need any more stays; the next daemon tries again to remove it", "image", name, "error", err)
	}
}

// dropLeftovers removes the images that an earlier daemon pulled for snapshots
// that are not there. Called with mu held.
func (s *Snapshotter) dropLeftovers(ctx context.Context) {
	const stays = "images that containerd does not need any more may stay; the next daemon tries again to remove them"
	dir := filepath.Join(s.opts.Dir, "images")
	entries, err := os.ReadDir(dir)
	if err != nil {
		s.log.Warn(stays, "error", err)
	}
	for _, e := range entries {
		name, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			s.log.Warn(stays, "error", err)
			continue
		}
		if s.marker(string(name)) != filepath.Join(dir, e.Name()) {
			_ = os.Remove(filepath.Join(dir, e.Name())) // half written
			continue
		}
		s.dropImage(ctx, string(name))
	}
}
