// Package imports brings what another registry has into a server that runs: from the registry's directory (the layout
// docker/registry/v2 of distribution), or from the registry itself.
//
// It pushes by the distribution API, as any client, so whatever holds for a push holds here: rights, the
// journal, and that what was acknowledged is durable. A manifest is pushed after all that it names, byte for byte, and its tag after it: an
// image can be pulled as soon as it is there.
//
// # Again
//
// Nothing is kept of how far an import came. What the server has is not sent again: a tag that names the same manifest there
// costs one question, a blob another one. So an import that was interrupted is begun again, and one that is repeated brings what is new.
//
// # What fails
//
// What is lost or damaged in the source is named, with the image that needs it; the others still come. Nothing that is not what its
// digest says gets into the server: the server compares.
package imports

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"

	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/access"
)

// Options of Run.
type Options struct {
	From string // a directory, or the URL of a registry: http[s]://HOST[:PORT][/PREFIX]
	To   string // the URL of a server; repositories keep their names below its prefix
	// Repositories bounds what is imported; none: all. One without * need not be in the catalog of the source.
	Repositories []string
	// Parallel is how many images, and how many blobs, are brought at once. Default 4.
	Parallel int
	// DryRun only says what would be brought.
	DryRun   bool
	Progress func(Report) // is called now and then, one call at a time; nil: it is not
	Log      *slog.Logger // nil: slog.Default
}

// Failure is something that could not be brought.
type Failure struct {
	Image string `json:"image"` // REPOSITORY:TAG or REPOSITORY@DIGEST; a repository alone if it could not be listed
	Error string `json:"error"`
}

// Report counts what was brought, or with DryRun would be.
type Report struct {
	Repositories int64         `json:"repositories"`
	Tags         int64         `json:"tags"`
	Here         int64         `json:"tags_here"` // of Tags, those that were there before
	Manifests    int64         `json:"manifests"`
	Blobs        int64         `json:"blobs"`
	Bytes        int64         `json:"bytes"`   // of blobs and manifests
	Mounted      int64         `json:"mounted"` // blobs that another repository of the server had
	Failures     []Failure     `json:"failures,omitempty"`
	Took         time.Duration `json:"took"`
}

// importer is one import.
type importer struct {
	o        Options
	from     source
	to       *remoteRegistry
	patterns []access.Pattern
	sending  *semaphore.Weighted // blobs on their way
	flights  singleflight.Group  // what several images want is brought once: by repository and digest

	mu     sync.Mutex
	r      Report                   // guarded by mu
	holder map[digest.Digest]string // guarded by mu: a repository of the server that has the blob
	met    map[string]bool          // guarded by mu: of a dry run
}

// maxHolders bounds what is remembered for mounts.
const maxHolders = 1 << 18

// Run imports. Errors: a source that cannot be listed, a server that cannot be reached; what fails of single images is in the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	begin := time.Now()
	if o.Parallel <= 0 {
		o.Parallel = 4
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Progress == nil {
		o.Progress = func(Report) {}
	}
	i := &importer{o: o, sending: semaphore.NewWeighted(int64(o.Parallel)), holder: map[digest.Digest]string{}, met: map[string]bool{}}
	for _, p := range o.Repositories {
		pattern, err := access.ParsePattern(p)
		if err != nil {
			return nil, err
		}
		i.patterns = append(i.patterns, pattern)
	}
	var err error
	if i.to, err = openRegistry(o.To); err == nil {
		err = i.to.ping(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("import to %s: %w", o.To, err)
	}
	if i.from, err = openSource(ctx, o.From); err != nil {
		return nil, fmt.Errorf("import from %s: %w", o.From, err)
	}
	err = i.from.repositories(ctx, o.Repositories, func(repo string) error {
		if len(i.patterns) > 0 && !slices.ContainsFunc(i.patterns, func(p access.Pattern) bool { return p.Match(repo) }) {
			return nil
		}
		return i.repository(ctx, repo)
	})
	i.r.Took = time.Since(begin)
	if err != nil {
		err = fmt.Errorf("import from %s: %w", o.From, err)
	}
	return &i.r, err
}

// count changes the report.
func (i *importer) count(fn func(*Report)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	fn(&i.r)
	i.o.Progress(i.r)
}

// fail records what cannot be brought. It returns an error that ends everything, if there is one.
func (i *importer) fail(ctx context.Context, image string, err error) error {
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	i.o.Log.Error("not imported", "image", image, "error", err)
	i.count(func(r *Report) { r.Failures = append(r.Failures, Failure{image, err.Error()}) })
	return nil
}

// repository brings one repository: tags, what no tag names as far as the source says so, and what refers to any of it.
func (i *importer) repository(ctx context.Context, name string) error {
	i.count(func(r *Report) { r.Repositories++ })
	repo, err := i.to.repository(name)
	if err != nil {
		return i.fail(ctx, name, err)
	}
	at := &place{i, name, repo}
	images, ctx := errgroup.WithContext(ctx)
	images.SetLimit(i.o.Parallel)
	err = i.from.tags(ctx, name, func(tag string) error {
		images.Go(func() error { return i.fail(ctx, name+":"+tag, at.tag(ctx, tag)) })
		return ctx.Err()
	})
	if err == nil {
		err = i.from.manifests(ctx, name, func(d digest.Digest) error {
			images.Go(func() error {
				_, err := at.image(ctx, d)
				return i.fail(ctx, name+"@"+d.String(), err)
			})
			return ctx.Err()
		})
	}
	err = i.fail(ctx, name, err)
	return errors.Join(images.Wait(), err)
}

// place is a repository of the server that is imported to.
type place struct {
	*importer
	name string
	repo *remote.Repository
}

// tag brings what a tag names.
func (p *place) tag(ctx context.Context, tag string) error {
	d, err := p.from.tag(ctx, p.name, tag)
	if err != nil {
		return err
	}
	there, err := p.repo.Manifests().Resolve(ctx, tag)
	if err != nil && !errors.Is(err, errdef.ErrNotFound) {
		return fmt.Errorf("ask the server: %w", err)
	}
	if err == nil && there.Digest == d {
		p.count(func(r *Report) { r.Tags, r.Here = r.Tags+1, r.Here+1 })
		return p.attached(ctx, document{desc: there}, map[digest.Digest]bool{})
	}
	m, err := p.image(ctx, d)
	if err != nil {
		return err
	}
	if !p.o.DryRun {
		if err := p.repo.Manifests().PushReference(ctx, m.desc, bytes.NewReader(m.bytes), tag); err != nil {
			return fmt.Errorf("push the tag: %w", err)
		}
	}
	p.count(func(r *Report) { r.Tags++ })
	return p.attached(ctx, m, map[digest.Digest]bool{})
}

// document is a manifest.
type document struct {
	desc  ocispec.Descriptor
	bytes []byte
}

// image brings a manifest after all that it names.
func (p *place) image(ctx context.Context, d digest.Digest) (document, error) {
	v, err, _ := p.flights.Do("manifest "+p.name+" "+d.String(), func() (any, error) {
		m, err := p.from.manifest(ctx, p.name, d)
		if err != nil {
			return m, err
		}
		switch has, err := p.repo.Manifests().Exists(ctx, m.desc); {
		case err != nil:
			return m, fmt.Errorf("ask the server for manifest %s: %w", d, err)
		case has:
			return m, nil
		}
		if err := p.parts(ctx, m); err != nil {
			return m, err
		}
		if p.o.DryRun && !p.first(d) {
			return m, nil
		}
		if !p.o.DryRun {
			if err := p.repo.Manifests().Push(ctx, m.desc, bytes.NewReader(m.bytes)); err != nil {
				return m, fmt.Errorf("push manifest %s: %w", d, err)
			}
		}
		p.count(func(r *Report) { r.Manifests, r.Bytes = r.Manifests+1, r.Bytes+m.desc.Size })
		return m, nil
	})
	m, _ := v.(document)
	return m, err
}

// attached brings what refers to a manifest, and to those that an index names, and to these. Signatures may name what they are
// of, so it follows no flight, and remembers where it was.
func (p *place) attached(ctx context.Context, m document, seen map[digest.Digest]bool) error {
	if !p.from.hasReferrers() || seen[m.desc.Digest] {
		return nil
	}
	seen[m.desc.Digest] = true
	if m.bytes == nil && oci.IsIndex(m.desc.MediaType) {
		var err error
		if m, err = p.from.manifest(ctx, p.name, m.desc.Digest); err != nil {
			return err
		}
	}
	if m.bytes != nil {
		_, others, err := named(m)
		if err != nil {
			return err
		}
		for _, d := range others {
			if isManifest(d.MediaType) {
				if err := p.attached(ctx, document{desc: d}, seen); err != nil {
					return err
				}
			}
		}
	}
	return p.from.referrers(ctx, p.name, m.desc, func(d digest.Digest) error {
		r, err := p.image(ctx, d)
		if err != nil {
			return fmt.Errorf("what refers to %s: %w", m.desc.Digest, err)
		}
		return p.attached(ctx, r, seen)
	})
}

// parts brings what a manifest names. All are tried: other images may want them.
func (p *place) parts(ctx context.Context, m document) error {
	blobs, others, err := named(m)
	if err != nil {
		return err
	}
	var all errgroup.Group
	all.SetLimit(2 * p.o.Parallel)
	for _, d := range blobs {
		all.Go(func() error { return p.blob(ctx, d) })
	}
	for _, d := range others {
		all.Go(func() error {
			if isManifest(d.MediaType) {
				_, err := p.image(ctx, d.Digest)
				return err
			}
			return p.blob(ctx, d) // a build cache's
		})
	}
	return all.Wait()
}

// blob brings a blob.
func (p *place) blob(ctx context.Context, d ocispec.Descriptor) error {
	_, err, _ := p.flights.Do("blob "+p.name+" "+d.Digest.String(), func() (any, error) {
		if err := p.sending.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer p.sending.Release(1)
		return nil, p.send(ctx, d)
	})
	if err != nil {
		return fmt.Errorf("blob %s: %w", d.Digest, err)
	}
	return nil
}

func (p *place) send(ctx context.Context, d ocispec.Descriptor) error {
	has, err := p.repo.Blobs().Exists(ctx, d)
	if err != nil {
		return fmt.Errorf("ask the server: %w", err)
	}
	if has {
		p.note(d.Digest)
		return nil
	}
	holder := p.note(d.Digest)
	if p.o.DryRun {
		if !p.first(d.Digest) {
			return nil
		}
		if holder == "" {
			p.count(func(r *Report) { r.Blobs, r.Bytes = r.Blobs+1, r.Bytes+d.Size })
		} else {
			p.count(func(r *Report) { r.Mounted++ })
		}
		return nil
	}
	var from *checked
	open := func() (io.ReadCloser, error) {
		r, err := p.from.blob(ctx, p.name, d)
		if err != nil {
			return nil, err
		}
		from = &checked{ReadCloser: r, want: d, hash: d.Digest.Algorithm().Hash()}
		return from, nil
	}
	if mounter, ok := p.repo.Blobs().(registry.Mounter); ok && holder != "" {
		return p.sent(d, &from, mounter.Mount(ctx, d, p.to.name(holder), open))
	}
	r, err := open()
	if err != nil {
		return err
	}
	defer r.Close()
	return p.sent(d, &from, p.repo.Blobs().Push(ctx, d, r))
}

// sent says how it ended; *from is nil if nothing had to be sent.
func (p *place) sent(d ocispec.Descriptor, from **checked, err error) error {
	if err != nil {
		p.forget(d.Digest)
		if *from != nil {
			return cmp.Or((*from).wrong(), err)
		}
		return err
	}
	p.count(func(r *Report) {
		if *from == nil {
			r.Mounted++
		} else {
			r.Blobs, r.Bytes = r.Blobs+1, r.Bytes+d.Size
		}
	})
	return nil
}

// first reports whether a dry run meets something of the repository for the first time: nothing of it gets there.
func (p *place) first(d digest.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := p.name + " " + d.String()
	met := p.met[key]
	p.met[key] = true
	return !met
}

// note remembers that the repository has a blob, or soon will. It returns another one that has.
func (p *place) note(d digest.Digest) (holder string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	holder = p.holder[d]
	if holder == "" && len(p.holder) < maxHolders {
		p.holder[d] = p.name
	}
	if holder == p.name {
		return ""
	}
	return holder
}

// forget undoes it.
func (p *place) forget(d digest.Digest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.holder, d)
}

// checked is a blob of the source on its way, hashed.
type checked struct {
	io.ReadCloser
	want ocispec.Descriptor
	hash hash.Hash
	n    int64
}

func (c *checked) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.hash.Write(b[:n])
	c.n += int64(n)
	return n, err
}

// wrong says what is wrong with the source, as far as it was read; nil: nothing is.
func (c *checked) wrong() error {
	got := digest.NewDigest(c.want.Digest.Algorithm(), c.hash)
	if c.n == c.want.Size && got != c.want.Digest {
		return fmt.Errorf("it is damaged in the source: its bytes have the digest %s", got)
	}
	return nil
}
