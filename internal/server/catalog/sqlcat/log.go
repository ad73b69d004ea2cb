package sqlcat

import (
	"context"
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/registers"
)

// LogState implements catalog.Logged.
func (c *Catalog) LogState(ctx context.Context) (s catalog.LogState, err error) {
	var stage int
	if s.Applied, s.Reserved, err = c.db.Versions(ctx); err == nil {
		err = c.db.Row(ctx, `SELECT stage FROM log`, nil, &stage)
	}
	s.Whole = stage >= len(registers.Stages)
	return s, err
}

// Unwritten calls fn with changes that are made, and that the log may lack yet.
func (c *Catalog) Unwritten(ctx context.Context, fn func([]catalog.Change) error) error {
	return c.db.Unwritten(ctx, fn)
}

// SetLog implements catalog.Logged.
func (c *Catalog) SetLog(ctx context.Context, log catalog.Log) error { return c.db.SetLog(ctx, log) }

// CatchUp implements catalog.Logged.
func (c *Catalog) CatchUp(ctx context.Context, changes []catalog.Change, upTo uint64) error {
	return c.db.CatchUp(ctx, changes, upTo)
}

// LogMore implements catalog.Logged. What it logs are changes like others, though they change nothing: between them and those that
// are made meanwhile the order of versions is that of transactions.
func (c *Catalog) LogMore(ctx context.Context) (whole bool, err error) {
	err = c.db.Change(ctx, database.MaxBatchBytes, func(ctx context.Context, tx *database.Tx) ([]catalog.Change, error) {
		var n int
		var id int64
		var name string
		if err := tx.Begin(ctx, tx.LockLog); err != nil {
			return nil, err
		}
		if err := tx.QueryRowContext(ctx, `SELECT stage, after_id, after_name FROM log`).Scan(&n, &id, &name); err != nil {
			return nil, err
		}
		if whole = n >= len(registers.Stages); whole {
			return nil, nil
		}
		var changes []catalog.Change
		for rows := 0; n < len(registers.Stages) && rows == 0; {
			more, afterID, afterName, last, err := registers.Stages[n].After(ctx, tx, id, name)
			if err != nil {
				return nil, err
			}
			changes, rows = append(changes, more...), len(more)
			if id, name = afterID, afterName; last { // rows that come later are logged by who adds them
				n, id, name = n+1, 0, ""
			}
		}
		// So that there is a change in any case, and the transaction is committed.
		changes = append(changes, catalog.Change{Kind: catalog.ChangesWhole, Gone: n < len(registers.Stages)})
		_, err := tx.ExecContext(ctx, `UPDATE log SET stage = $1, after_id = $2, after_name = $3`, n, id, name)
		whole = n >= len(registers.Stages)
		return changes, err
	})
	if err != nil {
		return false, fmt.Errorf("write what is older than the journal to it: %w", err)
	}
	return whole, nil
}
