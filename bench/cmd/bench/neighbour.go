package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/neighbour"
	"hydrofoil.dev/foil/bench/site"
)

func neighbourCommand() *cobra.Command {
	var o neighbour.Options
	rate := rateFlag(100e6)
	cmd := &cobra.Command{
		Use:   "neighbour [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure what a running service loses while its image arrives",
		Long: `Puts the service of an image under load that has just become ready, while the rest of
its image arrives over a link: wrk for a web server, pgbench, redis-benchmark. It
compares the rate with that of the same service on containerd's overlayfs, alone
and while as much is downloaded and thrown away; and says when the image was
complete, under load and without. With --against two builds of the worker are
measured in turns; the server is that of --foil.

With --connection it measures another neighbour: a download by some other program
over the same link, and which share of the bytes that download has while an image
arrives, by containerd and by Hydrofoil.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench neighbour needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Link.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return neighbour.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Images, "images", []string{"nginx:1", "postgres:1", "redis:1"}, "declared images, NAME:TAG")
	flags.DurationVar(&o.Link.RTT, "rtt", 50*time.Millisecond, "round-trip time of the link")
	flags.Var(&rate, "rate", "its rate")
	flags.DurationVar(&o.Period, "period", 10*time.Second, "how long the load lasts; what comes after the image is complete does not count")
	flags.IntVar(&o.Rounds, "rounds", 5, "measurements of each")
	flags.BoolVar(&o.Connection, "connection", false, "measure what another connection has of the link, not what services lose")
	flags.StringVar(&o.Against, "against", "", "another foil `BINARY`, as the worker, measured in turns with --foil")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and containers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}
