package snapshotter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff/apply"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/continuity/fs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// unpack materialises virtual snapshots, the lowest first. Another may do so at
// the same time.
func (s *Snapshotter) unpack(ctx context.Context, virtual []*record) error {
	s.materialise.Lock()
	defer s.materialise.Unlock()
	for _, r := range virtual {
		s.mu.Lock()
		todo := s.records[r.ID] != nil && s.records[r.ID].Role == roleLayer
		s.mu.Unlock()
		if !todo {
			continue
		}
		if err := s.unpackLayer(ctx, r); err != nil {
			return fmt.Errorf("unpack layer %s of image %s, which something else is made on: %w", r.Layer.Digest, r.Image, err)
		}
	}
	return nil
}

// unpackLayer does what containerd would have done with one layer: fetch it,
// compare its digests, apply it to what is below.
func (s *Snapshotter) unpackLayer(ctx context.Context, r *record) error {
	s.log.Info("a layer that was skipped is unpacked: something else is made on it", "image", r.Image, "layer", r.Layer.Digest, "chain_id", r.Chain)
	tmp := filepath.Join(s.dir(r.ID), "unpack")
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	upper, work := filepath.Join(tmp, "fs"), filepath.Join(tmp, "work")
	if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o711)); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	mounts := []mount.Mount{{Type: "bind", Source: upper, Options: []string{"rw", "rbind"}}}
	if r.Parent != "" {
		ids, err := s.chain(ctx, r.Parent)
		if err != nil {
			return err
		}
		lower := s.fsDir(ids[0])
		for _, id := range ids[1:] {
			lower += ":" + s.fsDir(id)
		}
		mounts, err = s.rewrite(ctx, r.Name, []mount.Mount{{
			Type:    "overlay",
			Source:  "overlay",
			Options: []string{"workdir=" + work, "upperdir=" + upper, "lowerdir=" + lower},
		}})
		if err != nil {
			return err
		}
		if err := likeParent(s.fsDir(ids[0]), upper); err != nil {
			return err
		}
	}
	blob := filepath.Join(tmp, "blob")
	if err := s.fetchBlob(ctx, r, blob); err != nil {
		return err
	}
	got, err := apply.NewFileSystemApplier(blobFile(blob)).Apply(ctx, r.Layer, mounts)
	if err != nil {
		return err
	}
	if got.Digest != r.DiffID {
		return fmt.Errorf("its tar stream has digest %s, the image's config says %s", got.Digest, r.DiffID)
	}
	du, err := fs.DiskUsage(ctx, upper)
	if err != nil {
		return err
	}
	done := *r
	done.Role, done.Size, done.Inodes = roleUnpacked, du.Size, du.Inodes
	b, err := json.Marshal(&done)
	if err != nil {
		return err
	}
	if err := syncTree(upper); err != nil {
		return err
	}
	// Until the record says otherwise the snapshot is virtual, and what is in
	// its directory of no consequence.
	if err := os.RemoveAll(s.fsDir(r.ID)); err != nil {
		return err
	}
	if err := os.Rename(upper, s.fsDir(r.ID)); err != nil {
		return err
	}
	if err := writeDurably(s.lazy(r.ID), b); err != nil {
		return err
	}
	s.unpacked.Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records[r.ID] == r {
		s.records[r.ID] = &done
	}
	return nil
}

// fetchBlob writes a layer's blob to a file, and compares its digest.
func (s *Snapshotter) fetchBlob(ctx context.Context, r *record, path string) (err error) {
	body, err := s.opts.Node.OpenBlob(ctx, r.Image, r.Layer)
	if err != nil {
		return err
	}
	defer body.Close()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	verify := r.Layer.Digest.Verifier()
	n, err := io.Copy(io.MultiWriter(f, verify), io.LimitReader(body, r.Layer.Size+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if n != r.Layer.Size || !verify.Verified() {
		return fmt.Errorf("the registry sent something else as blob %s", r.Layer.Digest)
	}
	return nil
}

// syncTree makes a directory durable, with all that is in its filesystem.
func syncTree(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return errors.Join(fmt.Errorf("sync the filesystem of %s: %w", dir, err), d.Close())
	}
	return d.Close()
}

func ownerOf(path string) (uid, gid int, err error) {
	fi, err := os.Stat(path)
	if err != nil {
		return 0, 0, err
	}
	st := fi.Sys().(*syscall.Stat_t)
	return int(st.Uid), int(st.Gid), nil
}

// blobFile is a content.Provider of one blob, in a file of that name.
type blobFile string

func (b blobFile) ReaderAt(context.Context, ocispec.Descriptor) (content.ReaderAt, error) {
	f, err := os.Open(string(b))
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &blobReader{f, fi.Size()}, nil
}

type blobReader struct {
	*os.File
	size int64
}

func (b *blobReader) Size() int64 { return b.size }
