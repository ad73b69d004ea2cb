package access

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
)

// target is what the attackers' process is told.
type target struct {
	Attack             string
	Server             string // host:port
	Token              string // empty: nobody in particular
	Method, Path       string // what most attacks send
	Body               []byte
	Clients, Addresses int // attackers, and from how many addresses
}

// tally is what it answers when it is to end.
type tally struct {
	Steps, Refused int64
	Seconds        float64
}

// AttackersCommand is the name of the command that calls Assault.
const AttackersCommand = "attackers"

// assault starts attackers, in a process that has only the processor time that nobody else wants, as if they were machines of
// their own. stop ends them.
func assault(ctx context.Context, t target) (stop func() (tally, error), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	var answer bytes.Buffer
	cmd := exec.CommandContext(ctx, "chrt", "--idle", "0", self, AttackersCommand)
	cmd.Stdout, cmd.Stderr = &answer, os.Stderr
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("bench: start attackers: %w", err)
	}
	stop = func() (done tally, err error) {
		err = errors.Join(in.Close(), cmd.Wait())
		if err == nil {
			err = json.Unmarshal(answer.Bytes(), &done)
		}
		if err != nil {
			err = fmt.Errorf("bench: attackers: %w", err)
		}
		return done, err
	}
	if err := json.NewEncoder(in).Encode(t); err != nil {
		_, failed := stop()
		return nil, errors.Join(fmt.Errorf("bench: tell attackers: %w", err), failed)
	}
	return stop, nil
}

// pause is what attackers do between steps: the round trip of a network.
const pause = 100 * time.Millisecond

// step is one thing that an attacker does again and again. refused: the server would not.
type step func(ctx context.Context, c *client) (refused bool)

// client is one attacker, or some that share an address.
type client struct {
	http.Client
	dialer net.Dialer
}

// Assault reads who to attack from in, does so until in ends, and writes what came of it to out.
func Assault(ctx context.Context, in io.Reader, out io.Writer) error {
	d := json.NewDecoder(in)
	var t target
	if err := d.Decode(&t); err != nil {
		return fmt.Errorf("bench: read what to attack: %w", err)
	}
	i := slices.Index(Names(), t.Attack)
	if i < 0 || t.Clients < 1 || t.Addresses < 1 || t.Addresses > t.Clients {
		return fmt.Errorf("bench: attack %q by %d from %d addresses makes no sense", t.Attack, t.Clients, t.Addresses)
	}
	if t.Attack == "idle" {
		h := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		defer h.Close()
		t.Server = strings.TrimPrefix(h.URL, "http://")
	}
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, in) // it ends, one way or the other
	})
	clients := make([]*client, t.Addresses)
	for n := range clients {
		// All of 127.0.0.0/8 is this machine; the honest client is 127.0.0.1.
		c := &client{dialer: net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, byte(1+n/250), byte(1+n%250))}}}
		c.Transport = &http.Transport{DialContext: c.dialer.DialContext, MaxIdleConnsPerHost: t.Clients}
		clients[n] = c
	}
	one := attacks[i].step(t)
	var steps, refusals atomic.Int64
	began := time.Now()
	for n := range t.Clients {
		all.Go(func() {
			for ctx.Err() == nil {
				refused := one(ctx, clients[n%len(clients)])
				if ctx.Err() != nil {
					return
				}
				steps.Add(1)
				if refused {
					refusals.Add(1)
				}
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	all.Wait()
	return json.NewEncoder(out).Encode(tally{steps.Load(), refusals.Load(), time.Since(began).Seconds()})
}

// send sends a request, and throws its answer away. It returns where the answer says that there is more.
func (t target) send(ctx context.Context, c *client, method, path string, body []byte) (location string, refused bool) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+t.Server+path, bytes.NewReader(body))
	if err != nil {
		return "", true
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	if t.Token != "" {
		req.Header.Set("Authorization", "Bearer "+t.Token)
	}
	res, err := c.Do(req)
	if err != nil {
		return "", true
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.Header.Get("Location"), err != nil || res.StatusCode == http.StatusTooManyRequests
}

// ask sends the same request again and again.
func ask(t target) step {
	return func(ctx context.Context, c *client) (refused bool) {
		_, refused = t.send(ctx, c, t.Method, t.Path, t.Body)
		return refused
	}
}

// uploads are begun, and never ended.
func uploads(t target) step {
	b := noise(64 << 10)
	return func(ctx context.Context, c *client) (refused bool) {
		where, refused := t.send(ctx, c, "POST", "/v2/mallory/app/blobs/uploads/", nil)
		if !refused && where != "" {
			_, refused = t.send(ctx, c, "PATCH", where, b)
		}
		return refused
	}
}

// bodies are announced, and come a byte each interval.
func bodies(interval time.Duration) func(target) step {
	return func(t target) step {
		head := fmt.Sprintf("POST /v2/mallory/app/blobs/uploads/?digest=%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Length: 1000000000\r\n\r\n",
			digest.FromString("never"), t.Server, t.Token)
		return func(ctx context.Context, c *client) (refused bool) {
			conn, err := c.dialer.DialContext(ctx, "tcp", t.Server)
			if err != nil {
				return true
			}
			defer conn.Close()
			stop := context.AfterFunc(ctx, func() { conn.Close() })
			defer stop()
			if _, err := conn.Write([]byte(head)); err != nil {
				return true
			}
			ended := make(chan bool, 1)
			go func() {
				answer := make([]byte, 64)
				n, _ := conn.Read(answer)
				ended <- bytes.Contains(answer[:n], []byte(" 429 "))
			}()
			for {
				select {
				case refused := <-ended:
					return refused
				case <-time.After(interval):
					if _, err := conn.Write([]byte{0}); err != nil {
						return <-ended
					}
				}
			}
		}
	}
}

// logins guess passwords.
func logins(t target) step {
	var n atomic.Int64
	return func(ctx context.Context, c *client) (refused bool) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+t.Server+"/v2/", nil)
		if err != nil {
			return true
		}
		req.SetBasicAuth("honest", fmt.Sprint("guess ", n.Add(1)))
		res, err := c.Do(req)
		if err != nil {
			return true
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return err != nil || res.StatusCode == http.StatusTooManyRequests
	}
}
