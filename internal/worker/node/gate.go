package node

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// openGate connects to the keeper, or starts one, and takes over the gate that
// an earlier daemon left with it, or makes a new one. It returns the
// descriptors that the keeper held, by name.
func (n *Node) openGate() (held map[string]*os.File, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, 30*time.Second)
	defer cancel()
	socket := filepath.Join(n.opts.Root, "run", "keeper.sock")
	o := keeper.Options{Socket: socket, Logger: n.log, Restarted: func(int) { n.metrics.keepers.Inc() }}
	if n.opts.Binary != "" {
		o.Command = []string{n.opts.Binary, "keeper", "--socket", socket}
	}
	if n.keeper, err = keeper.Start(ctx, o); err != nil {
		return nil, err
	}
	held = n.keeper.Held()
	if n.fromStore = n.holders().inherit(held); n.fromStore {
		n.log.Warn("keeper and daemon died together; the service manager has kept the gate", "descriptors", len(held))
	}
	g, fresh, loop, err := gate.Open(ctx, gate.Choice{Kind: n.opts.Gate, Root: n.opts.Root}, gate.Options{
		Keeper: n.holders(), Held: held, Logger: n.log, Dir: filepath.Join(n.opts.Root, "run", "gate"),
	})
	if err != nil {
		return nil, err
	}
	n.gate, n.gateLost, n.loop = g, fresh, loop
	return held, nil
}

func (n *Node) holders() holders { return holders{n, n.opts.Store} }

// dropLeft takes from the keeper what restore found no use for: arenas whose
// rootfs was removed, or completed, just when the daemon died. The descriptor of
// an arena that is incomplete and could not be opened is kept: it may be marked,
// and another descriptor of it would wait for itself.
func (n *Node) dropLeft(held map[string]*os.File) {
	used := make(map[string]bool)
	all := slices.Collect(maps.Values(n.rootfs))
	for _, r := range slices.AppendSeq(all, maps.Values(n.lent)) {
		name := gate.KeptArena + r.name()
		if r.arena != nil || r.kept != nil {
			used[name] = true
		} else if f := held[name]; f != nil && r.broken != nil && !r.rec.Complete {
			used[name], r.kept = true, f
		}
	}
	for name, f := range held {
		if !strings.HasPrefix(name, gate.KeptArena) || used[name] {
			continue
		}
		if err := n.holders().Drop(n.ctx, name); err != nil {
			n.log.Warn("take a descriptor from the keeper", "name", name, "error", err)
		}
		_ = f.Close()
	}
}

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
	if err := n.keeper.Stop(ctx); err != nil {
		errs = append(errs, err, n.keeper.Close())
	}
	return errors.Join(errs...)
}
