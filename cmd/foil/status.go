package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
)

func newStatusCommand() *cobra.Command {
	var root string
	var asJSON, watch bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "status [flags]",
		Short: "Show what the daemon is doing, and how far each pull is",
		Long: `status shows the daemon, its gate and keeper, each pull with its progress, rate
and the reads that had to wait, and what an operator should know. With --watch
it goes on until it is interrupted.

Exit codes: 0; 1 no daemon answers.`,
		Example: `  foil status
  foil status --watch
  foil status --json | jq '.pulls[] | {ref, rate}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval <= 0 {
				return usagef("--interval %s: must be more than 0", interval)
			}
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				if !watch {
					st, err := c.Status(ctx)
					if err != nil {
						return err
					}
					return printStatus(cmd, st, asJSON, nil)
				}
				return watchStatus(ctx, cmd, c, asJSON, interval)
			})
		},
	}
	clientRoot(cmd, &root)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the status as one JSON object a line")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on showing it, until interrupted")
	cmd.Flags().DurationVar(&interval, "interval", 500*time.Millisecond, "time between two looks with --watch")
	return cmd
}

func watchStatus(ctx context.Context, cmd *cobra.Command, c *api.Client, asJSON bool, interval time.Duration) error {
	var display *progress.Display
	if _, ok := progress.Terminal(cmd.OutOrStdout()); ok && !asJSON {
		display = progress.NewDisplay(cmd.OutOrStdout())
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		st, err := c.Status(ctx)
		if err == nil {
			err = printStatus(cmd, st, asJSON, display)
		}
		switch {
		case ctx.Err() != nil && errors.Is(err, context.Cause(ctx)):
			return nil // the way to end --watch
		case err != nil:
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// printStatus prints a status, or redraws it on display.
func printStatus(cmd *cobra.Command, st *api.Status, asJSON bool, display *progress.Display) error {
	w := cmd.OutOrStdout()
	if asJSON {
		return printJSON(w, st)
	}
	width := 0
	if cols, ok := progress.Terminal(w); ok {
		width = cols - 1
	}
	lines := statusLines(st, width)
	if display != nil {
		return display.Lines(lines...)
	}
	for _, l := range lines {
		if _, err := fmt.Fprintln(w, l); err != nil {
			return err
		}
	}
	return nil
}

// statusLines tells a status to people, with bars when width is more than 0.
func statusLines(st *api.Status, width int) []string {
	keeper := fmt.Sprintf("process %d", st.Keeper)
	if st.Keeper == 0 {
		keeper = "none"
	}
	lines := []string{fmt.Sprintf("daemon %s, process %d, since %s; gate %s, keeper %s",
		st.Version, st.PID, localTime(st.Started), st.Gate, keeper)}
	for _, server := range st.Servers {
		line := "no connection to " + server.URL
		switch {
		case server.WarmUp > 0:
			line = fmt.Sprintf("connected to %s, warmed up with %s at %s/s", server.URL, progress.Bytes(server.WarmUp), progress.Bytes(int64(server.Rate)))
		case server.Warm:
			line = "connected to " + server.URL
		}
		lines = append(lines, line)
	}
	for _, p := range st.Pulls {
		t := transfer(p.Event)
		t.Rate = p.Rate
		switch {
		case p.Event.Event == api.Failed:
			lines = append(lines, t.Name+" failed: "+p.Err)
		case width > 0:
			lines = append(lines, t.Line(width))
		default:
			lines = append(lines, t.String())
		}
	}
	if len(st.Pulls) == 0 {
		lines = append(lines, "no pulls")
	}
	for _, warning := range st.Warnings {
		lines = append(lines, "warning: "+warning)
	}
	return lines
}
