package sqlite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// Changes are made by one goroutine. It takes all that wait, makes them in one transaction, has the log take
// them, commits, and answers all: one change waits for two syncs or three, and a hundred do.

const (
	maxBatch = 128     // changes asked for, of a transaction
	reserve  = 1 << 20 // versions at once
)

// errClosed is what changes get after Close.
var errClosed = errors.New("the catalog is closed")

// request is a change that somebody waits for.
type request struct {
	ctx   context.Context
	bytes int
	fn    func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error)
	err   error
	done  chan struct{}
}

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

// Change implements database.Engine: it makes a change together with others.
func (e *engine) Change(ctx context.Context, bytes int, fn func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &request{ctx: ctx, bytes: bytes, fn: fn, done: make(chan struct{})}
	select {
	case e.l.requests <- r:
	case <-ctx.Done():
		return ctx.Err()
	case <-e.l.closing:
		return errClosed
	}
	<-r.done
	return r.err
}

// alone runs fn between transactions.
func (e *engine) alone(ctx context.Context, fn func() error) error {
	done := make(chan error, 1)
	select {
	case e.l.control <- func() { done <- fn() }:
		return <-done
	case <-ctx.Done():
		return ctx.Err()
	case <-e.l.closing:
		return errClosed
	}
}

// changer is the goroutine.
func (e *engine) changer() {
	defer close(e.l.stopped)
	for {
		select {
		case <-e.l.closing:
			return
		case fn := <-e.l.control:
			fn()
		case r := <-e.l.requests:
			batch, bytes := []*request{r}, r.bytes
		more:
			for len(batch) < maxBatch && bytes < database.MaxBatchBytes {
				select {
				case r := <-e.l.requests:
					batch = append(batch, r)
					bytes += r.bytes
				default:
					break more
				}
			}
			e.answer(batch)
		}
	}
}

// answer makes a batch of changes.
func (e *engine) answer(batch []*request) {
	// What is begun is ended: a statement that is interrupted takes the others of its transaction with it.
	ctx := context.Background()
	waiting := batch[:0:0]
	for _, r := range batch {
		if r.err = r.ctx.Err(); r.err == nil {
			waiting = append(waiting, r)
		}
	}
	err := e.catchUp(ctx)
	if err == nil && len(waiting) > 0 {
		err = e.makeChanges(ctx, waiting)
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
func (e *engine) catchUp(ctx context.Context) error {
	if len(e.l.behind) == 0 {
		return nil
	}
	err := e.Update(ctx, func(tx *database.Tx) error {
		for i := range e.l.behind {
			if err := registers.Apply(ctx, tx, &e.l.behind[i]); err != nil {
				return err
			}
		}
		return applied(ctx, tx, e.l.version)
	})
	if err != nil {
		return fmt.Errorf("changes that are in the journal cannot be made: %w", err)
	}
	e.l.behind = nil
	return nil
}

// makeChanges makes changes in one transaction. Those that fail leave nothing.
func (e *engine) makeChanges(ctx context.Context, batch []*request) error {
	for {
		need, err := e.tryChanges(ctx, batch)
		if err != nil || need == 0 {
			return err
		}
		// The reserve is durable before a version of it is in the log.
		upTo := max(e.l.reserved, e.l.version) + reserve + uint64(need)
		if _, err := e.write.ExecContext(ctx, `UPDATE log SET reserved = ?`, int64(upTo)); err != nil {
			return err
		}
		e.l.reserved = upTo
	}
}

// tryChanges is makeChanges, if there are versions enough: else it changes nothing, and says how many it needs.
func (e *engine) tryChanges(ctx context.Context, batch []*request) (need int, err error) {
	begun, err := e.write.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	tx := &database.Tx{Tx: begun, Dialect: e.Dialect}
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
	if e.l.log == nil || len(changes) == 0 {
		return 0, tx.Commit()
	}
	if uint64(len(changes)) > e.l.reserved-e.l.version {
		return len(changes), nil
	}
	now := time.Now()
	for i := range changes {
		e.l.version++
		changes[i].Version, changes[i].Time = e.l.version, now
	}
	if err := applied(ctx, tx, e.l.version); err != nil {
		return 0, err
	}
	if err := e.l.log.Append(ctx, changes); err != nil {
		return 0, err
	}
	if err := tx.Commit(); err != nil {
		e.l.behind = changes
		return 0, err
	}
	return 0, nil
}

func applied(ctx context.Context, tx *database.Tx, version uint64) error {
	_, err := tx.ExecContext(ctx, `UPDATE log SET applied = ?`, int64(version))
	return err
}

// Versions implements database.Engine.
func (e *engine) Versions(ctx context.Context) (applied, reserved uint64, err error) {
	err = e.Row(ctx, `SELECT applied, reserved FROM log`, nil, &applied, &reserved)
	return applied, reserved, err
}

// CatchUp implements database.Engine.
func (e *engine) CatchUp(ctx context.Context, changes []catalog.Change, upTo uint64) error {
	err := e.alone(ctx, func() error {
		return e.Update(ctx, func(tx *database.Tx) error {
			for i := range changes {
				if err := registers.Apply(ctx, tx, &changes[i]); err != nil {
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

// Unwritten implements database.Engine: the log comes first.
func (e *engine) Unwritten(context.Context, func([]catalog.Change) error) error { return nil }

// SetLog implements database.Engine: every change is in log before it counts.
func (e *engine) SetLog(ctx context.Context, log catalog.Log) error {
	return e.alone(ctx, func() error {
		var reserved uint64
		if err := e.write.QueryRowContext(ctx, `SELECT reserved FROM log`).Scan(&reserved); err != nil {
			return known(err)
		}
		// An earlier process may have used some of its reserve.
		e.l.log, e.l.version, e.l.reserved = log, reserved, reserved
		return nil
	})
}
