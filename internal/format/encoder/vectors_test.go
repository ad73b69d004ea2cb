package encoder

import (
	"testing"

	"hydrofoil.dev/foil/internal/format/encoder/programs"
)

// TestVectors says what vectors has to be, if it is otherwise.
func TestVectors(t *testing.T) {
	if got, err := goVector(); err != nil || got != vectors[Go] {
		t.Errorf("%s: %q, %v", Go, got, err)
	}
	s := &Set{Programs: programs.Program}
	defer s.Close()
	for _, name := range Names[1:] {
		p, err := s.program(name)
		if err != nil {
			t.Logf("not tested: %v", err)
			continue
		}
		if got, err := p.vector(t.Context()); err != nil || got != vectors[name] {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
