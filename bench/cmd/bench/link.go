package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/link"
)

func linkCommand() *cobra.Command {
	var options link.Options
	var rate rateFlag
	var check bool
	cmd := &cobra.Command{
		Use:   "link [flags] [-- COMMAND [ARG...]]",
		Short: "Join two network namespaces by an emulated link and run a command at the edge",
		Long: `Joins two network namespaces, cloud and edge, by an emulated link, checks that
the machine holds it, and runs COMMAND in the edge's namespace. COMMAND finds
both namespaces' paths in CLOUD_NETNS and EDGE_NETNS (nsenter --net=PATH enters
one), and both addresses in CLOUD_ADDR and EDGE_ADDR. Without COMMAND the check
is all.`,
		Example: `  bench link --rtt 100ms --rate 100mbit
  bench link --rtt 100ms --rate 100mbit -- sh -c 'ping -c 3 $CLOUD_ADDR'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			options.Rate = int64(rate)
			return runLink(cmd.Context(), options, check, args)
		},
	}
	cmd.Flags().DurationVar(&options.RTT, "rtt", 0, "round-trip time that the link adds")
	cmd.Flags().Var(&rate, "rate", "each direction's rate: 100mbit, 1gbit, ...; 0 is no limit")
	cmd.Flags().Int64Var(&options.Queue, "queue", 0, "bytes that may wait in each direction; 0 is one round trip's worth")
	cmd.Flags().Float64Var(&options.Loss, "loss", 0, "probability that a packet is lost")
	cmd.Flags().Uint64Var(&options.Seed, "seed", 0, "which packets are lost")
	cmd.Flags().BoolVar(&check, "check", true, "try the link first")
	return cmd
}

func runLink(ctx context.Context, options link.Options, check bool, args []string) error {
	// The link outlives ctx: the command is ended first.
	l, err := link.New(context.WithoutCancel(ctx), options)
	if err != nil {
		return err
	}
	defer l.Close()
	if check {
		m, err := l.Check(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "link: %v\n", m)
	}
	if len(args) == 0 {
		return nil
	}
	cmd := l.Command(ctx, link.Edge, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = os.Environ()
	for side, name := range map[link.Side]string{link.Cloud: "CLOUD", link.Edge: "EDGE"} {
		cmd.Env = append(cmd.Env, name+"_NETNS="+l.Namespace(side), name+"_ADDR="+l.Addr(side).String())
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	return cmd.Run()
}

// rateFlag is bits a second, written as tc(8) does: 100mbit, 1gbit, 56kbit.
type rateFlag int64

func (r *rateFlag) Set(s string) error {
	number, unit := strings.ToLower(s), 1.0
	for suffix, factor := range map[string]float64{"kbit": 1e3, "mbit": 1e6, "gbit": 1e9} {
		if rest, ok := strings.CutSuffix(number, suffix); ok {
			number, unit = rest, factor
		}
	}
	value, err := strconv.ParseFloat(strings.TrimSuffix(number, "bit"), 64)
	if err != nil || value < 0 {
		return fmt.Errorf("%q is no rate; write 100mbit, 1gbit, or bits a second", s)
	}
	*r = rateFlag(value * unit)
	return nil
}

func (r *rateFlag) String() string { return fmt.Sprintf("%gmbit", float64(*r)/1e6) }
func (*rateFlag) Type() string     { return "rate" }
