package node

import (
	"github.com/opencontainers/go-digest"

	"hydrofoil.dev/foil/internal/worker/store"
)

var _ store.Namer = (*Node)(nil)

// Named implements store.Namer.
func (n *Node) Named() map[digest.Digest]string {
	named := make(map[digest.Digest]string)
	name := func(chain digest.Digest, who string) {
		if named[chain] == "" {
			named[chain] = who
		}
	}
	for _, img := range n.images.List() {
		name(img.ChainID, "image "+img.Ref)
	}
	for chain, ids := range n.containers.On() {
		name(chain, "container "+ids[0])
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for chain := range n.holds {
		name(chain, "containerd")
	}
	return named
}

// ContainersOn implements store.Namer.
func (n *Node) ContainersOn(chain digest.Digest) []string { return n.containers.On()[chain] }

// Image implements store.Namer.
func (n *Node) Image(chain digest.Digest) string {
	if list := n.images.Of(chain); len(list) > 0 {
		return list[0].Ref
	}
	return chain.String()
}

// Held implements store.Namer.
func (n *Node) Held(chain digest.Digest) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.holds[chain] > 0
}
