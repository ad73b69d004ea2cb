package node

import (
	"time"

	"hydrofoil.dev/foil/internal/kernel"
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

// Process is what is about to run in a container. The zero value is what nobody knows.
type Process struct {
	Args []string // as they are executed; none: not known
	// Cgroup is the one that it will have, as kernel.CgroupOf returns it; empty: not known. Memory is the limit that
	// it will have there, bytes; 0: none.
	Cgroup string
	Memory int64
}

// memoryLeft is how much memory the container's limits leave it, before it has begun.
func (p Process) memoryLeft(c kernel.Cgroups) int64 {
	left := int64(kernel.Unlimited)
	if p.Memory > 0 {
		left = p.Memory
	}
	if p.Cgroup != "" {
		if above, err := c.MemoryLeft(p.Cgroup); err == nil {
			left = min(left, above)
		}
	}
	return left
}

// ContainerStarts tells that it is about to be started. process returns what will run; it is called if somebody
// wants to know: while the rootfs is being filled.
func (n *Node) ContainerStarts(key origin.Key, id string, process func() Process) {
	r := n.store.Get(key)
	if r == nil {
		return
	}
	p, _ := r.Filler().(*pull.Pull)
	l := start.LearnerOf(r)
	if p == nil && l.Over() {
		return
	}
	runs := process()
	if p != nil {
		p.Bound(runs.memoryLeft(""))
	}
	if len(runs.Args) == 0 {
		return
	}
	if p != nil {
		p.Runs(runs.Args)
	}
	l.Started(id, api.Start{Args: runs.Args, Started: time.Now()})
}
