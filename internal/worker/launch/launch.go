// Package launch is what the command line does with images and containers
// beyond asking the daemon: it runs an image in the foreground, tells which
// containers run, and removes containers and images. It joins the daemon (package
// api), which has the filesystems, and runc (package runner), which has the
// processes.
//
// # The story of a run
//
// Run pulls until the image is mounted, has the daemon prepare a container,
// starts it with runc, waits for its probe, and waits for its end.
// Each step is an event:
//
//	resolved   manifest and config are known
//	proving    how far the proof is of an image that starts only when it is proven
//	proven     it is
//	mounted    the rootfs can be used
//	started    the container's process runs
//	ready      its probe says so (only with a probe)
//	complete   the whole image is here; may come before or after started, ready
//	           and exited, or never, when the container ends first
//	exited     with the exit code
//
// Elapsed counts from Options.Begun in all of them. Bytes moved, contents here
// and waits are the daemon's counts at that moment.
package launch

import (
	"context"
	"errors"
	"path/filepath"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// Worker is a worker as the command line sees it.
type Worker struct {
	Client *api.Client
	Runner *runner.Runner
}

// StateRoot is where runc keeps its state of the containers of the worker at root.
func StateRoot(root string) string { return filepath.Join(root, "run", "runc") }

// Container is a prepared container and what runc knows of it.
type Container struct {
	api.Container
	// State is created, running, paused or stopped; a container that runc does
	// not know has been prepared only, or has ended, and is stopped.
	State string `json:"state"`
	PID   int    `json:"pid,omitempty"` // of its first process
}

// Running reports whether the container has a process.
func (c Container) Running() bool { return c.State != "stopped" }

// Containers lists the containers of the worker, oldest first.
func (w *Worker) Containers(ctx context.Context) ([]Container, error) {
	prepared, err := w.Client.Containers(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]Container, len(prepared))
	for i, c := range prepared {
		if list[i], err = w.state(ctx, c); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (w *Worker) state(ctx context.Context, c api.Container) (Container, error) {
	st, err := w.Runner.State(ctx, c.ID)
	switch {
	case errors.Is(err, runner.ErrNotFound):
		return Container{Container: c, State: "stopped"}, nil
	case err != nil:
		return Container{}, err
	}
	return Container{Container: c, State: st.Status, PID: st.PID}, nil
}
