package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/demo"
	"hydrofoil.dev/foil/bench/site"
)

func demoCommand() *cobra.Command {
	o := demo.Options{RTT: 100e6}
	rate := rateFlag(100e6)
	var image string
	cmd := &cobra.Command{
		Use:   "demo [flags] [-- COMMAND [ARG...]]",
		Short: "Push an image, run it far away before it has arrived, and compare with a full pull",
		Long: `Joins two network namespaces by an emulated link, serves an image in one and runs
it in the other: by foil run, and by containerd after a full pull; then the same
for an update of the image. Prints one table, and leaves nothing behind.

By default the image is redis, in two versions that are built from Debian
packages (the first time takes a minute or two). --image takes one from any
registry instead; --probe then says when its container is ready, and COMMAND
replaces its command. Such an image has no second version.`,
		Example: `  bench demo --foil ../bin/foil
  bench demo --foil ../bin/foil --rtt 150ms --rate 50mbit
  bench demo --foil ../bin/foil --image registry.example/nginx:1 --probe http:80/`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if os.Geteuid() != 0 {
				return fmt.Errorf("the demo needs root: it makes namespaces, mounts and containers")
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Images = []string{"redis:1", "redis:2"}
			if image != "" {
				o.Images, o.From = []string{image}, true
			}
			o.Rate, o.Command = int64(rate), args
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return demo.Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	cmd.Flags().StringVar(&o.Cache, "cache", here(".cache"), "where images are kept")
	cmd.Flags().StringVar(&image, "image", "", "HOST/REPOSITORY[:TAG] of a registry (or what else skopeo copies from), instead of redis")
	cmd.Flags().StringVar(&o.Probe, "probe", "", "tcp:PORT, http:PORT/PATH or exit")
	cmd.Flags().DurationVar(&o.RTT, "rtt", o.RTT, "round-trip time of the link")
	cmd.Flags().Var(&rate, "rate", "rate of the link in each direction")
	cmd.Flags().BoolVar(&o.SkipCheck, "skip-check", false, "do not try the link first")
	return cmd
}
