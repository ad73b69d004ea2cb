// Package arena keeps the contents of one rootfs on the worker: a sparse file
// in which every content has a fixed, 4 KiB-aligned place before its bytes
// arrive, and the presence map that says which blocks are here and verified.
//
// An arena is a directory with three files.
//
// arena is the sparse file. Its contents lie as Layout says. Holes are never
// written; the padding after a content is written together with its last
// segment or page, as zeros.
//
// presence is the presence map, mapped shared by the daemon: what it holds
// survives the daemon, but it may reach the disk before the bytes that it
// speaks of, so it counts only in the boot that wrote it. Integers are
// little-endian:
//
//	  0  8  magic "HFPRESNC"
//	  8  4  version, 2
//	 12  4  block size, 4096
//	 16 32  digest of the layout
//	 48 16  boot ID (/proc/sys/kernel/random/boot_id)
//	 64  8  size of the arena, bytes
//	 72  8  number of segments
//	 80  8  number of blocks
//	 88  4  offset of the maps, 4096
//	 92  4  CRC-32C of bytes 0 to 91
//	 96     zeros up to 4096
//	4096    one bit a segment, in 64-bit words: segments
//	        one bit a block, in 64-bit words: blocks
//	        one bit a block, in 64-bit words: runs
//
// Bit i is bit i%64 of word i/64. The words of the maps are in the host's byte
// order: they are touched by atomic instructions and never leave the host. Unused bits are 0.
//
// The bit of a segment is set after its bytes were compared with its ID and
// written; the bit of a block is set after those of all segments with bytes in
// the block, or after its bit of the runs, which says that a page run wrote it,
// after it was compared with the run's digest. The maps therefore confirm each other. A segment whose
// blocks are not all marked (the daemon died between the two) is not believed,
// nor is a bit of the runs whose block is not marked; a
// block marked without its segments and without its bit of the runs is
// corruption, and nothing in the file is believed.
//
// Page runs and segments say the same bytes in two ways, and cut points of segments are not at
// page boundaries. So whatever comes second is compared with what is here,
// byte for byte, before anything of it is written (ErrContradiction), and a
// segment whose last block is written by a page run is read, compared with its
// ID and marked, by Settle or the next Open if not at once.
//
// durable is what of it survives a power cut: the segments and runs whose bits were set
// before the last fdatasync of the arena began. It is replaced by rename. Integers, and the words of
// its maps, are little-endian:
//
//	 0  8  magic "HFDURABL"
//	 8  4  version, 2
//	12  4  block size, 4096
//	16 32  digest of the layout
//	48  8  size of the arena, bytes
//	56  8  number of segments
//	64  8  number of blocks
//	72     one bit a segment, in 64-bit words: segments
//	       one bit a block, in 64-bit words: runs
//	   32  SHA-256 of everything before
//
// Version 1 of both files had no runs. It is read, and written no more.
//
// Open believes presence in the boot that wrote it, else durable, else nothing.
// What can be believed is decided by the files alone; what an arena should hold
// is decided by the Layout, whose digest is in both.
package arena

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/durable"
	"hydrofoil.dev/foil/internal/kernel"
)

// Names of an arena's files in its directory.
const (
	FileName     = "arena"
	presenceName = "presence"
	durableName  = "durable"
)

// ErrClosed is returned by waits and writes on an arena that has been closed.
var ErrClosed = errors.New("the arena is closed")

// Arena is one open arena. All methods are safe for concurrent use.
type Arena struct {
	dir    string
	layout *Layout
	file   *os.File
	conn   syscall.RawConn // of file
	boot   kernel.BootID
	doubt  string

	// mu is held for reading while the maps are touched, for writing while
	// they are taken away (Close) or back (a failed Sync).
	mu     sync.RWMutex
	maps   *presence
	closed bool

	// contents guard what is written to a content, by its number: segments go
	// side by side, a page run goes alone. They are taken before mu.
	contents [64]sync.RWMutex

	missing atomic.Int64 // segments
	here    atomic.Int64 // bytes of contents
	written atomic.Int64 // bytes, since Open
	done    chan struct{}
	once    sync.Once // closes done

	waits waits
	reads reads

	// unsettled are segments that page runs have completed, for Settle.
	unsettled struct {
		sync.Mutex
		list []int
	}

	sync struct {
		sync.Mutex
		last    held  // what is in the durable file; nil: none is there
		failure error // of the first fdatasync that failed
	}
}

// Create makes an arena in dir, which it creates when needed. It fails with
// fs.ErrExist when dir has an arena, unix.EFBIG when the filesystem cannot hold a file
// of the layout's size, unix.ENOSPC when the disk is full.
func Create(dir string, l *Layout) (*Arena, error) {
	boot, err := kernel.ReadBootID()
	if err != nil {
		return nil, err
	}
	return create(dir, l, boot)
}

func create(dir string, l *Layout, boot kernel.BootID) (_ *Arena, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create arena: %w", err)
	}
	path := filepath.Join(dir, FileName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create arena: %w", err)
	}
	// Maps without an arena are what Remove leaves when it is interrupted. They must
	// not come back; Sync makes the new arena durable with its maps.
	found, err := removeMaps(dir)
	if err == nil {
		err = f.Truncate(l.size)
	}
	if err == nil && found {
		err = durable.Sync(dir)
	}
	var a *Arena
	if err == nil {
		a, err = open(dir, f, l, boot)
	}
	if err != nil {
		f.Close()
		os.Remove(path)
		return nil, fmt.Errorf("create arena %s of %d bytes: %w", dir, l.size, explain(err))
	}
	a.doubt = ""
	return a, nil
}

// Open opens the arena in dir. The layout must be the one it was created with:
// of the maps of another layout nothing is believed. The descriptor that it
// opens must come before the arena is put behind a gate: use OpenFile for an
// arena that is behind one already.
func Open(dir string, l *Layout) (*Arena, error) {
	boot, err := kernel.ReadBootID()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, FileName), os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open arena: %w", err)
	}
	a, err := open(dir, f, l, boot)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open arena %s: %w", dir, explain(err))
	}
	return a, nil
}

// OpenFile is Open with a descriptor of the arena file, open for reading and
// writing, that another process opened before the gate was put up: one opened
// now would block on the gate that it is to serve. The arena takes file over when OpenFile succeeds.
func OpenFile(dir string, file *os.File, l *Layout) (*Arena, error) {
	boot, err := kernel.ReadBootID()
	if err != nil {
		return nil, err
	}
	named, err := os.Stat(filepath.Join(dir, FileName))
	if err != nil {
		return nil, fmt.Errorf("open arena: %w", err)
	}
	if given, err := file.Stat(); err != nil {
		return nil, fmt.Errorf("open arena %s: %w", dir, err)
	} else if !os.SameFile(named, given) {
		return nil, fmt.Errorf("open arena %s: the descriptor is of another file", dir)
	}
	a, err := open(dir, file, l, boot)
	if err != nil {
		return nil, fmt.Errorf("open arena %s: %w", dir, explain(err))
	}
	return a, nil
}

func open(dir string, f *os.File, l *Layout, boot kernel.BootID) (*Arena, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	a := &Arena{dir: dir, layout: l, file: f, conn: conn, boot: boot, done: make(chan struct{})}
	a.waits.init()
	a.reads.init(l)
	p, err := openPresence(dir, l)
	if err != nil {
		return nil, err
	}
	durable, err := readDurable(dir, l)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.doubt = fmt.Sprintf("its durable map is not believed: %v", err)
	}
	have, err := checkPresence(p.mem, l, boot)
	switch {
	case st.Size() != l.size:
		// Created by a daemon that a power cut or a crash then stopped, or cut
		// by someone else. Its maps speak of bytes that are gone.
		a.doubt = fmt.Sprintf("the arena file is %d bytes long, want %d: nothing in it is believed", st.Size(), l.size)
		have, durable = held{}, held{}
		p.distrust()
		if err := f.Truncate(0); err != nil {
			return nil, errors.Join(err, p.close())
		}
		if err := f.Truncate(l.size); err != nil {
			return nil, errors.Join(err, p.close())
		}
	case errors.Is(err, errOtherBoot):
		have = durable
	case err != nil:
		if a.doubt == "" {
			a.doubt = fmt.Sprintf("its presence map is not believed, only what is durable: %v", err)
		} else {
			a.doubt += fmt.Sprintf("; nor is its presence map: %v", err)
		}
		have = durable
	}
	p.distrust()
	segments, bytes := p.fill(l, have)
	p.trust(l, boot)
	a.maps = p
	a.sync.last = durable
	a.here.Store(bytes)
	a.missing.Store(int64(l.Segments() - segments))
	a.finish()
	if a.Complete() {
		a.once.Do(func() { close(a.done) })
	}
	return a, nil
}

func readDurable(dir string, l *Layout) (held, error) {
	b, err := os.ReadFile(filepath.Join(dir, durableName))
	if err != nil {
		return held{}, err
	}
	return decodeDurable(b, l)
}

// explain adds to the errors of a full disk what to do about it.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fmt.Errorf("%w: free some space, or remove images with foil rm", err)
	case errors.Is(err, unix.EFBIG):
		return fmt.Errorf("%w for this filesystem: keep arenas on XFS, or on ext4 with 4 KiB blocks", err)
	}
	return err
}

// Dir returns the arena's directory.
func (a *Arena) Dir() string { return a.dir }

// Layout returns where things lie.
func (a *Arena) Layout() *Layout { return a.layout }

// File returns the daemon's descriptor of the arena file, which is exempt from
// the gate when it was opened before the gate was put up. It stays the arena's.
func (a *Arena) File() *os.File { return a.file }

// Doubt says what Open found in the arena's maps that it did not believe, and
// why; empty when everything fitted. A power cut alone is no reason for doubt.
func (a *Arena) Doubt() string { return a.doubt }

// Complete reports whether every segment is present.
func (a *Arena) Complete() bool { return a.missing.Load() == 0 }

// Done is closed when the arena becomes complete. It is not reopened if a
// failed Sync then takes segments back: Complete says how it is now.
func (a *Arena) Done() <-chan struct{} { return a.done }

// Missing returns how many segments are absent.
func (a *Arena) Missing() int { return int(a.missing.Load()) }

// ContentHere returns how many bytes of contents are present, holes included,
// of Layout().ContentBytes().
func (a *Arena) ContentHere() int64 { return a.here.Load() }

// Written returns how many bytes have been written to the arena since it was
// opened, padding not counted.
func (a *Arena) Written() int64 { return a.written.Load() }

// Present reports whether every block of [off, off+n) is present. What lies
// outside of the arena is. After Close it says what was so then: events of reads that were allowed to
// see a part of it may still be on their way when it leaves the gate.
func (a *Arena) Present(off, n int64) bool {
	from, to := a.blocks(off, n)
	a.mu.RLock()
	defer a.mu.RUnlock()
	return nextClear(a.maps.blocks, from, to) == to
}

// blocks returns the blocks [from, to) of [off, off+n), within the arena.
func (a *Arena) blocks(off, n int64) (from, to int) {
	if off < 0 {
		n, off = n+off, 0
	}
	if n <= 0 || off >= a.layout.size {
		return 0, 0
	}
	n = min(n, a.layout.size-off)
	return int(off / BlockSize), int((off + n + BlockSize - 1) / BlockSize)
}

// HasSegment reports whether segment i is present.
func (a *Arena) HasSegment(i int) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return !a.closed && bit(a.maps.segments, i)
}

// Verified reports whether all segments with bytes in [off, off+n) are present, each compared with its ID. Blocks
// may be present before: by pages, each compared with a digest of its own.
func (a *Arena) Verified(off, n int64) bool {
	first, end := a.layout.SegmentsIn(off, n)
	a.mu.RLock()
	defer a.mu.RUnlock()
	return !a.closed && nextClear(a.maps.segments, first, end) == end
}

// AbsentSegments appends to dst the absent segments with bytes in the absent
// blocks of [off, off+n), ascending.
func (a *Arena) AbsentSegments(dst []int, off, n int64) []int {
	from, to := a.blocks(off, n)
	first, end := a.layout.SegmentsIn(int64(from)*BlockSize, int64(to-from)*BlockSize)
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return dst
	}
	for i := nextClear(a.maps.segments, first, end); i < end; i = nextClear(a.maps.segments, i+1, end) {
		// Its blocks in the range may be here by page runs.
		lo, hi := max(from, int(a.layout.offsets[i]/BlockSize)), min(to, int((a.layout.end(i)-1)/BlockSize)+1)
		if nextClear(a.maps.blocks, lo, hi) < hi {
			dst = append(dst, i)
		}
	}
	return dst
}

// PresentBitmap returns which of the TOC's segments are present in this arena,
// in the form of bundle.Have.Present: bit i%8 of byte i/8 for TOC.Segments[i].
// Segments of contents that are not in this arena are absent: see MergePresent.
func (a *Arena) PresentBitmap() []byte {
	l := a.layout
	b := make([]byte, (l.tocSegments+7)/8)
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.closed {
		return b
	}
	for k := range l.contents {
		shift := int(l.contents[k].tocFirst) - int(l.contents[k].first)
		for i := int(l.contents[k].first); i < l.contentEnd(k); i++ {
			if bit(a.maps.segments, i) {
				b[(i+shift)/8] |= 1 << ((i + shift) % 8)
			}
		}
	}
	return b
}

// Sync makes what is present now durable: an fdatasync of the arena, and then a
// new durable map. It does nothing when nothing has arrived since the last one. What
// has been read by way of the gate leaves the arena's page cache (see Touch).
//
// When the fdatasync fails, the kernel may have dropped bytes that it had
// accepted. Then what is not durable is taken back, the arena fails, and so
// does every later Sync: the arena has to be opened anew once the disk works.
func (a *Arena) Sync(ctx context.Context) error {
	a.sync.Lock()
	defer a.sync.Unlock()
	if a.sync.failure != nil {
		return a.sync.failure
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("sync arena %s: %w", a.dir, err)
	}
	a.mu.RLock()
	closed := a.closed
	var now held
	if !closed {
		now = a.maps.held()
	}
	a.mu.RUnlock()
	if closed {
		return fmt.Errorf("sync arena %s: %w", a.dir, ErrClosed)
	}
	read := a.reads.undropped()
	if a.sync.last.segments != nil && now.equal(a.sync.last) {
		a.drop(read)
		return nil
	}
	var err error
	if cerr := a.conn.Control(func(fd uintptr) { err = fdatasync(int(fd)) }); cerr != nil {
		return fmt.Errorf("sync arena %s: %w", a.dir, cerr)
	}
	if err != nil {
		a.sync.failure = fmt.Errorf("sync arena %s: %w", a.dir, explain(err))
		a.revert()
		a.Fail(a.sync.failure)
		return a.sync.failure
	}
	if err := durable.Replace(filepath.Join(a.dir, durableName), encodeDurable(a.layout, now)); err != nil {
		return fmt.Errorf("sync arena %s: write its durable map: %w", a.dir, explain(err))
	}
	a.sync.last = now
	a.drop(read)
	return nil
}

func fdatasync(fd int) error {
	for {
		if err := unix.Fdatasync(fd); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// revert takes back every segment that is not durable. a.sync is locked.
func (a *Arena) revert() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.maps.distrust()
	segments, bytes := a.maps.fill(a.layout, a.sync.last)
	a.here.Store(bytes)
	a.missing.Store(int64(a.layout.Segments() - segments))
	// The maps stay without a header: whoever opens them next believes only
	// what is durable.
}

// Close lets go of the files. Waits end with ErrClosed, and Present knows no more than it did. What is not durable
// stays present until the host's next boot.
func (a *Arena) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	a.closed = true
	blocks := slices.Clone(a.maps.blocks)
	err := a.maps.close()
	a.maps.blocks = blocks
	a.mu.Unlock()
	a.waits.fail(ErrClosed, true)
	return errors.Join(err, a.file.Close())
}

// Remove closes the arena and deletes its files, and its directory if nothing
// else is in it.
func (a *Arena) Remove() error {
	err := a.Close()
	return errors.Join(err, Remove(a.dir))
}

// Remove deletes an arena that is not open. A missing one is no error.
func Remove(dir string) error {
	// The maps go first: an arena without maps holds nothing.
	if _, err := removeMaps(dir); err != nil {
		return fmt.Errorf("remove arena: %w", err)
	}
	if err := os.Remove(filepath.Join(dir, FileName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove arena: %w", err)
	}
	err := os.Remove(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

func removeMaps(dir string) (found bool, err error) {
	for _, name := range []string{durableName, durableName + ".new", presenceName} {
		switch err := os.Remove(filepath.Join(dir, name)); {
		case err == nil:
			found = true
		case !errors.Is(err, fs.ErrNotExist):
			return found, err
		}
	}
	return found, nil
}
