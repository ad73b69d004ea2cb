package neighbour

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/link"
	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/stats"
)

// Connections is what a connection of somebody else has of the link while an image arrives over it. It is one download that
// does not end, by the congestion control that Linux has by default (CUBIC), as of any other program.
type Connections struct {
	Image string       `json:"image"`
	Link  string       `json:"link"`
	Rows  []Connection `json:"rows"`
}

// Connection is that beside one engine, by round.
type Connection struct {
	Name string `json:"name"`
	// Shares are the connection's of all bytes that came over the link, from the command until nine tenths of the
	// image's had.
	Shares   []float64 `json:"shares"`
	Complete []float64 `json:"complete_seconds"` // from the command on
}

const (
	sampleEvery = 50 * time.Millisecond
	// settles is how long the other connection has the link for itself, to find its rate.
	settles = 3 * time.Second
	// connectionPort is nobody else's.
	connectionPort = 5999
)

// connections measures one image.
func (m *measurement) connections(ctx context.Context, name string) (c Connections, err error) {
	c = Connections{Image: name, Link: describe(m.Link)}
	builds := map[string]string{foil: m.Programs.Foil}
	names := []string{overlayfs, foil}
	if m.Against != "" {
		builds[against] = m.Against
		names = append(names, against)
	}
	for _, name := range names {
		c.Rows = append(c.Rows, Connection{Name: name})
	}
	for round := range m.Rounds {
		for i := range names {
			row := &c.Rows[(i+round)%len(names)]
			share, complete, err := m.beside(ctx, row.Name, builds[row.Name])
			if err != nil {
				return c, fmt.Errorf("%s, %s beside another connection: %w", name, row.Name, err)
			}
			row.Shares, row.Complete = append(row.Shares, share), append(row.Complete, complete.Seconds())
			if m.Log != nil {
				m.Log(fmt.Sprintf("measured %s, %s, round %d: another connection has %.2f of the link, complete after %v", name, row.Name, round+1, share, complete.Round(time.Millisecond)))
			}
		}
	}
	return c, nil
}

// beside has an image arrive at a worker of its own beside another connection.
func (m *measurement) beside(ctx context.Context, name, build string) (share float64, complete time.Duration, err error) {
	m.runs++
	dir := filepath.Join(m.site.Dir, fmt.Sprintf("run-%d", m.runs))
	defer func() { err = errors.Join(err, site.RemoveTree(dir)) }()
	var engine engines.Engine = &engines.Containerd{Snapshotter: overlayfs}
	programs := m.Programs
	if build != "" {
		engine, programs.Foil = &engines.Hydrofoil{}, build
	}
	w := engine.Worker(m.site, programs, dir)
	if err := w.Start(ctx); err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	other, err := downloadFrom(ctx, m.site.Link)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, other.end()) }()
	select {
	case <-time.After(settles):
	case <-ctx.Done():
		return 0, 0, context.Cause(ctx)
	}
	t := engines.Begin(m.site, w.Processes())
	defer t.End()
	sampled := sample(m.site.Link, other)
	c, err := w.Provision(ctx, m.im, t)
	defer func() { err = errors.Join(err, c.Stop()) }()
	if err == nil {
		err = w.Complete(ctx, m.im, t)
	}
	samples := sampled()
	if err != nil {
		return 0, 0, err
	}
	at, _ := t.At(engines.Complete)
	share, err = shareOf(samples)
	return share, at.Time, err
}

// moment is how many bytes had come, of all and of the other connection.
type moment struct{ all, other int64 }

// sample notes moments until it is told to end.
func sample(l *link.Link, other *endless) (end func() []moment) {
	var list []moment
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			list = append(list, moment{l.Stats(link.Cloud).Bytes, other.got.Load()})
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	return func() []moment {
		close(stop)
		<-done
		return list
	}
}

// shareOf is the other connection's share of the bytes that came until nine tenths of the image's had.
func shareOf(list []moment) (float64, error) {
	first, last := list[0], list[len(list)-1]
	image := func(m moment) int64 { return m.all - first.all - (m.other - first.other) }
	for _, m := range list {
		if all := m.all - first.all; all > 0 && image(m) >= image(last)*9/10 {
			return float64(m.other-first.other) / float64(all), nil
		}
	}
	return 0, errors.New("bench: nothing came over the link")
}

// endless is a download without an end.
type endless struct {
	got      atomic.Int64
	conn     net.Conn
	listener net.Listener
	done     chan error
}

// downloadFrom begins one from the cloud to the edge.
func downloadFrom(ctx context.Context, l *link.Link) (_ *endless, err error) {
	address := fmt.Sprintf("%s:%d", l.Addr(link.Cloud), connectionPort)
	e := &endless{done: make(chan error, 2)}
	if e.listener, err = l.Listen(link.Cloud, "tcp", address); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	go func() {
		conn, err := e.listener.Accept()
		if err == nil {
			_, err = io.Copy(conn, zeros{})
			conn.Close()
		}
		e.done <- err
	}()
	if e.conn, err = l.DialContext(ctx, link.Edge, "tcp", address); err != nil {
		return nil, errors.Join(fmt.Errorf("bench: %w", err), e.listener.Close())
	}
	go func() {
		buffer := make([]byte, 256<<10)
		for {
			n, err := e.conn.Read(buffer)
			e.got.Add(int64(n))
			if err != nil {
				e.done <- err
				return
			}
		}
	}()
	return e, nil
}

// end ends it. An error says that it had ended before.
func (e *endless) end() error {
	var early error
	select {
	case early = <-e.done:
		early = fmt.Errorf("bench: the other connection ended early: %w", early)
		e.done <- nil
	default:
	}
	e.conn.Close()
	e.listener.Close()
	<-e.done
	<-e.done
	return early
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// Write writes a result as a table, of medians.
func (c Connections) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "\nAnother connection while %s arrives over %s; medians of %d\n\n", c.Image, c.Link, len(c.Rows[0].Shares))
	fmt.Fprintln(t, "\tits share of the link\tthe image is complete")
	for _, row := range c.Rows {
		fmt.Fprintf(t, "%s\t%.2f\t%.1f s\n", row.Name, stats.Median(row.Shares), stats.Median(row.Complete))
	}
	return t.Flush()
}
