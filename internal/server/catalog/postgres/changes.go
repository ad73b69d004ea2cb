package postgres

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

// Update implements database.Engine.
func (e *engine) Update(ctx context.Context, fn func(tx *database.Tx) error) error {
	return e.Change(ctx, 0, func(_ context.Context, tx *database.Tx) ([]catalog.Change, error) {
		return database.Unlogged, fn(tx)
	})
}

// Change implements database.Engine.
func (e *engine) Change(ctx context.Context, _ int, fn func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error)) error {
	for tries := 1; ; tries++ {
		again, err := e.try(ctx, fn)
		if err == nil || !again || !pause(ctx, tries) {
			return known(err)
		}
		e.measuring.retries.WithLabelValues("change").Inc()
	}
}

// try makes a change once; again says that it was not made, and may be made now.
func (e *engine) try(ctx context.Context, fn func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error)) (again bool, err error) {
	conn, err := e.write.Conn(ctx)
	if err != nil {
		return lost(err), err
	}
	defer conn.Close()
	// Who gives up ends the statement that runs, and leaves a commit alone.
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	begun, err := conn.BeginTx(whole, nil)
	if err != nil {
		return lost(err), err
	}
	defer begun.Rollback() //nolint:errcheck // after a commit there is nothing to roll back
	changes, err := fn(ctx, &database.Tx{Tx: begun, Dialect: e.Dialect})
	if err != nil {
		return lost(err) || conflict(err), err
	}
	if changes == nil {
		return false, nil
	}
	xid, err := e.enqueue(ctx, begun, changes)
	if err != nil {
		return lost(err) || conflict(err), err
	}
	err = begun.Commit()
	if err == nil {
		if len(changes) > 0 {
			e.woken()
		}
		return false, nil
	}
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Severity == "ERROR" {
		return conflict(err), err
	}
	return e.outcome(ctx, xid, err)
}

// enqueue writes changes to the outbox, and returns the number of the transaction. It comes last: what is changed is locked by now, so that
// versions are in the order of changes.
func (e *engine) enqueue(ctx context.Context, tx *sql.Tx, changes []catalog.Change) (xid string, err error) {
	if len(changes) == 0 {
		err = tx.QueryRowContext(ctx, `SELECT CAST(pg_current_xact_id() AS TEXT)`).Scan(&xid)
		return xid, err
	}
	rows := make([][]byte, len(changes))
	for i := range changes {
		if rows[i], err = json.Marshal(&changes[i]); err != nil {
			return "", err
		}
	}
	err = tx.QueryRowContext(ctx, `WITH added AS (INSERT INTO outbox (version, at, change)
			SELECT nextval('log_version'), CAST($2 AS BIGINT), change FROM unnest(CAST($1 AS BYTEA[])) WITH ORDINALITY AS list (change, n) ORDER BY n)
		SELECT CAST(pg_current_xact_id() AS TEXT)`, rows, time.Now().UnixNano()).Scan(&xid)
	return xid, err
}

// outcome asks what became of a transaction whose commit failed with an error that does not say.
func (e *engine) outcome(ctx context.Context, xid string, failed error) (again bool, err error) {
	e.measuring.doubts.Inc()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for tries := 1; ; tries++ {
		var status sql.NullString
		err := e.write.QueryRowContext(ctx, `SELECT pg_xact_status(CAST(CAST($1 AS TEXT) AS XID8))`, xid).Scan(&status)
		future, isFuture := errors.AsType[*pgconn.PgError](err)
		switch {
		case err == nil && status.String == "committed":
			e.woken()
			return false, nil
		case err == nil && status.String == "aborted", isFuture && future.Code == "22023": // or on a standby that never had it
			return true, failed
		case err == nil && !status.Valid:
			return false, fmt.Errorf("%w; it is not known any more what became of the change", failed)
		}
		if tries = min(tries, maxTries-1); !pause(ctx, tries) {
			return false, errors.Join(failed, err)
		}
	}
}
