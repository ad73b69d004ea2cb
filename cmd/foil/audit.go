package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// audit is the file of --audit. What rotates it renames it and sends SIGHUP; the file is
// then opened again under its name.
type audit struct {
	path    string
	failed  func(error) // told when it cannot be opened again
	signals chan os.Signal
	done    chan struct{}

	mu  sync.Mutex
	out io.Writer // guarded by mu
	own *os.File  // guarded by mu: nil: it is standard output
}

// openAudit opens the file at path; - is stdout. failed is told when it cannot be opened again.
func openAudit(stdout io.Writer, path string, failed func(error)) (*audit, error) {
	if path == "-" {
		return &audit{out: stdout}, nil
	}
	a := &audit{path: path, failed: failed, signals: make(chan os.Signal, 1), done: make(chan struct{})}
	if err := a.open(); err != nil {
		return nil, err
	}
	signal.Notify(a.signals, syscall.SIGHUP)
	go func() {
		defer close(a.done)
		for range a.signals {
			// The old file goes on if that fails; its lines are worth more than the rotation.
			if err := a.open(); err != nil {
				a.failed(err)
			}
		}
	}()
	return a, nil
}

func (a *audit) open() error {
	f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.own
	a.out, a.own = f, f
	if old != nil {
		return old.Close()
	}
	return nil
}

// Write adds a line.
func (a *audit) Write(b []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.Write(b)
}

// Close ends the log.
func (a *audit) Close() error {
	if a.signals == nil {
		return nil
	}
	signal.Stop(a.signals)
	close(a.signals)
	<-a.done
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.own.Sync(), a.own.Close())
}
