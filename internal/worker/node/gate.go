package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/keeper"
	"hydrofoil.dev/foil/internal/worker/store"
)

// openGate connects to the keeper, or starts one, and takes over the gate that
// an earlier daemon left with it, or makes a new one.
func (n *Node) openGate() (in store.Inherited, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, 30*time.Second)
	defer cancel()
	socket := filepath.Join(n.opts.Root, "run", "keeper.sock")
	o := keeper.Options{Socket: socket, Logger: n.log, Restarted: func(int) { n.metrics.keepers.Inc() }}
	if n.opts.Binary != "" {
		o.Command = []string{n.opts.Binary, "keeper", "--socket", socket}
	}
	if n.keeper, err = keeper.Start(ctx, o); err != nil {
		return in, err
	}
	in.Held = n.keeper.Held()
	if in.FromStore = n.holders().inherit(in.Held); in.FromStore {
		n.log.Warn("keeper and daemon died together; the service manager has kept the gate", "descriptors", len(in.Held))
	}
	n.keepListening(ctx, in.Held)
	dir := filepath.Join(n.opts.Root, "run", "gate")
	g, fresh, loop, err := gate.Open(ctx, gate.Choice{Kind: n.opts.Gate, Root: n.opts.Root, Kept: n.opts.Store != nil}, gate.Options{
		Keeper: n.holders(), Held: in.Held, Logger: n.log, Dir: dir,
	})
	if err != nil {
		return in, err
	}
	n.gate, n.gateLost, n.loop = g, fresh, loop
	in.GateLost = fresh
	return in, n.lock.Note(dir)
}

func (n *Node) holders() holders { return holders{n, n.opts.Store} }

// closeGate stops answering. The keeper goes on holding the gate, unless
// nothing needs it: then it ends.
func (n *Node) closeGate(idle bool) error {
	var errs []error
	// Mounts may need a gate even when everything is here.
	idle = idle && n.gate != nil && n.gate.Idle()
	if n.gate != nil && !idle {
		errs = append(errs, n.gate.Close())
	}
	if n.keeper == nil {
		return errors.Join(errs...)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if n.gate == nil {
		// There was none to begin with. A keeper that holds something goes on.
		if err := n.keeper.Stop(ctx); err != nil {
			errs = append(errs, n.keeper.Close())
		}
		return errors.Join(errs...)
	}
	if !idle {
		return errors.Join(append(errs, n.keeper.Close())...)
	}
	errs = append(errs, n.gate.End(ctx))
	err := n.keeper.Stop(ctx)
	if err != nil {
		errs = append(errs, n.keeper.Close())
	}
	if n.answered.Load() && errors.Is(err, keeper.ErrNotEmpty) {
		err = nil // it answers who connects to the sockets that it holds, for a while
	}
	errs = append(errs, err)
	return errors.Join(errs...)
}

// gateName is the gate for `foil status`.
func (n *Node) gateName() string {
	if n.loop {
		return fmt.Sprintf("%s (%s)", n.gate.Kind(), kernel.GateLoop)
	}
	return n.gate.Kind()
}
