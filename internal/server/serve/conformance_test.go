package serve_test

import (
	"os"
	"os/exec"
	"testing"

	"hydrofoil.dev/foil/internal/server/serve"
)

// The conformance program of the OCI distribution-spec against a server on loopback.
func TestConformance(t *testing.T) {
	program := os.Getenv("FOIL_TEST_CONFORMANCE")
	if program == "" {
		t.Skip("FOIL_TEST_CONFORMANCE does not name the conformance program of the distribution-spec, as that of tools/conformance")
	}
	for _, version := range []string{"1.1", "dev"} {
		t.Run(version, func(t *testing.T) {
			s := start(t, serve.Options{})
			results := t.TempDir()
			cmd := exec.CommandContext(t.Context(), program)
			cmd.Dir = results
			cmd.Env = append(os.Environ(),
				"OCI_VERSION="+version,
				"OCI_REGISTRY="+s.Addr(),
				"OCI_TLS=disabled",
				"OCI_RESULTS_DIR="+results,
			)
			out, err := cmd.CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				t.Error(err)
			}
		})
	}
}
