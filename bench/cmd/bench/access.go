package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/access"
)

func accessCommand() *cobra.Command {
	var o access.Options
	cmd := &cobra.Command{
		Use:   "access [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure what logins and rules cost the server",
		Long: `Asks a server with rules, by a token, and an open one in turns for a manifest and
for a small blob, and compares the processor time that their processes take.`,
		Example: `  bench access --parallel 8`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return access.RunCost(cmd.Context(), o)
		},
	}
	accessFlags(cmd, &o, 200)
	cmd.Flags().IntVar(&o.Batch, "batch", 200, "requests of each server in a round: few, since machines change from second to second")
	cmd.Flags().IntVar(&o.Parallel, "parallel", 1, "how many of them are under way at a time")
	return cmd
}

func attacksCommand() *cobra.Command {
	var o access.Options
	cmd := &cobra.Command{
		Use:   "attacks [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure what strangers can cost the server",
		Long: `Has an honest client pull an image alone and beside an attack, in turns, from a
server with its limits and from one without those of [limits]: how much slower its
pulls are, and memory, descriptors and processors of the server. The row idle is the
same number of attackers at a server of nothing: what they take of this machine.
Attacks: ` + strings.Join(access.Names(), ", ") + `.`,
		Example: `  bench attacks --attacks logins,uploads --rounds 10`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return access.RunAttacks(cmd.Context(), o)
		},
	}
	accessFlags(cmd, &o, 5)
	cmd.Flags().DurationVar(&o.Period, "period", 5*time.Second, "how long each turn lasts")
	cmd.Flags().IntVar(&o.Clients, "clients", 512, "attackers at once")
	cmd.Flags().Float64Var(&o.Rate, "rate", 0, "Mbit/s of the honest client's link; 0: as fast as it goes")
	cmd.Flags().IntVar(&o.Addresses, "addresses", 1, "addresses that they come from")
	cmd.Flags().BoolVar(&o.Anonymous, "anonymous", false, "attackers have no token, and may pull")
	cmd.Flags().StringSliceVar(&o.Attacks, "attacks", nil, "which attacks; all without this")
	return cmd
}

// attackersCommand is what attacksCommand starts.
func attackersCommand() *cobra.Command {
	return &cobra.Command{Use: access.AttackersCommand, Args: cobra.NoArgs, Hidden: true, Short: "Attack a server, as standard input says",
		RunE: func(cmd *cobra.Command, _ []string) error { return access.Assault(cmd.Context(), os.Stdin, os.Stdout) }}
}

func accessFlags(cmd *cobra.Command, o *access.Options, rounds int) {
	flags := cmd.Flags()
	flags.StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	flags.IntVar(&o.Rounds, "rounds", rounds, "pairs of turns")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for the servers' roots")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
}
