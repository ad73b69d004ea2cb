package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/pull"
)

// maxManifest bounds a manifest, an index or a config, in bytes.
const maxManifest = 8 << 20

// Resolve asks an image's registry what a reference names, as containerd would: of an image that does not come as a
// bundle. Nothing is pulled.
//
// Errors: api.CodeUnauthorized, CodeUnavailable.
func (n *Node) Resolve(ctx context.Context, req api.PullRequest) (*pull.Header, error) {
	r, err := pull.ParseRef(req.Ref)
	if err != nil {
		return nil, err
	}
	want := n.pulls.Want(r, req)
	want.Credential = req.Credential // who asks has not been let in yet
	resolver := docker.NewResolver(docker.ResolverOptions{Hosts: n.hosts.Registry(ctx, want)})
	what := func(err error) error {
		code := api.CodeUnavailable
		if isDenied(err) {
			code = api.CodeUnauthorized
		}
		return api.Errorf(code, "ask the registry of %s what it names: %w", r, err)
	}
	_, desc, err := resolver.Resolve(ctx, r.Name)
	if err != nil {
		return nil, what(err)
	}
	fetcher, err := resolver.Fetcher(ctx, r.Name)
	if err != nil {
		return nil, what(err)
	}
	h := new(pull.Header)
	manifest, err := readBlob(ctx, fetcher, desc)
	if err == nil && images.IsIndexType(desc.MediaType) {
		h.Chosen = &bundle.Blob{Digest: desc.Digest, MediaType: desc.MediaType, Bytes: manifest}
		if desc, err = chooseManifest(manifest, req.Platform); err == nil {
			manifest, err = readBlob(ctx, fetcher, desc)
		}
	}
	if err != nil {
		return nil, what(err)
	}
	h.Manifest = bundle.Blob{Digest: desc.Digest, MediaType: desc.MediaType, Bytes: manifest}
	var m ocispec.Manifest
	if err := json.Unmarshal(manifest, &m); err != nil {
		return nil, what(fmt.Errorf("manifest %s: %w", desc.Digest, err))
	}
	config, err := readBlob(ctx, fetcher, m.Config)
	if err != nil {
		return nil, what(err)
	}
	h.Config = bundle.Blob{Digest: m.Config.Digest, MediaType: m.Config.MediaType, Bytes: config}
	h.Name = r.Host + "/" + r.Repository + "@" + desc.Digest.String()
	return h, nil
}

// chooseManifest returns the manifest of an index that containerd chooses for a platform; empty: on this host.
func chooseManifest(index []byte, platform string) (desc ocispec.Descriptor, err error) {
	host := platforms.Default()
	if platform != "" {
		p, err := platforms.Parse(platform)
		if err != nil {
			return desc, err
		}
		host = platforms.Only(p)
	}
	var x ocispec.Index
	if err := json.Unmarshal(index, &x); err != nil {
		return desc, fmt.Errorf("index: %w", err)
	}
	var fit []ocispec.Descriptor
	for _, m := range x.Manifests {
		if m.Platform == nil || host.Match(*m.Platform) {
			fit = append(fit, m)
		}
	}
	if len(fit) == 0 {
		return desc, fmt.Errorf("the index names no manifest for that platform")
	}
	slices.SortStableFunc(fit, func(a, b ocispec.Descriptor) int {
		switch {
		case a.Platform != nil && (b.Platform == nil || host.Less(*a.Platform, *b.Platform)):
			return -1
		case b.Platform != nil && (a.Platform == nil || host.Less(*b.Platform, *a.Platform)):
			return 1
		}
		return 0
	})
	return fit[0], nil
}

// readBlob fetches a blob of at most maxManifest bytes, and compares it with its digest.
func readBlob(ctx context.Context, from remotes.Fetcher, desc ocispec.Descriptor) ([]byte, error) {
	if err := desc.Digest.Validate(); err != nil {
		return nil, err
	}
	body, err := from.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, maxManifest+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxManifest {
		return nil, fmt.Errorf("%s has more than %d bytes", desc.Digest, maxManifest)
	}
	if desc.Digest.Algorithm().FromBytes(b) != desc.Digest {
		return nil, fmt.Errorf("the registry sent something else as %s", desc.Digest)
	}
	return b, nil
}

// isDenied reports whether a registry wants other credentials.
func isDenied(err error) bool {
	status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	return errors.Is(err, docker.ErrInvalidAuthorization) || ok && (status.StatusCode == http.StatusUnauthorized || status.StatusCode == http.StatusForbidden)
}
