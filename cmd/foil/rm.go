package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/api"
)

func newRmCommand() *cobra.Command {
	var root string
	var force bool
	cmd := &cobra.Command{
		Use:   "rm [flags] CONTAINER|REF...",
		Short: "Remove containers and images",
		Long: `rm removes containers that have ended, with what they wrote, and images. It
prints a line for each thing that it removed. A name that is a container's means
the container.

The bytes of an image go when no other image on the worker uses them. An image
that is still being pulled is no longer pulled.

With --force a running container is killed first, and an image takes its
containers with it.

Exit codes: 0 everything named was removed; 1 something was not (the rest was).`,
		Example: `  foil rm web
  foil rm --force registry.example/redis:7`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				var errs []error
				for _, name := range args {
					removed, err := worker(root, c).Remove(ctx, name, force)
					for _, r := range removed {
						if _, err := fmt.Fprintf(cmd.OutOrStdout(), "removed %s %s\n", r.Kind, r.Name); err != nil {
							return err
						}
					}
					errs = append(errs, err)
				}
				return errors.Join(errs...)
			})
		},
	}
	clientRoot(cmd, &root)
	cmd.ValidArgsFunction = completeNames(&root, true)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "kill what runs; remove an image's containers too")
	return cmd
}
