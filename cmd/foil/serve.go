package main

import (
	"errors"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/server/serve"
)

func newServeCommand() *cobra.Command {
	var opts serve.Options
	var level slog.Level
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a registry that also serves images as bundles",
		Long: `Runs a registry: an OCI registry that any client pushes to and pulls from,
with images kept as they are, and the source of the bundles that foil node
pulls. Everything it keeps is below one directory, on one file system.

Clients on the same machine may speak plain HTTP to it. For others give it a
certificate, or put it behind something that has one.

An interrupt or SIGTERM ends it: requests under way have the grace period to
finish. Whatever was acknowledged before is on disk, however it ends.`,
		Example: `  foil serve --root /var/lib/foil-registry
  foil serve --root /srv/registry --listen :443 --tls-cert cert.pem --tls-key key.pem
  skopeo copy --dest-tls-verify=false docker-archive:redis.tar docker://localhost:5000/redis:7`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (opts.TLSCert == "") != (opts.TLSKey == "") {
				return usagef("--tls-cert and --tls-key come together")
			}
			opts.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
			s, err := serve.Start(cmd.Context(), opts)
			if err != nil {
				return err
			}
			ended := make(chan error, 1)
			go func() { ended <- s.Wait() }()
			select {
			case err = <-ended:
			case <-cmd.Context().Done():
				opts.Log.Info("ending", "grace", opts.Grace)
			}
			return errors.Join(err, s.Close())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.Root, "root", "/var/lib/foil-registry", "`DIR` that everything is kept in; made when missing")
	flags.StringVar(&opts.Listen, "listen", ":5000", "`HOST:PORT` to listen on; port 0 takes a free one and the log says which")
	flags.StringVar(&opts.TLSCert, "tls-cert", "", "certificate `FILE` in PEM form, read again when it changes; without one: plain HTTP")
	flags.StringVar(&opts.TLSKey, "tls-key", "", "`FILE` of the certificate's key in PEM form")
	flags.Var(&opts.StartupMax, "startup-max", "how large the startup set of a service may be: a share of its image (16M are always allowed), or bytes such as `64M`; 0: none")
	flags.DurationVar(&opts.Grace, "grace", 10*time.Second, "how long requests may go on when the server is told to end")
	flags.TextVar(&level, "log-level", slog.LevelInfo, "least `LEVEL` to log: debug, info, warn or error")
	configurable(cmd)
	return cmd
}
