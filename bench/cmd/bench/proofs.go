package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/proofs"
	"hydrofoil.dev/foil/bench/site"
)

func proofsCommand() *cobra.Command {
	var o proofs.Options
	rate := rateFlag(100e6)
	cmd := &cobra.Command{
		Use:   "proofs [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure what proving images against their diff IDs costs",
		Long: `For each image: a worker with nothing pulls it whole, and proves it; seconds,
processor time of the daemons and bytes over the link, of both. With --beside an
image is started on a worker that has another one, while that is being proven in
the background and when it is, in pairs.`,
		Example: `  bench proofs --images redis:1,gcc:1
  bench proofs --images "" --beside redis:1 --while gcc:1 --rounds 10`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench proofs needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Link.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return proofs.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Images, "images", []string{"redis:1"}, "declared images, NAME:TAG, to be proven")
	flags.StringVar(&o.Beside, "beside", "", "declared image, NAME:TAG, to be started beside a proof; empty: none")
	flags.StringVar(&o.While, "while", "gcc:1", "the image that is proven meanwhile")
	flags.IntVar(&o.Rounds, "rounds", 5, "pairs of starts")
	flags.DurationVar(&o.Link.RTT, "rtt", 50*time.Millisecond, "round-trip time that the link adds")
	flags.Var(&rate, "rate", "each direction's rate")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and containers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}
