package main

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/scrub"
)

func newServerScrubCommand() *cobra.Command {
	var o scrub.Options
	var rate scrub.Rate
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "scrub",
		Short: "Read all that a server keeps, and mend what is damaged",
		Long: `Reads everything that rests below the root of foil serve: blobs, packs, entry lists, recipes, tables of
contents, indices, startup sets, manifests and the journal. Each is compared with its digest. What is lost or
damaged is made anew from what others hold, wherever that gives the same bytes: docs/scrub.md says what
comes from what. What cannot be mended is named, with the images that need it: push those again.

The server must not run; foil serve --scrub-rate does the same while it serves. With --check nothing is changed, and
the server may run. A pass that was interrupted goes on where it was; with --check it begins anew.

Exit codes: 0 all is whole, or was mended; 1 something is damaged that was not mended (with --check: at all), or an
error; 2 the command line makes no sense; 130 interrupted.`,
		Example: `  foil server scrub --root /var/lib/foil-registry
  foil server scrub --check --rate 20M --json | jq '.findings[] | select(.mended | not) | .images'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Rate = int64(rate)
			o.Log = slog.New(slog.DiscardHandler) // the report says it
			lines, end := oneLine(cmd.ErrOrStderr())
			o.Progress = func(p scrub.Progress) {
				lines(func() string {
					return fmt.Sprintf("%s: %d objects of %s read, %d damaged", p.Phase, p.Objects, progress.Bytes(p.Bytes), p.Damaged)
				})
			}
			r, err := scrub.Run(cmd.Context(), o)
			end()
			if r == nil {
				return err
			}
			print := printScrub
			if asJSON {
				print = func(w io.Writer, r *scrub.Report) error { return printJSON(w, r) }
			}
			if perr := print(cmd.OutOrStdout(), r); err == nil {
				err = perr
			}
			if err == nil && r.Unmended > 0 {
				return &exitError{code: 1}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&o.Root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.Flags().BoolVar(&o.Check, "check", false, "change nothing; the server may run")
	cmd.Flags().Var(&rate, "rate", "read at most so many bytes a second, as `20M`; 0: as fast as it goes")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

// oneLine shows a line on a terminal, now and then another one, until end is called.
func oneLine(w io.Writer) (show func(line func() string), end func()) {
	if _, ok := progress.Terminal(w); !ok {
		return func(func() string) {}, func() {}
	}
	display := progress.NewDisplay(w)
	var last time.Time
	show = func(line func() string) {
		if time.Since(last) >= 100*time.Millisecond {
			last = time.Now()
			_ = display.Lines(line()) // a terminal that is gone is no failure
		}
	}
	return show, func() { _ = display.Clear() }
}

func printScrub(w io.Writer, r *scrub.Report) error {
	var rows []string
	for _, f := range r.Findings {
		state := "damaged"
		if f.Mended != "" {
			state = "mended"
		}
		rows = append(rows, strings.Join([]string{state, f.Kind, f.Key, cmp.Or(strings.Join(f.Images, " "), "-")}, "\t"))
	}
	if len(rows) > 0 {
		if err := table(w, "STATE KIND OBJECT IMAGES", rows); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	for _, f := range r.Findings {
		fmt.Fprintf(w, "%s: %s\n", f.Key, cmp.Or(f.Mended, f.Why))
	}
	var all scrub.Count
	for _, c := range r.Checked {
		all.Objects, all.Bytes = all.Objects+c.Objects, all.Bytes+c.Bytes
	}
	state := "to its end"
	if r.Ended.IsZero() {
		state = "not to its end"
	}
	_, err := fmt.Fprintf(w, "read %s: %d objects of %s in %v; %d mended, %d damaged\n", state, all.Objects, progress.Bytes(all.Bytes), r.Took.Round(time.Millisecond), r.Mended, r.Unmended)
	return err
}
