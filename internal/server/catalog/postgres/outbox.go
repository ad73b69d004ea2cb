package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/sqlcat/database"
)

const (
	// perShipment is how many changes are written to the journal at once.
	perShipment = 256
	// gather is how long changes are waited for that one object of the journal can have as well.
	gather = 200 * time.Millisecond
	// look is how often what other processes left is looked for.
	look = 2 * time.Second
	// lastShipment is how long Close may take to write what is there.
	lastShipment = 10 * time.Second
)

// woken has what is in the outbox shipped.
func (e *engine) woken() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// SetLog implements database.Engine: from now on this process takes part in writing the outbox to log.
func (e *engine) SetLog(_ context.Context, log catalog.Log) error {
	if e.write == nil {
		return errors.New("the catalog was opened to be read")
	}
	e.shipping.Do(func() { e.work.Go(func() { e.shipper(log) }) })
	return nil
}

// shipper ships until Close.
func (e *engine) shipper(log catalog.Log) {
	for tries := 1; ; {
		more, err := true, error(nil)
		for more && err == nil {
			more, err = e.ship(e.closing, log)
		}
		wait := gather
		if err != nil && e.closing.Err() == nil {
			e.log.Warn("changes are not in the journal yet", "error", err)
			wait = min(time.Minute, time.Second<<tries)
			tries = min(tries+1, 6)
		} else {
			tries = 1
		}
		if err == nil {
			select {
			case <-e.wake:
			case <-time.After(look):
			case <-e.closing.Done():
			}
		}
		select {
		case <-time.After(wait):
		case <-e.closing.Done():
			ctx, cancel := context.WithTimeout(context.Background(), lastShipment)
			defer cancel()
			for more, err := true, error(nil); more && err == nil; {
				more, err = e.ship(ctx, log)
			}
			return
		}
	}
}

// scanChange reads a row of the outbox.
func scanChange(scan func(...any) error) (c catalog.Change, size int, err error) {
	var version, at int64
	var encoded []byte
	if err := scan(&version, &at, &encoded); err != nil {
		return c, 0, err
	}
	if err := json.Unmarshal(encoded, &c); err != nil {
		return c, 0, fmt.Errorf("change %d of the outbox: %w", version, err)
	}
	c.Version, c.Time = uint64(version), time.Unix(0, at)
	return c, len(encoded), nil
}

// Unwritten implements database.Engine.
func (e *engine) Unwritten(ctx context.Context, fn func([]catalog.Change) error) error {
	var changes []catalog.Change
	err := e.Rows(ctx, `SELECT version, at, change FROM outbox ORDER BY version`, nil, func(scan func(...any) error) error {
		c, _, err := scanChange(scan)
		changes = append(changes, c)
		return err
	})
	if err != nil || len(changes) == 0 {
		return err
	}
	return fn(changes)
}

// ship writes some of the outbox to the journal, and reports whether there may be more. Others ship other rows at the same time.
func (e *engine) ship(ctx context.Context, log catalog.Log) (more bool, err error) {
	err = e.Update(ctx, func(tx *database.Tx) error {
		var changes []catalog.Change
		var versions []int64
		bytes := 0
		err := tx.Rows(ctx, `SELECT version, at, change FROM outbox ORDER BY version LIMIT $1`+tx.LockFree, []any{perShipment}, func(scan func(...any) error) error {
			c, size, err := scanChange(scan)
			if err != nil {
				return err
			}
			if bytes += size; bytes > 2*database.MaxBatchBytes && len(changes) > 0 {
				return nil // the next time
			}
			changes, versions = append(changes, c), append(versions, int64(c.Version))
			return nil
		})
		if err != nil || len(changes) == 0 {
			more = false
			return err
		}
		more = len(changes) == perShipment || bytes > 2*database.MaxBatchBytes
		if err := log.Append(ctx, changes); err != nil {
			return fmt.Errorf("write changes %d to %d to the journal: %w", versions[0], versions[len(versions)-1], err)
		}
		list, err := database.List(versions)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM outbox WHERE `+tx.InNumbers("version", "$1"), list)
		return err
	})
	if err == nil {
		e.measuring.shipped.SetToCurrentTime()
	}
	return more, err
}
