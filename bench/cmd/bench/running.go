package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/running"
	"hydrofoil.dev/foil/bench/site"
)

func runningCommand() *cobra.Command {
	var o running.Options
	rate := rateFlag(100e6)
	cmd := &cobra.Command{
		Use:   "running [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure the file system of a running container against overlayfs",
		Long: `Mounts one complete image as containers have it, by Hydrofoil and by containerd's
overlayfs, and compares: find, stat, sequential and random reads, mmap, exec and,
for redis, postgres and gcc, their own work, cold and warm; and how much memory
two containers share, and one of another image. With --arriving it times the same
while the image arrives over a link.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench running needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Link.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return running.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Image, "image", "redis:1", "declared image, NAME:TAG")
	flags.StringVar(&o.With, "with", "", "another declared image, for the memory that the two share")
	flags.BoolVar(&o.Arriving, "arriving", false, "measure Hydrofoil while the image arrives")
	flags.DurationVar(&o.Link.RTT, "rtt", 50*time.Millisecond, "round-trip time of the link, with --arriving")
	flags.Var(&rate, "rate", "its rate")
	flags.IntVar(&o.Rounds, "rounds", 7, "measurements of each")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and containers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}

// operationCommand is what `bench running --arriving` has processes of its own do.
func operationCommand() *cobra.Command {
	return &cobra.Command{
		Use:    running.OperationCommand + " IMAGE OPERATION TREE",
		Hidden: true,
		Args:   cobra.ExactArgs(3),
		RunE: func(_ *cobra.Command, args []string) error {
			took, err := running.Operation(args[0], args[1], args[2])
			if err == nil {
				fmt.Println(took)
			}
			return err
		},
	}
}
