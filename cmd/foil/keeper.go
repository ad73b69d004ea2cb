package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/keeper"
)

// newKeeperCommand is for the daemon, which starts it; people have no use for
// it.
func newKeeperCommand() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:    "keeper --socket PATH",
		Short:  "Hold the daemon's descriptors while it restarts",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			var derr error
			err := keeper.Serve(cmd.Context(), socket, func() {
				fmt.Fprintln(cmd.OutOrStdout(), "ready")
				derr = keeper.Detach()
			})
			if err == nil {
				err = derr
			}
			return err
		},
	}
	cmd.Flags().StringVar(&socket, "socket", "", "Unix socket to listen on")
	cmd.MarkFlagRequired("socket")
	return cmd
}
