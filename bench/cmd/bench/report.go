package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/report"
	"hydrofoil.dev/foil/bench/results"
)

func reportCommand() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "report [flags] DIR",
		Short: "Draw a result as one HTML page, PNG files and one JSON file",
		Long: `Draws what bench run has left in DIR, whether it has ended or not: below
DIR/report (or --out), index.html, which needs no other file, a PNG for each
figure, and results.json with everything that was measured.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if out == "" {
				out = filepath.Join(args[0], "report")
			}
			page, err := report.Write(results.Dir(args[0]), out)
			if err != nil {
				return err
			}
			fmt.Println(page)
			return nil
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "directory for the page (default DIR/report)")
	return cmd
}
