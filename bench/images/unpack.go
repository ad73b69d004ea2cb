package images

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Unpack applies the layers of an image to an empty directory, as a container
// engine does that knows nothing better: whiteouts delete, and owners, modes,
// times and extended attributes are those of the layers. Each layer must have the
// digest that the config gives it. Nothing is written outside of dir, whatever the
// layers say. It needs root.
func (b *Built) Unpack(ctx context.Context, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("images: unpack: %w", err)
	}
	defer root.Close()
	if len(b.Manifest.Layers) != len(b.Config.RootFS.DiffIDs) {
		return fmt.Errorf("images: unpack %s: manifest and config disagree on the number of layers", b.Digest)
	}
	u := unpacker{root: root, times: map[string]time.Time{}}
	for i, layer := range b.Manifest.Layers {
		if err := u.layer(ctx, (&layout{b.Layout}).blob(layer.Digest), layer, b.Config.RootFS.DiffIDs[i].String()); err != nil {
			return fmt.Errorf("images: unpack layer %s: %w", layer.Digest, err)
		}
	}
	// Last, since what is put into a directory changes its time.
	for name, at := range u.times {
		if err := root.Chtimes(name, at, at); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("images: unpack: %w", err)
		}
	}
	return nil
}

type unpacker struct {
	root  *os.Root
	times map[string]time.Time // of directories
	made  map[string]bool      // what the current layer has made
}

func (u *unpacker) layer(ctx context.Context, blob string, layer v1.Descriptor, diffID string) error {
	file, err := os.Open(blob)
	if err != nil {
		return err
	}
	defer file.Close()
	plain, err := decompress(file, layer.MediaType)
	if err != nil {
		return err
	}
	diff := layer.Digest.Algorithm().Digester()
	stream := io.TeeReader(plain, diff.Hash())
	u.made = map[string]bool{}
	entries := tar.NewReader(stream)
	for {
		header, err := entries.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = u.entry(header, entries)
		}
		if err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, stream); err != nil {
		return err
	}
	if diff.Digest().String() != diffID {
		return fmt.Errorf("its contents have the digest %s, want %s", diff.Digest(), diffID)
	}
	return nil
}

func decompress(r io.Reader, mediaType string) (io.Reader, error) {
	switch {
	case strings.HasSuffix(mediaType, "gzip"):
		return gzip.NewReader(r)
	case strings.HasSuffix(mediaType, "zstd"):
		z, err := zstd.NewReader(r)
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	}
	return r, nil
}

func (u *unpacker) entry(header *tar.Header, body io.Reader) error {
	name := strings.TrimPrefix(path.Clean("/"+header.Name), "/")
	if name == "" {
		return u.finish(".", header)
	}
	dir, base := path.Split(name)
	dir = path.Clean(dir)
	if base == ".wh..wh..opq" {
		return u.clear(dir)
	}
	if hidden, ok := strings.CutPrefix(base, ".wh."); ok {
		return u.root.RemoveAll(path.Join(dir, hidden))
	}
	if err := u.root.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, err := u.root.Lstat(name)
	if err == nil && (!old.IsDir() || header.Typeflag != tar.TypeDir) {
		err = u.root.RemoveAll(name)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for made := name; made != "."; made = path.Dir(made) {
		u.made[made] = true
	}
	switch header.Typeflag {
	case tar.TypeDir:
		if err := u.root.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeReg:
		file, err := u.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(file, body)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := u.root.Symlink(header.Linkname, name); err != nil {
			return err
		}
	case tar.TypeLink:
		target := strings.TrimPrefix(path.Clean("/"+header.Linkname), "/")
		return u.root.Link(target, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		if err := u.node(name, header); err != nil {
			return err
		}
	default:
		return fmt.Errorf("%s: unknown type %q", name, header.Typeflag)
	}
	return u.finish(name, header)
}

// clear removes what lower layers have put into a directory.
func (u *unpacker) clear(dir string) error {
	entries, err := fs.ReadDir(u.root.FS(), dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if name := path.Join(dir, entry.Name()); !u.made[name] {
			if err := u.root.RemoveAll(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// node makes a device or a pipe.
func (u *unpacker) node(name string, header *tar.Header) error {
	parent, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer parent.Close()
	kind := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}[header.Typeflag]
	device := unix.Mkdev(uint32(header.Devmajor), uint32(header.Devminor))
	if err := unix.Mknodat(int(parent.Fd()), path.Base(name), kind|0o600, int(device)); err != nil {
		return &fs.PathError{Op: "mknod", Path: name, Err: err}
	}
	return nil
}

// finish gives an entry its owner, mode, extended attributes and time: in this
// order, since a new owner takes capabilities and set-ID bits away.
func (u *unpacker) finish(name string, header *tar.Header) error {
	if err := u.root.Lchown(name, header.Uid, header.Gid); err != nil {
		return err
	}
	if header.Typeflag == tar.TypeSymlink {
		return nil
	}
	mode := header.FileInfo().Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	if err := u.root.Chmod(name, mode); err != nil {
		return err
	}
	if header.Typeflag == tar.TypeDir {
		u.times[name] = header.ModTime
	} else if err := u.root.Chtimes(name, header.ModTime, header.ModTime); err != nil {
		return err
	}
	var xattrs []string
	for key := range header.PAXRecords {
		if xattr, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
			xattrs = append(xattrs, xattr)
		}
	}
	if len(xattrs) == 0 || header.Typeflag != tar.TypeReg && header.Typeflag != tar.TypeDir {
		return nil
	}
	file, err := u.root.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	slices.Sort(xattrs)
	for _, xattr := range xattrs {
		if err := unix.Fsetxattr(int(file.Fd()), xattr, []byte(header.PAXRecords["SCHILY.xattr."+xattr]), 0); err != nil {
			return fmt.Errorf("%s: set xattr %s: %w", name, xattr, err)
		}
	}
	return nil
}
