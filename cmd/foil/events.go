package main

import (
	"fmt"
	"io"
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

// barEvents draws a progress bar, and prints the last event below it.
type barEvents struct {
	display *progress.Display
	w       io.Writer // for the last event; nil: nowhere
	rate    progress.Rate
	last    api.Event
}

func (p *barEvents) print(ev api.Event) error {
	if ev.Event == api.Failed {
		return nil
	}
	p.last = ev
	t := transfer(ev)
	t.Rate = p.rate.Add(time.Now(), ev.BytesMoved)
	return p.display.Show(t)
}

func (p *barEvents) close() error {
	if err := p.display.Clear(); err != nil {
		return err
	}
	if p.w == nil || p.last.Event == "" || p.last.Event == api.Progress {
		return nil
	}
	_, err := fmt.Fprintln(p.w, eventLine(p.last))
	return err
}

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
	return t
}

// eventLine tells an event in one line.
func eventLine(ev api.Event) string {
	s := fmt.Sprintf("%s: %s after %s", ev.Ref, ev.Event, progress.Duration(seconds(ev.Elapsed)))
	switch ev.Event {
	case api.Resolved:
		return s + ", " + ev.Digest
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
