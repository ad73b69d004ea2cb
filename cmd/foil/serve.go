package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/catalog/postgres"
	"hydrofoil.dev/foil/internal/server/objects/s3"
	"hydrofoil.dev/foil/internal/server/serve"
	"hydrofoil.dev/foil/internal/server/upstream"
)

// Values of --upstream-credentials.
const (
	credsOwn    = "own"
	credsClient = "client"
)

// serveFlags are the flags of foil serve.
type serveFlags struct {
	opts    serve.Options
	level   slog.Level
	metrics string // an address of package metrics
	audit   string // a file; "-" is standard output
	creds   string // whose credentials say who may pull from an accelerator
}

func newServeCommand() *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run a registry that also serves images as bundles",
		Long: `Runs a registry: an OCI registry that any client pushes to and pulls from,
with images kept as they are, and the source of the bundles that foil node
pulls. Everything it keeps is below one directory, on one file system.

With --store bytes are kept in a bucket of an object store that speaks S3 instead:
s3://BUCKET[/PREFIX]?endpoint=https://HOST:PORT, and in the same way region=, style=path|host, ca=FILE,
credentials=env|iam|FILE, profile= and timeout=. Credentials come from AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY, from the machine or the pod, or from ~/.aws/credentials. Below --root stay the
catalog, uploads under way, and what was used lately (--store-cache). A bucket, or prefix, belongs
to one root; docs/operations.md has more.

With --catalog what is known of them is in a PostgreSQL database (15 or newer) instead of a file below --root. A
database belongs to one root.

On this machine's own addresses it is open: everybody who reaches it may pull, push and
delete, over plain HTTP. On any other address it wants TLS (--tls-cert, --tls-key) and
a file that says who may do what (--access), and does not start without; docs/access.md has
such files to begin with, and foil server access explains what they say. Both are read again
when they change. --insecure-open does without: behind a proxy that has TLS, or where
everybody may do everything.

With --upstream it is the accelerator of another registry: images are fetched
from there when they are asked for the first time, and served in bundles and
plainly; tags are looked up there. What is here is served when the upstream is
down. Pushes go to the upstream; its notifications, sent to
` + upstream.WebhookPath + `, have an image ingested before anybody asks.
Everybody who reaches the accelerator may pull what its credentials may, unless --access
says less, or --upstream-credentials client has the upstream decide for each client.

Its connections are controlled by BBR, where the host has it: others forget in idle
times what they have learned of a path. --congestion chooses another way, or leaves
it to the host. With BBR a new connection sends at once what a path of 100 Mbit/s
holds, so that a worker's first pull does not wait for TCP to find out what its path
can carry; --first-rate says another rate.

--metrics-listen serves metrics to Prometheus; docs/metrics.md lists them.

An interrupt or SIGTERM ends it: with --drain, /readyz says 503 first, while requests are still
accepted; then those under way have the grace period to finish. Whatever was acknowledged before is
durable, however it ends.

Exit codes: 0 it was told to end; 1 an error, in the log as well; 2 the command
line makes no sense.`,
		Example: `  foil serve --root /var/lib/foil-registry
  foil serve --root /srv/registry --listen :443 --tls-cert cert.pem --tls-key key.pem --access access.toml
  foil serve --root /var/lib/foil-registry --store 's3://images/prod?endpoint=https://s3.example:9000&region=eu-1'
  foil serve --root /var/lib/foil-registry --store s3://images/prod --catalog 'postgres://foil@db.example/foil?sslmode=verify-full'
  foil serve --root /srv/accelerator --upstream https://registry.example/team
  skopeo copy --dest-tls-verify=false docker-archive:redis.tar docker://localhost:5000/redis:7`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return runServe(cmd, &f)
		},
	}
	f.add(cmd.Flags())
	metricsFlag(cmd, &f.metrics)
	configurable(cmd)
	return cmd
}

func (f *serveFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.opts.Root, "root", "/var/lib/foil-registry", "`DIR` that everything is kept in; made when missing")
	flags.StringVar(&f.opts.Store, "store", "", "`URL` of the bucket that bytes are kept in: s3://BUCKET[/PREFIX][?endpoint=URL&...]; without it the one that the root names from before, or the root itself")
	flags.StringVar(&f.opts.Catalog, "catalog", "", "`URL` of the PostgreSQL database that the catalog is kept in: postgres://USER@HOST[:PORT]/DATABASE[?...], the password in PGPASSWORD or a passfile; without it the one that the root names from before, or a file below the root")
	flags.Int64Var(&f.opts.StoreCache, "store-cache", serve.DefaultStoreCache, "how many `BYTES` of a bucket are kept on the root's disk, of what was used lately")
	flags.StringVar(&f.opts.StoreRedirect, "store-redirect", "", "public `ENDPOINT` of the bucket, http:// or https://HOST[:PORT]: plain clients are sent there for blobs, with a URL that counts for a while; without it they get them from here")
	flags.DurationVar(&f.opts.StoreRedirectFor, "store-redirect-for", serve.DefaultStoreRedirectFor, "for how long such a URL counts, whoever has it, and also when its client has lost its rights")
	flags.StringVar(&f.opts.Listen, "listen", serve.DefaultListen, "`HOST:PORT` to listen on; :PORT is all addresses; port 0 takes a free one and the log says which")
	flags.StringVar(&f.opts.Congestion, "congestion", kernel.BBR, "TCP congestion `CONTROL` of its connections: bbr, where the host has it; system: what the host chooses; or the name of another, as cubic")
	flags.IntVar(&f.opts.FirstRate, "first-rate", serve.DefaultFirstRate, "how fast, in `MBIT` a second, a path is believed to be of which nothing is known yet: a new connection sends at once what such a path holds, where bbr controls it; 0: as much as its route says, ten packets unless somebody has set it (docs/network.md)")
	flags.StringVar(&f.opts.TLSCert, "tls-cert", "", "certificate `FILE` in PEM form, read again when it changes; without one: plain HTTP")
	flags.StringVar(&f.opts.TLSKey, "tls-key", "", "`FILE` of the certificate's key in PEM form")
	flags.StringVar(&f.opts.Access, "access", "", "`FILE` that says who may log in and do what, in TOML, read again when it changes (docs/access.md); without one everybody may do everything")
	flags.StringVar(&f.opts.Webhooks, "webhooks", "", "`FILE` that says who is told of pushes, pulls and deletions, in TOML, read again when it changes (docs/webhooks.md)")
	flags.BoolVar(&f.opts.InsecureOpen, "insecure-open", false, "listen for other machines without TLS, or without --access")
	flags.StringVar(&f.audit, "audit", "", "`FILE` that a line of JSON is added to for each decision about access, opened again at SIGHUP; -: standard output")
	flags.Var(&f.opts.StartupMax, "startup-max", "how large the startup set of a service may be: a share of its image (16M are always allowed), or bytes such as `64M`; 0: none")
	flags.Var(&f.opts.ScrubRate, "scrub-rate", "read what rests, over and over, at so many bytes a second, as `20M`, compare it with its digests, and mend what can be mended (docs/scrub.md); 0: do not")
	flags.DurationVar(&f.opts.ScrubEvery, "scrub-every", 24*time.Hour, "with --scrub-rate, begin to read all of it so long after the last time began; 1s: always")
	flags.StringVar(&f.opts.Upstream.URL, "upstream", "", "be the accelerator of the registry at `URL`: https://HOST[:PORT], and the prefix that repositories have there")
	flags.StringVar(&f.opts.Upstream.Auth, "upstream-auth", "", "`FILE` with USER:PASSWORD for the upstream, or a Docker configuration; else "+upstream.AuthEnv+" in the environment has USER:PASSWORD, or the user's Docker configuration counts")
	flags.StringVar(&f.creds, "upstream-credentials", credsOwn, "`WHOSE` credentials say who may pull: own, the server's, as far as --access allows; client: the upstream is asked with those that each client shows (docs/access.md)")
	flags.DurationVar(&f.opts.Upstream.RightsTTL, "upstream-rights-ttl", time.Minute, "how long the upstream's answer holds that a client may pull from a repository, with --upstream-credentials client")
	flags.StringVar(&f.opts.Upstream.CA, "upstream-ca", "", "`FILE` with certificates in PEM form that vouch for the upstream, besides the system's")
	flags.DurationVar(&f.opts.Upstream.TagTTL, "upstream-tag-ttl", 0, "how long the upstream's answer about a tag holds; 0: it is asked each time")
	flags.DurationVar(&f.opts.Upstream.TagTimeout, "upstream-tag-timeout", 5*time.Second, "how long the upstream has to answer about a tag that is here, before it is served as it was")
	flags.DurationVar(&f.opts.Grace, "grace", 10*time.Second, "how long requests may go on when the server is told to end")
	flags.DurationVar(&f.opts.Drain, "drain", 0, "how long it goes on accepting requests when it is told to end, while /readyz says 503: longer than a load balancer takes to look elsewhere")
	flags.DurationVar(&f.opts.Collect.Window, "undelete-window", catalog.DefaultWindow, "for how long foil server undelete brings back what was deleted; less than 0: never")
	flags.DurationVar(&f.opts.Collect.Grace, "gc-grace", 24*time.Hour, "for how long a blob stays that no manifest names")
	flags.DurationVar(&f.opts.Lease, "gc-lease", catalog.DefaultLease, "for how long a blob stays after a client was told that it is there, whatever else")
	flags.IntVar(&f.opts.Collect.Rate, "gc-rate", 32<<20, "how many `BYTES` a second are read and written to compact packs")
	flags.Int64Var(&f.opts.Reserve, "reserve", serve.DefaultReserve, "how many `BYTES` of the disk are left for deleting and collecting: pushes are refused when less is free; less than 0: none")
	flags.TextVar(&f.level, "log-level", slog.LevelInfo, "least `LEVEL` to log: debug, info, warn or error")
}

// check says what flags make no sense together.
func (f *serveFlags) check() error {
	if (f.opts.TLSCert == "") != (f.opts.TLSKey == "") {
		return usagef("--tls-cert and --tls-key come together")
	}
	f.opts.Upstream.ClientCredentials = f.creds == credsClient
	switch {
	case f.creds != credsOwn && f.creds != credsClient:
		return usagef("--upstream-credentials %q: want %s or %s", f.creds, credsOwn, credsClient)
	case f.creds == credsClient && f.opts.Upstream.URL == "":
		return usagef("--upstream-credentials client comes with --upstream")
	case f.creds == credsClient && f.opts.Access != "":
		return usagef("with --upstream-credentials client the upstream decides who may pull: leave out --access")
	case f.opts.Upstream.RightsTTL <= 0:
		return usagef("--upstream-rights-ttl %v: want more than nothing", f.opts.Upstream.RightsTTL)
	case f.opts.FirstRate < 0 || f.opts.FirstRate > 1e6:
		return usagef("--first-rate %d: want Mbit a second, or 0", f.opts.FirstRate)
	case f.audit != "" && f.opts.Access == "" && f.creds != credsClient:
		return usagef("--audit comes with --access, or --upstream-credentials client: an open server decides nothing")
	}
	if f.opts.Store != "" {
		if _, err := s3.Parse(f.opts.Store); err != nil {
			return usagef("--store: %v", err)
		}
	}
	if f.opts.Catalog != "" {
		if _, _, err := postgres.Parse(f.opts.Catalog); err != nil {
			return usagef("--catalog: %v", err)
		}
	}
	if f.opts.StoreCache < 64<<20 {
		return usagef("--store-cache %d: want 64 MiB (67108864) at least", f.opts.StoreCache)
	}
	if f.opts.Upstream.URL == "" && (f.opts.Upstream.Auth != "" || f.opts.Upstream.CA != "") {
		return usagef("--upstream-auth and --upstream-ca come with --upstream")
	}
	if f.opts.Upstream.URL != "" {
		if _, _, err := upstream.ParseURL(f.opts.Upstream.URL); err != nil {
			return usagef("%v", err)
		}
	}
	return checkMetrics(f.metrics)
}

// runServe is the server, until it is told to end.
func runServe(cmd *cobra.Command, f *serveFlags) error {
	f.opts.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: f.level}))
	if f.audit != "" {
		audit, err := openAudit(cmd.OutOrStdout(), f.audit, func(err error) {
			f.opts.Log.Error("the audit log stays in the file that it was in", "error", err)
		})
		if err != nil {
			return err
		}
		defer audit.Close()
		f.opts.Audit = audit
	}
	s, err := serve.Start(cmd.Context(), f.opts)
	if err != nil {
		return err
	}
	var all errgroup.Group
	ctx, end := context.WithCancel(cmd.Context())
	defer func() {
		end()
		_ = all.Wait()
	}()
	if f.metrics != metrics.Off {
		serveMetrics(ctx, &all, f.metrics, f.opts.Log, s.Metrics())
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Wait() }()
	select {
	case err = <-ended:
	case <-cmd.Context().Done():
		f.opts.Log.Info("ending", "grace", f.opts.Grace)
	}
	return errors.Join(err, s.Close())
}
