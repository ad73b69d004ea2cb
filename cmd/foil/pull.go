package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
)

func newPullCommand() *cobra.Command {
	var root, until string
	var asJSON, startup bool
	var interval time.Duration
	var req api.PullRequest
	var creds func() (credentials.Credential, error)
	cmd := &cobra.Command{
		Use:   "pull [flags] REF",
		Short: "Fetch an image, or what of it is not here yet",
		Long: `pull fetches an image from its server and waits until every byte of it is
here, verified and safe on the disk. Only what the worker lacks is moved: bytes
that any other image here has are used in place.

The daemon does the work (foil pull starts one if none runs), so that an
interrupted command does not stop the pull: "foil status" goes on showing it,
and the same command joins it again. With --until mounted the command ends as
soon as containers can start; the rest comes in the background.

REF is HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]. The host is never guessed. Which
servers answer for it, their certificates and credentials: see foil node.

Exit codes: 0 the image is here; 1 it could not be had; 2 the command line
makes no sense; 130 interrupted (the pull goes on).`,
		Example: `  foil pull registry.example/redis:7
  foil pull --until mounted registry.example/redis:7
  foil pull --json 10.0.0.7:5000/app:v2 --plain-http | jq -r .event`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.Ref, req.Until, req.NoStartup = args[0], api.EventKind(until), !startup
			if req.Until != api.Mounted && req.Until != api.Complete {
				return usagef("--until %s: say mounted or complete", until)
			}
			if _, err := api.NormalRef(req.Ref); err != nil {
				return &usageError{err}
			}
			if req.Credential, err = creds(); err != nil {
				return &usageError{err}
			}
			if err := needRoot(os.Geteuid(), "foil pull"); err != nil {
				return err
			}
			out := pullPrinter(cmd, asJSON, &interval)
			req.Interval = interval
			err = pull(cmd.Context(), root, req, out)
			return errors.Join(err, out.close())
		},
	}
	clientRoot(cmd, &root)
	cmd.ValidArgsFunction = completeNames(&root, false)
	creds = credsFlag(cmd)
	f := cmd.Flags()
	f.StringVar(&req.Platform, "platform", "", "`OS/ARCH[/VARIANT]` to choose from an index (default this host's)")
	f.BoolVar(&req.PlainHTTP, "plain-http", false, "speak HTTP without TLS; loopback addresses always do")
	f.BoolVar(&startup, "startup", true, "have the pages that a start touches come first, if the server knows them")
	f.StringVar(&until, "until", string(api.Complete), "wait for `EVENT`: mounted (containers can start) or complete")
	f.BoolVar(&asJSON, "json", false, "print one event a line, as JSON")
	f.DurationVar(&interval, "interval", 0, "time between progress reports (default 0.1s on a terminal, 10s elsewhere, none with --json)")
	return cmd
}

// pullPrinter chooses how events are shown, and how often progress is.
func pullPrinter(cmd *cobra.Command, asJSON bool, interval *time.Duration) eventPrinter {
	every := func(d time.Duration) {
		if *interval == 0 {
			*interval = d
		}
	}
	if asJSON {
		return jsonEvents{cmd.OutOrStdout()}
	}
	if _, ok := progress.Terminal(cmd.ErrOrStderr()); ok {
		every(100 * time.Millisecond)
		return &barEvents{display: progress.NewDisplay(cmd.ErrOrStderr()), w: cmd.OutOrStdout()}
	}
	every(10 * time.Second)
	return lineEvents{cmd.OutOrStdout()}
}

// pull pulls through the daemon at root, which it starts if none runs.
func pull(ctx context.Context, root string, req api.PullRequest, out eventPrinter) error {
	begun := time.Now()
	c, err := api.EnsureDaemon(ctx, root, api.EnsureOptions{})
	if err != nil {
		return err
	}
	defer c.Close()
	for ev, err := range c.Pull(ctx, req) {
		if ev.Event != "" {
			ev.Elapsed = time.Since(begun).Seconds()
			if perr := out.print(ev); perr != nil {
				return perr
			}
		}
		if err != nil && ctx.Err() != nil {
			return &exitError{130, errors.New("interrupted; the daemon goes on with the pull: foil status shows it, foil rm " + req.Ref + " ends it")}
		}
		if err != nil {
			return advise(root, err)
		}
	}
	return nil
}
