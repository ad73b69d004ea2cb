package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/server/catalog"
)

// SQLSTATEs that something is done about.
const (
	serialization   = "40001"
	deadlock        = "40P01"
	cachedPlan      = "0A000" // a migration has changed what a statement returns
	readOnly        = "25006" // the server has become a standby
	tooMany         = "53300" // connections
	diskFull        = "53100"
	notText         = "22021" // a zero byte, or no UTF-8
	notTextInJSON   = "22P05"
	shutdown        = "57P01"
	crash           = "57P02"
	starting        = "57P03"
	dataCorrupted   = "XX001"
	indexCorrupted  = "XX002"
	connectionClass = "08"
)

// conflict reports whether a transaction lost against another one.
func conflict(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (e.Code == serialization || e.Code == deadlock)
}

// lost reports whether the connection, or the server, has gone.
func lost(err error) bool {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch e.Code {
		case readOnly, tooMany, shutdown, crash, starting, cachedPlan:
			return true
		}
		return e.Code[:min(2, len(e.Code))] == connectionClass
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sql.ErrNoRows) {
		return false
	}
	_, connect := errors.AsType[*pgconn.ConnectError](err)
	_, network := errors.AsType[net.Error](err)
	return connect || network || pgconn.SafeToRetry(err) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, driver.ErrBadConn) || errors.Is(err, net.ErrClosed) || errors.Is(err, sql.ErrConnDone)
}

// known turns errors into those that callers branch on.
func known(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return catalog.ErrNotFound
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch e.Code {
		case diskFull:
			return fmt.Errorf("%w (%w)", unix.ENOSPC, err)
		case dataCorrupted, indexCorrupted:
			return fmt.Errorf("%w (%w)", catalog.ErrDamaged, err)
		}
	}
	if err != nil && (lost(err) || conflict(err)) {
		return &catalog.Unavailable{Err: err}
	}
	return err
}

// knownReading is known for what looks something up: nothing has a name that is no text.
func knownReading(err error) error {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && (e.Code == notText || e.Code == notTextInJSON) {
		return catalog.ErrNotFound
	}
	return known(err)
}

const (
	maxTries = 12
	// maxWait between two tries; the first one waits some milliseconds.
	maxWait = time.Second
)

// pause waits before another try, longer each time, and reports whether there is one.
func pause(ctx context.Context, tries int) bool {
	if tries >= maxTries {
		return false
	}
	wait := min(maxWait, 4*time.Millisecond<<tries)
	select {
	case <-time.After(wait/2 + rand.N(wait)):
		return true
	case <-ctx.Done():
		return false
	}
}

// readAgain is the Again of what reads.
func (e *engine) readAgain(ctx context.Context, err error, tries int) bool {
	if !lost(err) && !conflict(err) || !pause(ctx, tries) {
		return false
	}
	e.measuring.retries.WithLabelValues("read").Inc()
	return true
}
