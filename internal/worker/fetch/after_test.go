package fetch

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
)

// A server, or what is in front of it, that asks not to be asked again for a while is
// not, unless nobody would wait for so long.
func TestRetryAfter(t *testing.T) {
	m := newImage(t, "a", files(30)...)
	for name, tc := range map[string]struct {
		answers  []script
		requests int
		says     string // the error; empty: the pull succeeds
	}{
		"503 and then 429": {[]script{{status: http.StatusServiceUnavailable, after: "1"}, {status: http.StatusTooManyRequests, after: "1"}}, 3, ""},
		"in front of it":   {[]script{{status: http.StatusServiceUnavailable, after: "1", body: "<html>"}}, 2, ""},
		"behind a header":  {[]script{{cutAt: 60000}, {status: http.StatusServiceUnavailable, after: "1"}}, 3, ""},
		"too long":         {[]script{{status: http.StatusServiceUnavailable, after: "30"}}, 1, "which asks to be asked again in 30s, try again then"},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, []*image{m}, func(t *testing.T, s *server, w *worker) {
				s.scripts = tc.answers
				c := s.client(t, ClientOptions{})
				defer c.Close()
				err := Start(t.Context(), w.options(c, 1)).Wait()
				if tc.says == "" {
					if err != nil {
						t.Fatal(err)
					}
					w.check()
				} else if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("Wait: %v, want %q", err, tc.says)
				}
				if len(s.times) != tc.requests {
					t.Fatalf("%d requests, want %d", len(s.times), tc.requests)
				}
				for i, a := range tc.answers[:tc.requests-1] {
					if d := s.times[i+1].Sub(s.times[i]); a.after != "" && d < time.Second {
						t.Errorf("request %d came %v after one that asked for a second", i+1, d)
					}
				}
			})
		})
	}
}

// What is asked for is bounded, and taken from those who may ask.
func TestAsked(t *testing.T) {
	for _, tc := range []struct {
		status int
		after  string
		want   time.Duration
	}{
		{http.StatusServiceUnavailable, "5", 5 * time.Second},
		{http.StatusTooManyRequests, "86400", MostAfter},
		{http.StatusTooManyRequests, "", 0},
		{http.StatusBadGateway, "5", 0},
		{http.StatusNotFound, "5", 0},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", tc.after)
			w.WriteHeader(tc.status)
		}))
		c, err := NewClient(ClientOptions{Base: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Post(t.Context(), bundle.PullPath, nil, nil)
		if got := Asked(fmt.Errorf("pull: %w", err)); got != tc.want {
			t.Errorf("%d, %q: %v, want %v (%v)", tc.status, tc.after, got, tc.want, err)
		}
		c.Close()
		srv.Close()
	}
	noneLeft(t)
}
