package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/runner"
)

func newPsCommand() *cobra.Command {
	var root string
	var asJSON, all bool
	cmd := &cobra.Command{
		Use:   "ps [flags]",
		Short: "List containers",
		Long: `ps lists the containers of this worker that run; with --all also those that have
ended and were not removed.

Exit codes: 0; 1 no daemon answers, or runc does not.`,
		Example: `  foil ps
  foil ps --all --json | jq -r 'select(.state == "stopped") | .id' | xargs -r foil rm`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				list, err := worker(root, c).Containers(ctx)
				if err != nil {
					return err
				}
				return printContainers(cmd, list, all, asJSON)
			})
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that do not run")
	return cmd
}

// worker joins the daemon and runc.
func worker(root string, c *api.Client) *launch.Worker {
	return &launch.Worker{Client: c, Runner: &runner.Runner{StateRoot: launch.StateRoot(root)}}
}

func printContainers(cmd *cobra.Command, list []launch.Container, all, asJSON bool) error {
	w := cmd.OutOrStdout()
	var rows []string
	for _, c := range list {
		if !all && !c.Running() {
			continue
		}
		if asJSON {
			c.Config = nil // the image's, and long
			if err := printJSON(w, c); err != nil {
				return err
			}
			continue
		}
		pid := "-"
		if c.PID != 0 {
			pid = fmt.Sprint(c.PID)
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%s\t%s\t%s", c.ID, c.Ref, c.State, pid, localTime(c.Created)))
	}
	if asJSON {
		return nil
	}
	return table(w, "CONTAINER IMAGE STATE PID CREATED", rows)
}
