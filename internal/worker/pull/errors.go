package pull

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"syscall"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// answers is of a server that is up and reachable, with TLS or without as it was asked.
const answers = api.ServerAnswers + ", but does not give the image now: its log, or that of a proxy in front of it, says why"

// Forgotten is for what a registry refuses after a restart of the daemon, without what it was shown before.
const Forgotten = "credentials that were shown for a pull are not kept over a restart of the daemon: pull the image again with them, " +
	"or have the daemon's user log in (docker login)"

// plainly is for an image that is no lazy one. A snapshotter goes the plain way by itself.
const plainly = "containerd, docker or podman may run it as they pull it without foil"

// codeOf is the one table from what can go wrong in a pull to the code that
// clients of the daemon see.
var codeOf = []struct {
	is   func(error) bool
	code string
	todo string // what to do about it, for people
}{
	{isAny(syscall.ENOSPC, syscall.EDQUOT), api.CodeNoSpace, "free space on the filesystem of the root, or remove images with `foil rm`, and pull again"},
	{isBundle(bundle.CodeNotFound), api.CodeNotFound, ""},
	{isOlder, api.CodeUnsupported, "the server is older than this foil and does not understand what it asks: upgrade the server first"},
	{isBundle(bundle.CodeInvalid), api.CodeInvalid, ""},
	{isBundle(bundle.CodeUnauthorized), api.CodeUnauthorized, ""},
	{isBundle(bundle.CodeUnsupported), api.CodeUnsupported, plainly},
	{isAny(oci.ErrNoPlatform), api.CodeNotFound, ""},
	{isAny(oci.ErrRefused), api.CodeUnsupported, plainly},
	{isBundle(bundle.CodeUnavailable), api.CodeUnavailable, answers},
	{isBundle(bundle.CodeCorrupt), api.CodeCorrupt, ""},
	{isStatus(http.StatusNotFound, http.StatusMethodNotAllowed), api.CodeUnsupported, "the server is no Hydrofoil server"},
	{isStatus(http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect), api.CodeUnsupported,
		"the server sends its clients elsewhere: name that host in the image's name, or in a hosts.toml (foil node --hosts-dir)"},
	{isAny(bundle.ErrForeign), api.CodeUnsupported, "the server is no Hydrofoil server"},
	{isStatus(http.StatusUnauthorized, http.StatusForbidden), api.CodeUnauthorized, ""},
	{isAny(bundle.ErrCorrupt, fetch.ErrDamaged), api.CodeCorrupt, ""},
	{isAnswered, api.CodeUnavailable, answers},
	{isAny(fetch.ErrUnreachable), api.CodeUnavailable, ""},
	{isAny(syscall.EPERM, syscall.EACCES), api.CodeUnauthorized, ""},
	{isAny(fetch.ErrStopped, context.Canceled, context.DeadlineExceeded), api.CodeUnavailable, ""},
}

// AsError gives an error the code of the table, if it has none of its own.
func AsError(err error) *api.Error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return api.AsError(err)
	}
	for _, c := range codeOf {
		if c.is(err) {
			e := &api.Error{Code: c.code, Message: err.Error()}
			if c.todo != "" {
				e.Message += ": " + c.todo
			}
			return e
		}
	}
	return api.AsError(err)
}

func isAny(targets ...error) func(error) bool {
	return func(err error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
}

func isBundle(code string) func(error) bool {
	return func(err error) bool {
		e, ok := errors.AsType[*bundle.Error](err)
		return ok && e.Code == code
	}
}

// isOlder reports whether a server refused a request for a field that it does not
// know, as servers did before they left such fields out.
func isOlder(err error) bool {
	e, ok := errors.AsType[*remote.StatusError](err)
	return ok && e.Status == http.StatusBadRequest && strings.Contains(e.Message, "unknown field")
}

// isAnswered reports whether a server was given up that did answer: with a status, with less than what it
// began, or by way of its token server.
func isAnswered(err error) bool {
	busy := isStatus(http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout)
	return busy(err) || errors.Is(err, remote.ErrTokenServer) ||
		errors.Is(err, fetch.ErrUnreachable) && (errors.As(err, new(*remote.StatusError)) || isAny(fetch.ErrEmpty, io.ErrUnexpectedEOF)(err))
}

func isStatus(codes ...int) func(error) bool {
	return func(err error) bool {
		e, ok := errors.AsType[*remote.StatusError](err)
		if !ok {
			return false
		}
		for _, c := range codes {
			if e.Status == c {
				return true
			}
		}
		return false
	}
}
