package startup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
)

// Memory is what one start takes of a worker's memory, bytes.
type Memory struct {
	Image    string `json:"image"`
	Engine   string `json:"engine"`
	Daemons  int64  `json:"daemons"`        // the sum of the peaks of their resident sets, until complete
	Ready    int64  `json:"cache_ready"`    // of its files in the page cache, when the container was ready
	Complete int64  `json:"cache_complete"` // and some seconds after the image was complete
}

// memorySettles is how long after the end of a pull the page cache is looked at again:
// what was written has been synced by then.
const memorySettles = 3 * time.Second

// memory starts an image once with each of Hydrofoil, traced, and containerd's
// overlayfs, which pulls all of it first. FlacIO, section 5.2.6.
func (b *bench) memory(ctx context.Context, name string) (list []Memory, err error) {
	im, err := b.image(ctx, name+":1")
	if err != nil {
		return nil, err
	}
	err = b.at(ctx, link.Options{RTT: b.RTT, Rate: b.Rate}, []engines.Image{im}, func(s *site.Site) error {
		for _, e := range []engines.Engine{&engines.Hydrofoil{}, &engines.Containerd{Snapshotter: "overlayfs"}} {
			if _, err := e.Find(ctx, b.Programs); err != nil {
				b.log("memory, %s is left out: %v", e.Name(), err)
				continue
			}
			if _, err := e.Prepare(ctx, s, b.Programs, im); err != nil {
				return err
			}
			m, err := b.memoryOf(ctx, s, e, im)
			if err != nil {
				return fmt.Errorf("%s: %w", e.Name(), err)
			}
			list = append(list, m)
		}
		return nil
	})
	return list, err
}

func (b *bench) memoryOf(ctx context.Context, s *site.Site, e engines.Engine, im engines.Image) (m Memory, err error) {
	m = Memory{Image: im.Name, Engine: e.Name()}
	dir, err := os.MkdirTemp(s.Dir, "worker-")
	if err != nil {
		return m, fmt.Errorf("bench: %w", err)
	}
	w := e.Worker(s, b.Programs, dir)
	if err := w.Start(ctx); err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	if err := site.DropCaches(); err != nil {
		return m, err
	}
	t := engines.Begin(s, w.Processes())
	ended := false
	defer func() {
		if !ended {
			t.End()
		}
	}()
	c, err := w.Provision(ctx, im, t)
	defer func() { err = errors.Join(err, c.Stop()) }()
	if err != nil {
		return m, err
	}
	if err := im.Ready.Wait(ctx, s.Link, c.Process); err != nil {
		return m, err
	}
	if m.Ready, err = cached(dir); err != nil {
		return m, err
	}
	if err := w.Complete(ctx, im, t); err != nil {
		return m, err
	}
	select {
	case <-time.After(memorySettles):
	case <-ctx.Done():
		return m, context.Cause(ctx)
	}
	if m.Complete, err = cached(dir); err != nil {
		return m, err
	}
	m.Daemons, ended = t.End().Memory, true
	b.log("%s, %s: page cache %.1f MB when ready, %.1f MB when complete; daemons %.1f MB", im.Name, m.Engine, mb(m.Ready), mb(m.Complete), mb(m.Daemons))
	return m, nil
}

// cached returns how many bytes of the files below dir are in the page cache, also of
// filesystems that are mounted there, but for overlays: those have the pages of the
// files below them.
func cached(dir string) (total int64, err error) {
	pages := func(path string) error {
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		var st unix.Cachestat_t
		if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &st, 0); err != nil {
			return fmt.Errorf("cachestat %s: %w", path, err)
		}
		total += int64(st.Cache) * int64(os.Getpagesize())
		return nil
	}
	type file struct{ dev, ino uint64 }
	seen := map[file]bool{}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // gone meanwhile
		}
		if err != nil {
			return err
		}
		if d.IsDir() {
			var st unix.Statfs_t
			if err := unix.Statfs(path, &st); err == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		info, err := d.Info()
		if err == nil {
			st := info.Sys().(*syscall.Stat_t)
			k := file{st.Dev, st.Ino}
			if seen[k] {
				return nil
			}
			seen[k] = true
			err = pages(path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("bench: page cache of %s: %w", dir, err)
	}
	return total, nil
}
