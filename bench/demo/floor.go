package demo

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// startup is what a container reads of its image before it is ready.
type startup struct {
	touched    int64 // bytes of the pages that were read
	compressed int64 // of those whose contents are new here, all in one zstd stream
	contents   map[[sha256.Size]byte]bool
}

// measureStartup runs an image from a tree that is mounted with readahead off,
// until it is ready, and asks the kernel which pages of its files are in the
// page cache then (mincore): those and no others were touched. The tree is an
// EROFS image on a loop device, whose readahead is its own.
//
// Pages of files whose contents are in have are not counted as compressed: a
// worker that has the earlier version has them.
func (d *demo) measureStartup(ctx context.Context, tree string, built *images.Built, have map[[sha256.Size]byte]bool) (s startup, err error) {
	dir, err := os.MkdirTemp(d.dir, "startup-")
	if err != nil {
		return s, fmt.Errorf("demo: %w", err)
	}
	image, lower := filepath.Join(dir, "tree.erofs"), filepath.Join(dir, "lower")
	rootfs, upper, work := filepath.Join(dir, "rootfs"), filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	for _, path := range []string{lower, rootfs, upper, work} {
		if err := os.Mkdir(path, 0o755); err != nil {
			return s, fmt.Errorf("demo: %w", err)
		}
	}
	if _, err := d.run(ctx, link.Edge, "mkfs.erofs", image, tree); err != nil {
		return s, err
	}
	if err := dropCaches(); err != nil {
		return s, err
	}
	if _, err := d.run(ctx, link.Edge, "mount", "-t", "erofs", "-o", "ro,loop", image, lower); err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, unix.Unmount(lower, unix.MNT_DETACH)) }()
	if err := noReadahead(lower); err != nil {
		return s, err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work)
	if err := unix.Mount("overlay", rootfs, "overlay", 0, options); err != nil {
		return s, fmt.Errorf("demo: mount overlay on %s: %w", lower, err)
	}
	defer func() { err = errors.Join(err, unix.Unmount(rootfs, unix.MNT_DETACH)) }()

	// The very container that foil run makes.
	spec, err := runner.Spec(built.Config, runner.SpecOptions{ID: "startup", Dir: dir, Rootfs: rootfs, Args: d.options.Command})
	if err != nil {
		return s, err
	}
	if err := runner.WriteSpec(dir, spec); err != nil {
		return s, err
	}
	p, err := d.start(link.Edge, nil, "runc", "--root", filepath.Join(dir, "runc"), "run", "--bundle", dir, "startup")
	if err != nil {
		return s, err
	}
	err = d.ready.wait(ctx, d.link, p)
	if err == nil {
		s, err = collectTouched(lower, have)
	}
	return s, errors.Join(err, p.stop(syscall.SIGTERM))
}

// noReadahead turns readahead off for the block device that path is mounted from.
func noReadahead(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("demo: stat %s: %w", path, err)
	}
	setting := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", unix.Major(st.Dev), unix.Minor(st.Dev))
	if err := os.WriteFile(setting, []byte("0"), 0); err != nil {
		return fmt.Errorf("demo: turn readahead off: %w", err)
	}
	return nil
}

// collectTouched looks at the page cache first, at all files, and only then
// reads them.
func collectTouched(tree string, have map[[sha256.Size]byte]bool) (startup, error) {
	s := startup{contents: map[[sha256.Size]byte]bool{}}
	type file struct {
		path  string
		pages []byte // as mincore(2) gives them; nil if none is there
	}
	var files []file
	seen := map[uint64]bool{} // inodes, since links are one file
	err := filepath.WalkDir(tree, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if ino := info.Sys().(*syscall.Stat_t).Ino; seen[ino] || info.Size() == 0 {
			return nil
		} else {
			seen[ino] = true
		}
		pages, err := residentPages(path, info.Size())
		if err != nil {
			return err
		}
		files = append(files, file{path, pages})
		return nil
	})
	if err != nil {
		return s, fmt.Errorf("demo: look at the page cache of %s: %w", tree, err)
	}

	var count counter
	stream, err := zstd.NewWriter(&count)
	if err != nil {
		return s, fmt.Errorf("demo: %w", err)
	}
	page := int64(os.Getpagesize())
	for _, f := range files {
		content, err := os.ReadFile(f.path)
		if err != nil {
			return s, fmt.Errorf("demo: %w", err)
		}
		sum := sha256.Sum256(content)
		s.contents[sum] = true
		for i, resident := range f.pages {
			if resident&1 == 0 {
				continue
			}
			from := int64(i) * page
			to := min(from+page, int64(len(content)))
			s.touched += to - from
			if !have[sum] {
				stream.Write(content[from:to])
			}
		}
	}
	if err := stream.Close(); err != nil {
		return s, fmt.Errorf("demo: %w", err)
	}
	s.compressed = int64(count)
	return s, nil
}

// residentPages says of each page of a file whether it is in the page cache,
// in bit 0. Mapping a file reads nothing.
func residentPages(path string, size int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mapped, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap %s: %w", path, err)
	}
	defer unix.Munmap(mapped)
	page := int64(os.Getpagesize())
	pages := make([]byte, (size+page-1)/page)
	if err := mincore(mapped, pages); err != nil {
		return nil, fmt.Errorf("mincore %s: %w", path, err)
	}
	return pages, nil
}

type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}
