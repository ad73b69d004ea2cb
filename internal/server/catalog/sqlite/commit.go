package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// Changes are made by one goroutine. It takes all that wait, makes them in one transaction, has the log take
// them, commits, and answers all: one change waits for two syncs or three, and a hundred do.

const (
	maxBatch      = 128     // changes asked for, of a transaction
	maxBatchBytes = 8 << 20 // of manifests in it
	reserve       = 1 << 20 // versions at once
)

// errClosed is what changes get after Close.
var errClosed = errors.New("the catalog is closed")

// request is a change that somebody waits for.
type request struct {
	ctx   context.Context
	bytes int
	// fn makes the change and returns what the log is told; their versions and times are set later. nil:
	// nothing is different; unlogged: something is that the log is not told.
	fn   func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error)
	err  error
	done chan struct{}
}

// unlogged is the result of a change that the log need not know.
var unlogged = []catalog.Change{}

// logging is what the goroutine that makes changes knows.
type logging struct {
	log              catalog.Log // nil: there is none
	version          uint64      // the last that was given
	reserved         uint64
	behind           []catalog.Change // in the log, and not committed
	requests         chan *request
	control          chan func()
	closing, stopped chan struct{}
}

func newLogging() logging {
	return logging{requests: make(chan *request), control: make(chan func()), closing: make(chan struct{}), stopped: make(chan struct{})}
}

// change makes a change, together with others, and returns when it is durable.
func (c *Catalog) change(ctx context.Context, bytes int, fn func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &request{ctx: ctx, bytes: bytes, fn: fn, done: make(chan struct{})}
	select {
	case c.l.requests <- r:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.l.closing:
		return errClosed
	}
	<-r.done
	return r.err
}

// alone runs fn between transactions.
func (c *Catalog) alone(ctx context.Context, fn func() error) error {
	done := make(chan error, 1)
	select {
	case c.l.control <- func() { done <- fn() }:
		return <-done
	case <-ctx.Done():
		return ctx.Err()
	case <-c.l.closing:
		return errClosed
	}
}

// changer is the goroutine.
func (c *Catalog) changer() {
	defer close(c.l.stopped)
	for {
		select {
		case <-c.l.closing:
			return
		case fn := <-c.l.control:
			fn()
		case r := <-c.l.requests:
			batch, bytes := []*request{r}, r.bytes
		more:
			for len(batch) < maxBatch && bytes < maxBatchBytes {
				select {
				case r := <-c.l.requests:
					batch = append(batch, r)
					bytes += r.bytes
				default:
					break more
				}
			}
			c.answer(batch)
		}
	}
}

// answer makes a batch of changes.
func (c *Catalog) answer(batch []*request) {
	// What is begun is ended: a statement that is interrupted takes the others of its transaction with it.
	ctx := context.Background()
	waiting := batch[:0:0]
	for _, r := range batch {
		if r.err = r.ctx.Err(); r.err == nil {
			waiting = append(waiting, r)
		}
	}
	err := c.catchUp(ctx)
	if err == nil && len(waiting) > 0 {
		err = c.makeChanges(ctx, waiting)
	}
	for _, r := range waiting {
		if err != nil { // also for who was told that there is nothing: that may have been of this transaction
			r.err = known(err)
		}
	}
	for _, r := range batch {
		close(r.done)
	}
}

// catchUp commits what the log has and a commit that failed did not make.
func (c *Catalog) catchUp(ctx context.Context) error {
	if len(c.l.behind) == 0 {
		return nil
	}
	err := c.update(ctx, func(tx *sql.Tx) error {
		for i := range c.l.behind {
			if err := apply(ctx, tx, &c.l.behind[i]); err != nil {
				return err
			}
		}
		return applied(ctx, tx, c.l.version)
	})
	if err != nil {
		return fmt.Errorf("changes that are in the journal cannot be made: %w", err)
	}
	c.l.behind = nil
	return nil
}

// makeChanges makes changes in one transaction. Those that fail leave nothing.
func (c *Catalog) makeChanges(ctx context.Context, batch []*request) error {
	for {
		need, err := c.tryChanges(ctx, batch)
		if err != nil || need == 0 {
			return err
		}
		// The reserve is durable before a version of it is in the log.
		upTo := max(c.l.reserved, c.l.version) + reserve + uint64(need)
		if _, err := c.write.ExecContext(ctx, `UPDATE log SET reserved = ?`, int64(upTo)); err != nil {
			return err
		}
		c.l.reserved = upTo
	}
}

// tryChanges is makeChanges, if there are versions enough: else it changes nothing, and says how many it needs.
func (c *Catalog) tryChanges(ctx context.Context, batch []*request) (need int, err error) {
	tx, err := c.write.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback() //nolint:errcheck // after a commit there is nothing to roll back
	var changes []catalog.Change
	different := false
	for _, r := range batch {
		if _, err := tx.ExecContext(ctx, `SAVEPOINT one`); err != nil {
			return 0, err
		}
		made, err := r.fn(ctx, tx)
		r.err = known(err)
		if err != nil {
			made = nil
			// After some errors (a full disk) SQLite has ended all of the transaction; then this fails.
			if _, err := tx.ExecContext(ctx, `ROLLBACK TO one`); err != nil {
				return 0, errors.Join(r.err, err)
			}
		}
		if _, err := tx.ExecContext(ctx, `RELEASE one`); err != nil {
			return 0, err
		}
		changes, different = append(changes, made...), different || made != nil
	}
	if !different {
		return 0, nil // what is as it was is durable: it was committed before
	}
	if c.l.log == nil || len(changes) == 0 {
		return 0, tx.Commit()
	}
	if uint64(len(changes)) > c.l.reserved-c.l.version {
		return len(changes), nil
	}
	now := time.Now()
	for i := range changes {
		c.l.version++
		changes[i].Version, changes[i].Time = c.l.version, now
	}
	if err := applied(ctx, tx, c.l.version); err != nil {
		return 0, err
	}
	if err := c.l.log.Append(ctx, changes); err != nil {
		return 0, err
	}
	if err := tx.Commit(); err != nil {
		c.l.behind = changes
		return 0, err
	}
	return 0, nil
}

func applied(ctx context.Context, tx *sql.Tx, version uint64) error {
	_, err := tx.ExecContext(ctx, `UPDATE log SET applied = ?`, int64(version))
	return err
}

// LogState implements catalog.Logged.
func (c *Catalog) LogState(ctx context.Context) (s catalog.LogState, err error) {
	var stage int
	err = c.write.QueryRowContext(ctx, `SELECT applied, reserved, stage FROM log`).Scan(&s.Applied, &s.Reserved, &stage)
	s.Whole = stage >= len(stages)
	return s, known(err)
}

// SetLog implements catalog.Logged.
func (c *Catalog) SetLog(ctx context.Context, log catalog.Log) error {
	return c.alone(ctx, func() error {
		s, err := c.LogState(ctx)
		if err != nil {
			return err
		}
		// An earlier process may have used some of its reserve.
		c.l.log, c.l.version, c.l.reserved = log, s.Reserved, s.Reserved
		return nil
	})
}

// CatchUp implements catalog.Logged.
func (c *Catalog) CatchUp(ctx context.Context, changes []catalog.Change, upTo uint64) error {
	err := c.alone(ctx, func() error {
		return c.update(ctx, func(tx *sql.Tx) error {
			for i := range changes {
				if err := apply(ctx, tx, &changes[i]); err != nil {
					return err
				}
			}
			return applied(ctx, tx, upTo)
		})
	})
	if err != nil {
		return fmt.Errorf("make changes that are in the journal: %w", err)
	}
	return nil
}
