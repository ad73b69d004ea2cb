package demo

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

// process is a program that runs on one side of the link until it is stopped.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string        // path of what it has said
	done chan struct{} // closed when it has ended
	err  error         // of Wait; read after done
}

// start starts a program in the background. Files are its descriptors from 3 on.
func (d *demo) start(side link.Side, files []*os.File, name string, args ...string) (*process, error) {
	base := filepath.Base(name)
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		base += "-" + args[0]
	}
	log, err := os.CreateTemp(d.dir, base+"-*.log")
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	defer log.Close()
	p := &process{name: base, log: log.Name(), done: make(chan struct{})}
	// Not of the demo's context: what is stopped in order is stopped by stop,
	// and what is not, by the end of the namespaces.
	p.cmd = d.link.Command(context.Background(), side, name, args...)
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.ExtraFiles = log, log, files
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("demo: start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// stop asks a process to end and waits; one that does not listen is killed.
func (p *process) stop(signal syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	p.cmd.Process.Signal(signal)
	select {
	case <-p.done:
		return nil
	case <-time.After(15 * time.Second):
	}
	p.cmd.Process.Kill()
	<-p.done
	return fmt.Errorf("demo: %s did not end on %v and was killed%s", p.name, signal, p.said())
}

// said is the end of a process's log, to go into an error.
func (p *process) said() string {
	text, err := os.ReadFile(p.log)
	if err != nil || len(strings.TrimSpace(string(text))) == 0 {
		return ""
	}
	return "; it said:\n" + lastLines(strings.TrimSpace(string(text)))
}

func lastLines(text string) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-12):], "\n")
}

// until polls test until it is true, ctx ends, or p does (p may be nil).
func (p *process) until(ctx context.Context, what string, test func() bool) error {
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	var done chan struct{}
	if p != nil {
		done = p.done
	}
	for !test() {
		select {
		case <-ctx.Done():
			err := fmt.Errorf("demo: %s: %w", what, context.Cause(ctx))
			if p != nil && errors.Is(context.Cause(ctx), errTooLong) {
				err = fmt.Errorf("%w%s", err, p.said())
			}
			return err
		case <-done:
			return fmt.Errorf("demo: %s: %s ended too early (%v)%s", what, p.name, p.cmd.ProcessState, p.said())
		case <-ticker.C:
		}
	}
	return nil
}

// errTooLong ends steps that would otherwise wait for ever.
var errTooLong = errors.New("it takes too long")

// run runs a program to its end and gives its standard output.
func (d *demo) run(ctx context.Context, side link.Side, name string, args ...string) (string, error) {
	cmd := d.link.Command(ctx, side, name, args...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("demo: %s: %w", filepath.Base(name), context.Cause(ctx))
		}
		// ctr draws its progress on its standard output, over and over.
		said := strings.TrimSpace(stderr.String())
		if said == "" {
			said = strings.TrimSpace(stdout.String())
		}
		return "", fmt.Errorf("demo: %s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, lastLines(said))
	}
	return stdout.String(), nil
}
