package gate_test

import (
	"os"
	"testing"

	"hydrofoil.dev/foil/internal/worker/gate/gatetest"
)

func TestMain(m *testing.M) {
	gatetest.Child()
	os.Exit(m.Run())
}
