package node

import (
	"slices"

	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/store"
)

var _ store.Namer = (*Node)(nil)

// Named implements store.Namer.
func (n *Node) Named() map[origin.Key]string {
	named := make(map[origin.Key]string)
	name := func(key origin.Key, who string) {
		if named[key] == "" {
			named[key] = who
		}
	}
	for _, img := range n.images.List() {
		name(img.Rootfs, "image "+img.Ref)
	}
	for key, ids := range n.containers.On() {
		name(key, "container "+ids[0])
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for key := range n.holds {
		name(key, "containerd")
	}
	return named
}

// ContainersOn implements store.Namer.
func (n *Node) ContainersOn(key origin.Key) []string { return n.containers.On()[key] }

// Image implements store.Namer.
func (n *Node) Image(key origin.Key) string {
	if list := n.images.Of(key); len(list) > 0 {
		return list[0].Ref
	}
	return string(key)
}

// Held implements store.Namer.
func (n *Node) Held(key origin.Key) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.holds[key] > 0
}

// Origins implements store.Namer.
func (n *Node) Origins(key origin.Key) (list []string) {
	for _, img := range n.images.Of(key) {
		list = append(list, origin.Of(img.Ref))
	}
	slices.Sort(list)
	return slices.Compact(list)
}
