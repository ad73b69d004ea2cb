package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/node"
)

func newGCCommand() *cobra.Command {
	var root string
	var asJSON bool
	var req api.GCRequest
	cmd := &cobra.Command{
		Use:   "gc [flags]",
		Short: "Free what nothing needs, and say what stays and why",
		Long: `gc frees disk space on this worker: what crashes left behind and, when images
take more than a limit, images that are complete and that nothing uses, the
least recently used first. What other images share with them stays.

The limit is the daemon's (foil node --disk-limit) unless --limit gives another.
It counts what images take, not what containers write. With --limit 0 every image
goes that nothing uses.

Each line says of one thing whether it goes, what that frees or what it takes,
and why. With --dry-run nothing is changed.

Exit codes: 0; 1 no daemon answers; 2 the limit makes no sense.`,
		Example: `  foil gc --dry-run
  foil gc --limit 20GB
  foil gc --dry-run --limit 0 --json | jq '.items[] | select(.goes)'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := node.ParseLimit(req.Limit); err != nil {
				return usagef("--limit: %w", err)
			}
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				r, err := c.GC(ctx, req)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), r)
				}
				return printGC(cmd.OutOrStdout(), r)
			})
		},
	}
	clientRoot(cmd, &root)
	cmd.Flags().BoolVarP(&req.DryRun, "dry-run", "n", false, "change nothing")
	cmd.Flags().StringVar(&req.Limit, "limit", "", "`LIMIT` for what images take: 80% of the filesystem, or 20GB")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func printGC(w io.Writer, r *api.GCReport) error {
	goes := "removed"
	if r.DryRun {
		goes = "would go"
	}
	var rows []string
	for _, want := range []bool{true, false} {
		for _, it := range r.Items {
			if it.Goes != want {
				continue
			}
			what := "stays"
			if it.Goes {
				what = goes
			}
			rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s", what, progress.Bytes(it.Bytes), it.Kind, it.Name, it.Why))
		}
	}
	if len(rows) > 0 {
		if err := table(w, "WHAT BYTES KIND NAME WHY", rows); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	freed := "freed " + progress.Bytes(r.Freed)
	if r.DryRun {
		freed = "would free " + progress.Bytes(r.Freed)
	}
	limit := "no limit is set"
	if r.Limit != nil {
		limit = "the limit is " + progress.Bytes(*r.Limit)
	}
	_, err := fmt.Fprintf(w, "%s; images take %s, %s; %s of %s are free on the filesystem\n",
		freed, progress.Bytes(r.Used), limit, progress.Bytes(r.Free), progress.Bytes(r.Size))
	return err
}
