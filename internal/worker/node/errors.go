package node

import (
	"context"
	"errors"
	"net/http"
	"syscall"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

// codeOf is the one table from what can go wrong in a pull to the code that
// clients of the daemon see.
var codeOf = []struct {
	is   func(error) bool
	code string
	todo string // what to do about it, for people
}{
	{isAny(syscall.ENOSPC, syscall.EDQUOT), api.CodeNoSpace, "free space on the filesystem of the root, or remove images with `foil rm`, and pull again"},
	{isBundle(bundle.CodeNotFound), api.CodeNotFound, ""},
	{isBundle(bundle.CodeInvalid), api.CodeInvalid, ""},
	{isBundle(bundle.CodeUnauthorized), api.CodeUnauthorized, ""},
	{isBundle(bundle.CodeUnsupported), api.CodeUnsupported, ""},
	{isBundle(bundle.CodeUnavailable), api.CodeUnavailable, ""},
	{isBundle(bundle.CodeCorrupt), api.CodeCorrupt, ""},
	{isStatus(http.StatusNotFound, http.StatusMethodNotAllowed), api.CodeUnsupported, "the server is no Hydrofoil server"},
	{isStatus(http.StatusUnauthorized, http.StatusForbidden), api.CodeUnauthorized, ""},
	{isAny(bundle.ErrCorrupt), api.CodeCorrupt, ""},
	{isAny(fetch.ErrUnreachable), api.CodeUnavailable, ""},
	{isAny(syscall.EPERM, syscall.EACCES), api.CodeUnauthorized, ""},
	{isAny(fetch.ErrStopped, context.Canceled, context.DeadlineExceeded), api.CodeUnavailable, ""},
}

// asError gives an error the code of the table, if it has none of its own.
func asError(err error) *api.Error {
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

func isStatus(codes ...int) func(error) bool {
	return func(err error) bool {
		e, ok := errors.AsType[*fetch.StatusError](err)
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
