package node

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"hydrofoil.dev/foil/internal/worker/gate"
	"hydrofoil.dev/foil/internal/worker/keeper"
)

// DescriptorStore holds descriptors besides the keeper, in a process that does
// not die: the service manager's. *systemd.Store is one.
type DescriptorStore interface {
	// Inherited returns what it held when this process started, by name. The files
	// belong to the caller.
	Inherited() map[string]*os.File
	Put(ctx context.Context, name string, f *os.File) error
	Drop(ctx context.Context, name string) error
}

// holders are who else has the daemon's descriptors. The keeper must: without it
// nothing goes on. A store is asked as well where there is one, so that the death
// of daemon and keeper together loses nothing either. Put and Drop return when both
// have done it; that the store fails harms nobody as long as the keeper lives.
type holders struct {
	n     *Node
	store DescriptorStore // or nil
}

func (h holders) Put(ctx context.Context, name string, f *os.File) error {
	if err := h.n.keeper.Put(ctx, name, f); err != nil {
		return err
	}
	if h.store != nil {
		if err := h.store.Put(ctx, name, f); err != nil {
			h.n.log.Warn("a descriptor is with the keeper only: should it die together with the daemon, reads of what is absent are lost", "name", name, "error", err)
		}
	}
	return nil
}

func (h holders) Drop(ctx context.Context, name string) error {
	if h.store != nil {
		if err := h.store.Drop(ctx, name); err != nil {
			// It keeps an arena's room on the disk until the service is stopped.
			h.n.log.Warn("a descriptor stays in the store until the service is stopped", "name", name, "error", err)
		}
	}
	return h.n.keeper.Drop(ctx, name)
}

// inherit adds to what the keeper held what only the store does. lost: the keeper
// had no gate, and the store has: keeper and daemon died together.
//
// The keeper knows better, because it is told first. But a keeper that was started
// by a daemon which died before it had given it everything lacks the rest; of the
// same gate that can be had here.
func (h holders) inherit(held map[string]*os.File) (lost bool) {
	if h.store == nil {
		return false
	}
	kept := h.store.Inherited()
	mine, theirs := gateOf(held), gateOf(kept)
	use := theirs != nil && (mine == nil || sameFile(mine, theirs))
	for name, f := range kept {
		if use && held[name] == nil {
			held[name] = f
			continue
		}
		_ = f.Close()
		if held[name] == nil {
			if err := h.store.Drop(h.n.ctx, name); err != nil {
				h.n.log.Warn("a descriptor stays in the store until the service is stopped", "name", name, "error", err)
			}
		}
	}
	return use && mine == nil
}

func gateOf(held map[string]*os.File) *os.File {
	if f := held[gate.KeptGroup]; f != nil {
		return f
	}
	return held[gate.KeptFUSE]
}

// sameFile reports whether two descriptors are of one open file.
func sameFile(a, b *os.File) bool {
	const dupfdQuery = 1024 + 3 // F_DUPFD_QUERY, Linux 6.10
	// Not File.Fd: it would make reads of the gate block.
	var same bool
	ra, err := a.SyscallConn()
	if err != nil {
		return false
	}
	rb, err := b.SyscallConn()
	if err != nil {
		return false
	}
	err = ra.Control(func(x uintptr) {
		_ = rb.Control(func(y uintptr) {
			got, err := unix.FcntlInt(x, dupfdQuery, int(y))
			same = err == nil && got == 1
		})
	})
	return err == nil && same
}

var _ gate.Keeper = holders{}
var _ gate.Keeper = (*keeper.Client)(nil)
