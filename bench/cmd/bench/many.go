package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/many"
	"hydrofoil.dev/foil/bench/site"
)

func manyCommand() *cobra.Command {
	var o many.Options
	var scales []string
	rate := rateFlag(1e9)
	cmd := &cobra.Command{
		Use:   "many [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure many starts at once from one server",
		Long: `Has some workers start some services each, all at the same moment, from one server:
by foil, whose services were traced, and by containerd with overlayfs. Every worker has
a daemon of its own and nothing on its disk; all share one link, that of the server.
Says how many starts there are a second, and how long the first, the median and the
slowest take until they answer.`,
		Example: `  bench many --images redis:1 --scales 1x1,8x1,8x8 --rounds 5`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench many needs root: it makes namespaces, mounts and containers")
			}
			if o.Scales, err = parseScales(scales); err != nil {
				return err
			}
			if o.Rounds < 1 {
				return fmt.Errorf("--rounds %d: there is at least one", o.Rounds)
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Link.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return many.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Images, "images", []string{"redis:1"}, "declared images, NAME:TAG, that a worker's services have in turns")
	flags.StringSliceVar(&o.Engines, "engines", []string{"hydrofoil", "overlayfs"}, "engines to compare")
	flags.StringSliceVar(&scales, "scales", []string{"1x1", "8x1", "8x8"}, "WORKERSxSERVICES that start at once")
	flags.DurationVar(&o.Link.RTT, "rtt", 5*time.Millisecond, "round-trip time of the link")
	flags.Var(&rate, "rate", "its rate, for all workers together")
	flags.IntVar(&o.Rounds, "rounds", 3, "measurements of each")
	flags.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "of one measurement")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and workers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}

// parseScales reads WORKERSxSERVICES.
func parseScales(texts []string) (all []many.Scale, err error) {
	for _, text := range texts {
		var s many.Scale
		if n, err := fmt.Sscanf(text+" ", "%dx%d ", &s.Workers, &s.Services); n != 2 || err != nil || s.String() != text || s.Workers < 1 || s.Services < 1 || s.Workers*s.Services > 1000 {
			return nil, fmt.Errorf("--scales %q: write WORKERSxSERVICES, such as 8x8; at most 1000 in all", text)
		}
		all = append(all, s)
	}
	return all, nil
}
