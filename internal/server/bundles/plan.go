package bundles

import (
	"context"
	"time"

	"hydrofoil.dev/foil/internal/server/planner"
	"hydrofoil.dev/foil/internal/server/startup"
)

// plan is the plan of a pull, which is made in the background.
type plan struct {
	p    *pull
	done chan struct{} // closed when it has been made
	made *planner.Plan // nil, with err, if it cannot be
	err  error
	sent bool
}

// plan begins to make the plan of what d says. Of an image of which only the header is wanted
// nothing is planned.
func (p *pull) plan(ctx context.Context, d *planner.Difference, x *planner.Index, encoded []byte, set *startup.Set, delivery *startup.Delivery) *plan {
	l := &plan{p: p, done: make(chan struct{})}
	if p.req.Image.Header {
		l.made = new(planner.Plan)
		close(l.done)
		return l
	}
	go func() {
		defer close(l.done)
		defer p.h.o.Guard.Place(ctx)()
		began := time.Now()
		defer func() { p.charge(time.Since(began)) }()
		var guess planner.Order
		if set == nil && delivery == nil {
			guess, l.err = p.h.serviceOrder(ctx, p.image, x, encoded, p.req.Image.Service(p.image.Image.Config))
		} else {
			guess, l.err = p.h.order(ctx, p.image, x, encoded)
		}
		if l.err != nil {
			return
		}
		d.SetOrder(orderOf(x, guess, set, delivery != nil))
		l.made = d.Plan()
	}()
	return l
}

// wait waits until it has been made, or cannot be.
func (l *plan) wait() { <-l.done }

// ready reports whether it has been made.
func (l *plan) ready() bool {
	select {
	case <-l.done:
		return l.err == nil
	default:
		return false
	}
}

// send sends it, once.
func (l *plan) send() error {
	if l.sent {
		return nil
	}
	l.sent = true
	l.p.makeAnew(l.made.Sources)
	l.p.queue.start(l.made.Sources)
	if err := l.p.w.Plan(&l.made.Wire); err != nil {
		return writeFailed{err}
	}
	if err := l.p.flush(); err != nil {
		return writeFailed{err}
	}
	return nil
}

// between is what goes between two pieces of a startup set for a worker that takes it there
// (bundle.Request.EarlyPlan): the plan, as soon as there is one, and what has been promoted since.
func (l *plan) between(ctx context.Context) error {
	if !l.p.req.EarlyPlan || !l.ready() {
		return nil
	}
	if err := l.send(); err != nil {
		return err
	}
	return l.p.suspect(l.p.queue.sendPromoted(ctx, l.p.h.frames, l.p.w, l.p.flush))
}

// suspect passes on an error of frames or pages of the image, which is repaired before it is
// served again if they are damaged.
func (p *pull) suspect(err error) error {
	if isDamage(err) {
		p.h.suspect(p.image)
	}
	return err
}
