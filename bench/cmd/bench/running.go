package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/running"
	"hydrofoil.dev/foil/bench/site"
)

func runningCommand() *cobra.Command {
	var o running.Options
	cmd := &cobra.Command{
		Use:   "running [flags]",
		Short: "Measure the file system of a running container against overlayfs",
		Long: `Mounts one complete image as containers have it, by Hydrofoil and by containerd's
overlayfs, and compares: find, stat, sequential and random reads, mmap and exec,
cold and warm, and how much of the page cache two containers share.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench running needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return running.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Image, "image", "redis:1", "declared image, NAME:TAG")
	flags.IntVar(&o.Rounds, "rounds", 7, "measurements of each")
	flags.StringVar(&o.Cache, "cache", "../.cache", "directory on a disk, for images and containers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	programFlags(cmd, &o.Programs)
	return cmd
}
