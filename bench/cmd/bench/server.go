package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/serving"
	"hydrofoil.dev/foil/bench/site"
)

func serverCommand() *cobra.Command {
	var o serving.Options
	cmd := &cobra.Command{
		Use:   "server [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure serving one bundle to many workers, against nginx, and planning",
		Long: `Serves the first image's bundle to many workers at once, who ask again and again,
by foil serve and by nginx, which sends the same bytes from a file: each on one
core, in turns. And plans every image, fresh and as an update. Needs two cores,
and nginx.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench server needs root: it makes namespaces")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return serving.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and for the registry")
	flags.StringSliceVar(&o.Images, "images", []string{"redis"}, "declared images, without tags; the first is served")
	flags.IntSliceVar(&o.Workers, "workers", []int{1, 4, 16, 64}, "how many workers ask at once")
	flags.DurationVar(&o.Period, "period", 3*time.Second, "of one measurement")
	flags.IntVar(&o.Rounds, "rounds", 3, "measurements of each")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	return cmd
}
