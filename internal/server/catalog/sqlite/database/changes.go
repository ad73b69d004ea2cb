package database

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
	maxBatch = 128     // changes asked for, of a transaction
	reserve  = 1 << 20 // versions at once
)

// MaxBatchBytes is of manifests in a transaction.
const MaxBatchBytes = 8 << 20

// errClosed is what changes get after Close.
var errClosed = errors.New("the catalog is closed")

// request is a change that somebody waits for.
type request struct {
	ctx   context.Context
	bytes int
	// fn makes the change and returns what the log is told; their versions and times are set later. nil:
	// nothing is different; Unlogged: something is that the log is not told.
	fn   func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error)
	err  error
	done chan struct{}
}

// Unlogged is the result of a change that the log need not know.
var Unlogged = []catalog.Change{}

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

// Change makes a change, together with others, and returns when it is durable. bytes are those of manifests in
// it; fn is as in request.
func (d *DB) Change(ctx context.Context, bytes int, fn func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &request{ctx: ctx, bytes: bytes, fn: fn, done: make(chan struct{})}
	select {
	case d.l.requests <- r:
	case <-ctx.Done():
		return ctx.Err()
	case <-d.l.closing:
		return errClosed
	}
	<-r.done
	return r.err
}

// alone runs fn between transactions.
func (d *DB) alone(ctx context.Context, fn func() error) error {
	done := make(chan error, 1)
	select {
	case d.l.control <- func() { done <- fn() }:
		return <-done
	case <-ctx.Done():
		return ctx.Err()
	case <-d.l.closing:
		return errClosed
	}
}

// changer is the goroutine.
func (d *DB) changer() {
	defer close(d.l.stopped)
	for {
		select {
		case <-d.l.closing:
			return
		case fn := <-d.l.control:
			fn()
		case r := <-d.l.requests:
			batch, bytes := []*request{r}, r.bytes
		more:
			for len(batch) < maxBatch && bytes < MaxBatchBytes {
				select {
				case r := <-d.l.requests:
					batch = append(batch, r)
					bytes += r.bytes
				default:
					break more
				}
			}
			d.answer(batch)
		}
	}
}

// answer makes a batch of changes.
func (d *DB) answer(batch []*request) {
	// What is begun is ended: a statement that is interrupted takes the others of its transaction with it.
	ctx := context.Background()
	waiting := batch[:0:0]
	for _, r := range batch {
		if r.err = r.ctx.Err(); r.err == nil {
			waiting = append(waiting, r)
		}
	}
	err := d.catchUp(ctx)
	if err == nil && len(waiting) > 0 {
		err = d.makeChanges(ctx, waiting)
	}
	for _, r := range waiting {
		if err != nil { // also for who was told that there is nothing: that may have been of this transaction
			r.err = Known(err)
		}
	}
	for _, r := range batch {
		close(r.done)
	}
}

// catchUp commits what the log has and a commit that failed did not make.
func (d *DB) catchUp(ctx context.Context) error {
	if len(d.l.behind) == 0 {
		return nil
	}
	err := d.Update(ctx, func(tx *sql.Tx) error {
		for i := range d.l.behind {
			if err := d.apply(ctx, tx, &d.l.behind[i]); err != nil {
				return err
			}
		}
		return applied(ctx, tx, d.l.version)
	})
	if err != nil {
		return fmt.Errorf("changes that are in the journal cannot be made: %w", err)
	}
	d.l.behind = nil
	return nil
}

// makeChanges makes changes in one transaction. Those that fail leave nothing.
func (d *DB) makeChanges(ctx context.Context, batch []*request) error {
	for {
		need, err := d.tryChanges(ctx, batch)
		if err != nil || need == 0 {
			return err
		}
		// The reserve is durable before a version of it is in the log.
		upTo := max(d.l.reserved, d.l.version) + reserve + uint64(need)
		if _, err := d.Write.ExecContext(ctx, `UPDATE log SET reserved = ?`, int64(upTo)); err != nil {
			return err
		}
		d.l.reserved = upTo
	}
}

// tryChanges is makeChanges, if there are versions enough: else it changes nothing, and says how many it needs.
func (d *DB) tryChanges(ctx context.Context, batch []*request) (need int, err error) {
	tx, err := d.Write.BeginTx(ctx, nil)
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
		r.err = Known(err)
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
	if d.l.log == nil || len(changes) == 0 {
		return 0, tx.Commit()
	}
	if uint64(len(changes)) > d.l.reserved-d.l.version {
		return len(changes), nil
	}
	now := time.Now()
	for i := range changes {
		d.l.version++
		changes[i].Version, changes[i].Time = d.l.version, now
	}
	if err := applied(ctx, tx, d.l.version); err != nil {
		return 0, err
	}
	if err := d.l.log.Append(ctx, changes); err != nil {
		return 0, err
	}
	if err := tx.Commit(); err != nil {
		d.l.behind = changes
		return 0, err
	}
	return 0, nil
}

func applied(ctx context.Context, tx *sql.Tx, version uint64) error {
	_, err := tx.ExecContext(ctx, `UPDATE log SET applied = ?`, int64(version))
	return err
}

// CatchUp makes changes of the log that the file lacks, and then has those of at least version upTo.
func (d *DB) CatchUp(ctx context.Context, changes []catalog.Change, upTo uint64) error {
	err := d.alone(ctx, func() error {
		return d.Update(ctx, func(tx *sql.Tx) error {
			for i := range changes {
				if err := d.apply(ctx, tx, &changes[i]); err != nil {
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

// SetLog has every change be in log before it counts.
func (d *DB) SetLog(ctx context.Context, log catalog.Log) error {
	return d.alone(ctx, func() error {
		var reserved uint64
		if err := d.Write.QueryRowContext(ctx, `SELECT reserved FROM log`).Scan(&reserved); err != nil {
			return Known(err)
		}
		// An earlier process may have used some of its reserve.
		d.l.log, d.l.version, d.l.reserved = log, reserved, reserved
		return nil
	})
}
