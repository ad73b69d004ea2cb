package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/kernel"
)

func newDoctorCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor [flags]",
		Short: "Say what this host can do, and what to do about the rest",
		Long: `doctor tries everything that a worker needs or can use on this host, by doing it
once in --root, and leaves nothing behind. It says which gate would hold back
reads of bytes that have not arrived, and what to do about what is missing. Ask
it before the first pull, and when "foil node" does not start. It needs no
daemon.

Exit codes: 0 a worker can run here; 1 it cannot.`,
		Example: `  sudo foil doctor
  foil doctor --json | jq -r 'select(.state == "missing") | .fix'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			features, err := kernel.Features(cmd.Context(), root)
			if err != nil {
				return err
			}
			return printDoctor(cmd.OutOrStdout(), root, features, asJSON)
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	return cmd
}

// finding is a feature in JSON.
type finding struct {
	Feature string `json:"feature"`
	State   string `json:"state"` // ok, missing, or absent: missing and not needed
	Needed  bool   `json:"needed"`
	Since   string `json:"since,omitempty"`
	Detail  string `json:"detail,omitempty"`
	Fix     string `json:"fix,omitempty"`
}

func printDoctor(w io.Writer, root string, features []kernel.Feature, asJSON bool) error {
	var rows, advice []string
	lacking, powerless := 0, false
	gate := ""
	for _, f := range features {
		v := finding{f.Name, "ok", f.Need, f.Min, f.Detail, f.Fix}
		switch {
		case !f.Have && f.Need:
			v.State = "missing"
			lacking++
		case !f.Have:
			v.State = "absent"
		}
		if f.Name == kernel.FeatureGate && f.Have {
			gate, _, _ = strings.Cut(f.Detail, ":")
		}
		if asJSON {
			if err := printJSON(w, v); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s", f.Name, v.State, orDash(f.Min), orDash(f.Detail)))
		if f.Fix != "" && !powerless {
			advice = append(advice, f.Name+": "+f.Fix)
		}
		// Without root the rest fails for that reason, and says nothing.
		powerless = powerless || f.Name == "root" && !f.Have
	}
	var verdict error
	if lacking > 0 {
		gate = ""
		verdict = fmt.Errorf("a worker cannot run on this host with its root at %s: what it needs is missing, see above", root)
	}
	if asJSON {
		return errors.Join(printJSON(w, map[string]any{"gate": gate, "ok": lacking == 0}), verdict)
	}
	if err := table(w, "FEATURE STATE SINCE FOUND", rows); err != nil {
		return err
	}
	if len(advice) > 0 {
		fmt.Fprintln(w, "\nWhat to do:")
		for _, a := range advice {
			fmt.Fprintln(w, "  "+a)
		}
	}
	if gate == "" {
		gate = "none"
	}
	if _, err := fmt.Fprintf(w, "\ngate: %s\n", gate); err != nil {
		return err
	}
	return verdict
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
