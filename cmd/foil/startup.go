package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/format/bundle"
	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/picture"
	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
)

func newStartupCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "startup",
		Short: "Make, show and remove startup sets of an image",
		Long: `startup is about startup sets: the pages of an image that a service (entrypoint
and command) reads until it is ready. The image's server has them, and sends them
first. They come from traces ("foil startup create", "foil trace"), from what
workers report of starts, or from another version of the image. A wrong set costs
bytes and never does harm. docs/startup.md says more.`,
		Example: `  foil startup create --probe tcp:6379 registry.example/redis:7
  foil startup ls registry.example/redis:7
  foil startup show registry.example/redis:7`,
	}
	onlySubcommands(cmd)
	cmd.AddCommand(newStartupCreateCommand(), newStartupLsCommand(), newStartupShowCommand(), newStartupRmCommand())
	return cmd
}

// aboutFlags are those of the commands that ask about an image.
type aboutFlags struct {
	root   string
	asJSON bool
	req    api.AboutImage
	creds  func() (credentials.Credential, error)
}

func (f *aboutFlags) add(cmd *cobra.Command) {
	clientRoot(cmd, &f.root)
	cmd.ValidArgsFunction = completeNames(&f.root, false)
	f.creds = credsFlag(cmd)
	cmd.Flags().StringVar(&f.req.Platform, "platform", "", "`OS/ARCH[/VARIANT]` to choose from an index (default this host's)")
	cmd.Flags().BoolVar(&f.req.PlainHTTP, "plain-http", false, "speak HTTP without TLS; loopback addresses always do")
}

// ask calls fn with a client of the daemon, for the image ref.
func (f *aboutFlags) ask(cmd *cobra.Command, ref string, fn func(context.Context, *api.Client) error) (err error) {
	if f.req.Ref, err = api.NormalRef(ref); err != nil {
		return &usageError{err}
	}
	if f.req.Credential, err = f.creds(); err != nil {
		return &usageError{err}
	}
	return ask(cmd.Context(), f.root, fn)
}

func newStartupCreateCommand() *cobra.Command {
	var f traceFlags
	cmd := &cobra.Command{
		Use:   "create [flags] REF [-- COMMAND ARG...]",
		Short: "Trace a service and make its startup set",
		Long: `create traces a service as "foil trace" does, sends the traces to the image's
server, and says what startup set came of it.

Exit codes: 0; 1 the service did not become ready, or there is no set.`,
		Example: `  foil startup create --runs 3 --probe tcp:6379 registry.example/redis:7
  foil startup create --probe exit registry.example/python:3 -- python3 -c 'import numpy'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.apply(args); err != nil {
				return err
			}
			f.trace.Send = true
			last, err := f.run(cmd, nil)
			if err != nil {
				return err
			}
			return ask(cmd.Context(), f.root, func(ctx context.Context, c *api.Client) error {
				req := api.AboutImage{Ref: last.Ref, Platform: f.opts.Pull.Platform, PlainHTTP: f.opts.Pull.PlainHTTP, Credential: f.opts.Pull.Credential}
				report, err := c.Startup(ctx, req)
				if err != nil {
					return err
				}
				report.Services = slices.DeleteFunc(report.Services, func(s bundle.Service) bool { return s.ID != last.Service })
				if len(report.Services) == 0 {
					return fmt.Errorf("the server has the trace but no startup set of service %s: it touches too little, or more than sets may have", last.Service)
				}
				return printServices(cmd, report, f.asJSON)
			})
		},
	}
	f.add(cmd)
	return cmd
}

func newStartupLsCommand() *cobra.Command {
	var f aboutFlags
	cmd := &cobra.Command{
		Use:   "ls [flags] REF",
		Short: "List the startup sets of an image",
		Long: `ls lists the services of which the image's server has startup sets: where each set
comes from (traced, learned from reports of workers, inherited from another
version, common to the other services), how many traces and reports made it, and
how large it is. Pages that several services share are kept once.

Exit codes: 0; 1 the server does not answer, or knows no such image.`,
		Example: `  foil startup ls registry.example/redis:7
  foil startup ls --json registry.example/redis:7 | jq -r .id`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.ask(cmd, args[0], func(ctx context.Context, c *api.Client) error {
				report, err := c.Startup(ctx, f.req)
				if err != nil {
					return err
				}
				return printServices(cmd, report, f.asJSON)
			})
		},
	}
	f.add(cmd)
	jsonFlag(cmd, &f.asJSON)
	return cmd
}

func printServices(cmd *cobra.Command, r *bundle.StartupReport, asJSON bool) error {
	w := cmd.OutOrStdout()
	var rows []string
	for _, s := range r.Services {
		if asJSON {
			if err := printJSON(w, s); err != nil {
				return err
			}
			continue
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%d\t%d\t%d\t%s\t%.1f%%\t%s\t%s\t%s", s.ID, s.Origin, s.Traces, s.Reports, s.Pages,
			progress.Bytes(s.Bytes), percent(s.Bytes, r.ImageBytes), progress.Bytes(s.Stored), localTime(s.Updated), commandText(s.Args)))
	}
	if asJSON {
		return nil
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintf(w, "no startup sets of TOC %s: workers' reports make some, or \"foil startup create\"\n", shortDigest(r.TOC.String()))
		return err
	}
	if err := table(w, "SERVICE ORIGIN TRACES REPORTS PAGES SIZE SHARE STORED UPDATED COMMAND", rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "all sets of the image: %s stored for %s of pages, %.1f%% of the image's %s\n",
		progress.Bytes(r.StoreBytes), progress.Bytes(r.StoreRawBytes), percent(r.StoreRawBytes, r.ImageBytes), progress.Bytes(r.ImageBytes))
	return err
}

// commandText is a command line for a table.
func commandText(args []string) string {
	s := strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, strings.Join(args, " "))
	if r := []rune(s); len(r) > 60 {
		return string(r[:59]) + "…"
	}
	return s
}

func newStartupShowCommand() *cobra.Command {
	var f aboutFlags
	var html string
	var all bool
	cmd := &cobra.Command{
		Use:   "show [flags] REF [-- COMMAND ARG...]",
		Short: "Show which pages of which files a startup set has",
		Long: `show draws the image by directory, with the pages of a startup set in it, and lists
the files with most of them. --html writes a page for a browser instead, which
needs nothing else: a map to look into, the order of the pages, and all files.

The service is chosen by --service, by (the end of) its command, or is the only
one. The image need not be here.

Exit codes: 0; 1 the server does not answer, or there is no such set.`,
		Example: `  foil startup show registry.example/redis:7
  foil startup show --html redis.html registry.example/redis:7
  foil startup show registry.example/python:3 -- python3 -c 'import numpy'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.ask(cmd, args[0], func(ctx context.Context, c *api.Client) error {
				set, err := f.set(ctx, c, args[1:])
				if err != nil {
					return err
				}
				return showSet(cmd, set, html, f.asJSON, all)
			})
		},
	}
	f.add(cmd)
	jsonFlag(cmd, &f.asJSON)
	cmd.Flags().StringVar(&f.req.Service, "service", "", "`ID` of the service, as foil startup ls shows it")
	cmd.Flags().StringVar(&html, "html", "", "write a page of HTML to `FILE`")
	cmd.Flags().BoolVar(&all, "all", false, "list all files")
	return cmd
}

// set fetches the startup set of the service that is meant.
func (f *aboutFlags) set(ctx context.Context, c *api.Client, command []string) (*picture.Set, error) {
	if f.req.Service == "" {
		report, err := c.Startup(ctx, f.req)
		if err != nil {
			return nil, err
		}
		if f.req.Service, err = chooseService(report.Services, command, f.req.Ref); err != nil {
			return nil, err
		}
	} else if len(command) > 0 {
		return nil, usagef("--service and a command: use one of them")
	}
	r, err := c.StartupService(ctx, f.req)
	if err != nil {
		return nil, err
	}
	f.req.TOC = r.TOC.String()
	img, err := imageOf(ctx, c, f.req)
	if err != nil {
		return nil, err
	}
	set, err := img.OfService(r)
	if err != nil {
		return nil, err
	}
	set.Facts = []picture.Fact{
		{Name: "origin", Value: r.Origin},
		{Name: "traces", Value: fmt.Sprint(r.Traces)},
		{Name: "reports", Value: fmt.Sprint(r.Reports)},
		{Name: "stored", Value: progress.Bytes(r.Stored)},
	}
	return set, nil
}

// chooseService returns the ID of the service whose arguments end with command,
// or of the only one there is.
func chooseService(list []bundle.Service, command []string, ref string) (string, error) {
	var fit []bundle.Service
	for _, s := range list {
		if n := len(s.Args) - len(command); n >= 0 && slices.Equal(s.Args[n:], command) {
			fit = append(fit, s)
		}
	}
	switch {
	case len(fit) == 1:
		return fit[0].ID, nil
	case len(list) == 0:
		return "", fmt.Errorf("%s has no startup sets: workers' reports make some, or \"foil startup create\"", ref)
	case len(fit) == 0:
		return "", fmt.Errorf("no service of %s runs %s: \"foil startup ls %s\" lists them", ref, strings.Join(command, " "), ref)
	}
	ids := make([]string, len(fit))
	for i, s := range fit {
		ids[i] = s.ID + " (" + commandText(s.Args) + ")"
	}
	return "", fmt.Errorf("%s has several services; choose one with --service: %s", ref, strings.Join(ids, ", "))
}

// showSet writes a set as HTML to a file, as JSON, or as text.
func showSet(cmd *cobra.Command, set *picture.Set, html string, asJSON, all bool) error {
	w := cmd.OutOrStdout()
	if html != "" {
		err := writeHTML(set, html)
		if err == nil && !asJSON {
			_, err = fmt.Fprintf(w, "written: %s\n", html)
		}
		if err != nil || !asJSON {
			return err
		}
	}
	if asJSON {
		for _, t := range set.Touched {
			if err := printJSON(w, t); err != nil {
				return err
			}
		}
		return nil
	}
	o := picture.TextOptions{}
	o.Width, o.Terminal = progress.Terminal(w)
	o.Color = o.Terminal && os.Getenv("NO_COLOR") == ""
	if all {
		o.Files = -1
	}
	return set.Text(w, o)
}

func writeHTML(set *picture.Set, path string) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	if err := errors.Join(set.HTML(file, time.Now()), file.Close()); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return nil
}

func newStartupRmCommand() *cobra.Command {
	var f aboutFlags
	var all bool
	cmd := &cobra.Command{
		Use:   "rm [flags] REF",
		Short: "Forget startup sets, and what was learned",
		Long: `rm makes the image's server forget the startup set of a service, or with --all
those of all services of the image, with the traces and reports that made them.
Learning begins anew.

Exit codes: 0; 1 the server does not answer, or there is no such service.`,
		Example: `  foil startup rm --service 0123456789abcdef registry.example/redis:7
  foil startup rm --all registry.example/redis:7`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (f.req.Service != "") {
				return usagef("say which: --service ID, or --all")
			}
			if f.req.Service != "" && !isService(f.req.Service) {
				return usagef("--service %s: a service's ID has 16 hexadecimal digits", f.req.Service)
			}
			return f.ask(cmd, args[0], func(ctx context.Context, c *api.Client) error {
				return c.ForgetStartup(ctx, f.req)
			})
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&f.req.Service, "service", "", "`ID` of the service, as foil startup ls shows it")
	cmd.Flags().BoolVar(&all, "all", false, "forget all services of the image")
	return cmd
}

func isService(id string) bool {
	return len(id) == len(trace.Service(nil)) && strings.Trim(id, "0123456789abcdef") == ""
}
