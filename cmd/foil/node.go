package main

import (
	"errors"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/node"
)

func newNodeCommand() *cobra.Command {
	var opts node.Options
	var level slog.Level
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Run the worker's daemon",
		Long: `Runs the daemon of a worker, which pulls images as bundles, mounts them before
their contents have arrived and makes reads of what is absent wait. The other
commands talk to it over a Unix socket below its directory; foil run and foil
pull start it when none runs.

An interrupt or SIGTERM ends it. Containers go on; reads of what has not
arrived wait until the next daemon, which goes on with the pulls. So it does
after a crash, and after a reboot with what had reached the disk.`,
		Example: `  foil node
  foil node --root /srv/foil --give-up 10m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
			opts.Version = version()
			n, err := node.New(opts)
			if err != nil {
				return err
			}
			return errors.Join(n.Serve(cmd.Context()), n.Close())
		},
	}
	flags := cmd.Flags()
	rootFlag(cmd, &opts.Root)
	flags.DurationVar(&opts.GiveUp, "give-up", 5*time.Minute, "how long a pull tries to reach a server that is gone before reads that wait for it fail")
	flags.TextVar(&level, "log-level", slog.LevelInfo, "least `LEVEL` to log: debug, info, warn or error")
	configurable(cmd)
	return cmd
}
