package pull

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/oci"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/fetch"
	"hydrofoil.dev/foil/internal/worker/remote"
)

func TestErrorsHaveCodes(t *testing.T) {
	status := func(code int, message string) error {
		return &remote.StatusError{Method: "POST", URL: "http://h" + bundle.PullPath, Status: code, Message: message, Said: nil}
	}
	said := func(code string) error {
		return &remote.StatusError{Status: http.StatusBadRequest, Said: &bundle.Error{Code: code, Message: "no"}}
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
		{said(bundle.CodeUnsupported), api.CodeUnsupported, "docker or podman"},
		{fmt.Errorf("image r:1: %w: it is an artifact", oci.ErrRefused), api.CodeUnsupported, "docker or podman"},
		{fmt.Errorf("%w: another platform", oci.ErrNoPlatform), api.CodeNotFound, "another platform"},
		{status(403, ""), api.CodeUnauthorized, ""},
		{said(bundle.CodeNotFound), api.CodeNotFound, ""},
		{said(bundle.CodeInvalid), api.CodeInvalid, ""},
		// What servers of before startup sets, and of before holds, say to a request of today.
		{&remote.StatusError{Status: 400, Message: `bundle request: json: unknown field "startup"`, Said: &bundle.Error{Code: bundle.CodeInvalid}}, api.CodeUnsupported, "upgrade the server"},
		{status(400, `bundle request: json: unknown field "hold"`), api.CodeUnsupported, "upgrade the server"},
		{fetch.ErrDamaged, api.CodeCorrupt, ""},
		{fetch.ErrUnreachable, api.CodeUnavailable, ""},
		// Given up, although it answers.
		{fmt.Errorf("%w http://h: %w", fetch.ErrUnreachable, status(503, "")), api.CodeUnavailable, api.ServerAnswers},
		{fmt.Errorf("%w http://h, which asks to be asked again in 1m0s: %w", fetch.ErrUnreachable, status(429, "")), api.CodeUnavailable, api.ServerAnswers},
		{status(503, ""), api.CodeUnavailable, api.ServerAnswers},
		{status(429, ""), api.CodeUnavailable, api.ServerAnswers},
		{fmt.Errorf("%w http://h: %w", fetch.ErrUnreachable, fetch.ErrEmpty), api.CodeUnavailable, api.ServerAnswers},
		{fmt.Errorf("%w http://h: %w 503 Service Unavailable", fetch.ErrUnreachable, remote.ErrTokenServer), api.CodeUnavailable, api.ServerAnswers},
		{fmt.Errorf("%w http://h: %w", fetch.ErrUnreachable, said(bundle.CodeUnavailable)), api.CodeUnavailable, api.ServerAnswers},
	} {
		e := AsError(fmt.Errorf("pull registry.example/app:1: %w", c.err))
		if e.Code != c.code || !strings.Contains(e.Message, c.todo) {
			t.Errorf("%v: %s, %q; want %s and %q", c.err, e.Code, e.Message, c.code, c.todo)
		}
		if answered := strings.Contains(e.Message, api.ServerAnswers); answered != (c.todo == api.ServerAnswers) {
			t.Errorf("%v: %q", c.err, e.Message)
		}
	}
}
