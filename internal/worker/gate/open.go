package gate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"hydrofoil.dev/foil/internal/kernel"
)

// Choice is the gate that a daemon is to have.
type Choice struct {
	// Kind is kernel.GateFanotify, GateFUSE or GateLoop; empty: the best that
	// the host can have.
	Kind string
	// Root is the worker's root directory, on whose filesystem arenas are.
	Root string
	// Kept says that somebody has the gate's descriptors even when daemon and keeper
	// are killed together; see kernel.ChooseGate.
	Kept bool
}

// Open takes over the gate that an earlier daemon left with the keeper, of
// whatever kind it is, or makes a new one. fresh: there was none to inherit,
// as ErrNoGate says. loop: EROFS must be mounted over loop devices.
//
// An inherited gate comes before the choice: mounts depend on it.
func Open(ctx context.Context, c Choice, o Options) (g Gate, fresh, loop bool, err error) {
	log := o.Logger
	if log == nil {
		log = slog.Default()
	}
	kind, why := c.Kind, "it was asked for"
	switch kind {
	case "":
		if kind, why, err = kernel.ChooseGate(ctx, c.Root, c.Kept); err != nil {
			// What it is that does not work is said where it is needed: at the
			// latest when something is mounted.
			log.Warn("this host seems to lack what a gate needs; `foil doctor` says more", "err", err)
			kind = kernel.GateFanotify
		}
	case kernel.GateFanotify, kernel.GateFUSE, kernel.GateLoop:
	default:
		return nil, false, false, fmt.Errorf("no gate is called %q: say %s, %s or %s", kind, kernel.GateFanotify, kernel.GateFUSE, kernel.GateLoop)
	}
	loop = kind == kernel.GateLoop
	if fan, err := Takeover(ctx, o); !errors.Is(err, ErrNoGate) {
		if err != nil {
			return nil, false, false, err
		}
		if kind != kernel.GateFanotify {
			log.Warn("the fanotify gate of the last daemon is kept: rootfs that are incomplete depend on it; stop the daemon when nothing is pulled, and start it again, for the other", "asked", kind)
		}
		return fan, false, false, nil
	}
	if fuse, err := TakeoverFUSE(o); !errors.Is(err, ErrNoGate) {
		if err != nil {
			return nil, false, false, err
		}
		if kind == kernel.GateFanotify && c.Kind != "" {
			log.Warn("the FUSE gate of the last daemon is kept: mounts depend on it; stop the daemon when nothing is pulled, and start it again, for the other", "asked", kind)
		}
		return fuse, false, loop, nil
	}
	if kind == kernel.GateFanotify {
		if why != "" && !c.Kept {
			log.Warn("no service manager keeps the gate: if daemon and keeper are killed together, reads of absent bytes return zeros; start the daemon by systemd (deploy/systemd), or with --gate fuse", "why", why)
		}
		g, err := New(ctx, o)
		if err != nil {
			return nil, true, false, err
		}
		return g, true, false, nil
	}
	log.Info("reads of what is absent are held back by FUSE", "gate", kind, "why", why)
	fuse, err := NewFUSE(ctx, o)
	if err != nil {
		return nil, true, false, err
	}
	return fuse, true, loop, nil
}
