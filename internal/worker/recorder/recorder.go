// Package recorder records which blocks of arenas are read through mounts that
// are made over its devices, in the order of the first reads. Whoever mounts
// EROFS over Devices with read-ahead off gets every page that is read, and none
// besides: the kernel asks for one page at a time then.
//
// Where the kernel has pre-content events, a device is the arena itself, by way of
// a copy of its mount that only the recorder has: events are raised for what was
// opened through that copy, so other mounts over the same arena are neither seen
// nor slowed down. Else it is a file of a FUSE filesystem of the recorder's own
// (package gate). Arenas must hold all that is read: nothing waits here.
//
// When its process dies, what reads through fanotify devices goes on and is not
// recorded; FUSE devices fail (ENOTCONN).
package recorder

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate"
)

// Options of a Recorder.
type Options struct {
	// Root is a directory, on whose filesystem the arenas are.
	Root string
	// Arenas are the paths of arenas below Root; they name the recorder's devices.
	Arenas []string
	// FUSE, unless empty, makes the devices files of a FUSE filesystem, mounted
	// there: a directory that the recorder makes, and unmounts.
	FUSE string
	// MaxReads bounds what is recorded; 0 means 1<<20.
	MaxReads int
	Logger   *slog.Logger // nil: slog.Default()
}

// Recorder records until it is closed.
type Recorder struct {
	*Log
	log     *slog.Logger
	devices []string
	inodes  map[inode]int

	// The fanotify kind's.
	group, mount *os.File
	wg           sync.WaitGroup
	// The FUSE kind's.
	fuse  *gate.FUSE
	files []*os.File
}

type inode struct{ dev, ino uint64 }

// Start begins to record.
func Start(ctx context.Context, o Options) (_ *Recorder, err error) {
	r := &Recorder{Log: NewLog(len(o.Arenas), o.MaxReads), log: o.Logger, inodes: make(map[inode]int)}
	if r.log == nil {
		r.log = slog.Default()
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("record reads: %w", err), r.Close())
		}
	}()
	if o.FUSE != "" {
		return r, r.serve(ctx, o)
	}
	return r, r.watch(o)
}

// watch makes the devices of the fanotify kind.
func (r *Recorder) watch(o Options) (err error) {
	if r.group, err = kernel.NewFanotifyGroup(); err != nil {
		return err
	}
	if r.mount, err = kernel.CloneMount(o.Root); err != nil {
		return err
	}
	for i, path := range o.Arenas {
		rel, err := filepath.Rel(o.Root, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return &os.PathError{Op: "stat", Path: path, Err: err}
		}
		r.inodes[inode{uint64(st.Dev), st.Ino}] = i
		r.devices = append(r.devices, fmt.Sprintf("/proc/self/fd/%d/%s", descriptor(r.mount), rel))
	}
	if err := kernel.MarkPreAccessMount(r.group, r.mount); err != nil {
		return err
	}
	r.wg.Go(r.events)
	return nil
}

// descriptor returns the number of f's descriptor and leaves its mode alone.
func descriptor(f *os.File) (fd int) {
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

// events notes and allows what is read, until the group is closed.
func (r *Recorder) events() {
	var (
		buf    [64 * kernel.PreAccessEventLen]byte
		events []kernel.FanotifyEvent
		group  = descriptor(r.group)
	)
	for {
		n, err := r.group.Read(buf[:])
		now := time.Now()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, os.ErrClosed):
			return
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			// Without a free descriptor the kernel fails the read it could not
			// tell us of.
			r.log.Error("a read that was to be recorded failed", "error", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if events, err = kernel.ParseFanotifyEvents(events[:0], buf[:n]); err != nil {
			r.log.Error("recorder cannot understand the kernel", "error", err)
		}
		for _, e := range events {
			if e.Number < 0 {
				continue
			}
			var st unix.Stat_t
			if err := unix.Fstat(int(e.Number), &st); err != nil {
				r.log.Error("stat the descriptor of an event", "error", err)
			} else if i, ok := r.inodes[inode{uint64(st.Dev), st.Ino}]; ok {
				off, count := int64(0), st.Size
				if e.Ranged {
					off, count = int64(e.Offset), int64(e.Count)
				}
				r.Add(i, off, min(count, st.Size-off), now, false)
			}
			if err := kernel.FanotifyAllow(group, e.Number); err != nil {
				r.log.Error("recorder cannot answer", "number", e.Number, "error", err)
			}
			unix.Close(int(e.Number))
		}
	}
}

// serve makes the devices of the FUSE kind.
func (r *Recorder) serve(ctx context.Context, o Options) error {
	g, err := gate.NewFUSE(ctx, gate.Options{Dir: o.FUSE, Logger: r.log})
	if err != nil {
		return err
	}
	r.fuse = g
	for i, path := range o.Arenas {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		r.files = append(r.files, f)
		name := strconv.Itoa(i)
		if err := g.Guard(name, f, &noted{r, i}); err != nil {
			return err
		}
		r.devices = append(r.devices, g.Device(name, path))
	}
	return g.Start()
}

// noted answers for an arena that has everything, and notes what it is asked.
type noted struct {
	r     *Recorder
	arena int
}

func (n *noted) Present(int64, int64) bool { return true }

func (n *noted) Met(off, count int64, _ bool) {
	n.r.Add(n.arena, off, count, time.Now(), false)
}

func (n *noted) Need(context.Context, int64, int64) error { return nil }

// Devices returns the paths by which EROFS is to be mounted over the arenas.
// They mean something in this process only, and until Close.
func (r *Recorder) Devices() []string { return r.devices }

// Close ends the recording. Fanotify devices go on, unrecorded; FUSE devices
// fail.
func (r *Recorder) Close() error {
	var errs []error
	if r.group != nil {
		// Wakes the reader of events.
		errs = append(errs, r.group.SetReadDeadline(time.Unix(1, 0)))
		r.wg.Wait()
		errs = append(errs, r.group.Close())
		r.group = nil
	}
	if r.mount != nil {
		errs = append(errs, r.mount.Close())
		r.mount = nil
	}
	if r.fuse != nil {
		errs = append(errs, r.fuse.End(context.Background()))
		r.fuse = nil
	}
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	r.files = nil
	return errors.Join(errs...)
}
