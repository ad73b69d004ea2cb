package images

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// Verified is what was found of an image that works.
type Verified struct {
	Files  int           // regular files of the unpacked image; links to one are one
	Bytes  int64         // in them
	Unpack time.Duration // from layers to files
	Ready  time.Duration // from creating the container to ready
}

// Verify unpacks an image, runs it by runc in a network namespace of its own, and
// waits until its probe says that it is ready. Errors have the last of what the
// container said. It needs root, and leaves nothing behind.
func (b *Builder) Verify(ctx context.Context, image *Built, timeout time.Duration) (v Verified, err error) {
	dir, err := os.MkdirTemp(b.Cache, "verify-")
	if err != nil {
		return v, fmt.Errorf("images: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rootfs := filepath.Join(dir, "rootfs")
	// Users of the container find their way to its root.
	if err := errors.Join(os.Chmod(dir, 0o711), os.Mkdir(rootfs, 0o755)); err != nil {
		return v, fmt.Errorf("images: %w", err)
	}
	start := time.Now()
	if err := image.Unpack(ctx, rootfs); err != nil {
		return v, err
	}
	v.Unpack = time.Since(start)
	if v.Files, v.Bytes, err = count(rootfs); err != nil {
		return v, err
	}
	v.Ready, err = b.ready(ctx, image, dir, rootfs, timeout)
	return v, err
}

// ready runs an unpacked image until it is ready, and tells how long that took.
func (b *Builder) ready(ctx context.Context, image *Built, dir, rootfs string, timeout time.Duration) (took time.Duration, err error) {
	p, err := probe.Parse(image.Probe)
	if err != nil {
		return 0, fmt.Errorf("images: %w", err)
	}
	id := filepath.Base(dir)
	spec, err := runner.Spec(image.Config, runner.SpecOptions{ID: id, Dir: dir, Rootfs: rootfs, Args: image.Args, Net: runner.NoNetwork})
	if err != nil {
		return 0, fmt.Errorf("images: %w", err)
	}
	if err := runner.WriteSpec(dir, spec); err != nil {
		return 0, fmt.Errorf("images: %w", err)
	}
	var said tail
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not ready after %v", timeout))
	defer cancel()
	start := time.Now()
	r := runner.Runner{StateRoot: filepath.Join(dir, "runc")}
	c, err := r.Start(ctx, id, dir, runner.IO{Stdout: p.Writer(&said), Stderr: p.Writer(&said)})
	if err != nil {
		return 0, fmt.Errorf("images: %w", err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err = p.Wait(ctx, c); err != nil {
		return 0, fmt.Errorf("images: %w; the container said:\n%s", err, said.String())
	}
	return time.Since(start), nil
}

// count counts files and their bytes.
func count(root string) (files int, bytes int64, err error) {
	seen := map[inode]bool{}
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if stat := info.Sys().(*syscall.Stat_t); stat.Nlink > 1 {
			id := inode{stat.Dev, stat.Ino}
			if seen[id] {
				return nil
			}
			seen[id] = true
		}
		files++
		bytes += info.Size()
		return nil
	})
	if err != nil {
		return 0, 0, fmt.Errorf("images: count files: %w", err)
	}
	return files, bytes, nil
}

// tail keeps the last of what is written.
type tail struct {
	mu   sync.Mutex // two streams of a container write
	text []byte
}

const tailBytes = 4 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if extra := len(t.text) - tailBytes; extra > 0 {
		t.text = append(t.text[:0], t.text[extra:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}
