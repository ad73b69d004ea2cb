package fetch

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// A server, or what is in front of it, that asks not to be asked again for a while is
// not, unless nobody would wait for so long.
func TestRetryAfter(t *testing.T) {
	m := newImage(t, files(30)...)
	for name, tc := range map[string]struct {
		answers  []script
		requests int
		says     string // the error; empty: the pull succeeds
	}{
		"503 and then 429": {[]script{{Status: http.StatusServiceUnavailable, After: "1"}, {Status: http.StatusTooManyRequests, After: "1"}}, 3, ""},
		"in front of it":   {[]script{{Status: http.StatusServiceUnavailable, After: "1", Body: "<html>"}}, 2, ""},
		"behind a header":  {[]script{{CutAt: 60000}, {Status: http.StatusServiceUnavailable, After: "1"}}, 3, ""},
		"too long":         {[]script{{Status: http.StatusServiceUnavailable, After: "30"}}, 1, "which asks to be asked again in 30s, try again then"},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, m, func(t *testing.T, s *server, w *worker) {
				s.Scripts = tc.answers
				c := s.Client(t, remote.Options{})
				defer c.Close()
				err := Start(t.Context(), w.options(c)).Wait()
				if tc.says == "" {
					if err != nil {
						t.Fatal(err)
					}
					w.check()
				} else if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("Wait: %v, want %q", err, tc.says)
				}
				if len(s.Times) != tc.requests {
					t.Fatalf("%d requests, want %d", len(s.Times), tc.requests)
				}
				for i, a := range tc.answers[:tc.requests-1] {
					if d := s.Times[i+1].Sub(s.Times[i]); a.After != "" && d < time.Second {
						t.Errorf("request %d came %v after one that asked for a second", i+1, d)
					}
				}
			})
		})
	}
}

// An answer that would be the same again ends the pull.
func TestAskingAgain(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want bool
	}{
		{&remote.StatusError{Status: 404}, true},
		{&remote.StatusError{Status: 501}, true},
		{&remote.StatusError{Status: 429}, false},
		{&remote.StatusError{Status: 502}, false},
		{&remote.StatusError{Status: 404, Said: &bundle.Error{Code: bundle.CodeNotFound}}, true},
		{&remote.StatusError{Status: 400, Said: &bundle.Error{Code: bundle.CodeUnavailable}}, false},
	} {
		if got := isFinal(tc.err); got != tc.want {
			t.Errorf("%v: %v", tc.err, got)
		}
	}
}
