package node

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/rootfs"
)

// Held is the mounted rootfs of an image that somebody besides containers uses.
type Held struct {
	Ref      string        // the image's, in the normal form of package api
	Digest   digest.Digest // of its manifest
	Manifest []byte
	Config   []byte
	ChainID  digest.Digest
	Rootfs   origin.Key // what Release takes
	// Complete: every byte of it was here already when Hold was called.
	Complete bool
	// Mount is where the rootfs is mounted, read-only. It stays there, also when
	// daemons come and go, until the hold is released.
	Mount string
}

// Has reports whether an image is here, or its pull has begun.
func (n *Node) Has(name string) bool {
	name, err := api.NormalRef(name)
	return err == nil && (n.images.Get(name) != nil || n.pulls.Running(name))
}

// Hold pulls an image, or joins its pull, until its rootfs is mounted, and keeps
// the image from being removed until Release is called as often. Holds are not
// remembered: who has one takes it again from the next daemon, before requests
// are served. When ctx ends, Hold returns and the pull goes on.
func (n *Node) Hold(ctx context.Context, name string) (*Held, error) {
	name, err := api.NormalRef(name)
	if err != nil {
		return nil, err
	}
	if h := n.holdMounted(name, nil); h != nil {
		return h, nil
	}
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	defer leave()
	p, err := n.pulls.Start(ctx, api.PullRequest{Ref: name, Until: api.Mounted}, pull.How{Admitted: true})
	if err != nil {
		return nil, err
	}
	err = p.Follow(ctx, api.PullRequest{Until: api.Mounted}, func(ev api.Event) error {
		if ev.Err != "" {
			return &api.Error{Code: ev.Code, Message: ev.Err}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if h := n.holdMounted(name, p); h != nil {
		return h, nil
	}
	return nil, api.Errorf(api.CodeConflict, "image %s was removed just when its rootfs had been mounted: pull it again", name)
}

// holdMounted returns nil unless the image's rootfs is mounted and well. p is the
// pull that mounted it just now, or nil.
func (n *Node) holdMounted(name string, p *pull.Pull) *Held {
	img := n.images.Get(name)
	if img == nil {
		return nil
	}
	n.mu.Lock()
	if n.closing {
		n.mu.Unlock()
		return nil
	}
	n.holds[img.Rootfs]++
	n.mu.Unlock()
	// Who removes the image marks it first, and looks for holds then.
	r := n.store.Get(img.Rootfs)
	if n.pulls.Blocked(name) || n.images.Get(name) == nil || r == nil || !r.Mount().Mounted() || r.Broken() != nil {
		n.Release(img.Rootfs)
		return nil
	}
	n.images.Touch(name)
	n.pulls.TryNow(name, n.opts.wantedRetry)
	return &Held{
		Ref:      img.Ref,
		Digest:   img.Digest,
		Manifest: img.Manifest,
		Config:   img.Config,
		ChainID:  img.ChainID,
		Rootfs:   img.Rootfs,
		Complete: r.Complete() && (p == nil || p.HadAll()),
		Mount:    r.Mountpoint(),
	}
}

// Release ends a hold. What nothing else uses stays until an image is removed.
func (n *Node) Release(key origin.Key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.holds[key]--; n.holds[key] <= 0 {
		delete(n.holds, key)
	}
}

// Proven reports whether a rootfs is known to be the layers that its chain ID names.
func (n *Node) Proven(key origin.Key) bool {
	r := n.store.Get(key)
	return r != nil && r.Proof() == rootfs.Proven
}

// RootfsUsage returns what a rootfs takes on the disk: see store.Store.Usage.
func (n *Node) RootfsUsage(key origin.Key) (size, inodes int64, err error) {
	size, inodes, ok := n.store.Usage(key)
	if !ok {
		return 0, 0, api.Errorf(api.CodeNotFound, "rootfs %s is not here", key)
	}
	return size, inodes, nil
}

// OpenBlob asks an image's registry for one of its blobs, as containerd would.
// The bytes are not verified.
func (n *Node) OpenBlob(ctx context.Context, name string, blob ocispec.Descriptor) (io.ReadCloser, error) {
	return n.openBlob(ctx, name, blob, credentials.Credential{})
}

// openBlob is OpenBlob with what is shown to the registry; nothing: what there is.
func (n *Node) openBlob(ctx context.Context, name string, blob ocispec.Descriptor, shown credentials.Credential) (io.ReadCloser, error) {
	r, err := pull.ParseRef(name)
	if err != nil {
		return nil, err
	}
	req := n.pulls.About(r.Name, shown)
	resolver := docker.NewResolver(docker.ResolverOptions{Hosts: n.hosts.Registry(ctx, n.pulls.Want(r, req))})
	fetcher, err := resolver.Fetcher(ctx, r.Name)
	if err != nil {
		return nil, fmt.Errorf("fetch blob %s of %s: %w", blob.Digest, name, err)
	}
	// Not from its urls: they name whatever host the image's builder chose.
	blob.URLs = nil
	body, err := fetcher.Fetch(ctx, blob)
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "fetch blob %s of %s: %w", blob.Digest, name, err)
	}
	return body, nil
}
