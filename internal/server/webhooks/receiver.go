package webhooks

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"hydrofoil.dev/foil/internal/backoff"
	"hydrofoil.dev/foil/internal/format/bundle"
)

// receiver delivers to one webhook, one event after the other.
type receiver struct {
	s    *Sender
	name string
	hook atomic.Pointer[*Webhook] // as it is configured now
	stop context.CancelFunc
	wake chan bool // something was queued; true: the configuration has changed
}

func newReceiver(s *Sender, h *Webhook, stop context.CancelFunc) *receiver {
	r := &receiver{s: s, name: h.Name, stop: stop, wake: make(chan bool, 1)}
	r.hook.Store(&h)
	return r
}

// poke wakes the receiver up.
func (r *receiver) poke(changed bool) {
	if changed {
		select { // it counts more than what is there
		case <-r.wake:
		default:
		}
	}
	select {
	case r.wake <- changed:
	default:
	}
}

// run delivers until ctx ends. After a failure nothing is sent before the pause is over.
func (r *receiver) run(ctx context.Context) {
	failures, until := 0, time.Time{}
	for ctx.Err() == nil {
		i, due, err := r.s.queue.next(ctx, r.name)
		if err != nil {
			if ctx.Err() == nil {
				r.s.log.Error("the queue of webhooks cannot be read", "webhook", r.name, "error", err)
			}
			due = time.Now().Add(r.s.o.Most)
		}
		if until.After(due) {
			due = until
		}
		if i == nil || time.Until(due) > 0 {
			if r.wait(ctx, i == nil && err == nil, due) {
				failures, until = 0, time.Time{}
			}
			continue
		}
		if r.deliver(ctx, i, &until, failures) {
			failures = 0
		} else {
			failures++
		}
	}
}

// wait waits until something is due, was queued, or the configuration has changed, which it reports.
func (r *receiver) wait(ctx context.Context, forever bool, due time.Time) (changed bool) {
	var timer <-chan time.Time
	if !forever {
		t := time.NewTimer(time.Until(due))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-ctx.Done():
	case <-timer:
	case changed = <-r.wake:
	}
	if changed {
		if err := r.s.queue.hurry(ctx, r.name); err != nil && ctx.Err() == nil {
			r.s.log.Error("the queue of webhooks cannot be written", "error", err)
		}
	}
	return changed
}

// deliver sends one event, and keeps what became of it. It reports whether the receiver works.
func (r *receiver) deliver(ctx context.Context, i *item, until *time.Time, failures int) bool {
	h := *r.hook.Load()
	log := r.s.log.With("webhook", r.name, "event", i.id)
	if age := time.Since(i.made); age > time.Duration(h.GiveUp) {
		r.settle(ctx, i, fmt.Errorf("given up after %v and %d tries", age.Round(time.Second), i.tries))
		return failures == 0
	}
	err := send(ctx, h, i.id, i.body)
	if err == nil {
		r.s.tries.WithLabelValues("ok").Inc()
		r.settle(ctx, i, nil)
		return true
	}
	if ctx.Err() != nil {
		return false // the server ends: the event is sent again by the next one
	}
	r.s.tries.WithLabelValues("failed").Inc()
	if final, ok := errors.AsType[*refusal](err); ok && final.final {
		r.settle(ctx, i, err)
		return true
	}
	b := backoff.Backoff{First: r.s.o.First, Most: r.s.o.Most}
	*until = time.Now().Add(max(backoff.Spread(b.Pause(failures+1)), min(after(err), time.Hour)))
	due := time.Now().Add(b.Pause(i.tries + 1))
	if failures == 0 {
		log.Warn("a webhook fails: events wait", "error", err)
	}
	if err := r.s.queue.failed(ctx, i, due, err); err != nil && ctx.Err() == nil {
		log.Error("the queue of webhooks cannot be written", "error", err)
	}
	return false
}

// settle removes an event that was delivered, or, with an error, is dropped.
func (r *receiver) settle(ctx context.Context, i *item, dropped error) {
	result := "delivered"
	if dropped != nil {
		result = "dropped"
		r.s.log.Warn("events dropped", "events", 1, "webhook", r.name, "event", i.id, "why", dropped)
	}
	r.s.events.WithLabelValues(result).Inc()
	// If that fails the event comes once more.
	if err := r.s.queue.done(context.WithoutCancel(ctx), i, dropped); err != nil {
		r.s.log.Error("the queue of webhooks cannot be written", "webhook", r.name, "error", err)
	}
}

// refusal is an answer that is no success.
type refusal struct {
	status string
	after  time.Duration
	final  bool // the event will never be taken
}

func (e *refusal) Error() string { return "it answers " + e.status }

// after is when a receiver wants to be asked again; 0: it does not say.
func after(err error) time.Duration {
	if e, ok := errors.AsType[*refusal](err); ok {
		return e.after
	}
	return 0
}

// send sends an event to a webhook. Errors have no secret in them: *refusal, or what kept it from answering.
func send(ctx context.Context, h *Webhook, id string, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(h.Timeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.URL, bytes.NewReader(body))
	if err != nil {
		return errors.New("the url is none")
	}
	req.Header.Set("Content-Type", "application/cloudevents+json; charset=utf-8")
	req.Header.Set("User-Agent", "foil")
	if name, value, err := h.header(); err != nil {
		return err
	} else if name != "" {
		req.Header.Set(name, value)
	}
	key, err := h.secret()
	if err != nil {
		return err
	}
	if key != nil {
		sign(req.Header, key, id, body, time.Now())
	}
	client, err := h.client()
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the URL may have a secret in it
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer in %v", time.Duration(h.Timeout))
		}
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // what it says is not looked at
	if resp.StatusCode/100 == 2 {
		return nil
	}
	e := &refusal{status: strconv.Itoa(resp.StatusCode) + " " + http.StatusText(resp.StatusCode), after: bundle.RetryAfter(resp.Header, time.Now())}
	switch resp.StatusCode {
	case http.StatusBadRequest, http.StatusGone, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity:
		e.final = true
	}
	return e
}

// sign adds the headers of the Standard Webhooks specification: HMAC-SHA256 of id, time and body.
func sign(h http.Header, key []byte, id string, body []byte, now time.Time) {
	at := strconv.FormatInt(now.Unix(), 10)
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", id, at, body)
	h.Set("Webhook-Id", id)
	h.Set("Webhook-Timestamp", at)
	h.Set("Webhook-Signature", "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
}

// client follows redirects that keep method and body, on the same server: others would get the event, and
// the header with it.
func (h *Webhook) client() (*http.Client, error) {
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true}
	if h.CA != "" {
		b, err := os.ReadFile(h.CA)
		if err != nil {
			return nil, fmt.Errorf("ca: %w", err)
		}
		roots, err := x509.SystemCertPool()
		if err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("ca: %s has no certificates in PEM form", h.CA)
		}
		t.TLSClientConfig.RootCAs = roots
	}
	return &http.Client{Transport: t, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) > 5 || req.Method != http.MethodPost || req.URL.Scheme != via[0].URL.Scheme || req.URL.Host != via[0].URL.Host {
			return http.ErrUseLastResponse
		}
		return nil
	}}, nil
}

// Test sends an event of its own to a webhook of a configuration, by its name or URL, or to any other URL. It reports how long the
// answer took.
func Test(ctx context.Context, c *Config, target string) (time.Duration, error) {
	h := c.find(target)
	for _, o := range c.Webhooks {
		if h == nil && o.URL == target {
			h = o
		}
	}
	if h == nil {
		h = &Webhook{Name: "test", URL: target, Events: []string{Push}, Repositories: []string{"**"}}
		if err := h.check(); err != nil {
			return 0, fmt.Errorf("webhook %s: no webhook has this name or URL, and as a URL: %w", where(target), err)
		}
	}
	id, body, err := encode(c.Source, "test", Data{Repository: "test/image", Tags: []string{"latest"}}, time.Now())
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if err := send(ctx, h, id, body); err != nil {
		return 0, fmt.Errorf("webhook %s: %w", h.Where(), err)
	}
	return time.Since(began), nil
}
