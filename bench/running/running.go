// Package running measures containers that run, from images that are complete:
// what their file systems cost them, Hydrofoil's against containerd's overlayfs.
//
// For each, two containers' file systems of one image are mounted, as containers
// have them (overlayfs with a writable layer of its own each), and the same code
// works on both in turns, below paths of equal length:
//
//	find        read all directories
//	stat        look up each file
//	read        read the largest files from front to back
//	random      read blocks of 4 KiB at random places of them
//	mmap        touch each page of their mappings
//	exec        run a program of the image a few times, in it
//	task        what the image is for (see tasks): redis and PostgreSQL under
//	            load, a C++ program compiled
//
// each with the page cache dropped before (cold) and again right after (warm, a few
// times, of which the median counts). For each there are the time on the clock and
// the processor time that it cost, user and system, which says more on a machine
// that does other things as well. Kernel threads that worked for it are not in it.
// Before the first of them it is waited until Hydrofoil's mount reads past its
// arenas' page cache, which it does a minute after the image is complete.
//
// Shared says which part of the pages that one container has read the other
// finds in the page cache; Memory by how much the page cache of the machine grows
// when one container reads its largest files, then a second one, then one of
// another image (Options.With).
//
// With Options.Arriving the same operations, cold, are timed in a container that
// is ready while the rest of its image arrives over a link, by Hydrofoil, each on
// a worker of its own: what lazy reads cost.
package running

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
)

// Options say what is measured.
type Options struct {
	Programs engines.Programs
	Image    string // NAME:TAG of the declared ones
	With     string // another one, for Memory; "" for none
	Arriving bool
	Link     link.Options // of Arriving
	Rounds   int
	Cache    string // directory on a disk
	Out      io.Writer
	JSON     string // file for the result; "" for none
	Log      func(line string)
}

// Result is what was measured.
type Result struct {
	Image  string   `json:"image"`
	Files  int      `json:"files"`
	Bytes  int64    `json:"bytes"` // of the largest files, that read, random and mmap work on
	Rows   []Row    `json:"rows"`
	Shared []Share  `json:"shared"`
	Memory []Memory `json:"memory"`
	// Arriving is there instead of the others if it was asked for.
	Arriving []Arriving `json:"arriving,omitempty"`
	Link     string     `json:"link,omitempty"`
}

// Memory is by how many bytes the page cache grew.
type Memory struct {
	Engine string `json:"engine"`
	One    int64  `json:"one"`             // by the first container
	Two    int64  `json:"two"`             // by the second one
	Other  int64  `json:"other,omitempty"` // by one of the other image
}

// Arriving is one operation while the image arrives: the median in seconds, and
// of how many rounds the image was complete before the operation had ended.
type Arriving struct {
	What     string  `json:"what"`
	Seconds  float64 `json:"seconds"`
	Complete int     `json:"complete"`
	Rounds   int     `json:"rounds"`
}

// Row is one operation.
type Row struct {
	What  string `json:"what"`
	Cache string `json:"cache"` // cold or warm
	Wall  Pair   `json:"wall"`
	CPU   Pair   `json:"cpu"` // user and system
}

// Pair compares the engines: medians in seconds, and the median of the rounds'
// ratios with its interval.
type Pair struct {
	Hydrofoil float64        `json:"hydrofoil_seconds"`
	Overlayfs float64        `json:"overlayfs_seconds"`
	Ratio     float64        `json:"ratio"`
	Interval  stats.Interval `json:"interval"`
}

// pair compares measurements of which those of one round have one index.
func pair(hydrofoil, overlayfs []float64) Pair {
	ratios := make([]float64, len(hydrofoil))
	for i := range ratios {
		ratios[i] = hydrofoil[i] / overlayfs[i]
	}
	return Pair{stats.Median(hydrofoil), stats.Median(overlayfs), stats.Median(ratios), stats.Bootstrap(ratios, stats.Median)}
}

// Share is how much of what one container has read another one has in memory.
type Share struct {
	Engine string  `json:"engine"`
	Part   float64 `json:"part"` // of the pages
}

// How many bytes of the largest files are enough.
const enough = 128 << 20

// How often an operation is done again when what it reads is in memory; tasks are
// once.
const again = 5

// Run measures. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	for _, path := range []*string{&o.Cache, &o.Programs.Foil} {
		if *path, err = filepath.Abs(*path); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	catalogue, err := images.Declared()
	if err != nil {
		return err
	}
	builder := images.Builder{Cache: filepath.Join(o.Cache, "images"), Log: o.Log}
	var ims []engines.Image
	for _, name := range []string{o.Image, o.With} {
		if name == "" {
			continue
		}
		built, err := builder.Build(ctx, catalogue, name)
		if err != nil {
			return err
		}
		ready, err := site.ParseReadiness(built.Probe, false)
		if err != nil {
			return err
		}
		ims = append(ims, engines.Image{Name: name, Ref: engines.RegistryAddr + "/" + name, Built: built, Ready: ready, Command: built.Args})
	}
	dir, err := site.Scratch(o.Cache, "running-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	if !o.Arriving {
		o.Link = link.Options{}
	}
	l, err := link.New(context.WithoutCancel(ctx), o.Link)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	s := &site.Site{Dir: dir, Link: l}
	server, err := engines.Serve(ctx, s, o.Programs.Foil, filepath.Join(dir, "serve"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(syscall.SIGTERM)) }()
	for _, im := range ims {
		if err := engines.Push(ctx, s, im); err != nil {
			return err
		}
	}
	if o.Arriving {
		return arriving(ctx, s, o, ims[0])
	}
	contestants := []engines.Engine{&engines.Hydrofoil{}, &engines.Containerd{Snapshotter: "overlayfs"}}
	return mountAll(ctx, s, o, ims, contestants, nil)
}

// mountAll provisions the images with each engine, mounts the first one twice and
// the other once, and when all are mounted measures.
func mountAll(ctx context.Context, s *site.Site, o Options, ims []engines.Image, left []engines.Engine, trees [][]string) (err error) {
	if len(left) == 0 {
		return measure(ctx, o, ims[0], trees)
	}
	dir := filepath.Join(s.Dir, left[0].Name())
	w := left[0].Worker(s, o.Programs, dir)
	if err := w.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	for _, im := range ims {
		if err := provision(ctx, s, w, im, true); err != nil {
			return fmt.Errorf("%s: %w", left[0].Name(), err)
		}
	}
	mounter := w.(engines.Mounter)
	refs := []string{ims[0].Ref, ims[0].Ref}
	if len(ims) > 1 {
		refs = append(refs, ims[1].Ref)
	}
	var mounted func(have []string) error
	mounted = func(have []string) error {
		if len(have) < len(refs) {
			at := filepath.Join(s.Dir, fmt.Sprintf("tree-%d-%d", len(trees), len(have)))
			return mounter.Mounted(ctx, refs[len(have)], func(tree string) error {
				return bound(tree, at, func() error { return mounted(append(have, at)) })
			})
		}
		if err := settled(ctx, dir); err != nil {
			return err
		}
		return mountAll(ctx, s, o, ims, left[1:], append(trees, have))
	}
	return mounted(nil)
}

// bound calls fn while a tree is at another place as well: all are measured below paths
// of one length and depth, since every component costs each lookup some time.
func bound(tree, at string, fn func() error) (err error) {
	if err := os.Mkdir(at, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := unix.Mount(tree, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bench: bind %s to %s: %w", tree, at, err)
	}
	defer func() { err = errors.Join(err, unix.Unmount(at, unix.MNT_DETACH)) }()
	return fn()
}

// settled waits until EROFS mounts below a directory read past the page cache of
// their devices, where the kernel can (Linux 6.15).
func settled(ctx context.Context, dir string) error {
	waited := time.NewTimer(90 * time.Second)
	defer waited.Stop()
	for {
		mounts, err := os.ReadFile("/proc/self/mounts")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		waits := false
		for line := range strings.Lines(string(mounts)) {
			f := strings.Fields(line) // source, target, type, options
			waits = waits || f[2] == "erofs" && strings.HasPrefix(f[1], dir+"/") && !slices.Contains(strings.Split(f[3], ","), "directio")
		}
		if !waits {
			return nil
		}
		select {
		case <-time.After(time.Second):
		case <-waited.C: // this kernel cannot
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// provision gets an image onto a worker, complete if asked for, and runs it until
// it is ready.
func provision(ctx context.Context, s *site.Site, w engines.Worker, im engines.Image, complete bool) (err error) {
	t := engines.Begin(s, w.Processes())
	defer t.End()
	c, err := w.Provision(ctx, im, t)
	defer func() { err = errors.Join(err, c.Stop()) }()
	if err != nil {
		return err
	}
	if err := im.Ready.Wait(ctx, s.Link, c.Process); err != nil {
		return err
	}
	if !complete {
		return nil
	}
	return w.Complete(ctx, im, t)
}

// operation is what is timed, on a tree.
type operation struct {
	name string
	do   func(tree string, in inventory) error
}

// inventory is what is in a tree.
type inventory struct {
	files   []string // all, as paths in the tree
	largest []string
	bytes   int64 // of the largest
	program string
}

var operations = []operation{
	{"find", func(tree string, _ inventory) error {
		return filepath.WalkDir(tree, func(_ string, _ fs.DirEntry, err error) error { return err })
	}},
	{"stat", func(tree string, in inventory) error {
		for _, path := range in.files {
			var st unix.Stat_t
			if err := unix.Lstat(filepath.Join(tree, path), &st); err != nil {
				return err
			}
		}
		return nil
	}},
	{"read", func(tree string, in inventory) error {
		buffer := make([]byte, 128<<10)
		return each(tree, in, func(f *os.File, _ int64) error {
			_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buffer)
			return err
		})
	}},
	{"random", func(tree string, in inventory) error {
		dice := rand.New(rand.NewPCG(1, 2))
		block := make([]byte, 4096)
		return each(tree, in, func(f *os.File, size int64) error {
			for range min(size/4096, 500) {
				if _, err := f.ReadAt(block, dice.Int64N(size/4096)*4096); err != nil {
					return err
				}
			}
			return nil
		})
	}},
	{"mmap", func(tree string, in inventory) error {
		var sum byte
		err := each(tree, in, func(f *os.File, size int64) error {
			mapped, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_PRIVATE)
			if err != nil {
				return err
			}
			for i := 0; i < len(mapped); i += 4096 {
				sum += mapped[i]
			}
			return unix.Munmap(mapped)
		})
		_ = sum
		return err
	}},
	{"exec", func(tree string, in inventory) error {
		for range 20 {
			cmd := exec.Command(in.program)
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: tree}
			cmd.Dir = "/"
			if err := cmd.Run(); err != nil {
				return err
			}
		}
		return nil
	}},
}

func each(tree string, in inventory, do func(f *os.File, size int64) error) error {
	for _, path := range in.largest {
		f, err := os.Open(filepath.Join(tree, path))
		if err != nil {
			return err
		}
		info, err := f.Stat()
		if err == nil {
			err = do(f, info.Size())
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// look lists a tree.
func look(tree string) (in inventory, err error) {
	type file struct {
		path string
		size int64
	}
	var regular []file
	err = filepath.WalkDir(tree, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, tree)
		in.files = append(in.files, name)
		if entry.Type().IsRegular() {
			info, err := entry.Info()
			if err != nil {
				return err
			}
			regular = append(regular, file{name, info.Size()})
		}
		return nil
	})
	if err != nil {
		return in, fmt.Errorf("bench: list %s: %w", tree, err)
	}
	slices.SortStableFunc(regular, func(a, b file) int { return int(b.size - a.size) })
	for _, f := range regular {
		if in.bytes >= enough || f.size < 4096 {
			break
		}
		in.largest, in.bytes = append(in.largest, f.path), in.bytes+f.size
	}
	for _, program := range []string{"/usr/bin/true", "/bin/true"} {
		if slices.Contains(in.files, program) {
			in.program = program
		}
	}
	if in.program == "" || len(in.largest) == 0 {
		return in, fmt.Errorf("bench: %s holds no /bin/true, or nothing that is worth reading", tree)
	}
	return in, nil
}

func measure(ctx context.Context, o Options, im engines.Image, trees [][]string) error {
	in, err := look(trees[0][0])
	if err != nil {
		return err
	}
	operations := withTask(im)
	result := Result{Image: im.Name, Files: len(in.files), Bytes: in.bytes}
	for _, op := range operations {
		// By cache (cold, warm), then tree.
		var wall, cpu [2][2][]float64
		for round := range o.Rounds {
			for i := range trees {
				i = (i + round) % len(trees)
				if err := site.DropCaches(); err != nil {
					return err
				}
				for cache, times := range []int{1, again} {
					if op.name == taskName {
						times = 1
					}
					var walls, cpus []float64
					for range times {
						if ctx.Err() != nil {
							return context.Cause(ctx)
						}
						took, cost, err := timed(func() error { return op.do(trees[i][0], in) })
						if err != nil {
							return fmt.Errorf("bench: %s in %s: %w", op.name, trees[i][0], err)
						}
						walls, cpus = append(walls, took.Seconds()), append(cpus, cost.Seconds())
					}
					wall[cache][i] = append(wall[cache][i], stats.Median(walls))
					cpu[cache][i] = append(cpu[cache][i], stats.Median(cpus))
				}
			}
		}
		for cache, name := range []string{"cold", "warm"} {
			result.Rows = append(result.Rows, Row{
				What: op.name, Cache: name, Wall: pair(wall[cache][0], wall[cache][1]), CPU: pair(cpu[cache][0], cpu[cache][1]),
			})
		}
		if o.Log != nil {
			o.Log("measured " + op.name)
		}
	}
	for i, name := range []string{"hydrofoil", "overlayfs"} {
		if err := site.DropCaches(); err != nil {
			return err
		}
		if err := operations[2].do(trees[i][0], in); err != nil {
			return fmt.Errorf("bench: read in %s: %w", trees[i][0], err)
		}
		resident, pages := 0, 0
		for _, path := range in.largest {
			here, all, err := engines.Resident(filepath.Join(trees[i][1], path))
			if err != nil {
				return fmt.Errorf("bench: %w", err)
			}
			resident, pages = resident+here, pages+all
		}
		result.Shared = append(result.Shared, Share{name, float64(resident) / float64(pages)})
	}
	for i, name := range []string{"hydrofoil", "overlayfs"} {
		m, err := memory(trees[i])
		if err != nil {
			return err
		}
		m.Engine = name
		result.Memory = append(result.Memory, m)
	}
	return result.deliver(o)
}

// timed returns how long do took, and the processor time of this process and of
// those that it has started and waited for.
func timed(do func() error) (took, cost time.Duration, err error) {
	before, err := processorTime()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := do(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	after, err := processorTime()
	return took, after - before, err
}

func processorTime() (sum time.Duration, err error) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var usage unix.Rusage
		if err := unix.Getrusage(who, &usage); err != nil {
			return 0, fmt.Errorf("bench: getrusage: %w", err)
		}
		sum += time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	return sum, nil
}

// memory reads the largest files of an engine's trees, one tree after the other.
func memory(trees []string) (m Memory, err error) {
	if err := site.DropCaches(); err != nil {
		return m, err
	}
	for i, tree := range trees {
		in, err := look(tree)
		if err != nil {
			return m, err
		}
		before, err := cached()
		if err != nil {
			return m, err
		}
		if err := operations[2].do(tree, in); err != nil {
			return m, fmt.Errorf("bench: read in %s: %w", tree, err)
		}
		after, err := cached()
		if err != nil {
			return m, err
		}
		*[]*int64{&m.One, &m.Two, &m.Other}[i] = after - before
	}
	return m, nil
}

// cached is the size of the machine's page cache in bytes.
func cached() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("bench: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); f[0] == "Cached:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("bench: /proc/meminfo does not say how large the page cache is")
}

// deliver writes a result to where the options say.
func (result Result) deliver(o Options) error {
	if o.JSON != "" {
		text, err := json.MarshalIndent(result, "", "\t")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		if err := os.WriteFile(o.JSON, append(text, '\n'), 0o644); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return result.Write(o.Out)
}

// Write writes a result as a table.
func (r Result) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	if len(r.Arriving) > 0 {
		fmt.Fprintf(t, "\nA container of %s that is ready, while the rest arrives over %s\n\n", r.Image, r.Link)
		fmt.Fprintln(t, "operation\tHydrofoil\trounds\tcomplete before its end")
		for _, a := range r.Arriving {
			fmt.Fprintf(t, "%s\t%.0f ms\t%d\t%d\n", a.What, 1e3*a.Seconds, a.Rounds, a.Complete)
		}
		return t.Flush()
	}
	fmt.Fprintf(t, "\nA container of %s that runs: %d files; %.0f MB of the largest ones are read\n\n", r.Image, r.Files, float64(r.Bytes)/1e6)
	fmt.Fprintln(t, "operation\tcache\tHydrofoil\toverlayfs\tratio\t95% interval\tCPU\toverlayfs\tratio\t95% interval")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s", row.What, row.Cache)
		for _, p := range []Pair{row.Wall, row.CPU} {
			fmt.Fprintf(t, "\t%.1f ms\t%.1f ms\t%.2f\t%.2f to %.2f", 1e3*p.Hydrofoil, 1e3*p.Overlayfs, p.Ratio, p.Interval.Low, p.Interval.High)
		}
		fmt.Fprintln(t)
	}
	for _, s := range r.Shared {
		fmt.Fprintf(t, "\n%s: of what one container has read, another one finds %.0f%% in memory", s.Engine, 100*s.Part)
	}
	fmt.Fprintln(t)
	if len(r.Memory) > 0 {
		fmt.Fprintln(t, "\npage cache\tone container\tand another\tand one of another image")
		for _, m := range r.Memory {
			fmt.Fprintf(t, "%s\t%.1f MB\t%+.1f MB\t%+.1f MB\n", m.Engine, float64(m.One)/1e6, float64(m.Two)/1e6, float64(m.Other)/1e6)
		}
	}
	return t.Flush()
}
