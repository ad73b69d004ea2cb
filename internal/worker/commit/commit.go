// Package commit makes an image of what a container has changed, on this worker: its layer, its documents, and its
// rootfs, which can be run at once. Nothing is pulled, and nothing is unpacked: the rootfs uses the contents of the
// image that the container is on where they lie, and has an arena for what is new.
//
// # Steps
//
//  1. The changes are written as a layer, an uncompressed tar stream, to a file without a name (package changes). From
//     here on the container may go on.
//  2. The stream is read as anybody's is (package layer): its digest, which is the diff ID, its entries and their
//     segments.
//  3. The table of contents: that of the base, taken as one layer, and the new one, flattened (package flatten).
//  4. The rootfs is laid out and mounted (package store), segments come from the layer's file, are verified, and all
//     is made durable.
//  5. The layer's file gets its name in the rootfs's directory, and the entry list its place beside it.
//  6. The record of the image. That is the commit point: before it nothing names the rootfs, and it goes.
//
// # Whose it is
//
// The rootfs is of the registry of its base: what is in it came from there, or from whoever ran the container. So the
// image's name must be of that registry, or of its group. Servers are told of no rootfs that was made here
// (rootfs.Record.Made).
//
// # What is known of it
//
// The new layer was hashed here. So the image is proven as any other is (package proof), without a server, once
// its base is: the entry lists of the base's layers are known then, and flattened together with the new one's they must
// make this very rootfs. A base that is not proven may be committed on; what is made of it is not proven before the
// base is.
package commit

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/flatten"
	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/format/segment"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/changes"
	"hydrofoil.dev/foil/internal/worker/images"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/proof"
	"hydrofoil.dev/foil/internal/worker/rootfs"
	"hydrofoil.dev/foil/internal/worker/store"
)

// Options configure Commit. All but At are required.
type Options struct {
	Root   string
	Store  *store.Store
	Images *images.Set
	Groups origin.Groups
	// At is called at named points, in tests.
	At func(point string)
}

// Base is what a container is on. The rootfs is used by the caller, and complete.
type Base struct {
	Image  *images.Image
	Rootfs *store.Rootfs
}

// Commit makes the image that req names of the changes in a tree on base. read is called as soon as the container's
// files have been read. An image of that name is replaced.
//
// Errors: api.CodeInvalid for a name or a change that cannot be; api.CodeConflict when the base is not complete, or the
// container changes files meanwhile; those of store.Open.
func Commit(ctx context.Context, o Options, base Base, tree changes.Tree, req api.CommitRequest, read func()) (*api.CommitReport, error) {
	if o.At == nil {
		o.At = func(string) {}
	}
	c := &commit{Options: o, base: base, req: req, now: time.Now().UTC()}
	if !req.Created.IsZero() {
		c.now = req.Created.UTC()
	}
	defer func() {
		c.leases.End()
		o.Store.Collect() // what came to nothing, and what the name named before
	}()
	if err := c.check(); err != nil {
		return nil, err
	}
	file, err := c.write(ctx, tree)
	read()
	if file != nil {
		defer file.Close()
	}
	if err != nil {
		return nil, err
	}
	o.At("layer")
	if err := c.read(ctx, file); err != nil {
		return nil, fmt.Errorf("the layer of the changes: %w", err)
	}
	if err := c.documents(); err != nil {
		return nil, err
	}
	if err := c.flatten(ctx); err != nil {
		return nil, err
	}
	r, err := c.fill(ctx, file)
	if err != nil {
		return nil, err
	}
	o.At("filled")
	img := &images.Image{
		Version: images.Version, Ref: c.ref, Platform: base.Image.Platform, Plain: base.Image.Plain, Made: true,
		Digest: c.image.Manifest.Digest, Manifest: c.image.Manifest.Bytes, Config: c.image.Config.Bytes,
		ChainID: c.image.ChainID, Rootfs: r.Key(), Created: time.Now().UTC(),
	}
	record, err := o.Images.Stage(img)
	if err == nil {
		err = errors.Join(o.Images.Put(img, record), o.Images.Sync())
	}
	if err != nil {
		return nil, err
	}
	return &api.CommitReport{
		Ref: c.ref, Digest: img.Digest.String(), DiffID: c.diffID.String(),
		LayerBytes: c.size, FileBytes: c.written.Bytes, Entries: c.written.Entries,
	}, nil
}

// commit is one call of Commit.
type commit struct {
	Options
	base   Base
	req    api.CommitRequest
	now    time.Time
	ref    string // of the new image
	leases store.Leases

	manifest *ocispec.Manifest // of the base
	config   *ocispec.Image

	written changes.Written
	starts  map[string]int64 // where the bytes of a file begin in the layer, by its path
	diffID  digest.Digest
	size    int64 // of the layer
	entries []*layer.Entry
	image   *bundle.Image
	toc     *toc.TOC
}

// place is where a segment's bytes are in the layer.
type place struct{ off, length int64 }

func (c *commit) check() (err error) {
	if c.ref, err = api.NormalRef(c.req.Ref); err != nil {
		return err
	}
	r := c.base.Rootfs
	switch registry := origin.Of(c.ref); {
	case r.Origin() == "":
		return api.Errorf(api.CodeConflict, "image %s was pulled by an older foil, which noted not from where: pull it again", c.base.Image.Ref)
	case !c.Groups.Same(r.Origin(), registry):
		return api.Errorf(api.CodeInvalid, "the container's image is of the registry %s: give what is made of it a name there, %s/...", r.Origin(), r.Origin())
	case bytes.Contains([]byte(c.ref), []byte("@")):
		return api.Errorf(api.CodeInvalid, "image name %s: the digest of what is made is not known before: leave it out", c.ref)
	case r.Broken() != nil:
		return api.Errorf(api.CodeCorrupt, "image %s cannot be served: %w", c.base.Image.Ref, r.Broken())
	case !r.Complete():
		return api.Errorf(api.CodeConflict, "image %s has not arrived yet, and what is made of it would lack that: wait for it with `foil pull %s`", c.base.Image.Ref, c.base.Image.Ref)
	}
	c.manifest, c.config = new(ocispec.Manifest), new(ocispec.Image)
	mediaType := mediaTypeOf(c.base.Image.Manifest)
	if c.manifest, err = oci.ReadManifest(mediaType, c.base.Image.Manifest); err == nil {
		c.config, err = oci.ReadConfig(c.manifest, c.manifest.Config.MediaType, c.base.Image.Config)
	}
	if err != nil {
		return api.Errorf(api.CodeUnsupported, "documents of image %s: %w", c.base.Image.Ref, err)
	}
	return nil
}

// mediaTypeOf returns what a manifest calls itself; those of OCI need not.
func mediaTypeOf(manifest []byte) string {
	d := document{}
	var mediaType string
	if jsonErr := d.parse(manifest); jsonErr == nil {
		_ = d.get("mediaType", &mediaType) // else ReadManifest says so
	}
	return cmp.Or(mediaType, ocispec.MediaTypeImageManifest)
}

// layerType is what the new layer is called beside those of the base.
func (c *commit) layerType() string {
	if c.manifest.Config.MediaType == ocispec.MediaTypeImageConfig {
		return ocispec.MediaTypeImageLayer
	}
	return "application/vnd.docker.image.rootfs.diff.tar"
}

// write writes the layer to a file without a name.
func (c *commit) write(ctx context.Context, tree changes.Tree) (*os.File, error) {
	dir := filepath.Join(c.Root, "rootfs") // where it is to have one
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "make a file in", Path: dir, Err: err}
	}
	file := os.NewFile(uintptr(fd), "layer")
	w, sum := bufio.NewWriterSize(file, 1<<20), sha256.New()
	c.starts = make(map[string]int64)
	count := &counter{w: io.MultiWriter(w, sum)}
	c.written, err = tree.WriteLayer(ctx, count, changes.LayerOptions{
		Latest: c.req.Created,
		File:   func(path string) { c.starts[path] = count.n },
	})
	if err == nil {
		err = w.Flush()
	}
	if errors.Is(err, changes.ErrRunning) {
		err = api.Errorf(api.CodeConflict, "%w: try again, or have it paused", err)
	}
	c.diffID, c.size = digest.NewDigest(digest.SHA256, sum), count.n
	return file, err
}

// counter counts what is written.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// read takes the layer apart.
func (c *commit) read(ctx context.Context, file *os.File) error {
	r, err := layer.NewReader(ctx, io.NewSectionReader(file, 0, c.size), layer.Descriptor{Digest: c.diffID, Size: c.size, DiffID: c.diffID}, layer.Options{})
	if err != nil {
		return err
	}
	defer r.Close()
	splitter := segment.NewSplitter(nil)
	for {
		e, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if e.Size > 0 {
			if err := e.Split(splitter, r, func(segment.ID, []byte) error { return nil }); err != nil {
				return err
			}
		}
		c.entries = append(c.entries, e)
	}
}

// documents makes config and manifest.
func (c *commit) documents() error {
	config, err := newConfig(c.base.Image.Config, c.diffID, c.req, c.now)
	if err != nil {
		return err
	}
	manifest, err := newManifest(c.base.Image.Manifest, config, &ocispec.Descriptor{MediaType: c.layerType(), Digest: c.diffID, Size: c.size})
	if err != nil {
		return err
	}
	// As whoever pulls it reads them.
	mediaType := mediaTypeOf(c.base.Image.Manifest)
	m, err := oci.ReadManifest(mediaType, manifest)
	if err == nil {
		_, err = oci.ReadConfig(m, m.Config.MediaType, config)
	}
	if err != nil {
		return api.Errorf(api.CodeUnsupported, "documents of the new image: %w", err)
	}
	c.image = &bundle.Image{
		Manifest: bundle.Blob{Digest: digest.FromBytes(manifest), MediaType: mediaType, Bytes: manifest},
		Config:   bundle.Blob{Digest: m.Config.Digest, MediaType: m.Config.MediaType, Bytes: config},
		ChainID:  flatten.ChainID(append(slices.Clone(c.config.RootFS.DiffIDs), c.diffID)),
	}
	return nil
}

// sliceEntries are entries in memory, as flatten.Entries.
type sliceEntries []*layer.Entry

func (s *sliceEntries) Next() (*layer.Entry, error) {
	if len(*s) == 0 {
		return nil, io.EOF
	}
	e := (*s)[0]
	*s = (*s)[1:]
	return e, nil
}

// flatten makes the table of contents.
func (c *commit) flatten(ctx context.Context) error {
	have, err := c.base.Rootfs.Read()
	if err != nil {
		return err
	}
	diff := sliceEntries(c.entries)
	c.toc, err = flatten.By(ctx, have.TOC.Rules, []flatten.Layer{
		{Digest: c.base.Rootfs.ChainID(), DiffID: c.base.Rootfs.ChainID(), Entries: flatten.Tree(have.TOC)},
		{Digest: c.diffID, DiffID: c.diffID, Entries: &diff},
	})
	if err != nil {
		return err
	}
	c.toc.ChainID = c.image.ChainID
	if c.image.TOC, err = toc.Encode(c.toc); err != nil {
		return err
	}
	c.image.TOCDigest, c.image.Segments = toc.Digest(c.image.TOC), uint32(len(c.toc.Segments))
	return nil
}

// filler is who fills the rootfs: nobody takes it over, or joins.
type filler struct{ _ byte }

func (*filler) Claimed() bool { return true }
func (*filler) Yield()        {}

// fill makes the rootfs, whole and durable, or finds it.
func (c *commit) fill(ctx context.Context, file *os.File) (*store.Rootfs, error) {
	base, weak := c.base.Rootfs, ""
	if base.Proof() != rootfs.Proven {
		weak = base.Record().Weak
	}
	by := new(filler)
	r, made, err := c.Store.Open(store.Wanted{
		Registry: base.Origin(), Image: c.image, TOC: c.toc, Weak: weak, By: by, Leases: &c.leases, Made: true,
	})
	if r != nil {
		defer r.Unclaim(by)
	}
	switch {
	case err != nil:
		return nil, err
	case made == nil && r.Complete() && r.Broken() == nil:
		return r, nil // the same was made before
	case made == nil:
		return nil, api.Errorf(api.CodeConflict, "the very same image is being made, or pulled, just now: try again in a moment")
	}
	if err := c.fillNew(ctx, r, file); err != nil {
		r.GiveUp(by, err)
		return nil, err
	}
	return r, nil
}

func (c *commit) fillNew(ctx context.Context, r *store.Rootfs, file *os.File) error {
	mounted := c.Store.MountFirst(r, func() error { return nil })
	if mounted != nil {
		return mounted
	}
	if a := r.Arena(); a != nil {
		if err := c.writeSegments(ctx, r, file); err != nil {
			return err
		}
		c.Store.CopyShared(ctx, r, &c.leases) // what no arena lends in place
		if !a.Complete() {
			return api.Errorf(api.CodeCorrupt, "image %s lacks %d segments of its contents: `foil verify %s` says more", c.base.Image.Ref, a.Missing(), c.base.Image.Ref)
		}
	}
	if err := c.keepLayer(r, file); err != nil {
		return err
	}
	if err := c.Store.Finish(ctx, r); err != nil {
		return err
	}
	c.Store.LeaveGate(r)
	c.Store.PassGate()
	return nil
}

// writeSegments fills the arena with what the layer has of it.
func (c *commit) writeSegments(ctx context.Context, r *store.Rootfs, file *os.File) error {
	places := make(map[segment.ID]place)
	for _, e := range c.entries {
		off, ok := c.starts[e.Name]
		for _, s := range e.Segments {
			if ok && !s.ID.IsHole() {
				places[s.ID] = place{off, int64(s.Length)}
			}
			off += int64(s.Length)
		}
	}
	a := r.Arena()
	l := a.Layout()
	buf := make([]byte, segment.MaxLength)
	for i := range l.Segments() {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		s := l.Segment(i)
		p, ok := places[s.ID]
		if !ok || p.length != int64(s.Length) || a.HasSegment(i) {
			continue
		}
		if _, err := file.ReadAt(buf[:p.length], p.off); err != nil {
			return err
		}
		if err := a.WriteSegment(i, buf[:p.length]); err != nil {
			return err
		}
	}
	return nil
}

// LayerPath is where the tar stream of a layer that was made here is kept, for who pushes or saves the image.
func LayerPath(r *store.Rootfs, diffID digest.Digest) string {
	return r.Path(rootfs.LayerPrefix + diffID.Encoded())
}

// keepLayer gives the layer's file its name, and keeps its entries for the proof; and those of what the base was made
// of here.
func (c *commit) keepLayer(r *store.Rootfs, file *os.File) error {
	if err := file.Sync(); err != nil {
		return err
	}
	path := LayerPath(r, c.diffID)
	if err := unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", file.Fd()), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW); err != nil && !errors.Is(err, os.ErrExist) {
		return &os.PathError{Op: "keep the layer as", Path: path, Err: err}
	}
	for _, d := range c.config.RootFS.DiffIDs {
		err := os.Link(LayerPath(c.base.Rootfs, d), LayerPath(r, d))
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	dir := store.ProofDir(r)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var list bytes.Buffer
	w, err := layer.NewListWriter(&list)
	if err != nil {
		return err
	}
	for _, e := range c.entries {
		if err := w.Write(e); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return errors.Join(durable.Replace(proof.ListPath(dir, c.diffID), list.Bytes()), durable.Sync(r.Dir()))
}
