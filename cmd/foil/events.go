package main

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
)

// An eventPrinter shows the events of a pull or a run.
type eventPrinter interface {
	print(ev api.Event) error
	// close takes what is only for the moment off the terminal.
	close() error
}

// jsonEvents prints every event as it is.
type jsonEvents struct{ w io.Writer }

func (p jsonEvents) print(ev api.Event) error { return printJSON(p.w, ev) }
func (p jsonEvents) close() error             { return nil }

// lineEvents prints a line an event.
type lineEvents struct{ w io.Writer }

func (p lineEvents) print(ev api.Event) error {
	if ev.Event == api.Failed {
		return nil // the error is printed when the command ends with it
	}
	_, err := fmt.Fprintln(p.w, eventLine(ev))
	return err
}

func (p lineEvents) close() error { return nil }

// barEvents draws a progress bar for each image, and prints the last event of each below them.
type barEvents struct {
	display *progress.Display
	w       io.Writer // for the last events; nil: nowhere
	bars    []*bar    // in the order in which the images were first heard of
}

// bar is what is known of one image.
type bar struct {
	rate progress.Rate
	last api.Event
	progress.Transfer
}

func (p *barEvents) print(ev api.Event) error {
	if ev.Event == api.Failed {
		return nil
	}
	i := slices.IndexFunc(p.bars, func(b *bar) bool { return b.last.Ref == ev.Ref })
	if i < 0 {
		i = len(p.bars)
		p.bars = append(p.bars, new(bar))
	}
	b := p.bars[i]
	if ev.Proof != nil && b.last.Proof == nil {
		b.rate = progress.Rate{} // of what is hashed, from here on
	}
	b.last, b.Transfer = ev, transfer(ev)
	b.Rate = b.rate.Add(time.Now(), b.Moved)
	all := make([]progress.Transfer, len(p.bars))
	for i, b := range p.bars {
		all[i] = b.Transfer
	}
	return p.display.Show(all...)
}

func (p *barEvents) close() error {
	if err := p.display.Clear(); err != nil {
		return err
	}
	for _, b := range p.bars {
		if p.w == nil || b.last.Event == api.Progress || b.last.Event == api.Proving {
			continue
		}
		if _, err := fmt.Fprintln(p.w, eventLine(b.last)); err != nil {
			return err
		}
	}
	return nil
}

// together shows the events of several pulls, one after the other.
type together struct {
	mu  sync.Mutex
	out eventPrinter // guarded by mu
}

func (p *together) print(ev api.Event) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.print(ev)
}

func (p *together) close() error { return p.out.close() }

// noEvents shows nothing.
type noEvents struct{}

func (noEvents) print(api.Event) error { return nil }
func (noEvents) close() error          { return nil }

// transfer is what a bar shows of an event.
func transfer(ev api.Event) progress.Transfer {
	t := progress.Transfer{
		Name: ev.Ref, Moved: ev.BytesMoved, Total: ev.BytesTotal,
		Waits: ev.Waits, Waited: seconds(ev.Waited),
		Trouble: ev.Trouble, Done: ev.Event == api.Complete,
	}
	if ev.Event != api.Progress {
		t.Phase = string(ev.Event)
	}
	if p := ev.Proof; p != nil {
		t.Moved, t.Total, t.Done = p.Hashed, p.Total, ev.Event == api.Proven
		t.Phase = provingPhase(p.State, p.Layer, p.Layers)
	}
	return t
}

// provingPhase says what a proof is doing.
func provingPhase(state string, layer, layers int) string {
	switch {
	case layer > 0:
		return fmt.Sprintf("proving, layer %d of %d", layer, layers)
	case layers > 0:
		return "proving, files"
	case state == "served":
		return "waits for its proof"
	}
	return proofWord(state)
}

// eventLine tells an event in one line.
func eventLine(ev api.Event) string {
	s := fmt.Sprintf("%s: %s after %s", ev.Ref, ev.Event, progress.Duration(seconds(ev.Elapsed)))
	switch ev.Event {
	case api.Resolved:
		return s + ", " + ev.Digest
	case api.Proving:
		if p := ev.Proof; p != nil {
			return fmt.Sprintf("%s: %s after %s, %s of %s hashed", ev.Ref, provingPhase(p.State, p.Layer, p.Layers), progress.Duration(seconds(ev.Elapsed)), progress.Bytes(p.Hashed), progress.Bytes(p.Total))
		}
	case api.Proven:
		return s
	case api.Progress:
		s = fmt.Sprintf("%s: %s", ev.Ref, progress.Duration(seconds(ev.Elapsed)))
	}
	s += ", " + progress.Bytes(ev.BytesMoved)
	if ev.BytesTotal > 0 && ev.Event != api.Complete {
		s += " of " + progress.Bytes(ev.BytesTotal)
	}
	s += " moved"
	if ev.Trouble != "" {
		s += ", trying again: " + progress.OneLine(ev.Trouble)
	}
	if ev.Waits > 0 {
		s += fmt.Sprintf(", %d reads waited %s", ev.Waits, progress.Duration(seconds(ev.Waited)))
	}
	return s
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
