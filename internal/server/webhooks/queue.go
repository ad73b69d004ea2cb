package webhooks

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	_ "modernc.org/sqlite" // the driver

	"hydrofoil.dev/foil/internal/durable"
)

// queue is what waits for receivers: an SQLite file, in WAL mode with synchronous=FULL, so that what was added is on the disk.
// One process writes; foil server webhooks reads beside it.
type queue struct {
	db    *sql.DB
	count atomic.Int64
}

// item is an event for one receiver.
type item struct {
	seq     int64
	webhook string
	id      string
	made    time.Time
	tries   int
	body    []byte
}

const schema = `
CREATE TABLE IF NOT EXISTS waiting (
	seq     INTEGER PRIMARY KEY AUTOINCREMENT,
	webhook TEXT NOT NULL,
	id      TEXT NOT NULL,
	made    INTEGER NOT NULL, -- nanoseconds, as due
	due     INTEGER NOT NULL,
	tries   INTEGER NOT NULL DEFAULT 0,
	body    BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS waiting_due ON waiting (webhook, due, seq);
CREATE TABLE IF NOT EXISTS receivers (
	webhook    TEXT PRIMARY KEY,
	delivered  INTEGER NOT NULL DEFAULT 0,
	dropped    INTEGER NOT NULL DEFAULT 0,
	failures   INTEGER NOT NULL DEFAULT 0, -- in a row
	last_ok    INTEGER NOT NULL DEFAULT 0,
	last_error TEXT NOT NULL DEFAULT '',
	error_at   INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;`

// openQueue opens the file; reading only, it must be there.
func openQueue(ctx context.Context, path string, reading bool) (_ *queue, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	q := url.Values{"_pragma": {"busy_timeout(10000)", "journal_mode(WAL)", "synchronous(FULL)"}, "_txlock": {"immediate"}}
	if reading {
		if _, err := os.Stat(abs); err != nil {
			return nil, err
		}
		q = url.Values{"_pragma": {"busy_timeout(10000)", "query_only(1)"}}
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("queue of webhooks %s: %w", path, err), db.Close())
		}
	}()
	db.SetMaxOpenConns(1)
	w := &queue{db: db}
	if reading {
		return w, nil
	}
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return nil, err
	}
	if err := durable.Sync(filepath.Dir(abs)); err != nil {
		return nil, err
	}
	return w, w.recount(ctx)
}

func (q *queue) Close() error { return q.db.Close() }

func (q *queue) waiting() int64 { return q.count.Load() }

func (q *queue) recount(ctx context.Context) error {
	var n int64
	err := q.db.QueryRowContext(ctx, `SELECT count(*) FROM waiting`).Scan(&n)
	q.count.Store(n)
	return err
}

func (q *queue) update(ctx context.Context, fn func(tx *sql.Tx) error) error {
	tx, err := q.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// add adds items, but those whose receiver has as many as limit, and returns how many these are.
func (q *queue) add(ctx context.Context, items []item, limit int) (full int, err error) {
	added := 0
	err = q.update(ctx, func(tx *sql.Tx) error {
		for _, i := range items {
			r, err := tx.ExecContext(ctx, `INSERT INTO waiting (webhook, id, made, due, body)
				SELECT ?1, ?2, ?3, ?3, ?4 WHERE (SELECT count(*) FROM waiting WHERE webhook = ?1) < ?5`, i.webhook, i.id, i.made.UnixNano(), i.body, limit)
			if err != nil {
				return err
			}
			n, err := r.RowsAffected()
			if err != nil {
				return err
			}
			if added += int(n); n == 0 {
				full++
				if err := note(ctx, tx, i.webhook, `dropped = dropped + 1`); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	q.count.Add(int64(added))
	return full, nil
}

// note changes what is known of a receiver.
func note(ctx context.Context, tx *sql.Tx, webhook, set string, args ...any) error {
	if _, err := tx.ExecContext(ctx, `INSERT INTO receivers (webhook) VALUES (?) ON CONFLICT DO NOTHING`, webhook); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `UPDATE receivers SET `+set+` WHERE webhook = ?`, append(args, webhook)...)
	return err
}

// next returns the item of a receiver that is due first, and when; nil: there is none.
func (q *queue) next(ctx context.Context, webhook string) (*item, time.Time, error) {
	i := item{webhook: webhook}
	var made, due int64
	err := q.db.QueryRowContext(ctx, `SELECT seq, id, made, due, tries, body FROM waiting WHERE webhook = ? ORDER BY due, seq LIMIT 1`, webhook).
		Scan(&i.seq, &i.id, &made, &due, &i.tries, &i.body)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, time.Time{}, nil
	}
	i.made = time.Unix(0, made)
	return &i, time.Unix(0, due), err
}

// done removes an item that was delivered, or, with an error, dropped.
func (q *queue) done(ctx context.Context, i *item, dropped error) error {
	err := q.update(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM waiting WHERE seq = ?`, i.seq); err != nil {
			return err
		}
		now := time.Now().UnixNano()
		if dropped != nil {
			return note(ctx, tx, i.webhook, `dropped = dropped + 1, last_error = ?, error_at = ?`, dropped.Error(), now)
		}
		return note(ctx, tx, i.webhook, `delivered = delivered + 1, failures = 0, last_ok = ?`, now)
	})
	if err == nil {
		q.count.Add(-1)
	}
	return err
}

// failed keeps an item for another try.
func (q *queue) failed(ctx context.Context, i *item, due time.Time, why error) error {
	return q.update(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `UPDATE waiting SET due = ?, tries = tries + 1 WHERE seq = ?`, due.UnixNano(), i.seq); err != nil {
			return err
		}
		return note(ctx, tx, i.webhook, `failures = failures + 1, last_error = ?, error_at = ?`, why.Error(), time.Now().UnixNano())
	})
}

// hurry makes everything of a receiver due now.
func (q *queue) hurry(ctx context.Context, webhook string) error {
	_, err := q.db.ExecContext(ctx, `UPDATE waiting SET due = made WHERE webhook = ?`, webhook)
	return err
}

// keepOnly drops what waits for others than these, and returns how much that was.
func (q *queue) keepOnly(ctx context.Context, webhooks []string) (dropped int64, err error) {
	list, err := json.Marshal(append([]string{}, webhooks...))
	if err != nil {
		return 0, err
	}
	err = q.update(ctx, func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `DELETE FROM waiting WHERE webhook NOT IN (SELECT value FROM json_each(?))`, string(list))
		if err != nil {
			return err
		}
		if dropped, err = r.RowsAffected(); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM receivers WHERE webhook NOT IN (SELECT value FROM json_each(?))`, string(list))
		return err
	})
	if err == nil {
		q.count.Add(-dropped)
	}
	return dropped, err
}

// State is how it stands with one webhook.
type State struct {
	Name      string    `json:"name"`
	URL       string    `json:"url"` // without its query
	Events    []string  `json:"events"`
	State     string    `json:"state"` // "idle", "waiting" or "failing"
	Waiting   int       `json:"waiting"`
	Delivered int       `json:"delivered"`
	Dropped   int       `json:"dropped"`
	Failures  int       `json:"failures"` // in a row
	LastOK    time.Time `json:"last_ok,omitzero"`
	LastError string    `json:"last_error,omitempty"`
	ErrorAt   time.Time `json:"error_at,omitzero"`
}

// States reads how it stands with each webhook of a configuration. A server may run.
func States(ctx context.Context, c *Config, path string) ([]State, error) {
	q, err := openQueue(ctx, path, true)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // nothing has happened yet
	}
	if err != nil {
		return nil, err
	}
	if q != nil {
		defer q.Close()
	}
	all := []State{}
	for _, h := range c.Webhooks {
		s := State{Name: h.Name, URL: h.Where(), Events: h.Events, State: "idle"}
		if q != nil {
			if err := q.state(ctx, &s); err != nil {
				return nil, fmt.Errorf("queue of webhooks: %w", err)
			}
		}
		all = append(all, s)
	}
	return all, nil
}

func (q *queue) state(ctx context.Context, s *State) error {
	if err := q.db.QueryRowContext(ctx, `SELECT count(*) FROM waiting WHERE webhook = ?`, s.Name).Scan(&s.Waiting); err != nil {
		return err
	}
	var ok, bad int64
	err := q.db.QueryRowContext(ctx, `SELECT delivered, dropped, failures, last_ok, last_error, error_at FROM receivers WHERE webhook = ?`, s.Name).
		Scan(&s.Delivered, &s.Dropped, &s.Failures, &ok, &s.LastError, &bad)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if ok > 0 {
		s.LastOK = time.Unix(0, ok).UTC()
	}
	if bad > 0 {
		s.ErrorAt = time.Unix(0, bad).UTC()
	}
	if s.Waiting > 0 {
		s.State = "waiting"
	}
	if s.Failures > 0 {
		s.State = "failing"
	}
	return nil
}
