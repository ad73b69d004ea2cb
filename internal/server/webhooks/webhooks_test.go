package webhooks

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"hydrofoil.dev/foil/internal/logtest"
	"hydrofoil.dev/foil/internal/metrics/metricstest"
)

// target is a receiver that answers as it is told.
type target struct {
	*httptest.Server
	got    chan event
	mu     sync.Mutex
	answer func(w http.ResponseWriter, r *http.Request, e event) int // guarded by mu
}

const secret = "0123456789abcdef-a-secret"

func listen(t *testing.T) *target {
	r := &target{got: make(chan event, 1000)}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, err := io.ReadAll(req.Body)
		if err != nil {
			return // the sender has gone
		}
		var e event
		d := json.NewDecoder(strings.NewReader(string(b)))
		d.DisallowUnknownFields()
		if err := d.Decode(&e); err != nil || req.Method != "POST" || req.Header.Get("Content-Type") != "application/cloudevents+json; charset=utf-8" ||
			e.SpecVersion != "1.0" || e.ID == "" || e.Source == "" || e.Type == "" {
			t.Errorf("%s %v: no CloudEvent: %s, %v", req.Method, req.Header, b, err)
		}
		mac := hmac.New(sha256.New, []byte(secret))
		fmt.Fprintf(mac, "%s.%s.%s", e.ID, req.Header.Get("Webhook-Timestamp"), b)
		if s := req.Header.Get("Webhook-Signature"); s != "" && s != "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)) {
			t.Errorf("the signature is %s", s)
		}
		r.mu.Lock()
		answer := r.answer
		r.mu.Unlock()
		status := 204
		if answer != nil {
			status = answer(w, req, e)
		}
		if status/100 == 2 {
			r.got <- e
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *target) answers(f func(w http.ResponseWriter, r *http.Request, e event) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func hook(name, url, more string) string {
	return fmt.Sprintf("[[webhook]]\nname = %q\nurl = %q\nevents = [\"push\", \"pull\", \"delete\"]\nrepositories = [\"team/**\"]\n%s\n", name, url, more)
}

// sender starts one over a directory.
func sender(t *testing.T, dir string, change func(*Options)) (*Sender, *logtest.Buffer) {
	t.Helper()
	log := new(logtest.Buffer)
	o := Options{File: filepath.Join(dir, "webhooks.toml"), Queue: filepath.Join(dir, "queue.db"), First: time.Millisecond, Most: 20 * time.Millisecond, Look: time.Millisecond,
		Log: slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil))}
	if change != nil {
		change(&o)
	}
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, log
}

func states(t *testing.T, s *Sender) State {
	t.Helper()
	c, err := Read(s.o.File)
	if err != nil {
		t.Fatal(err)
	}
	all, err := States(t.Context(), c, s.o.Queue)
	if err != nil || len(all) == 0 {
		t.Fatal(all, err)
	}
	return all[0]
}

// until waits for a state.
func until(t *testing.T, s *Sender, ok func(State) bool) State {
	t.Helper()
	for {
		if v := states(t, s); ok(v) {
			return v
		}
		time.Sleep(time.Millisecond)
	}
}

func TestDelivered(t *testing.T) {
	r, dir := listen(t), t.TempDir()
	write(t, filepath.Join(dir, "secret"), secret)
	write(t, filepath.Join(dir, "header"), "Authorization: Bearer hidden-token\n")
	write(t, filepath.Join(dir, "webhooks.toml"), "source = \"https://registry.example\"\n"+hook("one", r.URL+"/?key=hidden-key", fmt.Sprintf("secret-file = %q\nheader-file = %q", filepath.Join(dir, "secret"), filepath.Join(dir, "header"))))
	r.answers(func(_ http.ResponseWriter, req *http.Request, _ event) int {
		if req.Header.Get("Authorization") != "Bearer hidden-token" || req.Header.Get("Webhook-Signature") == "" {
			return 401
		}
		return 200
	})
	s, log := sender(t, dir, nil)
	s.Happened(Push, Data{Repository: "other/app", Digest: "sha256:0"})
	s.Happened(Push, Data{Repository: "team/app", Digest: "sha256:1", Tags: []string{"v1"}, MediaType: "m", Size: 3, Subject: "user:ann"})
	e := <-r.got
	at := e.Time
	e.ID, e.Time = "", time.Time{}
	want := event{SpecVersion: "1.0", Source: "https://registry.example", Type: "dev.hydrofoil.image.pushed.v1", Subject: "team/app@sha256:1", ContentType: "application/json",
		Data: Data{Repository: "team/app", Digest: "sha256:1", Tags: []string{"v1"}, MediaType: "m", Size: 3, Subject: "user:ann"}}
	if diff := cmp.Diff(want, e); diff != "" || time.Since(at) > time.Hour {
		t.Error(at, diff)
	}
	// Pulls of one image by one subject are one event.
	for range 3 {
		for _, who := range []string{"user:ann", "user:bob"} {
			s.Pulled(Data{Repository: "team/app", Digest: "sha256:1", Subject: who})
		}
	}
	s.Happened(Delete, Data{Repository: "team/app", Tags: []string{"v1"}})
	var types []string
	for range 3 {
		types = append(types, (<-r.got).Type)
	}
	if n := strings.Count(strings.Join(types, " "), "pulled"); n != 2 {
		t.Errorf("events: %v", types)
	}
	v := until(t, s, func(v State) bool { return v.Delivered == 4 })
	if v.State != "idle" || v.URL != r.URL+"/?..." {
		t.Errorf("%+v", v)
	}
	if _, err := Test(t.Context(), mustRead(t, s.o.File), "one"); err != nil || (<-r.got).Type != "dev.hydrofoil.test.v1" {
		t.Errorf("test: %v", err)
	}
	r.answers(func(http.ResponseWriter, *http.Request, event) int { return 500 })
	s.Happened(Push, Data{Repository: "team/app"})
	until(t, s, func(v State) bool { return v.Failures > 0 })
	if strings.Contains(log.String(), "hidden") || strings.Contains(log.String(), secret) {
		t.Error("a secret is in the log")
	}
}

func mustRead(t *testing.T, file string) *Config {
	t.Helper()
	c, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A receiver fails in every way, and gets each event at last, under one id; the sender is replaced meanwhile.
func TestFailsAndReturns(t *testing.T) {
	r, dir := listen(t), t.TempDir()
	write(t, filepath.Join(dir, "webhooks.toml"), hook("one", r.URL, `timeout = "50ms"`))
	ids := make(chan string, 100)
	n := 0
	r.answers(func(w http.ResponseWriter, req *http.Request, e event) int {
		ids <- e.ID
		n++
		switch n {
		case 1:
			return 503
		case 2:
			w.Header().Set("Location", "http://127.0.0.2:1/")
			return 307 // to another host
		case 3:
			<-req.Context().Done() // slow
			return 200
		case 4:
			panic(http.ErrAbortHandler)
		}
		return 429
	})
	s, _ := sender(t, dir, nil)
	s.Happened(Push, Data{Repository: "team/app", Digest: "sha256:1"})
	first := <-ids
	for range 4 {
		if id := <-ids; id != first {
			t.Errorf("the event came as %s and %s", first, id)
		}
	}
	if v := until(t, s, func(v State) bool { return v.Failures >= 5 && strings.Contains(v.LastError, "429") }); v.State != "failing" || v.Waiting != 1 {
		t.Errorf("%+v", v)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r.answers(nil)
	s, _ = sender(t, dir, nil)
	if e := <-r.got; e.ID != first {
		t.Errorf("after a restart it came as %s, not %s", e.ID, first)
	}
	until(t, s, func(v State) bool { return v.Delivered == 1 && v.Failures == 0 && v.State == "idle" })
}

// Nobody waits for a receiver; and what is beyond what may wait, refused or too old is dropped, counted and logged.
func TestDropped(t *testing.T) {
	r, dir := listen(t), t.TempDir()
	file := filepath.Join(dir, "webhooks.toml")
	write(t, file, hook("one", r.URL, ""))
	leave := make(chan struct{})
	r.answers(func(_ http.ResponseWriter, req *http.Request, _ event) int {
		select {
		case <-leave:
		case <-req.Context().Done():
		}
		return 400
	})
	s, log := sender(t, dir, func(o *Options) { o.Limit = 3 })
	for range 5 { // returns though the receiver never answers
		s.Happened(Push, Data{Repository: "team/app"})
	}
	if v := states(t, s); v.Waiting != 3 || v.Dropped != 2 {
		t.Errorf("%+v", v)
	}
	close(leave)
	until(t, s, func(v State) bool { return v.Dropped == 5 && v.Waiting == 0 })
	r.answers(func(http.ResponseWriter, *http.Request, event) int { return 500 })
	write(t, file, hook("one", r.URL, `give-up = "1ms"`))
	s.Happened(Push, Data{Repository: "team/app"})
	until(t, s, func(v State) bool { return v.Dropped == 6 && strings.Contains(v.LastError, "given up") })
	for _, why := range []string{"as many as may wait", "400 Bad Request", "given up"} {
		if !strings.Contains(log.String(), why) {
			t.Errorf("the log lacks %q", why)
		}
	}
}

// A configuration that is corrected counts at once, whatever the pause; one that is wrong does not.
func TestReadAgain(t *testing.T) {
	r, dir := listen(t), t.TempDir()
	file := filepath.Join(dir, "webhooks.toml")
	write(t, file, hook("one", "http://127.0.0.1:1", ""))
	s, log := sender(t, dir, func(o *Options) { o.First, o.Most = time.Hour, time.Hour })
	s.Happened(Push, Data{Repository: "team/app"})
	until(t, s, func(v State) bool { return v.Failures == 1 })
	write(t, file, "[[webhook]]\nnam = 1\n")
	for !strings.Contains(log.String(), "there is no setting webhook.nam") {
		time.Sleep(time.Millisecond)
	}
	write(t, file, hook("one", r.URL, ""))
	<-r.got
}

func TestMetricsAreDocumented(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "webhooks.toml"), "")
	s, _ := sender(t, dir, nil)
	metricstest.Table(t, "../../../docs/metrics.md", "webhooks", s.Metrics())
}

func TestConfig(t *testing.T) {
	for says, c := range map[string]string{
		"wants a name":               hook("", "https://a.example", ""),
		"the name is taken":          hook("a", "https://a.example", "") + hook("a", "https://a.example", ""),
		"its url is to be https":     hook("a", "ftp://a.example", ""),
		"has credentials":            hook("a", "https://u:p@a.example", ""),
		"wants an https":             hook("a", "http://a.example", `header-file = "x"`),
		"header-file: open":          hook("a", "https://a.example", `header-file = "/does/not/exist"`),
		"secret-file: open":          hook("a", "https://a.example", `secret-file = "/does/not/exist"`),
		"there is no setting source": "sources = \"x\"\n",
	} {
		if _, err := parse([]byte(c)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %s", err, says)
		}
	}
	if _, err := Test(context.Background(), new(Config), "http://user:hidden@127.0.0.1:1/"); err == nil || strings.Contains(err.Error(), "hidden") {
		t.Errorf("test: %v", err)
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
