package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/database"
	"hydrofoil.dev/foil/internal/server/catalog/sqlite/registers"
)

// LogState implements catalog.Logged.
func (c *Catalog) LogState(ctx context.Context) (s catalog.LogState, err error) {
	var stage int
	err = c.db.Write.QueryRowContext(ctx, `SELECT applied, reserved, stage FROM log`).Scan(&s.Applied, &s.Reserved, &stage)
	s.Whole = stage >= len(registers.Stages)
	return s, database.Known(err)
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
	err = c.db.Change(ctx, database.MaxBatchBytes, func(ctx context.Context, tx *sql.Tx) ([]catalog.Change, error) {
		var n int
		var id int64
		var name string
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
		_, err := tx.ExecContext(ctx, `UPDATE log SET stage = ?, after_id = ?, after_name = ?`, n, id, name)
		whole = n >= len(registers.Stages)
		return changes, err
	})
	if err != nil {
		return false, fmt.Errorf("write what is older than the journal to it: %w", err)
	}
	return whole, nil
}
