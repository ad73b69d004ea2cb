// Package servers remembers which servers of bundles the worker pulls from, and keeps a warm
// connection to those that it uses most, so that the next pull does not begin with handshakes
// and TCP's slow start. Nobody has to name them.
//
// What is remembered is in <root>/servers.json: addresses, and how often and when they were
// used. No credential is, nor an image's name, nor is any shown to a server on such a
// connection. A record that is lost costs one slow first pull.
//
// Whoever gets a worker to pull from a server of his own is connected to until it was not used
// for ForgetAfter. So little may be had by that: few servers, one small request every nine
// seconds, and few warm-ups (remote.Keeping).
package servers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/worker/locks"
	"hydrofoil.dev/foil/internal/worker/records"
	"hydrofoil.dev/foil/internal/worker/remote"
)

// Options configure a Set. Path and Client are required.
type Options struct {
	// Path is the record's.
	Path string
	// Most is how many servers a connection is kept to; 0: none, and none is remembered.
	Most int
	// Named are addresses that somebody else keeps a connection to.
	Named []string
	// Keeping says how connections are kept.
	Keeping remote.Keeping
	// Client returns the client by which pulls speak to a server, without credentials. An
	// error means that the server is not to be had any more as it was.
	Client func(ctx context.Context, s Server) (*remote.Client, error)
	Logger *slog.Logger // nil means none
}

// Set is what a worker knows of servers. Close ends its connections.
type Set struct {
	opts Options
	log  *slog.Logger
	stop context.CancelFunc
	work sync.WaitGroup
	told bool          // the record cannot be written, and the log says so; of run alone
	wake chan struct{} // has room for one: something was used since run looked

	mu     locks.Mutex[locks.Leaf]
	memory memory  // guarded by mu
	kept   []*kept // guarded by mu
}

// kept is a connection that is kept.
type kept struct {
	server Server
	client *remote.Client
	end    context.CancelFunc
}

// lookEvery is how often it is asked who has not been used for too long.
const lookEvery = time.Hour

// Open reads the record, and begins to connect. One that cannot be read is begun anew.
func Open(o Options) *Set {
	s := &Set{opts: o, log: o.Logger, wake: make(chan struct{}, 1)}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	if o.Most <= 0 {
		return s
	}
	b, err := os.ReadFile(o.Path)
	if err == nil {
		s.memory, err = decodeMemory(b)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("which servers were used is not known; it is noted anew", "path", o.Path, "error", err)
	}
	s.work.Go(func() { s.run(ctx) })
	return s
}

// Close ends the connections that are kept, and waits for that.
func (s *Set) Close() {
	s.stop()
	s.work.Wait()
}

// Used notes that a pull had what it wanted from a server. It waits for nothing.
func (s *Set) Used(server Server) {
	if s.opts.Most <= 0 || server.check() != nil {
		return
	}
	s.mu.Lock()
	s.memory.note(time.Now(), server)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Clients returns those whose connections are kept.
func (s *Set) Clients() (list []*remote.Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kept {
		list = append(list, k.client)
	}
	return list
}

// run keeps connections to the right servers, and writes down what was used.
func (s *Set) run(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for used := false; ; {
		s.keep(ctx)
		if used {
			s.write()
		}
		select {
		case <-s.wake:
			used = true
		case <-tick.C:
			used = false
		case <-ctx.Done():
			if len(s.wake) > 0 {
				s.write()
			}
			for _, k := range s.kept { // nobody else changes it
				k.end()
			}
			return
		}
	}
}

// keep begins and ends connections.
func (s *Set) keep(ctx context.Context) {
	s.mu.Lock()
	wanted := s.memory.top(time.Now(), s.opts.Most+len(s.opts.Named))
	s.mu.Unlock()
	wanted = slices.DeleteFunc(wanted, func(w Server) bool { return slices.Contains(s.opts.Named, w.Base) })
	wanted = wanted[:min(len(wanted), s.opts.Most)]
	var now []*kept
	for _, k := range s.kept { // written here only
		if slices.Contains(wanted, k.server) {
			now = append(now, k)
			continue
		}
		k.end()
	}
	for _, w := range wanted {
		if slices.ContainsFunc(now, func(k *kept) bool { return k.server == w }) {
			continue
		}
		c, err := s.opts.Client(ctx, w)
		if err != nil {
			s.log.Debug("a server that was used is not connected to", "server", w.Base, "error", err)
			continue
		}
		mine, end := context.WithCancel(ctx)
		s.work.Go(func() { c.Keep(mine, s.opts.Keeping) })
		now = append(now, &kept{w, c, end})
	}
	s.mu.Lock()
	s.kept = now
	s.mu.Unlock()
}

// write writes the record. It is a hint, so that nothing waits until it is durable.
func (s *Set) write() {
	s.mu.Lock()
	b, err := s.memory.encode()
	s.mu.Unlock()
	if err == nil {
		err = records.Replace(s.opts.Path, b)
	}
	if err != nil && !s.told {
		s.log.Warn("which servers were used is not noted", "error", fmt.Errorf("%s: %w", s.opts.Path, err))
	}
	s.told = err != nil
}
