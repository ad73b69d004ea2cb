package engines

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// Floor is T*: how fast a start could be that moves only what is touched. It is
// the fastest warm start of the same container, one round trip, and the bytes
// that it touches before it is ready, compressed, at the link's rate.
type Floor struct {
	Warm       time.Duration `json:"warm_ns"`
	Touched    int64         `json:"touched"`    // bytes of the pages that were read
	Compressed int64         `json:"compressed"` // of those whose contents are new here, all in one zstd stream

	// Files are those that were touched, by path from the root.
	Files    []string                   `json:"-"`
	contents map[[sha256.Size]byte]bool // of the whole image
}

// At is the floor over a link; rate is bits a second, 0 without a limit.
func (f Floor) At(rtt time.Duration, rate int64) time.Duration {
	t := f.Warm + rtt
	if rate > 0 {
		t += time.Duration(float64(f.Compressed) * 8e9 / float64(rate))
	}
	return t
}

// Mounter is a worker that can show the file tree of an image that it has.
type Mounter interface {
	Mounted(ctx context.Context, ref string, fn func(tree string) error) error
}

// MeasureFloor runs an image with runc alone, from a tree that is mounted with
// readahead off, until it is ready, and asks the kernel which pages of its files
// are in the page cache then (mincore): those and no others were touched. Then
// it runs it thrice more, everything being in the page cache, for the fastest
// time. The tree is an EROFS image on a loop device, whose readahead is its own;
// it stays in the file keep, for WarmStarts.
//
// Pages of files whose contents an earlier version has, if there is one, are not
// counted as compressed: a worker that is updated has them.
func MeasureFloor(ctx context.Context, s *site.Site, from Mounter, im Image, earlier *Floor, keep string) (f Floor, err error) {
	err = from.Mounted(ctx, im.Ref, func(tree string) error {
		_, err := s.Run(ctx, link.Edge, "mkfs.erofs", keep, tree)
		return err
	})
	if err != nil {
		return f, err
	}
	if err := site.DropCaches(); err != nil {
		return f, err
	}
	var have map[[sha256.Size]byte]bool
	if earlier != nil {
		have = earlier.contents
	}
	err = mountTree(ctx, s, keep, func(dir, lower string) error {
		if err := noReadahead(lower); err != nil {
			return err
		}
		_, err := startAlone(ctx, s, im, lower, dir, "touch", func() error {
			f, err = collectTouched(lower, have)
			return err
		})
		if err != nil {
			return fmt.Errorf("bench: measure what %s touches before %s: %w", im.Name, im.Ready.Probe, err)
		}
		warm, err := warmStarts(ctx, s, im, lower, dir)
		if err == nil {
			f.Warm = slices.Min(warm)
		}
		return err
	})
	return f, err
}

// WarmStarts are three warm starts of an image, the fastest of which is Floor.Warm, measured
// anew: machines become slower and faster from one hour to the next. The file tree holds the
// image's files, as MeasureFloor left it.
func WarmStarts(ctx context.Context, s *site.Site, im Image, tree string) (took []time.Duration, err error) {
	err = mountTree(ctx, s, tree, func(dir, lower string) error {
		if _, err := startAlone(ctx, s, im, lower, dir, "touch", nil); err != nil {
			return fmt.Errorf("bench: start %s for the first time: %w", im.Name, err)
		}
		took, err = warmStarts(ctx, s, im, lower, dir)
		return err
	})
	return took, err
}

// mountTree mounts an EROFS image at lower while fn runs, which has a directory of
// its own besides.
func mountTree(ctx context.Context, s *site.Site, tree string, fn func(dir, lower string) error) (err error) {
	dir, err := os.MkdirTemp(s.Dir, "floor-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	lower := filepath.Join(dir, "lower")
	if err := errors.Join(os.Chmod(dir, 0o711), os.Mkdir(lower, 0o755)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if _, err := s.Run(ctx, link.Edge, "mount", "-t", "erofs", "-o", "ro,loop", tree, lower); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Unmount(lower, unix.MNT_DETACH)) }()
	return fn(dir, lower)
}

// warmStarts are three starts of which everything is in the page cache.
func warmStarts(ctx context.Context, s *site.Site, im Image, lower, dir string) (took []time.Duration, err error) {
	for i := range 3 {
		t, err := startAlone(ctx, s, im, lower, dir, fmt.Sprintf("warm-%d", i), nil)
		if err != nil {
			return nil, fmt.Errorf("bench: measure a warm start of %s: %w", im.Name, err)
		}
		took = append(took, t)
	}
	return took, nil
}

// startAlone runs a container by runc, on an overlay over lower, until it is
// ready; then it calls fn, if there is one, and ends it.
func startAlone(ctx context.Context, s *site.Site, im Image, lower, parent, id string, fn func() error) (took time.Duration, err error) {
	dir := filepath.Join(parent, id)
	rootfs, upper, work := filepath.Join(dir, "rootfs"), filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	for _, path := range []string{dir, rootfs, upper, work} {
		if err := os.Mkdir(path, 0o755); err != nil {
			return 0, fmt.Errorf("bench: %w", err)
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work)
	if err := unix.Mount("overlay", rootfs, "overlay", 0, options); err != nil {
		return 0, fmt.Errorf("bench: mount overlay on %s: %w", lower, err)
	}
	defer func() { err = errors.Join(err, unix.Unmount(rootfs, unix.MNT_DETACH)) }()
	// The very container that foil run makes. There, no words are no command,
	// instead of none in place of the image's.
	var args []string
	if len(im.Command) > 0 {
		args = im.Command
	}
	spec, err := runner.Spec(im.Built.Config, runner.SpecOptions{ID: id, Dir: dir, Rootfs: rootfs, Args: args})
	if err != nil {
		return 0, err
	}
	if err := runner.WriteSpec(dir, spec); err != nil {
		return 0, err
	}
	began := time.Now()
	state := filepath.Join(parent, "runc")
	p, err := s.Start(link.Edge, nil, "runc", "--root", state, "run", "--bundle", dir, id)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, kill(s, state, id, p)) }()
	p.Init = func(ctx context.Context) (int, error) { return runcInit(ctx, state) }
	if err := im.Ready.Wait(ctx, s.Link, p); err != nil {
		return 0, err
	}
	took = time.Since(began)
	if fn != nil {
		err = fn()
	}
	return took, err
}

// kill ends a container of runc's that p runs in the foreground. Many services
// do not listen to SIGTERM as the first process of their namespace.
func kill(s *site.Site, state, id string, p *site.Process) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, site.ErrTooLong)
	defer cancel()
	_, err := s.Run(ctx, link.Edge, "runc", "--root", state, "kill", id, "KILL")
	select {
	case <-p.Done:
		return nil // by itself, perhaps meanwhile
	case <-ctx.Done():
		return errors.Join(err, p.Stop(syscall.SIGTERM))
	}
}

// noReadahead turns readahead off for the block device that path is mounted from.
func noReadahead(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("bench: stat %s: %w", path, err)
	}
	setting := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", unix.Major(st.Dev), unix.Minor(st.Dev))
	if err := os.WriteFile(setting, []byte("0"), 0); err != nil {
		return fmt.Errorf("bench: turn readahead off: %w", err)
	}
	return nil
}

// collectTouched looks at the page cache first, at all files, and only then
// reads them.
func collectTouched(tree string, have map[[sha256.Size]byte]bool) (Floor, error) {
	s := Floor{contents: map[[sha256.Size]byte]bool{}}
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
		return s, fmt.Errorf("bench: look at the page cache of %s: %w", tree, err)
	}

	var count counter
	stream, err := zstd.NewWriter(&count)
	if err != nil {
		return s, fmt.Errorf("bench: %w", err)
	}
	page := int64(os.Getpagesize())
	for _, f := range files {
		content, err := os.ReadFile(f.path)
		if err != nil {
			return s, fmt.Errorf("bench: %w", err)
		}
		sum := sha256.Sum256(content)
		s.contents[sum] = true
		if slices.ContainsFunc(f.pages, func(page byte) bool { return page&1 != 0 }) {
			s.Files = append(s.Files, strings.TrimPrefix(f.path, tree))
		}
		for i, resident := range f.pages {
			if resident&1 == 0 {
				continue
			}
			from := int64(i) * page
			to := min(from+page, int64(len(content)))
			s.Touched += to - from
			if !have[sum] {
				stream.Write(content[from:to])
			}
		}
	}
	if err := stream.Close(); err != nil {
		return s, fmt.Errorf("bench: %w", err)
	}
	s.Compressed = int64(count)
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

// Resident says how many of a file's pages are in the page cache.
func Resident(path string) (resident, pages int, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, 0, err
	}
	vec, err := residentPages(path, info.Size())
	for _, page := range vec {
		resident += int(page & 1)
	}
	return resident, len(vec), err
}

type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}
