// Package contact measures what a first contact costs: how much later the bytes of a start are
// here, from a server that this worker has no connection to, than over a connection that is
// warm, and which part of that is which.
//
// The server is foil serve, the client that of the worker's daemon (package remote), the path a
// link with a round trip and a rate. Bytes come from bundle.WarmPath, as many as a startup set
// has: nothing but the network is measured. Cold and warm answers take turns.
//
// The parts of a cold answer: TCP's handshake; TLS's; from the request to the first bytes, of
// which HTTP/2's first frame has to be whole; and the rest, in which TCP begins slowly. Names are not
// resolved: the link has no name server.
package contact

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// Options say what is measured.
type Options struct {
	Foil  string
	RTTs  []time.Duration
	Rate  int64 // bits a second
	Queue int64 // bytes; 0: see link.Options
	Bytes int64 // of one answer, at most bundle.MaxWarm
	Runs  int   // of each
	// Connections are how many at once bring an answer, each its share.
	Connections []int
	// Windows are initial windows, in packets, that the routes of both sides have: what the server sends at first, and
	// twice as much that the worker takes; 0: Linux's.
	Windows []int
	// FirstRates are what the server is told by --first-rate, Mbit/s; less than 0: nothing.
	FirstRates []int
	// Idle is for how long the bytes of a connection that is kept are counted; 0: not at all.
	Idle  time.Duration
	Cache string // directory on a disk
	Out   io.Writer
	JSON  string // file for the result; "" for none
	Log   func(line string)
}

// Parts are those of one answer, in seconds.
type Parts struct {
	TCP   float64 `json:"tcp"`
	TLS   float64 `json:"tls"`
	First float64 `json:"first"` // from the request to the first bytes
	Rest  float64 `json:"rest"`
}

// Total is all of it.
func (p Parts) Total() float64 { return p.TCP + p.TLS + p.First + p.Rest }

// Case is one kind of contact over one link.
type Case struct {
	RTT         time.Duration `json:"rtt_ns"`
	TLS         bool          `json:"tls"`
	Connections int           `json:"connections"`
	Window      int           `json:"window"`
	FirstRate   int           `json:"first_rate"` // Mbit/s
	Warm        Parts         `json:"warm"`       // medians
	Cold        Parts         `json:"cold"`       // medians, of the connection that took longest
	More        float64       `json:"more"`       // median of cold less warm, seconds
	Dropped     int64         `json:"dropped"`
}

// Result is what was measured.
type Result struct {
	Bytes int64   `json:"bytes"`
	Cases []Case  `json:"cases"`
	Idle  *Idling `json:"idle,omitempty"`
}

// Idling is what a connection takes that is kept and not used.
type Idling struct {
	TLS   bool    `json:"tls"`
	Hours float64 `json:"hours"` // measured
	Up    float64 `json:"up"`    // bytes an hour, from the worker, IP headers included
	Down  float64 `json:"down"`
}

// Run measures. It must run inside site.Confine.
func Run(ctx context.Context, o Options) (err error) {
	if err := site.Furnish(); err != nil {
		return err
	}
	if o.Runs < 1 || o.Bytes < 1 || o.Bytes > bundle.MaxWarm {
		return fmt.Errorf("bench: %d runs of %d bytes: there is at least one, of 1 to %d", o.Runs, o.Bytes, bundle.MaxWarm)
	}
	if o.Foil, err = filepath.Abs(o.Foil); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	dir, err := site.Scratch(o.Cache, "contact-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	b := &bench{Options: o, dir: dir}
	result := Result{Bytes: o.Bytes}
	for _, rtt := range o.RTTs {
		for _, secure := range []bool{false, true} {
			for _, window := range o.Windows {
				for _, first := range o.FirstRates {
					cases, err := b.over(ctx, rtt, secure, window, first)
					if err != nil {
						return err
					}
					result.Cases = append(result.Cases, cases...)
				}
			}
		}
	}
	if o.Idle > 0 {
		if result.Idle, err = b.idle(ctx); err != nil {
			return err
		}
	}
	if o.JSON != "" {
		text, err := json.MarshalIndent(result, "", "\t")
		if err == nil {
			err = os.WriteFile(o.JSON, append(text, '\n'), 0o644)
		}
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return result.Write(o.Out)
}

type bench struct {
	Options
	dir string
}

// place is a link with a server.
type place struct {
	link   *link.Link
	server *site.Process
	base   string
	tls    *tls.Config
}

// with makes a place, and calls fn.
func (b *bench) with(ctx context.Context, rtt time.Duration, secure bool, window, first int, fn func(*place) error) (err error) {
	l, err := link.New(context.WithoutCancel(ctx), link.Options{RTT: rtt, Rate: b.Rate, Queue: b.Queue})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if window > 0 {
		if err := windows(ctx, l, window); err != nil {
			return err
		}
	}
	p := &place{link: l, base: "http://" + engines.RegistryAddr}
	s := &site.Site{Dir: b.dir, Link: l}
	root, err := os.MkdirTemp(b.dir, "serve-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	args := []string{"serve", "--root", root, "--listen", engines.RegistryAddr, "--insecure-open"}
	if first >= 0 {
		args = append(args, "--first-rate", strconv.Itoa(first))
	}
	if secure {
		certificate, key, err := newCertificate(b.dir, l.Addr(link.Cloud))
		if err != nil {
			return err
		}
		pool := x509.NewCertPool()
		if text, err := os.ReadFile(certificate); err != nil || !pool.AppendCertsFromPEM(text) {
			return fmt.Errorf("bench: certificate: %w", err)
		}
		p.base, p.tls = "https://"+engines.RegistryAddr, &tls.Config{RootCAs: pool}
		args = append(args, "--tls-cert", certificate, "--tls-key", key)
	}
	if p.server, err = s.Start(link.Cloud, nil, b.Foil, args...); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.server.Stop(syscall.SIGTERM)) }()
	starting, cancel := context.WithTimeoutCause(ctx, 30*time.Second, site.ErrTooLong)
	defer cancel()
	if err := p.server.Until(starting, "start foil serve", func() bool {
		conn, err := l.DialContext(starting, link.Cloud, "tcp4", engines.RegistryAddr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}); err != nil {
		return err
	}
	return fn(p)
}

// windows sets the initial windows of both sides' routes, as an administrator does.
func windows(ctx context.Context, l *link.Link, packets int) error {
	for side, setting := range map[link.Side][]string{link.Cloud: {"initcwnd", strconv.Itoa(packets)}, link.Edge: {"initrwnd", strconv.Itoa(2 * packets)}} {
		out, err := l.Command(ctx, side, "ip", "-4", "route", "show", "proto", "kernel").CombinedOutput()
		if err != nil {
			return fmt.Errorf("bench: ip route show: %w: %s", err, out)
		}
		route := strings.Fields(strings.ReplaceAll(strings.SplitN(string(out), "\n", 2)[0], "linkdown", ""))
		args := append(append([]string{"-4", "route", "change"}, route...), "proto", "kernel")
		if out, err := l.Command(ctx, side, "ip", append(args, setting...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("bench: ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// client is that of a worker.
func (p *place) client() (*remote.Client, error) {
	return remote.New(remote.Options{Base: p.base, TLS: p.tls, Dial: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = p.link.Do(link.Edge, func() error {
			d := net.Dialer{Control: func(_, _ string, socket syscall.RawConn) error {
				_ = kernel.LetReceive(socket) // as the daemon does
				return nil
			}}
			conn, err = d.DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}})
}

// over measures over one link.
func (b *bench) over(ctx context.Context, rtt time.Duration, secure bool, window, first int) (cases []Case, err error) {
	err = b.with(ctx, rtt, secure, window, first, func(p *place) error {
		warm, err := p.client()
		if err != nil {
			return err
		}
		defer warm.Close()
		if _, err := warm.Warm(ctx, bundle.MaxWarm); err != nil {
			return err
		}
		for _, connections := range b.Connections {
			c := Case{RTT: rtt, TLS: secure, Connections: connections, Window: window, FirstRate: first}
			dropped := p.link.Stats(link.Cloud).Dropped
			var more []float64
			var warms, colds []Parts
			for range b.Runs {
				w, err := answer(ctx, warm, b.Bytes)
				if err != nil {
					return err
				}
				cold, err := b.cold(ctx, p, connections)
				if err != nil {
					return err
				}
				warms, colds, more = append(warms, w), append(colds, cold), append(more, cold.Total()-w.Total())
			}
			c.Warm, c.Cold, c.More = medians(warms), medians(colds), stats.Median(more)
			c.Dropped = p.link.Stats(link.Cloud).Dropped - dropped
			b.Log(fmt.Sprintf("%v, TLS %v, %d connections, window %d, first rate %d: %.2f s more", rtt, secure, connections, window, first, c.More))
			cases = append(cases, c)
		}
		return nil
	})
	return cases, err
}

// cold has an answer come over connections that are new, each its share.
func (b *bench) cold(ctx context.Context, p *place, connections int) (longest Parts, err error) {
	var running sync.WaitGroup
	parts, errs := make([]Parts, connections), make([]error, connections)
	for i := range connections {
		running.Go(func() {
			c, err := p.client()
			if err == nil {
				parts[i], err = answer(ctx, c, b.Bytes/int64(connections))
				c.Close()
			}
			errs[i] = err
		})
	}
	running.Wait()
	for _, one := range parts {
		if one.Total() > longest.Total() {
			longest = one
		}
	}
	return longest, errors.Join(errs...)
}

// answer has n bytes come.
func answer(ctx context.Context, c *remote.Client, n int64) (p Parts, err error) {
	began := time.Now()
	connected, secured := began, began
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		ConnectDone:      func(_, _ string, _ error) { connected, secured = time.Now(), time.Now() },
		TLSHandshakeDone: func(tls.ConnectionState, error) { secured = time.Now() },
	})
	s, err := c.Stream(traced, bundle.WarmPath, bundle.Warm{Bytes: n}, 0)
	if err != nil {
		return p, err
	}
	defer s.Close()
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		return p, err
	}
	first := time.Now()
	got, err := io.Copy(io.Discard, s)
	if err == nil && got != n-1 {
		err = fmt.Errorf("bench: %d bytes came, asked for %d", got+1, n)
	}
	return Parts{
		TCP: connected.Sub(began).Seconds(), TLS: secured.Sub(connected).Seconds(),
		First: first.Sub(secured).Seconds(), Rest: time.Since(first).Seconds(),
	}, err
}

func medians(all []Parts) Parts {
	of := func(part func(Parts) float64) float64 {
		var x []float64
		for _, p := range all {
			x = append(x, part(p))
		}
		return stats.Median(x)
	}
	return Parts{
		TCP: of(func(p Parts) float64 { return p.TCP }), TLS: of(func(p Parts) float64 { return p.TLS }),
		First: of(func(p Parts) float64 { return p.First }), Rest: of(func(p Parts) float64 { return p.Rest }),
	}
}

// idle counts what goes over the link while a connection is kept, and nothing else happens. A
// round trip makes no difference to that.
func (b *bench) idle(ctx context.Context) (idling *Idling, err error) {
	err = b.with(ctx, 50*time.Millisecond, true, 0, -1, func(p *place) error {
		c, err := p.client()
		if err != nil {
			return err
		}
		defer c.Close()
		keeping, end := context.WithCancel(ctx)
		kept := make(chan struct{})
		go func() { defer close(kept); c.Keep(keeping, remote.Keeping{}) }()
		defer func() { end(); <-kept }()
		if err := p.server.Until(ctx, "keep a connection", func() bool { _, ok := c.Kept(); return ok }); err != nil {
			return err
		}
		up, down, began := p.link.Stats(link.Edge).Bytes, p.link.Stats(link.Cloud).Bytes, time.Now()
		select {
		case <-time.After(b.Idle):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		hours := time.Since(began).Hours()
		idling = &Idling{
			TLS: true, Hours: hours,
			Up:   float64(p.link.Stats(link.Edge).Bytes-up) / hours,
			Down: float64(p.link.Stats(link.Cloud).Bytes-down) / hours,
		}
		return nil
	})
	return idling, err
}

// Write writes a result as a table.
func (r Result) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "\n%.1f MB over a new connection, and over a warm one; seconds, medians\n\nround trip\tTLS\tconnections\twindow\tfirst rate\twarm\tcold\tmore\tround trips\tTCP\tTLS\tfirst bytes\tslow start\tdropped\n", float64(r.Bytes)/1e6)
	for _, c := range r.Cases {
		secure, window, first := "no", "Linux's", "default"
		if c.TLS {
			secure = "yes"
		}
		if c.Window > 0 {
			window = strconv.Itoa(c.Window)
		}
		switch {
		case c.FirstRate == 0:
			first = "none"
		case c.FirstRate > 0:
			first = strconv.Itoa(c.FirstRate) + " Mbit/s"
		}
		fmt.Fprintf(t, "%v\t%s\t%d\t%s\t%s\t%.2f\t%.2f\t%.2f\t%.1f\t%.2f\t%.2f\t%.2f\t%.2f\t%d\n", c.RTT, secure, c.Connections, window, first,
			c.Warm.Total(), c.Cold.Total(), c.More, c.More/c.RTT.Seconds(),
			c.Cold.TCP-c.Warm.TCP, c.Cold.TLS-c.Warm.TLS, c.Cold.First-c.Warm.First, c.Cold.Rest-c.Warm.Rest, c.Dropped)
	}
	if i := r.Idle; i != nil {
		fmt.Fprintf(t, "\nA connection that is kept, with TLS: %.0f kB an hour up, %.0f kB down (counted for %v)\n",
			i.Up/1e3, i.Down/1e3, time.Duration(i.Hours*float64(time.Hour)).Round(time.Second))
	}
	return t.Flush()
}
