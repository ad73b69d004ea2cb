package site

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"hydrofoil.dev/foil/bench/link"
)

// Process is a program that runs on one side of the link until it is stopped.
type Process struct {
	Log  string        // path of the file with what it has said
	Done chan struct{} // closed when it has ended
	Err  error         // how it ended; read after Done
	// Init finds the ID of the first process of the container that this runs in
	// the foreground; nil if it runs none. exec probes need it.
	Init func(ctx context.Context) (int, error)

	name string
	cmd  *exec.Cmd
}

// Stand makes a process that stands for what somebody else runs, such as a
// container of a daemon. Who follows that appends what it says to the log, and
// calls end once, with how it ended.
func (s *Site) Stand(name string) (p *Process, end func(error), err error) {
	log, err := os.CreateTemp(s.Dir, name+"-*.log")
	if err != nil {
		return nil, nil, fmt.Errorf("bench: %w", err)
	}
	if err := log.Close(); err != nil {
		return nil, nil, fmt.Errorf("bench: %w", err)
	}
	p = &Process{name: name, Log: log.Name(), Done: make(chan struct{})}
	return p, func(err error) {
		p.Err = err
		close(p.Done)
	}, nil
}

// PID is the process's ID; 0 for one that only stands for another.
func (p *Process) PID() int {
	if p.cmd == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// Start starts a program in the background. Files are its descriptors from 3 on.
func (s *Site) Start(side link.Side, files []*os.File, name string, args ...string) (*Process, error) {
	base := filepath.Base(name)
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") && !strings.Contains(args[0], "/") {
		base += "-" + args[0]
	}
	log, err := os.CreateTemp(s.Dir, base+"-*.log")
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer log.Close()
	p := &Process{name: base, Log: log.Name(), Done: make(chan struct{})}
	// Not of the caller's context: what is stopped in order is stopped by stop,
	// and what is not, by the end of the namespaces.
	p.cmd = exec.Command(name, args...)
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.ExtraFiles = log, log, files
	if err := s.Link.Start(side, p.cmd); err != nil {
		return nil, fmt.Errorf("bench: start %s: %w", name, err)
	}
	go func() {
		p.Err = p.cmd.Wait()
		s.count(side, p.cmd.ProcessState)
		close(p.Done)
	}()
	return p, nil
}

// Stop asks a process to end and waits; one that does not listen is killed.
func (p *Process) Stop(signal syscall.Signal) error {
	select {
	case <-p.Done:
		return nil
	default:
	}
	if p.cmd == nil {
		return fmt.Errorf("bench: %s is run by somebody else", p.name)
	}
	p.cmd.Process.Signal(signal)
	select {
	case <-p.Done:
		return nil
	case <-time.After(15 * time.Second):
	}
	p.cmd.Process.Kill()
	<-p.Done
	return fmt.Errorf("bench: %s did not end on %v and was killed%s", p.name, signal, p.Said())
}

// how it ended, in words; after Done.
func (p *Process) how() string {
	if p.Err == nil {
		return "in order"
	}
	return p.Err.Error()
}

// Said is the end of a process's log, to go into an error.
func (p *Process) Said() string {
	text, err := os.ReadFile(p.Log)
	if err != nil || len(strings.TrimSpace(string(text))) == 0 {
		return ""
	}
	return "; it said:\n" + lastLines(strings.TrimSpace(string(text)))
}

func lastLines(text string) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}

// Until polls test until it is true, ctx ends, or p does (p may be nil).
func (p *Process) Until(ctx context.Context, what string, test func() bool) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var done chan struct{}
	if p != nil {
		done = p.Done
	}
	for !test() {
		select {
		case <-ctx.Done():
			return p.gaveUp(ctx, what)
		case <-done:
			return p.endedEarly(what)
		case <-ticker.C:
		}
	}
	return nil
}

// gaveUp is the error of who waited for something until ctx ended; p may be nil.
func (p *Process) gaveUp(ctx context.Context, what string) error {
	err := fmt.Errorf("bench: %s: %w", what, context.Cause(ctx))
	if p != nil && errors.Is(context.Cause(ctx), ErrTooLong) {
		err = fmt.Errorf("%w%s", err, p.Said())
	}
	return err
}

// endedEarly is the error of who waited for something when p ended.
func (p *Process) endedEarly(what string) error {
	return fmt.Errorf("bench: %s: %s ended too early (%s)%s", what, p.name, p.how(), p.Said())
}

// ErrTooLong ends steps that would otherwise wait for ever.
var ErrTooLong = errors.New("it takes too long")

// Run runs a program to its end and gives its standard output.
func (s *Site) Run(ctx context.Context, side link.Side, name string, args ...string) (string, error) {
	cmd := s.Link.Command(ctx, side, name, args...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	s.count(side, cmd.ProcessState)
	if err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("bench: %s: %w", filepath.Base(name), context.Cause(ctx))
		}
		// ctr draws its progress on its standard output, over and over.
		said := strings.TrimSpace(stderr.String())
		if said == "" {
			said = strings.TrimSpace(stdout.String())
		}
		return "", fmt.Errorf("bench: %s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, lastLines(said))
	}
	return stdout.String(), nil
}

// count adds up the processor time of a program that has ended at the edge, and
// of those that it waited for.
func (s *Site) count(side link.Side, state *os.ProcessState) {
	if side == link.Edge && state != nil {
		s.spent.Add(int64(state.UserTime() + state.SystemTime()))
	}
}

// Spent is the processor time of all programs that have ended at the edge.
func (s *Site) Spent() time.Duration { return time.Duration(s.spent.Load()) }
