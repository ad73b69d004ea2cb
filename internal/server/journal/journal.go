// Package journal keeps, as objects beside the blobs, what would be lost with the catalog: which
// repository holds which blobs and manifests, the bytes of manifests, tags, deletions, and
// what ingest has made of layers. From it the catalog is rebuilt.
//
// # Changes
//
// The journal is a set of changes (catalog.Change). Each sets one register, or says that
// it is no more: repository, blob of a repository, manifest, tag, layer, rootfs. A change has a version;
// of the changes of one register the greatest version counts. So the order in which objects are read
// does not matter, nor does a change that is in two of them. Everything below rests on that.
//
// # Order of a push
//
//  1. The catalog begins a transaction, makes the changes of all who wait, and numbers them.
//  2. Their changes are one new object of the journal, durable.
//  3. The transaction is committed. It says up to which version the catalog has everything.
//  4. Those who wait get their answer.
//
// A crash before 2 leaves nothing. One between 2 and 3 leaves an object with versions that the catalog
// does not have: the next start makes these changes (Attach), so that what was answered before the crash and
// what is rebuilt later are the same. Nothing is acknowledged that the journal lacks.
//
// If an object may or may not have been written (its commit failed), it is deleted before anything else is
// appended. Versions are never used twice: the catalog reserves them durably before it numbers.
//
// # Objects
//
// An object is written once, under a name that was never used:
//
//	journal/LL/FIRST-LAST-HORIZON-RUN-PART
//
// LL is the level, 2 decimal digits. FIRST and LAST are the least and greatest version in it, HORIZON
// is that of compaction (below), RUN is random; these are 16 hexadecimal digits. PART is 6 decimal digits. Objects of one RUN are parts of one
// sorted sequence. The object:
//
//	magic    8 bytes: "hfjrnl\x00\x02"; the last byte is the version of the format: 1 is read as
//	         well, and has no deleted manifests and tags
//	records  one column (package columns)
//	sum      32 bytes: SHA-256 of everything before
//
// A record, where a block is a uvarint and as many bytes, an int is a zigzag varint:
//
//	kind      uvarint: 2 × catalog.ChangeKind, + 1 if it is gone
//	version   uvarint
//	time      int: nanoseconds since 1970
//	repo      block
//	name      block
//	value     unless it is gone; by kind
//
// Values. Blob: size (uvarint), media type (block). Manifest: media type, artifact type,
// subject (blocks), how many annotations (uvarint), each a key and a value (blocks) in order of keys, time of the push (int),
// bytes (block). Tag: digest (block). Layer: diff ID, entries, why refused (blocks), size, files (uvarints), recipe's key and
// digest (blocks) and size (uvarint). Rootfs: TOC, key, index (blocks). Deleted manifest, deleted tag: as a manifest and a
// tag, and then the time of the deletion (int). The others have none.
// Records are sorted by repo, kind, name, version; no two have the same of all four. Digests are text, as
// in the catalog.
//
// # Compaction
//
// Each transaction makes an object of level 0. When a level has Fan runs, they are merged into one of the
// next level; when what is merged is no smaller than all that is older, that is merged with it. So there are at most
// Fan runs a level, a level for each factor of Fan, and at most about as many bytes of outdated changes as of
// those that count. Parts are cut at some MiB, so that a merge takes bounded memory.
//
// A merge keeps of each register the latest change. It writes the whole new run, and then deletes the objects that it
// has read. A crash in between leaves changes twice. A deletion may be dropped as well, or the journal would
// only grow: by a merge of all runs that finds no other change of its register, and a day (Options.KeepDeletions) after. Then no object has anything that
// it hides: an older change of the register was merged away by an earlier merge, and that merge has deleted
// all its inputs, or this one would have read it. The greatest version so dropped is the horizon: a catalog
// that lacks it cannot catch up, and is rebuilt.
//
// # Limits
//
// An object has at most 64 MiB of records, a record at most 32 MiB. A damaged object is left alone, and told.
package journal

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// Prefix is that of the keys of all objects of the journal.
const Prefix = "journal/"

// ErrStale is returned, wrapped, by Attach for a catalog that is older than its journal.
var ErrStale = errors.New("the catalog is older than its journal")

// Options of a Journal. The zero value is usable.
type Options struct {
	// Fan is how many runs of a level are merged. Default 32.
	Fan int
	// KeepDeletions is how long a deletion is kept at least. Default a day.
	KeepDeletions time.Duration
	// Log takes what nobody waits for; nil means slog.Default.
	Log *slog.Logger
	// At is called at named points, for tests; nil: it is not.
	At func(point string)
}

// Journal is the journal in an object store. Its methods are safe for concurrent use.
type Journal struct {
	store objects.Store
	o     Options

	appending sync.Mutex // orders Append, is held over I/O

	mu      sync.Mutex
	doubt   string          // guarded by mu: an object that may be there and must not be
	damaged map[string]bool // guarded by mu: objects that are not merged
	fresh   int             // guarded by mu: about how many runs of level 0 there are

	wake   chan struct{} // there may be something to merge
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// New returns the journal in store. It compacts in the background, until Close.
func New(store objects.Store, o Options) *Journal {
	if o.Fan == 0 {
		o.Fan = 32
	}
	if o.KeepDeletions == 0 {
		o.KeepDeletions = 24 * time.Hour
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.At == nil {
		o.At = func(string) {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	j := &Journal{store: store, o: o, damaged: map[string]bool{}, wake: make(chan struct{}, 1), cancel: cancel}
	j.work.Go(func() { j.compactor(ctx) })
	return j
}

// Close ends compaction. Appends are the catalog's to end.
func (j *Journal) Close() error {
	j.cancel()
	j.work.Wait()
	return nil
}

// Append implements catalog.Log.
func (j *Journal) Append(ctx context.Context, changes []catalog.Change) error {
	j.appending.Lock()
	defer j.appending.Unlock()
	if err := j.settleDoubt(ctx); err != nil {
		return err
	}
	sorted := slices.Clone(changes)
	sortChanges(sorted)
	var keys []string
	w := newRunWriter(0, 0, func(key string, b []byte) error {
		if len(keys) > 0 {
			// All or nothing: what one object does not hold is no batch of the catalog's.
			return fmt.Errorf("append to the journal: %d changes have more than %d bytes", len(changes), maxRecords)
		}
		keys = append(keys, key)
		return j.put(ctx, key, b)
	})
	w.target = maxRecords
	for i := range sorted {
		if err := w.add(&sorted[i]); err != nil {
			return err
		}
	}
	if err := w.finish(); err != nil {
		return err
	}
	j.o.At("appended")
	j.grown(1)
	return nil
}

// grown counts runs of level 0, and has them merged once they are many.
func (j *Journal) grown(runs int) {
	j.mu.Lock()
	j.fresh += runs
	many := j.fresh >= j.o.Fan
	j.mu.Unlock()
	if many {
		select {
		case j.wake <- struct{}{}:
		default:
		}
	}
}

// settleDoubt sees to it that an object is not there whose commit failed.
func (j *Journal) settleDoubt(ctx context.Context) error {
	j.mu.Lock()
	key := j.doubt
	j.mu.Unlock()
	if key == "" {
		return nil
	}
	if err := j.store.Delete(ctx, key); err != nil {
		return fmt.Errorf("append to the journal: an object that failed before cannot be removed: %w", err)
	}
	j.mu.Lock()
	j.doubt = ""
	j.mu.Unlock()
	return nil
}

// put writes an object. What may be there after an error is in doubt.
func (j *Journal) put(ctx context.Context, key string, b []byte) error {
	w, err := j.store.Create(ctx, key)
	if err != nil {
		return fmt.Errorf("append to the journal: %w", err)
	}
	defer w.Close()
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("append to the journal: %w", err)
	}
	j.mu.Lock()
	j.doubt = key
	j.mu.Unlock()
	if err := w.Commit(); err != nil {
		// The next append would do it as well; so that a reader does not see it until then.
		return errors.Join(fmt.Errorf("append to the journal: %w", err), j.settleDoubt(ctx))
	}
	j.mu.Lock()
	j.doubt = ""
	j.mu.Unlock()
	return nil
}

// name is what the key of an object says.
type name struct {
	key                  string
	size                 int64
	level                int
	first, last, horizon uint64
	run                  uint64
	part                 int
}

func (n name) format() string {
	return fmt.Sprintf("%s%02d/%016x-%016x-%016x-%016x-%06d", Prefix, n.level, n.first, n.last, n.horizon, n.run, n.part)
}

// parseName reports false for what is no object of a journal.
func parseName(key string, size int64) (n name, ok bool) {
	rest, ok := strings.CutPrefix(key, Prefix)
	if !ok {
		return n, false
	}
	_, err := fmt.Sscanf(rest, "%02d/%016x-%016x-%016x-%016x-%06d", &n.level, &n.first, &n.last, &n.horizon, &n.run, &n.part)
	if err != nil || n.format() != key {
		return n, false
	}
	n.key, n.size = key, size
	return n, true
}

func random() uint64 {
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails
	v := uint64(0)
	for _, c := range b {
		v = v<<8 | uint64(c)
	}
	return v
}

// list returns the names of all objects, but for the one in doubt.
func (j *Journal) list(ctx context.Context) (all []name, err error) {
	j.mu.Lock()
	doubt := j.doubt
	j.mu.Unlock()
	err = j.store.List(ctx, Prefix, func(key string, size int64) error {
		if n, ok := parseName(key, size); ok && key != doubt {
			all = append(all, n)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the journal: %w", err)
	}
	return all, nil
}

// Summary is what the names of a journal's objects say.
type Summary struct {
	Objects int
	Fresh   int // of level 0
	Bytes   int64
	Last    uint64 // the greatest version
	Horizon uint64
}

// Summary lists the objects.
func (j *Journal) Summary(ctx context.Context) (s Summary, err error) {
	all, err := j.list(ctx)
	for _, n := range all {
		s.Objects++
		s.Bytes += n.size
		if n.level == 0 {
			s.Fresh++
		}
		s.Last, s.Horizon = max(s.Last, n.last), max(s.Horizon, n.horizon)
	}
	return s, err
}

// Damaged is an object that cannot be read.
type Damaged struct {
	Key string
	Err error
}

// Read calls fn for all changes, object by object. It goes on past objects that are damaged and returns them. Errors: fn's; the store's, and
// objects.ErrNotFound of an object that was there: compaction has replaced it, begin anew.
func (j *Journal) Read(ctx context.Context, fn func(key string, changes []catalog.Change) error) (damaged []Damaged, err error) {
	return j.read(ctx, 0, fn)
}

// read is Read for objects that have changes after a version.
func (j *Journal) read(ctx context.Context, after uint64, fn func(key string, changes []catalog.Change) error) (damaged []Damaged, err error) {
	all, err := j.list(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range all {
		if n.last <= after {
			continue
		}
		changes, err := j.object(ctx, n)
		if errors.Is(err, ErrCorrupt) {
			damaged = append(damaged, Damaged{n.key, err})
			continue
		}
		if err != nil {
			return damaged, err
		}
		if err := fn(n.key, changes); err != nil {
			return damaged, err
		}
	}
	return damaged, nil
}

// object reads one object.
func (j *Journal) object(ctx context.Context, n name) ([]catalog.Change, error) {
	fail := func(err error) ([]catalog.Change, error) {
		return nil, fmt.Errorf("read %s of the journal: %w", n.key, err)
	}
	if n.size > maxObject {
		return fail(corrupt("it has %d bytes, and none has more than %d", n.size, maxObject))
	}
	r, err := j.store.Open(ctx, n.key, 0, n.size)
	if err != nil {
		return fail(err)
	}
	defer r.Close()
	b := make([]byte, n.size)
	if _, err := io.ReadFull(r, b); err != nil {
		return fail(err)
	}
	changes, err := Decode(b)
	if err != nil {
		return fail(err)
	}
	for i := range changes {
		if v := changes[i].Version; v < n.first || v > n.last {
			return fail(corrupt("version %d is not between those of its name", v))
		}
	}
	return changes, nil
}

// Attach has the catalog make the changes that it lacks, which a crash left, and log all others from now on. Errors:
// ErrStale; ErrCorrupt.
func (j *Journal) Attach(ctx context.Context, c catalog.Logged) error {
	state, err := c.LogState(ctx)
	if err != nil {
		return err
	}
	s, err := j.Summary(ctx)
	if err != nil {
		return err
	}
	j.grown(s.Fresh)
	if s.Last > state.Reserved || s.Horizon > state.Applied {
		return fmt.Errorf("%w: it has changes up to %d, the journal has %d (deletions forgotten up to %d)", ErrStale, state.Applied, s.Last, s.Horizon)
	}
	if s.Last > state.Applied {
		var missing []catalog.Change
		damaged, err := j.read(ctx, state.Applied, func(_ string, changes []catalog.Change) error {
			for _, change := range changes {
				if change.Version > state.Applied {
					missing = append(missing, change)
				}
			}
			return nil
		})
		if err == nil && len(damaged) > 0 {
			err = damaged[0].Err
		}
		if err != nil {
			return err
		}
		slices.SortStableFunc(missing, byVersion)
		if err := c.CatchUp(ctx, missing, s.Last); err != nil {
			return err
		}
		j.o.Log.Info("changes that a crash left in the journal are made", "changes", len(missing))
	}
	return c.SetLog(ctx, j)
}
