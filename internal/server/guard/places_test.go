package guard_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// However many requests somebody has, from however many addresses, another one's is worked on next.
func TestRequestsAreWorkedOnInTurn(t *testing.T) {
	i := newIssuer(t)
	g := open(t, t.TempDir(), fmt.Sprintf("[[issuer]]\nname = \"ci\"\nurl = \"https://ci.example\"\nkeys = %q\naudience = \"foil\"\n[[issuer.identity]]\nname = \"{sub}\"\n"+
		"[[rule]]\nto = [\"everyone\"]\nallow = [\"pull\"]\nrepositories = [\"**\"]\n", i.URL+"/keys"))
	token := i.token("https://ci.example", map[string]any{"sub": "job", "aud": "foil"})
	const takes = 10 * time.Millisecond
	send := func(h http.Handler, address, token string, body io.Reader) {
		req := httptest.NewRequest("POST", "/", body)
		req.RemoteAddr = address
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, req); w.Code != 200 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	}
	open := func(*http.Request) bool { return false }
	// The issuer's keys are there from now on.
	send(g.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), open), "192.0.2.1:1", token, nil)
	synctest.Test(t, func(t *testing.T) {
		var inside, most atomic.Int64
		work := g.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			if n := inside.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(takes)
			inside.Add(-1)
		}), open)
		var all sync.WaitGroup
		flood := func(h http.Handler, body func() io.Reader) {
			for n := range 400 {
				all.Go(func() { send(h, fmt.Sprintf("192.0.2.%d:1", n%200), "", body()) })
			}
			synctest.Wait()
		}
		none := func() io.Reader { return nil }
		flood(work, none)
		began := time.Now()
		send(work, "198.51.100.1:1", token, none())
		if took := time.Since(began); took > 2*takes {
			t.Errorf("beside a flood it took %v, want %v and one piece of others' work at most", took, takes)
		}
		all.Wait()
		if n := most.Load(); n > int64(runtime.GOMAXPROCS(0)) {
			t.Errorf("%d requests were worked on at once", n)
		}

		// Who waits, for a body or for anything else, has no place.
		wait := g.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			if _, err := io.ReadAll(req.Body); err != nil {
				t.Error(err)
			}
			defer g.Place(req.Context())()
			time.Sleep(time.Hour)
		}), open)
		began = time.Now()
		flood(wait, func() io.Reader { return &slowBody{t: t} })
		all.Wait()
		if took := time.Since(began); took > 2*time.Hour+time.Minute {
			t.Errorf("400 that wait at once took %v", took)
		}
	})
}

// slowBody takes an hour.
type slowBody struct {
	t    *testing.T
	over bool
}

func (b *slowBody) Read(p []byte) (int, error) {
	if b.over {
		return 0, io.EOF
	}
	b.over = true
	time.Sleep(time.Hour)
	return strings.NewReader("x").Read(p)
}
