// Package usage says what a server's root is taken by, and by whom: what each repository and image would cost a registry that keeps
// layers as they are, what is theirs alone, and what is there more than once.
//
// It works on a copy of the catalog, as one transaction sees it, and on the entry lists of layers, and changes nothing; a server may
// run. What it counts is in a database of its own in the directory for temporary files: some 60 bytes a distinct segment, and
// 150 a distinct content. In memory it needs its caches, some 50 MiB, whatever there is.
//
// What is shared: a blob, segment or content is alone a repository's if no other one holds a layer that has it; an image's if no
// other image names the blob.
package usage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat"
	"hydrofoil.dev/foil/internal/server/dedup"
	"hydrofoil.dev/foil/internal/server/objects"
	"hydrofoil.dev/foil/internal/server/rootdir"
)

// Options of Look.
type Options struct {
	Root       string // of the server. Required
	Repository string // whose images are listed; empty: none, and all repositories are
	Largest    int    // how many contents are listed
	Progress   func(Progress)
}

// Progress is how far it is.
type Progress struct {
	Layers, Total int64
}

// Rest is what one kind takes.
type Rest struct {
	Kind  string `json:"kind"`
	Files int64  `json:"files"`
	Bytes int64  `json:"bytes"`
	Disk  int64  `json:"disk"` // bytes of the blocks that they take
}

// Repository is what one repository costs.
type Repository struct {
	Name      string `json:"name"`
	Manifests int64  `json:"manifests"`
	Tags      int64  `json:"tags"`
	// Plain is what a registry would keep of it that has nothing else: blobs and manifests.
	Plain int64 `json:"plain"`
	// Alone is what of Plain no other repository has, Shared the rest.
	Alone  int64 `json:"alone"`
	Shared int64 `json:"shared"`
	// Packed is what its segments take in packs that are no other's.
	Packed int64 `json:"packed_alone"`
	// Adds is what the repository adds to the store: blobs, manifests and packs that nobody else needs.
	Adds int64 `json:"adds"`
}

// Image is what one image costs.
type Image struct {
	Name         string `json:"name"` // REPOSITORY:TAG, or REPOSITORY@DIGEST
	Layers       int64  `json:"layers"`
	Plain        int64  `json:"plain"`        // its manifest, config and layers
	Uncompressed int64  `json:"uncompressed"` // tar streams of layers that were ingested
	Alone        int64  `json:"alone"`        // of Plain, what no other image names
	Shared       int64  `json:"shared"`
}

// Duplicates compares what there is with what is distinct of it.
type Duplicates struct {
	Count         int64 `json:"count"`
	Bytes         int64 `json:"bytes"`
	Distinct      int64 `json:"distinct"`
	DistinctBytes int64 `json:"distinct_bytes"`
}

// Ratio is how often a byte is there, on average.
func (d Duplicates) Ratio() float64 {
	if d.DistinctBytes == 0 {
		return 1
	}
	return float64(d.Bytes) / float64(d.DistinctBytes)
}

// Content is one of the largest contents.
type Content struct {
	ID     string `json:"id"`
	Bytes  int64  `json:"bytes"`
	Copies int64  `json:"copies"` // in distinct layers
	Path   string `json:"path"`   // one of those it has
	Layer  string `json:"layer"`  // that has it there
}

// Depth is what images have at one place of their stacks of layers.
type Depth struct {
	Layer int64 `json:"layer"` // 1 is the lowest; the last one counts all above as well
	Count int64 `json:"count"`
	Bytes int64 `json:"bytes"` // of tar streams
}

// Report is all of it.
type Report struct {
	Rest         []Rest       `json:"rest"`
	Total        Rest         `json:"total"`
	Repositories []Repository `json:"repositories"`
	Images       []Image      `json:"images,omitempty"`
	// Layers compares the layers that images name (their blobs) with distinct ones; Files and Segments what is in distinct layers.
	Layers   Duplicates `json:"layers"`
	Files    Duplicates `json:"files"`
	Segments Duplicates `json:"segments"`
	// Packed is what the distinct segments take in packs.
	Packed  int64         `json:"packed"`
	Largest []Content     `json:"largest,omitempty"`
	Depths  []Depth       `json:"depths"`
	Unread  []string      `json:"unread,omitempty"` // layers whose entry list cannot be read: they are not counted
	Read    int64         `json:"read"`             // bytes of entry lists
	Took    time.Duration `json:"took"`
}

type looker struct {
	o       Options
	cat     *sqlcat.Catalog
	objects objects.Store
	packs   *dedup.Store
	t       *tally
	r       *Report
}

// Look reads what there is. Errors: those of the files.
func Look(ctx context.Context, o Options) (_ *Report, err error) {
	begin := time.Now()
	fail := func(err error) (*Report, error) { return nil, fmt.Errorf("usage of %s: %w", o.Root, err) }
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	l := &looker{o: o, r: new(Report)}
	cat, end, err := rootdir.SnapshotCatalog(ctx, o.Root)
	if err != nil {
		return fail(err)
	}
	defer func() { err = errors.Join(err, end()) }()
	if l.objects, err = rootdir.ViewStore(o.Root); err != nil {
		return fail(err)
	}
	if l.r.Rest, l.r.Total, err = rest(ctx, o.Root, l.objects); err != nil {
		return fail(err)
	}
	l.cat, l.packs = cat, &dedup.Store{Objects: l.objects, Catalog: cat}
	if l.t, err = newTally(ctx); err != nil {
		return fail(err)
	}
	err = l.look(ctx)
	if err = errors.Join(err, l.t.close()); err != nil {
		return fail(err)
	}
	l.r.Took = time.Since(begin)
	return l.r, nil
}

func (l *looker) look(ctx context.Context) error {
	if err := l.links(ctx); err != nil {
		return err
	}
	if l.o.Repository != "" {
		if known, err := l.t.knows(ctx, l.o.Repository); err != nil || !known {
			return errors.Join(err, fmt.Errorf("there is no repository %q", l.o.Repository))
		}
	}
	if err := l.contents(ctx); err != nil {
		return err
	}
	return l.t.report(ctx, l.o, l.r)
}

// links tallies which repository holds what, and which image names what.
func (l *looker) links(ctx context.Context) error {
	return l.cat.EachLogged(ctx, func(changes []catalog.Change) error {
		return l.t.batch(ctx, func(b *batch) error {
			for i := range changes {
				if err := link(b, &changes[i]); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func link(b *batch, c *catalog.Change) error {
	switch c.Kind {
	case catalog.ChangedRepository:
		return b.do(addRepository, c.Repo)
	case catalog.ChangedBlob:
		return b.do(addLink, c.Repo, c.Name, c.Blob.Size)
	case catalog.ChangedTag:
		return b.do(addTag, c.Repo, c.Target.String(), c.Name)
	case catalog.ChangedLayer:
		return b.do(addLayer, c.Name, c.Layer.Size)
	case catalog.ChangedManifest:
		if err := b.do(addManifest, c.Repo, c.Name, len(c.Manifest.Bytes)); err != nil {
			return err
		}
		image, err := oci.ReadManifest(c.Manifest.MediaType, c.Manifest.Bytes)
		if err != nil {
			return nil // an index, or an artifact: its blobs are the repository's
		}
		if err := b.do(addNeed, c.Repo, c.Name, image.Config.Digest.String(), 0); err != nil {
			return err
		}
		for i, d := range image.Layers {
			if err := b.do(addNeed, c.Repo, c.Name, d.Digest.String(), i+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// contents tallies what is in the layers that somebody holds.
func (l *looker) contents(ctx context.Context) error {
	stats, err := l.cat.Stats(ctx)
	if err != nil {
		return err
	}
	p := Progress{Total: stats.Layers}
	return l.cat.EachLayer(ctx, func(row catalog.Layer) error {
		p.Layers++
		l.o.Progress(p)
		if row.Refused != "" {
			return nil
		}
		owner, held, err := l.t.owner(ctx, row.Blob.String())
		if err != nil || !held {
			return err
		}
		err = l.t.batch(ctx, func(b *batch) error { return l.layer(ctx, b, row, owner) })
		if errors.Is(err, objects.ErrNotFound) || errors.Is(err, layer.ErrBadList) {
			l.r.Unread = append(l.r.Unread, fmt.Sprintf("%s: %v", row.Blob, err))
			return nil
		}
		return err
	})
}

// layer tallies one layer.
func (l *looker) layer(ctx context.Context, b *batch, row catalog.Layer, owner int64) error {
	object, err := l.objects.Open(ctx, row.Entries, 0, -1)
	if err != nil {
		return err
	}
	defer object.Close()
	size, err := l.objects.Stat(ctx, row.Entries)
	if err != nil {
		return err
	}
	list, err := layer.NewListReader(object)
	if err != nil {
		return err
	}
	defer list.Close()
	l.r.Read += size
	places, err := l.packs.Places(ctx, []digest.Digest{row.Blob}, "")
	if err != nil {
		return err
	}
	var pieces []layer.Segment
	flush := func() error {
		err := l.segments(ctx, b, places, pieces, owner)
		pieces = pieces[:0]
		return err
	}
	for {
		e, err := list.Next()
		if err == io.EOF {
			return flush()
		}
		if err != nil {
			return err
		}
		if e.Size == 0 {
			continue
		}
		if err := b.do(addContent, e.Content[:], e.Size, e.Name, row.Blob.String()); err != nil {
			return err
		}
		for _, g := range e.Segments {
			if !g.ID.IsHole() {
				pieces = append(pieces, g)
			}
		}
		if len(pieces) >= 4096 {
			if err := flush(); err != nil {
				return err
			}
		}
	}
}

// rest walks the root, as du does, and lists the bucket, if there is one.
func rest(ctx context.Context, root string, store objects.Store) (list []Rest, total Rest, err error) {
	kinds := map[string]*Rest{}
	var order []string
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // gone meanwhile
		}
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		kind := "directories"
		if !e.IsDir() {
			kind = kindOf(strings.TrimPrefix(strings.TrimPrefix(path, root), "/"))
		}
		r := kinds[kind]
		if r == nil {
			r = &Rest{Kind: kind}
			kinds[kind] = r
			order = append(order, kind)
		}
		for _, r := range []*Rest{r, &total} {
			r.Files, r.Bytes, r.Disk = r.Files+1, r.Bytes+st.Size, r.Disk+512*st.Blocks
		}
		return ctx.Err()
	})
	if _, is, rerr := rootdir.InBucket(root); err == nil && is || rerr != nil {
		err = errors.Join(rerr, store.List(ctx, "", func(key string, size int64) error {
			first, _, _ := strings.Cut(key, "/")
			kind := "bucket: " + first
			if kinds[kind] == nil {
				kinds[kind] = &Rest{Kind: kind}
				order = append(order, kind)
			}
			for _, r := range []*Rest{kinds[kind], &total} {
				r.Files, r.Bytes, r.Disk = r.Files+1, r.Bytes+size, r.Disk+size
			}
			return nil
		}))
	}
	for _, kind := range order {
		list = append(list, *kinds[kind])
	}
	total.Kind = "total"
	return list, total, err
}

// kindOf names what is at a path below the root.
func kindOf(path string) string {
	first, below, _ := strings.Cut(path, "/")
	if first == "objects" {
		kind, _, _ := strings.Cut(below, "/")
		if strings.HasPrefix(kind, ".") {
			return "unfinished"
		}
		return kind
	}
	if strings.HasPrefix(first, "catalog.") {
		return "old catalogs"
	}
	return first
}
