package main

import (
	"os"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/compare"
	"hydrofoil.dev/foil/bench/results"
)

func compareCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "compare [flags] BEFORE AFTER",
		Short: "Say what became better or worse between two results, and whether it is more than noise",
		Long: `Pairs the runs of two result directories (the same engine, image, link and
repetition) and compares times, bytes, processor time and memory: medians, the
median of the pairs' ratios with a 95% interval, and over all settings of an
engine a sign test.`,
		Args: cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			before, err := results.Dir(args[0]).Load()
			if err != nil {
				return err
			}
			after, err := results.Dir(args[1]).Load()
			if err != nil {
				return err
			}
			return compare.Compare(before, after).Write(os.Stdout, all)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "list settings without a difference as well")
	return cmd
}
