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
	var markdown bool
	var only []string
	cmd := &cobra.Command{
		Use:   "report [flags] DIR",
		Short: "Draw a result as one HTML page, PNG files and one JSON file",
		Long: `Draws what bench run has left in DIR, whether it has ended or not: below
DIR/report (or --out), index.html, which needs no other file, a PNG for each
figure, and results.json with everything that was measured.

With --markdown it draws nothing, and prints tables for a document: for each rate,
fresh and update, the time to ready of each image with each engine, and means.`,
		Example: `  bench report results
  bench report --markdown --engines hydrofoil,overlayfs,curl results`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if markdown {
				all, err := results.Dir(args[0]).Load()
				if err != nil {
					return err
				}
				tables, err := report.Markdown(all, only...)
				if err != nil {
					return err
				}
				_, err = fmt.Fprint(cmd.OutOrStdout(), tables)
				return err
			}
			if len(only) > 0 {
				return fmt.Errorf("--engines is for --markdown; the page shows all")
			}
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
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print tables, and draw nothing")
	cmd.Flags().StringSliceVar(&only, "engines", nil, "engines of the tables (default all)")
	cmd.Flags().StringVar(&out, "out", "", "directory for the page (default DIR/report)")
	return cmd
}
