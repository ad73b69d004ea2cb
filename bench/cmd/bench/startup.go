package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/site"
	"hydrofoil.dev/foil/bench/startup"
)

func startupCommand() *cobra.Command {
	var o startup.Options
	rate := rateFlag(100e6)
	var services []string
	cmd := &cobra.Command{
		Use:   "startup [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure startup sets: their sizes, several services of one image, learning",
		Long: `For each image: how fast workers start it one after the other when nobody has
traced anything and they learn from each other's reports, and then a worker that
starts its next version; how fast that version starts where only the first one was
traced, fresh and as an update, against no set and a traced one; what a start takes of the page cache and of the daemons'
memory, against containerd's overlayfs; and how large the set is that foil trace gives. For one
image: what several of its services move, started one after the other on one
worker.`,
		Example: `  bench startup --images redis,nginx --workers 5
  bench startup --images redis --service-image scipy:1 --service 'python3|-c|import numpy' --service 'python3|-c|import scipy.linalg'`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench startup needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			for _, s := range services {
				o.Services = append(o.Services, strings.Split(s, "|"))
			}
			o.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return startup.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Images, "images", []string{"redis"}, "declared images, by name")
	flags.StringVar(&o.Service, "service-image", "scipy:1", "declared image, NAME:TAG, that has the services")
	flags.StringArrayVar(&services, "service", nil, "a command in it, its words separated by |; may be repeated")
	flags.IntVar(&o.Workers, "workers", 5, "workers that learn from each other")
	flags.BoolVar(&o.Updates, "updates", true, "measure versions that inherit their sets")
	flags.IntVar(&o.Rounds, "rounds", 1, "measurements of each of these, in turns; the median counts")
	flags.BoolVar(&o.Memory, "memory", true, "measure the memory of a start")
	flags.DurationVar(&o.RTT, "rtt", 100*time.Millisecond, "round-trip time that the link adds")
	flags.Var(&rate, "rate", "each direction's rate")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and containers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}
