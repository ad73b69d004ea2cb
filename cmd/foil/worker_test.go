package main

import (
	"errors"
	"strings"
	"testing"

	"hydrofoil.dev/foil/internal/worker/api"
)

func TestNeedRoot(t *testing.T) {
	if err := needRoot(0, "foil run"); err != nil {
		t.Error(err)
	}
	if err := needRoot(1000, "foil run"); err == nil || !strings.Contains(err.Error(), "run it with sudo") {
		t.Errorf("got %v", err)
	}
}

// Every code of an api.Error that has a next step gets one, once.
func TestAdvise(t *testing.T) {
	for _, test := range []struct{ code, message, want string }{
		{api.CodeNotFound, "no such tag", "no such tag"},
		{api.CodeUnavailable, "server gone", "server gone\nIs the server up"},
		{api.CodeUnavailable, "server gone: try --plain-http", "server gone: try --plain-http"},
		{api.CodeUnavailable, "503: the server answers, but", "503: the server answers, but"},
		{api.CodeUnavailable, "pull: the daemon is stopping", "pull: the daemon is stopping"},
		{api.CodeUnsupported, "no EROFS", "no EROFS\nWhat this host can do, and what to do about it: foil doctor --root /r"},
		{api.CodeNoSpace, "disk full", "disk full\nWhat is on the worker: foil images"},
		{api.CodeCorrupt, "frame 7", "frame 7\nWhat is wrong in detail: foil verify"},
		{api.CodeInternal, "nil map", "nil map\nThe daemon's log may say more: /r/run/node.log"},
		{api.CodeUnauthorized, "403", "403\nGive it credentials"},
	} {
		e := &api.Error{Code: test.code, Message: test.message}
		err := advise("/r", e)
		got := err.Error()
		if !strings.HasPrefix(got, test.want) || !strings.Contains(test.want, "\n") && got != test.want {
			t.Errorf("%s: got %q, want %q", test.code, got, test.want)
		}
		if !errors.Is(err, e) {
			t.Errorf("%s: the error is lost", test.code)
		}
	}
	plain := errors.New("plain")
	if got := advise("/r", plain); !errors.Is(got, plain) || got.Error() != "plain" {
		t.Errorf("got %v", got)
	}
	if advise("/r", nil) != nil {
		t.Error("advice about no error")
	}
}
