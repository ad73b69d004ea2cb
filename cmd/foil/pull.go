package main

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptrace"
	"os"
	"strings"
	"sync"
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
		Use:   "pull [flags] REF...",
		Short: "Fetch images, or what of them is not here yet",
		Long: `pull fetches images from their servers and waits until every byte of them is
here, verified and safe on the disk. Only what the worker lacks is moved: bytes
that any other image here has are used in place.

Several images are pulled side by side. What they share, and have from the same
server, comes once. If one fails the others go on.

The daemon does the work (foil pull starts one if none runs), so that an
interrupted command does not stop the pull: "foil status" goes on showing it,
and the same command joins it again. With --until mounted the command ends as
soon as containers can start; the rest comes in the background.

REF is HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]. The host is never guessed. Which
servers answer for it, their certificates and credentials: see foil node.

Exit codes: 0 the images are here; 1 one of them could not be had, and the error
says which; 2 the command line makes no sense; 130 interrupted (the pulls go on).`,
		Example: `  foil pull registry.example/redis:7
  foil pull --until mounted registry.example/redis:7
  foil pull registry.example/app:1 registry.example/worker:1
  foil pull --json 10.0.0.7:5000/app:v2 --plain-http | jq -r .event`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.Until, req.NoStartup = api.EventKind(until), !startup
			if req.Until != api.Mounted && req.Until != api.Complete {
				return usagef("--until %s: say mounted or complete", until)
			}
			for _, ref := range args {
				if _, err := api.NormalRef(ref); err != nil {
					return &usageError{err}
				}
			}
			if req.Credential, err = creds(); err != nil {
				return &usageError{err}
			}
			if req.Credential != (credentials.Credential{}) && len(registriesOf(args)) > 1 {
				return usagef("--creds and FOIL_CREDS are for one registry, and these images are of %d: pull them one by one", len(registriesOf(args)))
			}
			if err := needRoot(os.Geteuid(), "foil pull"); err != nil {
				return err
			}
			out := pullPrinter(cmd, asJSON, &interval)
			req.Interval = interval
			err = pullAll(cmd.Context(), root, args, req, out)
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

// between is how long after the request for one image the next one is asked for.
const between = 10 * time.Millisecond

// pullAll pulls images side by side, in the order in which they are named, through the daemon at
// root, which it starts if none runs.
func pullAll(ctx context.Context, root string, refs []string, req api.PullRequest, out eventPrinter) error {
	begun := time.Now()
	c, err := api.EnsureDaemon(ctx, root, api.EnsureOptions{})
	if err != nil {
		return err
	}
	defer c.Close()
	errs := make([]error, len(refs))
	together := &together{out: out}
	var pulls sync.WaitGroup
	for i, ref := range refs {
		req := req
		req.Ref = ref
		asked := make(chan struct{})
		sent := sync.OnceFunc(func() { close(asked) })
		pulls.Go(func() {
			defer sent()
			ctx := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { sent() }})
			errs[i] = pull(ctx, c, root, begun, req, together)
		})
		// The daemon begins them in this order: what they share comes with the first.
		<-asked
		if i < len(refs)-1 {
			time.Sleep(between)
		}
	}
	pulls.Wait()
	return failed(ctx, refs, errs)
}

// failed is the error of a command that pulled refs, or nil.
func failed(ctx context.Context, refs []string, errs []error) error {
	if len(refs) == 1 {
		return errs[0]
	}
	var lines []string
	for i, err := range errs {
		if err != nil {
			lines = append(lines, fmt.Sprintf("%s: %v", refs[i], err))
		}
	}
	switch {
	case len(lines) == 0:
		return nil
	case ctx.Err() != nil:
		return &exitError{130, errors.New("interrupted; the daemon goes on with the pulls: foil status shows them, foil rm ends them")}
	}
	return fmt.Errorf("%d of %d images could not be pulled:\n%s", len(lines), len(refs), strings.Join(lines, "\n"))
}

// pull pulls one image through a daemon.
func pull(ctx context.Context, c *api.Client, root string, begun time.Time, req api.PullRequest, out eventPrinter) error {
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
