package imports

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
	"oras.land/oras-go/v2/registry/remote/retry"

	"hydrofoil.dev/foil/internal/format/oci"
)

// source is what is imported from. What it returns as a manifest has the digest that was asked for.
type source interface {
	// repositories calls fn for each; wanted are patterns that a source which cannot list may take names from.
	repositories(ctx context.Context, wanted []string, fn func(repo string) error) error
	tags(ctx context.Context, repo string, fn func(tag string) error) error
	tag(ctx context.Context, repo, tag string) (digest.Digest, error)
	// manifests calls fn for those that it knows without a tag.
	manifests(ctx context.Context, repo string, fn func(digest.Digest) error) error
	manifest(ctx context.Context, repo string, d digest.Digest) (document, error)
	blob(ctx context.Context, repo string, d ocispec.Descriptor) (io.ReadCloser, error)
	// hasReferrers says that referrers returns some that manifests does not.
	hasReferrers() bool
	referrers(ctx context.Context, repo string, subject ocispec.Descriptor, fn func(digest.Digest) error) error
}

const maxManifest = 4 << 20 // what the server takes

func openSource(ctx context.Context, from string) (source, error) {
	if strings.Contains(from, "://") {
		r, err := openRegistry(from)
		if err != nil {
			return nil, err
		}
		return r, r.ping(ctx)
	}
	for _, below := range []string{"docker/registry/v2", "v2", "."} {
		d := directory(filepath.Join(from, filepath.FromSlash(below)))
		if info, err := os.Stat(filepath.Join(string(d), "repositories")); err == nil && info.IsDir() {
			return d, nil
		}
	}
	return nil, errors.New("it is no registry's directory: docker/registry/v2/repositories is not below it; name the root directory of its storage, or a URL")
}

// isManifest reports whether something of a type is pushed as a manifest.
func isManifest(mediaType string) bool {
	return oci.IsManifest(mediaType) || oci.IsIndex(mediaType) || mediaType == "application/vnd.oci.artifact.manifest.v1+json"
}

// named returns what a manifest names: blobs, and what may be manifests or blobs.
func named(m document) (blobs, others []ocispec.Descriptor, err error) {
	var f struct {
		Config    *ocispec.Descriptor  `json:"config"`
		Layers    []ocispec.Descriptor `json:"layers"`
		Blobs     []ocispec.Descriptor `json:"blobs"`
		Manifests []ocispec.Descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(m.bytes, &f); err != nil {
		return nil, nil, fmt.Errorf("manifest %s is no JSON: %w", m.desc.Digest, err)
	}
	if f.Config != nil {
		blobs = append(blobs, *f.Config)
	}
	for _, d := range slices.Concat(f.Layers, f.Blobs) {
		if !oci.Foreign(d) {
			blobs = append(blobs, d)
		}
	}
	for _, d := range slices.Concat(blobs, f.Manifests) {
		if err := d.Digest.Validate(); err != nil {
			return nil, nil, fmt.Errorf("manifest %s names %q: %w", m.desc.Digest, d.Digest, err)
		}
	}
	return blobs, f.Manifests, nil
}

// newDocument checks what came as a manifest.
func newDocument(d digest.Digest, mediaType string, b []byte) (document, error) {
	if got := d.Algorithm().FromBytes(b); got != d {
		return document{}, fmt.Errorf("manifest %s is damaged in the source: its bytes have the digest %s", d, got)
	}
	var f struct {
		MediaType string            `json:"mediaType"`
		Layers    []json.RawMessage `json:"layers"`
		Manifests []json.RawMessage `json:"manifests"`
		Schema    int               `json:"schemaVersion"`
	}
	if err := json.Unmarshal(b, &f); err != nil {
		return document{}, fmt.Errorf("manifest %s is no JSON: %w", d, err)
	}
	switch {
	case f.Schema == 1:
		return document{}, fmt.Errorf("manifest %s is of the schema of before 2016: pull the image and push it again with a client of today", d)
	case f.MediaType != "":
		mediaType = f.MediaType
	case mediaType != "" && isManifest(mediaType):
	case f.Manifests != nil: // OCI lets documents be silent about what they are
		mediaType = ocispec.MediaTypeImageIndex
	default:
		mediaType = ocispec.MediaTypeImageManifest
	}
	return document{ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(b))}, b}, nil
}

// directory is docker/registry/v2 below the root directory of distribution's storage.
type directory string

func (r directory) path(elements ...string) string {
	return filepath.Join(append([]string{string(r)}, elements...)...)
}

func (r directory) repositories(ctx context.Context, _ []string, fn func(string) error) error {
	top := r.path("repositories")
	return filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !e.IsDir() || ctx.Err() != nil {
			return ctx.Err()
		}
		if e.Name() == "_manifests" {
			name, err := filepath.Rel(top, filepath.Dir(path))
			if err == nil {
				err = fn(filepath.ToSlash(name))
			}
			if err != nil {
				return err
			}
		}
		if strings.HasPrefix(e.Name(), "_") {
			return fs.SkipDir
		}
		return nil
	})
}

func (r directory) tags(_ context.Context, repo string, fn func(string) error) error {
	list, err := os.ReadDir(r.path("repositories", repo, "_manifests", "tags"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range list {
		if err := fn(e.Name()); err != nil {
			return err
		}
	}
	return err
}

func (r directory) tag(_ context.Context, repo, tag string) (digest.Digest, error) {
	return r.link("repositories", repo, "_manifests", "tags", tag, "current")
}

// link reads what a link names.
func (r directory) link(elements ...string) (digest.Digest, error) {
	b, err := os.ReadFile(r.path(append(elements, "link")...))
	if err != nil {
		return "", fmt.Errorf("it is damaged in the source: %w", err)
	}
	d, err := digest.Parse(strings.TrimSpace(string(b)))
	if err != nil {
		return "", fmt.Errorf("it is damaged in the source: %s names %.80q: %w", filepath.Join(elements...), b, err)
	}
	return d, nil
}

func (r directory) manifests(_ context.Context, repo string, fn func(digest.Digest) error) error {
	for _, algorithm := range []digest.Algorithm{digest.SHA256, digest.SHA512} {
		list, err := os.ReadDir(r.path("repositories", repo, "_manifests", "revisions", algorithm.String()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range list {
			d := digest.NewDigestFromEncoded(algorithm, e.Name())
			if d.Validate() != nil {
				continue
			}
			if _, err := os.Stat(r.path("repositories", repo, "_manifests", "revisions", algorithm.String(), e.Name(), "link")); errors.Is(err, fs.ErrNotExist) {
				continue // it was deleted
			}
			if err := fn(d); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r directory) data(d digest.Digest) string {
	return r.path("blobs", d.Algorithm().String(), d.Encoded()[:2], d.Encoded(), "data")
}

func (r directory) manifest(_ context.Context, _ string, d digest.Digest) (document, error) {
	f, err := os.Open(r.data(d))
	if err != nil {
		return document{}, fmt.Errorf("manifest %s is lost in the source: %w", d, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return document{}, fmt.Errorf("manifest %s: %w", d, err)
	}
	return newDocument(d, "", b)
}

func (r directory) blob(_ context.Context, _ string, d ocispec.Descriptor) (io.ReadCloser, error) {
	f, err := os.Open(r.data(d.Digest))
	if err != nil {
		return nil, fmt.Errorf("it is lost in the source: %w", err)
	}
	if info, err := f.Stat(); err != nil || info.Size() != d.Size {
		f.Close()
		if err == nil {
			err = fmt.Errorf("it is damaged in the source: it has %d bytes, the manifest says %d", info.Size(), d.Size)
		}
		return nil, err
	}
	return f, nil
}

// hasReferrers: manifests has all there are.
func (directory) hasReferrers() bool { return false }

func (directory) referrers(context.Context, string, ocispec.Descriptor, func(digest.Digest) error) error {
	return nil
}

// remoteRegistry is a registry that runs.
type remoteRegistry struct {
	host   string
	prefix string // of the names of its repositories; empty, or ends in /
	plain  bool
	client *auth.Client
}

// openRegistry reads a URL. Credentials are those of Docker's configuration.
func openRegistry(at string) (*remoteRegistry, error) {
	u, err := url.Parse(at)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, errors.New("want the URL of a registry: https://HOST[:PORT], and the prefix of its repositories if there is one")
	}
	store, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return nil, err
	}
	r := &remoteRegistry{host: u.Host, prefix: strings.Trim(u.Path, "/"), plain: u.Scheme == "http"}
	if r.prefix != "" {
		r.prefix += "/"
	}
	r.client = &auth.Client{Client: retry.DefaultClient, Cache: auth.NewCache(), Credential: credentials.Credential(store)}
	r.client.SetUserAgent("foil")
	return r, nil
}

func (r *remoteRegistry) name(repo string) string { return r.prefix + repo }

func (r *remoteRegistry) registry() (*remote.Registry, error) {
	reg, err := remote.NewRegistry(r.host)
	if err != nil {
		return nil, err
	}
	reg.PlainHTTP, reg.Client = r.plain, r.client
	return reg, nil
}

func (r *remoteRegistry) ping(ctx context.Context) error {
	reg, err := r.registry()
	if err == nil {
		err = reg.Ping(ctx)
	}
	return err
}

func (r *remoteRegistry) repository(name string) (*remote.Repository, error) {
	repo, err := remote.NewRepository(r.host + "/" + r.name(name))
	if err != nil {
		return nil, err
	}
	repo.PlainHTTP, repo.Client = r.plain, r.client
	return repo, nil
}

func (r *remoteRegistry) repositories(ctx context.Context, wanted []string, fn func(string) error) error {
	if len(wanted) > 0 && !slices.ContainsFunc(wanted, func(p string) bool { return strings.Contains(p, "*") }) {
		for _, name := range wanted { // not every registry has a catalog, nor lets everybody have it
			if err := fn(name); err != nil {
				return err
			}
		}
		return nil
	}
	reg, err := r.registry()
	if err != nil {
		return err
	}
	err = reg.Repositories(ctx, "", func(page []string) error {
		for _, name := range page {
			if name, ok := strings.CutPrefix(name, r.prefix); ok {
				if err := fn(name); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("list repositories: %w; name them with --repository if the registry has no catalog", err)
	}
	return err
}

func (r *remoteRegistry) tags(ctx context.Context, name string, fn func(string) error) error {
	repo, err := r.repository(name)
	if err != nil {
		return err
	}
	err = repo.Tags(ctx, "", func(page []string) error {
		for _, tag := range page {
			if err := fn(tag); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, errdef.ErrNotFound) && ctx.Err() == nil {
		return fmt.Errorf("it has no tags: %w", err)
	}
	return err
}

func (r *remoteRegistry) tag(ctx context.Context, name, tag string) (digest.Digest, error) {
	repo, err := r.repository(name)
	if err != nil {
		return "", err
	}
	d, err := repo.Manifests().Resolve(ctx, tag)
	return d.Digest, err
}

// manifests: a registry lists none.
func (r *remoteRegistry) manifests(context.Context, string, func(digest.Digest) error) error {
	return nil
}

func (r *remoteRegistry) manifest(ctx context.Context, name string, d digest.Digest) (document, error) {
	repo, err := r.repository(name)
	if err != nil {
		return document{}, err
	}
	desc, body, err := repo.Manifests().FetchReference(ctx, d.String())
	if err != nil {
		return document{}, fmt.Errorf("manifest %s of the source: %w", d, err)
	}
	defer body.Close()
	var b bytes.Buffer
	if _, err := io.Copy(&b, io.LimitReader(body, maxManifest+1)); err != nil {
		return document{}, fmt.Errorf("manifest %s of the source: %w", d, err)
	}
	return newDocument(d, desc.MediaType, b.Bytes())
}

func (r *remoteRegistry) blob(ctx context.Context, name string, d ocispec.Descriptor) (io.ReadCloser, error) {
	repo, err := r.repository(name)
	if err != nil {
		return nil, err
	}
	body, err := repo.Blobs().Fetch(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("the source does not give it: %w", err)
	}
	return body, nil
}

func (*remoteRegistry) hasReferrers() bool { return true }

func (r *remoteRegistry) referrers(ctx context.Context, name string, subject ocispec.Descriptor, fn func(digest.Digest) error) error {
	repo, err := r.repository(name)
	if err != nil {
		return err
	}
	// By the API, or by the tag that clients use where there is none.
	err = repo.Referrers(ctx, subject, "", func(page []ocispec.Descriptor) error {
		for _, d := range page {
			if err := fn(d.Digest); err != nil {
				return err
			}
		}
		return nil
	})
	if errors.Is(err, errdef.ErrNotFound) {
		err = nil
	}
	return err
}
