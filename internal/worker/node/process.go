package node

import (
	"time"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/pull"
	"hydrofoil.dev/foil/internal/worker/start"
)

// ContainerMade tells that somebody besides foil run has made a container, or a view, on a
// rootfs.
func (n *Node) ContainerMade(key origin.Key, id string) {
	if r := n.store.Get(key); r != nil {
		start.LearnerOf(r).Created(id)
	}
}

// ContainerStarts tells that it is about to be started. process returns the arguments of its
// process as they are executed, none when they are not known; it is called if somebody wants
// to know: while the rootfs is being filled.
func (n *Node) ContainerStarts(key origin.Key, id string, process func() []string) {
	r := n.store.Get(key)
	if r == nil {
		return
	}
	p, _ := r.Filler().(*pull.Pull)
	l := start.LearnerOf(r)
	if p == nil && l.Over() {
		return
	}
	args := process()
	if len(args) == 0 {
		return
	}
	if p != nil {
		p.Runs(args)
	}
	l.Started(id, api.Start{Args: args, Started: time.Now()})
}
