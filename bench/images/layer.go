package images

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	digest "github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// What building leaves behind and no image keeps: a directory whose children
// are left out ends with a slash.
var leftovers = []string{
	"dev/", "proc/", "sys/", "run/", "tmp/",
	"var/lib/apt/lists/", "var/cache/apt/", "var/cache/debconf/", "var/cache/ldconfig/",
	"root/.cache/", "root/.npm/", "var/log/apt/", "var/log/dpkg.log", "var/log/alternatives.log", "var/log/bootstrap.log",
	"var/lib/dpkg/status-old", "var/lib/dpkg/available-old", "var/lib/dpkg/diversions-old", "var/lib/dpkg/statoverride-old",
	"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/.pwd.lock",
	"etc/resolv.conf", "etc/hostname", "etc/hosts", "etc/machine-id", "var/lib/dbus/machine-id",
}

func isLeftover(name string) bool {
	for _, left := range leftovers {
		if name == left || strings.HasSuffix(left, "/") && strings.HasPrefix(name, left) {
			return true
		}
	}
	return false
}

// writeLayer writes the tree at root as a layer, compressed, to w, and tells
// what a manifest and a config say of it. overlay means that root is an overlayfs
// upper directory, whose deletions become the layer's whiteouts.
//
// Entries are in the order of their names, whole seconds are the times, and none
// is after created: the same tree gives the same bytes.
func writeLayer(w io.Writer, root string, overlay bool, created time.Time) (specs.Descriptor, digest.Digest, error) {
	blob := &counter{to: w, hash: digest.Canonical.Digester()}
	compressed := gzip.NewWriter(blob)
	diff := digest.Canonical.Digester()
	// Reading and digesting the tree is half of the work: it is done beside
	// compressing. The goroutine ends with the pipe, of which both ends close.
	reader, pipe := io.Pipe()
	go func() {
		buffered := bufio.NewWriterSize(io.MultiWriter(pipe, diff.Hash()), 1<<20)
		writer := layerWriter{
			tar:     tar.NewWriter(buffered),
			root:    root,
			overlay: overlay,
			created: created,
			links:   map[inode]string{},
		}
		err := filepath.WalkDir(root, writer.add)
		if err == nil { // else the first error says it all
			err = errors.Join(writer.tar.Close(), buffered.Flush())
		}
		pipe.CloseWithError(err)
	}()
	_, err := io.Copy(compressed, reader)
	reader.CloseWithError(err)
	err = errors.Join(err, compressed.Close())
	if err != nil {
		return specs.Descriptor{}, "", fmt.Errorf("images: write layer of %s: %w", root, err)
	}
	return specs.Descriptor{
		MediaType: specs.MediaTypeImageLayerGzip,
		Digest:    blob.hash.Digest(),
		Size:      blob.n,
	}, diff.Digest(), nil
}

type inode struct{ dev, ino uint64 }

type layerWriter struct {
	tar     *tar.Writer
	root    string
	overlay bool
	created time.Time
	links   map[inode]string // the first name of each file that has several
}

// add is a fs.WalkDirFunc.
func (w *layerWriter) add(path string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	name, err := filepath.Rel(w.root, path)
	if err != nil || name == "." {
		return err
	}
	if isLeftover(name) {
		if entry.IsDir() {
			return filepath.SkipDir
		}
		return nil
	}
	info, err := entry.Info()
	if err != nil {
		return err
	}
	stat := info.Sys().(*syscall.Stat_t)
	if w.overlay && info.Mode()&fs.ModeCharDevice != 0 && stat.Rdev == 0 {
		dir, base := filepath.Split(name)
		return w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dir + ".wh." + base, ModTime: w.created})
	}

	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	header.Name = name
	if entry.IsDir() {
		header.Name += "/"
	}
	// Names of owners are the host's.
	header.Uname, header.Gname = "", ""
	header.AccessTime, header.ChangeTime = time.Time{}, time.Time{}
	header.ModTime = info.ModTime().Truncate(time.Second)
	if header.ModTime.After(w.created) {
		header.ModTime = w.created
	}
	xattrs, err := readXattrs(path)
	if err != nil {
		return err
	}
	opaque := false
	for key, value := range xattrs {
		switch {
		case strings.HasPrefix(key, "trusted.overlay."):
			opaque = opaque || key == "trusted.overlay.opaque" && value == "y"
		default:
			if header.PAXRecords == nil {
				header.PAXRecords = map[string]string{}
			}
			header.PAXRecords["SCHILY.xattr."+key] = value
		}
	}
	if info.Mode().IsRegular() && stat.Nlink > 1 {
		id := inode{stat.Dev, stat.Ino}
		if first, seen := w.links[id]; seen {
			header.Typeflag, header.Linkname, header.Size = tar.TypeLink, first, 0
		} else {
			w.links[id] = name
		}
	}
	if err := w.tar.WriteHeader(header); err != nil {
		return err
	}
	if w.overlay && opaque {
		if err := w.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name + "/.wh..wh..opq", ModTime: w.created}); err != nil {
			return err
		}
	}
	if header.Typeflag != tar.TypeReg {
		return nil
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(w.tar, file)
	return err
}

// readXattrs are all extended attributes of path itself.
func readXattrs(path string) (map[string]string, error) {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size == 0 {
		if errors.Is(err, unix.ENOTSUP) {
			err = nil
		}
		return nil, err
	}
	names := make([]byte, size)
	if size, err = unix.Llistxattr(path, names); err != nil {
		return nil, fmt.Errorf("list xattrs of %s: %w", path, err)
	}
	xattrs := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:size]), "\x00"), "\x00") {
		value := make([]byte, 64<<10) // the most that Linux stores
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return nil, fmt.Errorf("read xattr %s of %s: %w", name, path, err)
		}
		xattrs[name] = string(value[:n])
	}
	return xattrs, nil
}

// counter counts and digests what is written.
type counter struct {
	to   io.Writer
	hash digest.Digester
	n    int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.to.Write(b)
	c.hash.Hash().Write(b[:n])
	c.n += int64(n)
	return n, err
}
