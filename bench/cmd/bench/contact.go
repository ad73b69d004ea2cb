package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/contact"
	"hydrofoil.dev/foil/bench/site"
)

func contactCommand() *cobra.Command {
	var o contact.Options
	var rtts []string
	rate := rateFlag(100e6)
	cmd := &cobra.Command{
		Use:   "contact [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure what a first contact with a server costs, by part",
		Long: `Has as many bytes as a startup set has come from foil serve over a new connection,
and over a warm one, in turns, with TLS and without; and says how much longer the
new one takes: TCP's handshake, TLS's, the first bytes, TCP's slow start. Names are
not resolved. With --connections several new connections bring a share each; with
--windows the routes of both sides have that initial window, in packets, as an
administrator may set it (ip route change ... initcwnd N), with --first-rates what
the server's connections begin with is another (foil serve --first-rate N). With --idle it counts the
bytes that a kept connection takes.`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench contact needs root: it makes namespaces")
			}
			if o.RTTs, err = parseRTTs(rtts); err != nil {
				return err
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Rate = int64(rate)
			o.Out, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			return contact.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	flags.StringSliceVar(&rtts, "rtt", []string{"50ms", "150ms", "300ms"}, "round-trip times of the link")
	flags.Var(&rate, "rate", "its rate")
	flags.Int64Var(&o.Queue, "queue", 0, "bytes that may wait for the link; 0: one round trip's worth")
	flags.Int64Var(&o.Bytes, "bytes", 2<<20, "of an answer")
	flags.IntVar(&o.Runs, "runs", 5, "answers of each")
	flags.IntSliceVar(&o.Connections, "connections", []int{1}, "how many new connections bring an answer")
	flags.IntSliceVar(&o.FirstRates, "first-rates", []int{-1}, "what the server is told by --first-rate, in Mbit/s; 0: the route's window; -1: nothing")
	flags.IntSliceVar(&o.Windows, "windows", []int{0}, "initial windows of the routes, in packets; 0: Linux's")
	flags.DurationVar(&o.Idle, "idle", time.Minute, "for how long to count the bytes of a connection that is kept; 0: not at all")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	return cmd
}
