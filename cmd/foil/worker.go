package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/worker/api"
)

// rootFlag adds --root. FOIL_ROOT stands for the flag: it wins over the
// configuration file.
func rootFlag(cmd *cobra.Command, root *string) {
	cmd.Flags().StringVar(root, "root", api.DefaultRoot, "`DIR` of the worker; FOIL_ROOT in the environment sets it as well")
	if env := os.Getenv("FOIL_ROOT"); env != "" {
		*root = env
		cmd.Flags().Lookup("root").Changed = true
	}
}

// clientRoot adds --root to a command that talks to the daemon: unless it is
// given, the daemon's section of the configuration file says where that is.
func clientRoot(cmd *cobra.Command, root *string) {
	rootFlag(cmd, root)
	inner := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := configuredRoot(cmd, root); err != nil {
			return err
		}
		return inner(cmd, args)
	}
}

// configuredRoot sets root to what the daemon's section of the configuration file says,
// unless --root is given.
func configuredRoot(cmd *cobra.Command, root *string) error {
	if cmd.Flags().Changed("root") {
		return nil
	}
	tables, err := readConfig(cmd.Root(), defaultConfig, false)
	if err != nil {
		return err
	}
	if configured, ok := tables["node"]["root"]; ok {
		*root = configured
	}
	return nil
}

// jsonFlag adds --json to a command that lists things.
func jsonFlag(cmd *cobra.Command, asJSON *bool) {
	cmd.Flags().BoolVar(asJSON, "json", false, "print one JSON object a line")
}

// ask calls fn with a client of the daemon at root, which must run.
func ask(ctx context.Context, root string, fn func(context.Context, *api.Client) error) error {
	c := api.Dial(root)
	defer c.Close()
	return advise(root, fn(ctx, c))
}

// needRoot says what to do when the command has no chance without root.
func needRoot(euid int, command string) error {
	if euid == 0 {
		return nil
	}
	return fmt.Errorf("%s needs root, since it mounts filesystems and starts containers: run it with sudo", command)
}

// advise adds to an error what the code of an api.Error and the command line
// know about the next step, unless the message has it already.
func advise(root string, err error) error {
	e, ok := errors.AsType[*api.Error](err)
	if !ok {
		return err
	}
	if e.Code == api.CodeUnavailable && (strings.Contains(e.Message, api.ServerAnswers) || strings.Contains(e.Message, "the daemon")) {
		return err // the way to the server is not at fault
	}
	next := map[string]struct{ advice, has string }{
		api.CodeUnauthorized: {"Give it credentials: --creds or FOIL_CREDS for one pull, docker login as the daemon's user for all (foil node --docker-config).", "--creds"},
		api.CodeUnavailable:  {"Is the server up, and reachable from here? One that speaks HTTP without TLS needs --plain-http.", "--plain-http"},
		api.CodeUnsupported:  {"What this host can do, and what to do about it: foil doctor --root " + root, "server"},
		api.CodeNoSpace:      {"What is on the worker: foil images. To remove something: foil rm REF.", "foil rm"},
		api.CodeCorrupt:      {"What is wrong in detail: foil verify REF. To start afresh: foil rm REF, and pull again.", "foil rm"},
		api.CodeInternal:     {"The daemon's log may say more: " + api.LogPath(root) + ", or journalctl -u foil.", "'s log"},
	}[e.Code]
	if next.advice == "" || strings.Contains(err.Error(), next.has) {
		return err
	}
	return &advised{err, next.advice}
}

// advised is an error with the next step on a line of its own.
type advised struct {
	err    error
	advice string
}

func (a *advised) Error() string { return a.err.Error() + "\n" + a.advice }
func (a *advised) Unwrap() error { return a.err }

// printJSON writes one object a line.
func printJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }

// table writes rows in columns.
func table(w io.Writer, header string, rows []string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(tw, strings.ReplaceAll(header, " ", "\t"))
	for _, row := range rows {
		fmt.Fprintln(tw, row)
	}
	return tw.Flush()
}

// shortDigest is enough of a digest for people to compare.
func shortDigest(s string) string {
	d, err := digest.Parse(s)
	if err != nil {
		return s
	}
	return d.Encoded()[:12]
}

// localTime writes a time for a table.
func localTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05")
}

// completeNames makes the shell complete arguments with the names of images,
// and of containers if wanted, that are on the worker.
func completeNames(root *string, containers bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		if configuredRoot(cmd, root) != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		c := api.Dial(*root)
		defer c.Close()
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
		defer cancel()
		var names []string
		images, err := c.Images(ctx)
		for _, img := range images {
			names = append(names, img.Ref)
		}
		if containers && err == nil {
			var list []api.Container
			list, err = c.Containers(ctx)
			for _, c := range list {
				names = append(names, c.ID)
			}
		}
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
