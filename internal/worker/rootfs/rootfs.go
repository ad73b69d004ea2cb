// Package rootfs is one flattened filesystem on the worker: its files, its state, who
// fills it, who uses it, and what others have in its arena.
//
// # What is on the disk
//
// A rootfs is a directory <root>/rootfs/<hex of its key>, with a number after
// a dot while another one has that name. Package origin says what a key is:
//
//	rootfs.json  its record; written last: a directory without one is a
//	             leftover of a crash, and is removed
//	toc          the TOC as the server sent it
//	proof        what is known of its layers (package proof; derived)
//	placement    for each content the arena it lies in
//	contents     what its own arena holds (package contents; derived)
//	meta.erofs   the metadata image (derived); meta.erofs.old: one that was damaged,
//	             and in use, when it was written anew
//	arena, presence, durable
//	             package arena
//	mnt          where it is mounted, once for all containers; gated, bdi and
//	             readahead are of package mounts
//
// Contents are shared by reference: the metadata image of one rootfs points into
// the arena of another. One that nothing names, but for others that use contents in
// its arena, is a lender (lending.go).
//
// # Locks
//
// Rootfs.mu guards its fields, and is held for moments, never over I/O. A page fault
// takes it and no other (fill.go).
package rootfs

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/arena"
	"hydrofoil.dev/foil/internal/worker/contents"
	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/mounts"
)

// Rootfs is one flattened filesystem on the worker.
type Rootfs struct {
	opts Options
	dir  string
	id   digest.Digest
	mnt  *mounts.Mount

	// rec is what is on the disk. Complete, Meta, Hashed, Proof, Since, Wrong and Lying change, and are guarded by mu;
	// the rest is written once, before the rootfs is known to anybody.
	rec Record
	// ready is closed when its first mount has been made, or has failed.
	ready chan struct{}
	// meta waits until the metadata image has been written that LayOut began, and
	// returns its SHA-256; nil for a rootfs that was found on the disk.
	meta func() (string, error)
	// pendingMeta is how many bytes the metadata image will take; guarded by mu.
	pendingMeta int64

	mu    locks.Mutex[locks.Rootfs]
	state State
	why   error // of Broken
	// contents lists what its own arena holds; nil when that is not known. A lender's
	// is replaced when it shrinks.
	contents *contents.List
	replaced []*contents.List // that somebody may read still
	arena    *arena.Arena     // its own, open while it is incomplete
	retired  *arena.Arena     // the same after that, while somebody may read it
	// stranded is the descriptor of an arena that could not be opened again but may be
	// marked still: no other one can be read.
	stranded *os.File
	lent     []byte  // a bit for each segment of the TOC that lies in another arena; while incomplete
	recorded bool    // its record is on the disk: a new daemon will know it
	users    int     // while there are any it is not removed
	lending  lending // of a lender

	fill     filling
	observer Observer  // of what is read of its arena; nil: none
	warm     time.Time // until then the page cache of its arena is kept
}

// Observer is told of reads that meet the gate. It is called with no lock held.
type Observer interface {
	// Read tells of a read of the arena. waited: not all of it was here.
	Read(off, n int64, waited bool)
	// Stop returns when nothing of the rootfs is used any more.
	Stop()
}

// Options are those of all rootfs of a store.
type Options struct {
	Mounts mounts.Options
	Logger *slog.Logger
	// WakeAfter is how long after the failure of a pull a read of what it did not
	// bring has it begun again at the earliest.
	WakeAfter time.Duration
	// Waited is told how long each read of absent bytes took.
	Waited func(time.Duration)
}

// New returns a rootfs of which nothing is known but its directory.
func New(opts Options, dir string) *Rootfs {
	r := &Rootfs{opts: opts, dir: dir, ready: make(chan struct{}), mnt: mounts.New(opts.Mounts, dir)}
	name := filepath.Base(dir)
	if _, _, again := strings.Cut(name, "."); again {
		r.id = digest.FromString(name)
	} else {
		r.id = digest.Digest(KeyOf(dir))
	}
	return r
}

// become changes the state. An illegal transition is a bug: it ends a program that
// checks the order of locks, and is reported by others. Called with r.mu held.
func (r *Rootfs) become(state State) {
	if r.state != 0 && r.state != state && !slices.Contains(next[r.state], state) {
		msg := fmt.Sprintf("rootfs %s goes from %v to %v", r.rec.ChainID, r.state, state)
		if locks.Checked {
			panic("store: " + msg)
		}
		r.opts.Logger.Error("a bug: " + msg)
	}
	r.state = state
}

// ID names the rootfs's arena, for the gate, the keeper and other rootfs: its
// key, or the digest of its directory's name while there is a lender that
// was a rootfs of the same key.
func (r *Rootfs) ID() digest.Digest { return r.id }

// Name is what gate and keeper know the arena by.
func (r *Rootfs) Name() string { return r.id.Encoded() }

// ChainID is that of the layers that it was made of.
func (r *Rootfs) ChainID() digest.Digest { return r.rec.ChainID }

// TOC is the digest of its encoded TOC.
func (r *Rootfs) TOC() digest.Digest { return r.rec.TOC }

// Inodes is how many files of all kinds it has.
func (r *Rootfs) Inodes() int { return r.rec.Files }

// ContentBytes is how large its contents are together.
func (r *Rootfs) ContentBytes() int64 { return r.rec.Contents }

// Dir is its directory.
func (r *Rootfs) Dir() string { return r.dir }

// Path is that of a file in its directory.
func (r *Rootfs) Path(name string) string { return filepath.Join(r.dir, name) }

// Mountpoint is where it is mounted.
func (r *Rootfs) Mountpoint() string { return r.mnt.Point() }

// MetaImage is the file that is mounted.
func (r *Rootfs) MetaImage() string { return r.Path(mounts.Image) }

// Arenas lists the IDs of the arenas that hold its contents.
func (r *Rootfs) Arenas() []digest.Digest { return r.rec.Arenas }

// Own returns the index in Arenas of the rootfs's own arena, or -1.
func (r *Rootfs) Own() int { return slices.Index(r.rec.Arenas, r.id) }

// Borrows reports whether it has contents in the arena of another.
func (r *Rootfs) Borrows() bool {
	return slices.ContainsFunc(r.rec.Arenas, func(id digest.Digest) bool { return id != r.id })
}

// State returns where it is in its life.
func (r *Rootfs) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// Broken returns why nothing may be served from it, or nil.
func (r *Rootfs) Broken() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why
}

// Complete reports whether all of it is here and durable.
func (r *Rootfs) Complete() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec.Complete
}

// Mount is how it is mounted.
func (r *Rootfs) Mount() *mounts.Mount { return r.mnt }

// Ready is closed when its first mount has been made, or has failed.
func (r *Rootfs) Ready() <-chan struct{} { return r.ready }

// IsReady reports whether nobody is making its first mount.
func (r *Rootfs) IsReady() bool {
	select {
	case <-r.ready:
		return true
	default:
		return false
	}
}

// Arena returns its own arena while it is incomplete, else nil. It stays open while
// the rootfs is used.
func (r *Rootfs) Arena() *arena.Arena {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.arena
}

// Touched is how many bytes of its arena were read by way of the gate.
func (r *Rootfs) Touched() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.arena != nil:
		return r.arena.Touched()
	case r.retired != nil:
		return r.retired.Touched()
	}
	return 0
}

// Here is how many bytes of its contents are here.
func (r *Rootfs) Here() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.rec.Complete || r.Own() < 0:
		return r.rec.Contents
	case r.arena == nil:
		return 0
	}
	return r.rec.Contents - (r.arena.Layout().ContentBytes() - r.arena.ContentHere())
}

// Shared is how many bytes of its contents lie in other arenas.
func (r *Rootfs) Shared() int64 {
	if a := r.Arena(); a != nil {
		return r.rec.Contents - a.Layout().ContentBytes()
	}
	return r.rec.Contents
}

// Break makes it one from which nothing may be served.
func (r *Rootfs) Break(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.become(Broken)
	r.why = why
}

// Observer returns who is told of reads of its arena, or nil.
func (r *Rootfs) Observer() Observer {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.observer
}

// Use keeps it from being removed, and its arena open, until LetGo.
func (r *Rootfs) Use() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.users++
}

// LetGo ends a use.
func (r *Rootfs) LetGo() {
	r.mu.Lock()
	r.users--
	left := r.unusedLocked()
	r.mu.Unlock()
	left()
}

// unusedLocked takes what was kept open for those that used the rootfs, if nobody does: the
// arena of a complete one, lists that were replaced. The caller closes it, with
// r.mu released. Called with r.mu held.
func (r *Rootfs) unusedLocked() (closeLeft func()) {
	if r.users > 0 || r.retired == nil && len(r.replaced) == 0 {
		return func() {}
	}
	lists, a := r.replaced, r.retired
	r.replaced, r.retired = nil, nil
	return func() {
		for _, c := range lists {
			c.Close()
		}
		if a != nil {
			_ = a.Close()
		}
	}
}

// InUse reports whether somebody uses it, or fills it.
func (r *Rootfs) InUse() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.users > 0 || r.fill.by != nil
}

// Used reports whether a pull or a verification uses it.
func (r *Rootfs) Used() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.users > 0
}

// Close closes its files, whoever uses them.
func (r *Rootfs) Close() error {
	r.mu.Lock()
	a, stranded, list := r.arena, r.stranded, r.contents
	r.arena, r.stranded, r.contents = nil, nil, nil
	r.users = 0
	left := r.unusedLocked()
	r.mu.Unlock()
	left()
	var err error
	if a != nil {
		err = a.Close()
	}
	if stranded != nil {
		_ = stranded.Close()
	}
	list.Close()
	return err
}

// SetLent notes which segments lie in other arenas.
func (r *Rootfs) SetLent(t *toc.TOC, place Placement) {
	own := r.Own()
	lent := make([]byte, (len(t.Segments)+7)/8)
	for i := range t.Contents {
		if int(place[i]) == own {
			continue
		}
		c := &t.Contents[i]
		for s := c.First; s < c.First+c.Segments; s++ {
			lent[s/8] |= 1 << (s % 8)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lent = lent
}

// Have is what a server is told of the rootfs. ok is false when nothing may be
// told.
func (r *Rootfs) Have() (h bundle.Have, ok bool) {
	r.mu.Lock()
	complete, why, a, lent := r.rec.Complete, r.why, r.arena, r.lent
	r.mu.Unlock()
	h = bundle.Have{ChainID: r.rec.ChainID, TOC: r.rec.TOC}
	switch {
	case why != nil:
		return h, false
	case complete:
		return h, true
	case lent == nil:
		return h, false
	}
	h.Present = slices.Clone(lent)
	if a != nil {
		for i, b := range a.PresentBitmap() {
			h.Present[i] |= b
		}
		h.Pages = a.PresentPages()
	}
	return h, true
}

// Record returns what is on the disk of it, or will be.
func (r *Rootfs) Record() Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec
}

// LayOut begins its life: it is not on the disk yet, and by fills it.
func (r *Rootfs) LayOut(rec Record, by Filler) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.become(LaidOut)
	r.rec, r.fill.by = rec, by
}

// SetLayout notes, before anybody knows of the rootfs, how it is made up: the digest
// of its placement, what its own arena holds, and what waits until the metadata image
// is written.
func (r *Rootfs) SetLayout(placement string, list *contents.List, meta func() (string, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Placement, r.contents, r.meta = placement, list, meta
}

// SetMeta notes the digest of the metadata image.
func (r *Rootfs) SetMeta(sum string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Meta = sum
}

// MetaWritten waits until the metadata image of one that is laid out is written.
func (r *Rootfs) MetaWritten() (sum string, err error) {
	if r.meta == nil {
		return r.Record().Meta, nil
	}
	return r.meta()
}

// Recorded notes that its record is on the disk: a new daemon will know it.
func (r *Rootfs) Recorded() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recorded = true
}

// FirstMounted closes Ready: its first mount has been made, or has failed.
func (r *Rootfs) FirstMounted() { close(r.ready) }

// Mounted notes that it is mounted.
func (r *Rootfs) Mounted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.state == Broken:
	case r.rec.Complete:
		r.become(Complete)
	default:
		r.become(Filling)
	}
}

// Unmounted notes that it is not mounted any more.
func (r *Rootfs) Unmounted() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == Filling || r.state == Complete {
		r.become(Parked)
	}
}

// Found notes that it was found on the disk, by a new daemon, mounted or not.
func (r *Rootfs) Found(mounted bool) {
	close(r.ready)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recorded = true
	switch {
	case !mounted:
		r.state = Parked
	case r.rec.Complete:
		r.state = Complete
	default:
		r.state = Filling
	}
	if mounted {
		r.mnt.Found()
	}
}

// Unreadable notes that its record cannot be read, and why: it has another one's
// place only.
func (r *Rootfs) Unreadable(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rec.key() != r.Key() {
		r.rec = Record{ChainID: digest.Digest(r.Key())} // the only name that is known
	}
	r.become(Broken)
	r.why = why
}

// Unlisted notes that it is not known what a lender keeps, and why.
func (r *Rootfs) Unlisted(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.why = why
}

// Completed notes that all of it is here, and durable, and whether its contents were hashed whole. The page
// cache of its arena is kept until then.
func (r *Rootfs) Completed(hashed bool, warm time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rec.Complete, r.rec.Hashed, r.warm = true, hashed, warm
	if r.state == Filling {
		r.become(Complete)
	}
}

// Warm reports whether it is not complete and mounted, or the page cache of its arena
// is kept still.
func (r *Rootfs) Warm() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state != Complete || time.Now().Before(r.warm)
}

// Retire closes its arena, which is not behind the gate any more, when nobody uses it.
func (r *Rootfs) Retire() {
	r.mu.Lock()
	r.retired, r.arena, r.lent = r.arena, nil, nil
	left := r.unusedLocked()
	r.mu.Unlock()
	left()
}

// Lends returns how many contents may be used in place in its arena; -1: none may,
// since it is not known what is here, or whose, or a new daemon would not find it again.
func (r *Rootfs) Lends() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.contents == nil || r.why != nil || r.rec.Wrong != "" || r.rec.Unwalled || r.rec.Origin == "",
		r.state == Lending && !r.lending.exact, r.contents.Old(),
		r.state != Lending && !r.recorded:
		return -1
	}
	return r.contents.Len()
}

// Pending is how many bytes a pull will bring, which one that nobody has claimed
// does not.
func (r *Rootfs) Pending() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.arena == nil || r.fill.by == nil || !r.fill.by.Claimed() {
		return r.pendingMeta
	}
	return r.pendingMeta + r.arena.Layout().ContentBytes() - r.arena.ContentHere()
}

// PendingMeta notes, and returns, how many bytes its metadata image will take: 0 once it is written.
func (r *Rootfs) PendingMeta(n int64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pendingMeta = n
	return n
}

// Strand keeps the descriptor of an arena that could not be opened again but may be
// marked still: no other one can be read.
func (r *Rootfs) Strand(f *os.File) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stranded = f
}

// TakeStranded returns what Strand kept, which it keeps no more, or nil.
func (r *Rootfs) TakeStranded() *os.File {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.stranded
	r.stranded = nil
	return f
}

// Stranded reports whether Strand has kept something.
func (r *Rootfs) Stranded() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stranded != nil
}

// Gone ends its life: its directory is about to be removed. Nothing of it is written
// or noted any more when it returns. It returns its arena, if that is open.
func (r *Rootfs) Gone() *arena.Arena {
	if r.meta != nil {
		_, _ = r.meta() // it writes into the directory
	}
	r.mu.Lock()
	r.become(Gone)
	a, o := r.arena, r.observer
	r.mu.Unlock()
	if o != nil {
		o.Stop()
	}
	return a
}
