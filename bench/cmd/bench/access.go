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
		Example: `  bench access --rounds 40`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return access.RunCost(cmd.Context(), o)
		},
	}
	accessFlags(cmd, &o, 20)
	cmd.Flags().IntVar(&o.Batch, "batch", 2000, "requests of each server in a round")
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
	cmd.Flags().StringSliceVar(&o.Attacks, "attacks", nil, "which attacks; all without this")
	return cmd
}

func accessFlags(cmd *cobra.Command, o *access.Options, rounds int) {
	flags := cmd.Flags()
	flags.StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	flags.IntVar(&o.Rounds, "rounds", rounds, "pairs of turns")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for the servers' roots")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
}
