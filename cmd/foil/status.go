package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
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
		Use:   "status [flags] [REF]",
		Short: "Show what the daemon is doing, and how far each pull is",
		Long: `status shows the daemon, its gate and keeper, each pull with its progress, rate
and the reads that had to wait, and what an operator should know. With --watch
it goes on until it is interrupted.

With REF it shows that image's last pull, and each of the first 256 reads of
containers that had to wait for it: how long after the pull began, for how long,
which pages of 4 KiB of which file, and why: the startup set was still coming, or
the page is in none. The daemon remembers them for its last 32 pulls.

Exit codes: 0; 1 no daemon answers, or it has not pulled REF.`,
		Example: `  foil status
  foil status --watch
  foil status registry.example/redis:7
  foil status --json | jq '.pulls[] | {ref, rate}'
  foil status --json registry.example/redis:7 | jq '.reads[] | {path, page, took}'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if interval <= 0 {
				return usagef("--interval %s: must be more than 0", interval)
			}
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				show := func(display *progress.Display) error {
					if len(args) > 0 {
						report, err := c.PullReport(ctx, args[0])
						if err != nil {
							return err
						}
						return printStatus(cmd, report, asJSON, display, func(width int) []string { return reportLines(report, width) })
					}
					st, err := c.Status(ctx)
					if err != nil {
						return err
					}
					return printStatus(cmd, st, asJSON, display, func(width int) []string { return statusLines(st, width) })
				}
				if !watch {
					return show(nil)
				}
				return watchStatus(ctx, cmd, asJSON, interval, show)
			})
		},
	}
	clientRoot(cmd, &root)
	cmd.ValidArgsFunction = completeNames(&root, false)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the status as one JSON object a line")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on showing it, until interrupted")
	cmd.Flags().DurationVar(&interval, "interval", 500*time.Millisecond, "time between two looks with --watch")
	return cmd
}

// watchStatus calls show until the context ends, with a display to draw on if the
// output is a terminal.
func watchStatus(ctx context.Context, cmd *cobra.Command, asJSON bool, interval time.Duration, show func(*progress.Display) error) error {
	var display *progress.Display
	if _, ok := progress.Terminal(cmd.OutOrStdout()); ok && !asJSON {
		display = progress.NewDisplay(cmd.OutOrStdout())
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := show(display)
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

// printStatus prints v as JSON, or its lines, redrawn on display if there is one.
func printStatus(cmd *cobra.Command, v any, asJSON bool, display *progress.Display, linesOf func(width int) []string) error {
	w := cmd.OutOrStdout()
	if asJSON {
		return printJSON(w, v)
	}
	width := 0
	if cols, ok := progress.Terminal(w); ok {
		width = cols - 1
	}
	lines := linesOf(width)
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
		lines = append(lines, pullLine(p, width))
	}
	for _, p := range st.Proofs {
		lines = append(lines, p.Ref+": "+p.Proof)
	}
	if len(st.Pulls) == 0 {
		lines = append(lines, "no pulls")
	}
	for _, warning := range st.Warnings {
		lines = append(lines, "warning: "+warning)
	}
	return lines
}

// pullLine tells how far a pull is, with a bar when width is more than 0.
func pullLine(p api.PullStatus, width int) string {
	t := transfer(p.Event)
	t.Rate = p.Rate
	switch {
	case p.Event.Event == api.Failed:
		return t.Name + " failed: " + p.Err
	case width > 0:
		return t.Line(width)
	}
	return t.String()
}

// reportLines tells a pull, and the reads that waited for it.
func reportLines(report *api.PullReport, width int) []string {
	lines := []string{pullLine(report.PullStatus, width)}
	if len(report.Reads) == 0 {
		return lines
	}
	var rows []string
	for _, r := range report.Reads {
		pages, path, why := fmt.Sprint(r.Page), r.Path, "the startup set was still coming"
		if r.Pages > 1 {
			pages += fmt.Sprintf("-%d", r.Page+r.Pages-1)
		}
		if path == "" {
			pages, path = "-", "-"
		}
		if r.Planned {
			why = "in no startup set"
		}
		switch {
		case r.Waiting:
			why += ", waits still"
		case r.Err != "":
			why += ", failed: " + r.Err
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s",
			progress.Duration(r.Began.Sub(report.Began)), progress.Duration(seconds(r.Took)), pages, path, why))
	}
	var b strings.Builder
	_ = table(&b, "AFTER WAITED PAGES FILE WHY", rows) // a Builder takes everything
	lines = append(lines, strings.Split(strings.TrimSpace(b.String()), "\n")...)
	if more := report.Waits - int64(len(report.Reads)); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return lines
}
