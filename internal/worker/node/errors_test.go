package node

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
)

func TestErrorsHaveCodes(t *testing.T) {
	status := func(code int, message string) error {
		return &fetch.StatusError{Method: "POST", URL: "http://h" + bundle.PullPath, Status: code, Message: message, Said: nil}
	}
	said := func(code string) error {
		return &fetch.StatusError{Status: http.StatusBadRequest, Said: &bundle.Error{Code: code, Message: "no"}}
	}
	for _, c := range []struct {
		err        error
		code, todo string
	}{
		{syscall.ENOSPC, api.CodeNoSpace, "free space"},
		{status(404, "page not found"), api.CodeUnsupported, "no Hydrofoil server"},
		{status(307, "it redirects to https://h/x"), api.CodeUnsupported, "name that host"},
		{bundle.ErrForeign, api.CodeUnsupported, "no Hydrofoil server"},
		{bundle.ErrCorrupt, api.CodeCorrupt, ""},
		{status(403, ""), api.CodeUnauthorized, ""},
		{said(bundle.CodeNotFound), api.CodeNotFound, ""},
		{said(bundle.CodeInvalid), api.CodeInvalid, ""},
		// What servers of before startup sets, and of before holds, say to a request of today.
		{&fetch.StatusError{Status: 400, Message: `bundle request: json: unknown field "startup"`, Said: &bundle.Error{Code: bundle.CodeInvalid}}, api.CodeUnsupported, "upgrade the server"},
		{status(400, `bundle request: json: unknown field "hold"`), api.CodeUnsupported, "upgrade the server"},
		{fetch.ErrDamaged, api.CodeCorrupt, ""},
		{fetch.ErrUnreachable, api.CodeUnavailable, ""},
	} {
		e := asError(fmt.Errorf("pull registry.example/app:1: %w", c.err))
		if e.Code != c.code || !strings.Contains(e.Message, c.todo) {
			t.Errorf("%v: %s, %q; want %s and %q", c.err, e.Code, e.Message, c.code, c.todo)
		}
	}
}
