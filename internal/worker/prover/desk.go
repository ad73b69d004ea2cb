package prover

import (
	"context"
	"io"
	"time"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/proof"
)

// desk is where proofs work and rest, one at a time. Who waits for it has it in turn.
type desk chan struct{}

func newDesk() desk { return make(desk, 1) }

// seat is what one proof has of the desk. It is for one goroutine.
type seat struct {
	ctx   context.Context
	desk  desk
	taken bool
	since time.Time
	// priority is that of the thread that works; nil in tests.
	priority *kernel.Priority
}

// sit waits for the desk. It returns the cause if the proof is to end before.
func (s *seat) sit() error {
	if s.taken {
		return nil
	}
	select {
	case s.desk <- struct{}{}:
		s.taken, s.since = true, time.Now()
		return nil
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

func (s *seat) leave() {
	if s.taken {
		s.taken = false
		<-s.desk
	}
}

// away calls fn, which waits for a server, while others work.
func (s *seat) away(fn func() error) error {
	s.leave()
	err := fn()
	if cause := s.sit(); cause != nil {
		return cause
	}
	return err
}

// server is an image's server, asked by a proof that leaves the desk for as long as it waits.
type server struct {
	proof.Server
	seat *seat
}

// Recipe implements proof.Server.
func (s server) Recipe(ctx context.Context, layer int) (proof.Sections, error) {
	return s.sections(func() (proof.Sections, error) { return s.Server.Recipe(ctx, layer) })
}

// Contents implements proof.Server.
func (s server) Contents(ctx context.Context, layer int, runs []bundle.ContentRun) (proof.Sections, error) {
	return s.sections(func() (proof.Sections, error) { return s.Server.Contents(ctx, layer, runs) })
}

func (s server) sections(ask func() (proof.Sections, error)) (answer proof.Sections, err error) {
	var got proof.Sections
	err = s.seat.away(func() (err error) {
		got, err = ask()
		return err
	})
	if err != nil {
		if got != nil {
			_ = got.Close()
		}
		return nil, err
	}
	return sections{got, s.seat}, nil
}

// Blob implements proof.Server.
func (s server) Blob(ctx context.Context, layer int) (io.ReadCloser, error) {
	var got io.ReadCloser
	err := s.seat.away(func() (err error) {
		got, err = s.Server.Blob(ctx, layer)
		return err
	})
	if err != nil {
		if got != nil {
			_ = got.Close()
		}
		return nil, err
	}
	return blob{got, s.seat}, nil
}

type sections struct {
	proof.Sections
	seat *seat
}

// Next implements proof.Sections.
func (a sections) Next() (section any, err error) {
	err = a.seat.away(func() (err error) {
		section, err = a.Sections.Next()
		return err
	})
	return section, err
}

type blob struct {
	io.ReadCloser
	seat *seat
}

// Read implements io.Reader.
func (b blob) Read(p []byte) (n int, err error) {
	err = b.seat.away(func() (err error) {
		n, err = b.ReadCloser.Read(p)
		return err
	})
	return n, err
}
