package prover

import (
	"fmt"

	"hydrofoil.dev/foil/internal/worker/api"
)

// Phase is how far the proof of a rootfs is.
type Phase string

// The phases. All but Proven and Failed say that a server's word is all there is.
const (
	Served   Phase = "served"   // its turn has not come, or it is not complete
	Proving  Phase = "proving"  // it is on the way
	Unproven Phase = "unproven" // it came to nothing, and is tried again
	Proven   Phase = "proven"
	Failed   Phase = "failed" // it is not what its layers make
)

// State is how the proof of a rootfs stands.
type State struct {
	Phase   Phase
	Percent int // of Proving
	Layer   int // of Layers, that a proof hashes, the lowest is 1; 0: none
	Layers  int
	Why     string // of Unproven and Failed
}

// String is the state for people.
func (s State) String() string {
	switch {
	case s.Phase == Proving:
		return fmt.Sprintf("proving %d%%", s.Percent)
	case s.Why != "":
		return string(s.Phase) + ": " + s.Why
	}
	return string(s.Phase)
}

// Progress is the state of the proof of a rootfs whose contents are total bytes.
func (s State) Progress(total int64) *api.ProofProgress {
	p := &api.ProofProgress{State: s.String(), Hashed: total * int64(s.Percent) / 100, Total: total, Layer: s.Layer, Layers: s.Layers}
	if s.Phase == Proven {
		p.Hashed = total
	}
	return p
}
