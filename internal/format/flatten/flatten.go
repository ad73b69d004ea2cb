// Package flatten flattens the layers of an image into the TOC of its rootfs.
//
// The result is what containerd's archive.Apply makes on disk when it unpacks
// the layers one after the other into one directory; a test holds the two
// against each other. What follows from that, beyond the image specification:
//
//   - The root directory is 0755, owned by 0:0, with time 0: containerd gives it
//     nothing of what a layer says about it.
//   - Parents that no layer lists are made 0755, owned by 0:0 (by the group of
//     their own parent if that one has the setgid bit), with time 0; containerd
//     leaves the time of unpacking there, and also in directories of lower layers
//     whose names an upper layer changes. Those keep the time they have.
//   - Parents that are symlinks are followed, inside the rootfs.
//   - ".wh.x" removes x, whichever layer made it. ".wh..wh..opq" removes what
//     the directory holds, but for what this layer has made or touched under its
//     own name; it counts once for each directory and layer. Other names that
//     start with ".wh..wh." are whiteouts of names that nothing has.
//   - A directory over a directory changes the metadata and adds its extended
//     attributes; anything else replaces what was there, with all below it.
//   - A hard link names the inode itself, symlinks included, and its entry's
//     owner, mode, time and extended attributes become the inode's. As chown(2)
//     does on Linux, it drops security.capability unless it brings one.
//   - Directories get their times in a last step, by name: a directory entry
//     that a later one of the same layer replaced gives its time to what has the
//     name now; if nothing has it, the layer is refused.
//   - Times before 1970 or after 2262 become 0.
//   - user.* attributes of what is neither file nor directory are dropped, as
//     Linux does not have them.
//
// A layer that containerd cannot unpack is refused. Two things are not done
// that a disk would: default POSIX ACLs are not inherited by what is made below
// them, and no limit of a certain file system is held beyond those that package
// layer and package toc state.
//
// # Version
//
// Whoever has the same layers gets an equal TOC. So a change of these rules, or
// of how package layer reads entries, after which some layers give another TOC,
// is a new Version, which every TOC names (toc.TOC.Rules). Workers compare by
// the version of the TOC (By), so what old TOCs were made by stays; testdata has
// what each version makes of many layers. What archive/tar makes of a stream is
// part of the rules: look at its changes before a new Go.
package flatten

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/format/layer"
	"hydrofoil.dev/foil/internal/format/toc"
)

// Version is that of the rules by which Rootfs flattens.
const Version = 1

// released are the rules of each version, the first one first.
var released = [Version]func(context.Context, []Layer) (*toc.File, error){flatten}

// Layer is one layer to flatten.
type Layer struct {
	Digest digest.Digest // of the blob, for errors
	DiffID digest.Digest
	// Entries are in tar order and end with io.EOF; *layer.ListReader is one.
	Entries Entries
}

// Entries is a source of entries.
type Entries interface {
	Next() (*layer.Entry, error)
}

// ErrNoLayers is returned for an image without layers.
var ErrNoLayers = errors.New("an image without layers has no rootfs")

// ChainID names the rootfs of layers with these diff IDs, bottom first; empty
// without any.
func ChainID(diffIDs []digest.Digest) digest.Digest { return identity.ChainID(diffIDs) }

// Rootfs is By with the newest rules.
func Rootfs(ctx context.Context, layers []Layer) (*toc.TOC, error) { return By(ctx, Version, layers) }

// ErrRules is returned, wrapped, for rules that this program does not have.
var ErrRules = errors.New("unknown rules")

// By replays the layers, bottom first, by the rules of a version, and returns the
// rootfs in canonical order.
//
// Errors: ErrNoLayers; ErrRules; *layer.RefusedError when containerd would fail to
// unpack a layer; those of Entries; ctx's.
func By(ctx context.Context, rules uint8, layers []Layer) (*toc.TOC, error) {
	if len(layers) == 0 {
		return nil, ErrNoLayers
	}
	if rules == 0 || int(rules) > len(released) {
		return nil, fmt.Errorf("%w: version %d of how layers are flattened; this program has 1 to %d", ErrRules, rules, Version)
	}
	root, err := released[rules-1](ctx, layers)
	if err != nil {
		return nil, err
	}
	var diffIDs []digest.Digest
	for _, l := range layers {
		diffIDs = append(diffIDs, l.DiffID)
	}
	x, err := toc.Build(ChainID(diffIDs), root)
	if err != nil {
		return nil, err
	}
	x.Rules = rules
	return x, nil
}

// flatten is the first version of the rules.
func flatten(ctx context.Context, layers []Layer) (*toc.File, error) {
	t := newTree()
	for _, l := range layers {
		if err := t.apply(ctx, l); err != nil {
			return nil, err
		}
	}
	return t.root, nil
}

// tree is the filesystem as the layers so far have made it.
type tree struct {
	root  *toc.File
	files int // made so far, removed ones included
}

func newTree() *tree { return &tree{root: newDirectory(0o755)} }

func newDirectory(mode uint32) *toc.File {
	return &toc.File{Mode: unix.S_IFDIR | mode, Children: map[string]*toc.File{}}
}

func isDir(f *toc.File) bool { return f != nil && f.Mode&unix.S_IFMT == unix.S_IFDIR }

func isSymlink(f *toc.File) bool { return f.Mode&unix.S_IFMT == unix.S_IFLNK }

// change is what is remembered of one layer while it is applied.
type change struct {
	*tree
	made   []string        // resolved paths of entries, in order
	set    map[string]bool // of made, once it is needed
	opaque map[string]bool // directories whose opaque marker was seen
	dirs   []dirTime
}

type dirTime struct {
	name  string
	mtime int64
	nsec  uint32
}

func (t *tree) apply(ctx context.Context, l Layer) error {
	c := &change{tree: t, opaque: map[string]bool{}}
	for n := 0; ; n++ {
		if n%1024 == 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("flatten layer %s: %w", l.Digest, err)
			}
		}
		e, err := l.Entries.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("flatten layer %s: %w", l.Digest, err)
		}
		if err := c.entry(e); err != nil {
			return &layer.RefusedError{Layer: l.Digest, Entry: e.Name, Reason: err.Error()}
		}
	}
	for _, d := range c.dirs {
		if err := c.setTime(d); err != nil {
			return &layer.RefusedError{Layer: l.Digest, Entry: d.name, Reason: err.Error()}
		}
	}
	return nil
}

// maxFiles bounds what a stack of layers makes while it is flattened; a TOC
// holds as many.
const maxFiles = 2 * toc.MaxInodes

func (t *tree) newFile() error {
	if t.files++; t.files > maxFiles {
		return fmt.Errorf("the image makes more than %d files", maxFiles)
	}
	return nil
}

func (c *change) setTime(d dirTime) error {
	path, err := c.resolve(d.name)
	if err != nil {
		return err
	}
	f, err := c.lookup(path)
	if err != nil {
		return err
	}
	if f == nil {
		return errors.New("the layer itself removes this directory, which containerd cannot unpack")
	}
	f.Mtime, f.MtimeNsec = d.mtime, d.nsec
	return nil
}

// boundTime is containerd's: what does not fit into 63 bits of nanoseconds
// after 1970 becomes 0.
func boundTime(sec int64, nsec uint32) (int64, uint32) {
	const (
		most   = 1<<63 - 1
		second = 1_000_000_000
	)
	if sec < 0 || sec > most/second || sec == most/second && nsec > most%second {
		return 0, 0
	}
	return sec, nsec
}

// withXattr returns the set with one attribute added or replaced. Sets are
// sorted by name and not changed in place: entries share them.
func withXattr(set []toc.Xattr, x toc.Xattr) []toc.Xattr {
	i, found := slices.BinarySearchFunc(set, x.Name, func(a toc.Xattr, name string) int {
		switch {
		case a.Name < name:
			return -1
		case a.Name > name:
			return 1
		}
		return 0
	})
	out := slices.Clone(set)
	if found {
		out[i] = x
		return out
	}
	return slices.Insert(out, i, x)
}

func withoutXattr(set []toc.Xattr, name string) []toc.Xattr {
	i := slices.IndexFunc(set, func(x toc.Xattr) bool { return x.Name == name })
	if i < 0 {
		return set
	}
	return slices.Delete(slices.Clone(set), i, i+1)
}
