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

// defaultRoot is the worker's root unless a flag says otherwise.
func defaultRoot() string {
	if root := os.Getenv("FOIL_ROOT"); root != "" {
		return root
	}
	return api.DefaultRoot
}

// rootFlag adds --root.
func rootFlag(cmd *cobra.Command, root *string) {
	cmd.Flags().StringVar(root, "root", defaultRoot(),
		"`DIR` of the worker; FOIL_ROOT sets the default")
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
	next := map[string]struct{ advice, has string }{
		api.CodeUnauthorized: {"The registry wants credentials, and foil has none to give: use a registry that allows anonymous pulls.", "credential"},
		api.CodeUnavailable:  {"Is the server up, and reachable from here? One that speaks HTTP without TLS needs --plain-http.", "--plain-http"},
		api.CodeUnsupported:  {"What this host can do, and what to do about it: foil doctor --root " + root, "foil doctor"},
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
