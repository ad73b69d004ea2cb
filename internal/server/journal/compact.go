package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/objects"
)

// runWriter makes the objects of one run of changes that come sorted.
type runWriter struct {
	put    func(key string, b []byte) error
	target int
	name   name
	raw    []byte
}

func newRunWriter(level int, horizon uint64, put func(key string, b []byte) error) *runWriter {
	return &runWriter{put: put, target: target, name: name{level: level, horizon: horizon, run: random()}}
}

func (w *runWriter) add(c *catalog.Change) error {
	before := len(w.raw)
	w.raw = appendRecord(w.raw, c)
	if n := len(w.raw) - before; n > maxRecord {
		return fmt.Errorf("a change of %s %s has %d bytes, and the journal takes %d", c.Repo, c.Name, n, maxRecord)
	}
	if len(w.raw) > w.target && before > 0 {
		record := slices.Clone(w.raw[before:])
		w.raw = w.raw[:before]
		if err := w.finish(); err != nil {
			return err
		}
		w.raw = append(w.raw, record...)
	}
	if w.name.first == 0 {
		w.name.first = c.Version
	}
	w.name.first, w.name.last = min(w.name.first, c.Version), max(w.name.last, c.Version)
	return nil
}

// finish writes what was added since it was called last.
func (w *runWriter) finish() error {
	if len(w.raw) == 0 {
		return nil
	}
	if err := w.put(w.name.format(), encodeRecords(w.raw)); err != nil {
		return err
	}
	w.raw = w.raw[:0]
	w.name.first, w.name.last = 0, 0
	w.name.part++
	return nil
}

// compactor merges whenever there is something to merge.
func (j *Journal) compactor(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-j.wake:
		}
		err := j.Compact(ctx)
		if err != nil && ctx.Err() == nil {
			j.o.Log.Error("the journal is not compacted", "error", err)
		}
	}
}

// Compact merges what is to be merged now. The compactor calls it as well.
func (j *Journal) Compact(ctx context.Context) error {
	for {
		all, err := j.list(ctx)
		if err != nil {
			return err
		}
		j.mu.Lock()
		runs := runsOf(all, j.damaged)
		j.fresh = 0 // what is appended meanwhile may be counted twice
		for _, r := range runs {
			if r.level == 0 {
				j.fresh++
			}
		}
		j.mu.Unlock()
		m, ok := j.plan(runs)
		if !ok {
			return nil
		}
		if err := j.merge(ctx, m); err != nil {
			return err
		}
	}
}

// run is the parts of one sorted sequence.
type run struct {
	level int
	parts []name
	bytes int64
}

// runsOf groups objects into runs, but for those that are damaged: their runs stay as they are.
func runsOf(all []name, damaged map[string]bool) (runs []run) {
	slices.SortFunc(all, func(a, b name) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(a.run, b.run), cmp.Compare(a.part, b.part))
	})
	for i := 0; i < len(all); {
		k, bad := i, false
		r := run{level: all[i].level}
		for ; k < len(all) && all[k].run == all[i].run && all[k].level == all[i].level; k++ {
			r.bytes += all[k].size
			bad = bad || damaged[all[k].key]
		}
		if r.parts = all[i:k]; !bad {
			runs = append(runs, r)
		}
		i = k
	}
	return runs
}

// merging is what is merged into a run of a level.
type merging struct {
	runs  []run
	level int
	all   bool // no other object has older changes
}

// plan says what to merge next, if anything.
func (j *Journal) plan(runs []run) (m merging, ok bool) {
	count := map[int]int{}
	for _, r := range runs {
		count[r.level]++
	}
	for level := 0; level <= 90; level++ {
		if count[level] < j.o.Fan {
			continue
		}
		upper, rest, deepest := int64(0), int64(0), level+1
		for _, r := range runs {
			if r.level <= level {
				upper += r.bytes
			} else {
				rest += r.bytes
				deepest = max(deepest, r.level)
			}
		}
		if upper >= rest {
			j.mu.Lock()
			defer j.mu.Unlock()
			return merging{runs: runs, level: deepest, all: len(j.damaged) == 0}, true
		}
		m.level = level + 1
		for _, r := range runs {
			if r.level == level {
				m.runs = append(m.runs, r)
			}
		}
		return m, true
	}
	return m, false
}

// cursor goes through a run.
type cursor struct {
	parts   []name
	changes []catalog.Change // that come next
}

// fill has c.changes hold the next change, if there is one.
func (j *Journal) fill(ctx context.Context, c *cursor) error {
	for len(c.changes) == 0 && len(c.parts) > 0 {
		n := c.parts[0]
		changes, err := j.object(ctx, n)
		if errors.Is(err, ErrCorrupt) || errors.Is(err, objects.ErrNotFound) {
			j.mu.Lock()
			j.damaged[n.key] = true
			j.mu.Unlock()
			j.o.Log.Error("an object of the journal is lost or damaged", "object", n.key, "error", err)
		}
		if err != nil {
			return err
		}
		c.parts, c.changes = c.parts[1:], changes
	}
	return nil
}

// merge writes the new run, and then deletes what it was made of.
func (j *Journal) merge(ctx context.Context, m merging) error {
	var horizon uint64
	var inputs []name
	cursors := make([]*cursor, len(m.runs))
	for i, r := range m.runs {
		cursors[i] = &cursor{parts: r.parts}
		inputs = append(inputs, r.parts...)
		for _, n := range r.parts {
			horizon = max(horizon, n.horizon)
		}
	}
	old := time.Now().Add(-j.o.KeepDeletions)
	var merged []catalog.Change // the part at hand: names have the horizon, which is known at the end of it
	var forgotten *catalog.Change
	size := 0
	w := newRunWriter(m.level, 0, func(key string, b []byte) error { return j.putMerged(ctx, key, b) })
	flush := func() error {
		w.name.horizon = horizon
		for i := range merged {
			if err := w.add(&merged[i]); err != nil {
				return err
			}
		}
		merged, size = merged[:0], 0
		return w.finish()
	}
	for {
		c, others, err := j.next(ctx, cursors)
		if err != nil {
			return fmt.Errorf("compact the journal: %w", err)
		}
		if c == nil {
			break
		}
		if c.Gone && m.all && !others && c.Time.Before(old) {
			horizon, forgotten = max(horizon, c.Version), c
			continue
		}
		merged = append(merged, *c)
		if size += len(c.Repo) + len(c.Name) + len(c.Manifest.Bytes) + 64; size >= target {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if len(merged) == 0 && w.name.part == 0 && forgotten != nil {
		merged = append(merged, *forgotten) // or nothing would tell the horizon
	}
	if err := flush(); err != nil {
		return err
	}
	j.o.At("merged")
	for _, n := range inputs {
		if err := j.store.Delete(ctx, n.key); err != nil {
			return fmt.Errorf("compact the journal: %w", err)
		}
		j.o.At("deleted")
	}
	return nil
}

// putMerged writes an object of a merge. If it fails, what may be there repeats what is elsewhere.
func (j *Journal) putMerged(ctx context.Context, key string, b []byte) error {
	w, err := j.store.Create(ctx, key)
	if err != nil {
		return fmt.Errorf("compact the journal: %w", err)
	}
	defer w.Close()
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("compact the journal: %w", err)
	}
	if err := w.Commit(); err != nil {
		return fmt.Errorf("compact the journal: %w", err)
	}
	j.o.At("part")
	return nil
}

// next takes the changes of the least register off the cursors, and returns the latest; others says
// whether there were more than that one. It returns nil at the end.
func (j *Journal) next(ctx context.Context, cursors []*cursor) (latest *catalog.Change, others bool, err error) {
	var first *catalog.Change
	for _, c := range cursors {
		if err := j.fill(ctx, c); err != nil {
			return nil, false, err
		}
		if len(c.changes) > 0 && (first == nil || c.changes[0].CompareRegisters(first) < 0) {
			first = &c.changes[0]
		}
	}
	if first == nil {
		return nil, false, nil
	}
	for _, c := range cursors {
		for {
			if err := j.fill(ctx, c); err != nil {
				return nil, false, err
			}
			if len(c.changes) == 0 || c.changes[0].CompareRegisters(first) != 0 {
				break
			}
			change := &c.changes[0]
			c.changes = c.changes[1:]
			switch {
			case latest == nil:
				latest = change
			case change.Version > latest.Version:
				latest, others = change, true
			case change.Version < latest.Version:
				others = true
			}
		}
	}
	return latest, others, nil
}
