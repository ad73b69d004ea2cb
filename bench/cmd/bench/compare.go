package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/compare"
	"hydrofoil.dev/foil/bench/results"
	"hydrofoil.dev/foil/bench/run"
)

func compareCommand() *cobra.Command {
	var all bool
	var measures []string
	cmd := &cobra.Command{
		Use:   "compare [flags] BEFORE AFTER | DIR",
		Short: "Say what became better or worse between two results, and whether it is more than noise",
		Long: `Pairs the runs of two result directories (the same engine, image, link and
repetition) and compares times, waits, bytes, processor time and memory: medians,
the median of the pairs' ratios with a 95% interval, and over all settings the
geometric mean of the pairs' ratios with its 95% upper bound, the worst setting and
a sign test. DIR is what bench run --against has written.`,
		Example: `  bench compare before after
  bench compare --all --measures ready,'longest wait' results`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 1 {
				return compareTurns(args[0], all, measures...)
			}
			return compareDirs(args[0], args[1], all, measures...)
		},
	}
	cmd.Flags().StringSliceVar(&measures, "measures", nil, "what is compared: ready, longest wait, complete, bytes until ready, bytes in all, cpu, memory (default all)")
	cmd.Flags().BoolVar(&all, "all", false, "list settings without a difference as well")
	return cmd
}

// compareTurns compares the two results of a benchmark of two builds.
func compareTurns(dir string, all bool, measures ...string) error {
	return compareDirs(filepath.Join(dir, run.Before), filepath.Join(dir, run.After), all, measures...)
}

func compareDirs(before, after string, all bool, measures ...string) error {
	was, err := results.Dir(before).Load()
	if err != nil {
		return err
	}
	is, err := results.Dir(after).Load()
	if err != nil {
		return err
	}
	report, err := compare.Compare(was, is).Only(measures...)
	if err != nil {
		return err
	}
	return report.Write(os.Stdout, all)
}
