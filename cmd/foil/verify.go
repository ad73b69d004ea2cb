package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
)

func newVerifyCommand() *cobra.Command {
	var root string
	var asJSON, proof bool
	cmd := &cobra.Command{
		Use:   "verify [flags] REF",
		Short: "Compare every local byte of an image with its digest",
		Long: `verify reads every byte of an image that is on this worker and compares it with
the digest that the image's manifest leads to. Use it after a disk error, or to
be sure. Bytes that have not arrived yet are counted, and are no error.

That is right which the image's server said. The result tells whether more is known:
"served", the server's word is all there is; "proven", the layers were hashed here,
are those that the image's config names, and make these files. With --proof it
has that found out now, and waits.

Each file that is wrong is named. To repair an image, remove it and pull it
again: what is right in other images is not moved again.

Exit codes: 0 every byte that is here is right; 1 some are wrong, or the image
could not be verified, or proven with --proof; 2 the command line makes no sense.`,
		Example: `  foil verify registry.example/redis:7
  foil verify --proof registry.example/redis:7
  foil verify --json registry.example/redis:7 | jq -r 'select(.bad) | .bad'`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := api.NormalRef(args[0]); err != nil {
				return &usageError{err}
			}
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				if proof {
					if err := follow(cmd, args[0], c.Prove(ctx, args[0]), asJSON); err != nil {
						return err
					}
				}
				return verify(ctx, cmd, c, args[0], asJSON)
			})
		},
	}
	clientRoot(cmd, &root)
	cmd.ValidArgsFunction = completeNames(&root, false)
	jsonFlag(cmd, &asJSON)
	cmd.Flags().BoolVar(&proof, "proof", false, "prove the image against the diff IDs of its layers first, now; its registry is asked for what is not here")
	return cmd
}

// follow shows the progress of a proof until it has ended.
func follow(cmd *cobra.Command, ref string, events iter.Seq2[api.VerifyEvent, error], asJSON bool) (err error) {
	var display *progress.Display
	if _, ok := progress.Terminal(cmd.ErrOrStderr()); ok && !asJSON {
		display = progress.NewDisplay(cmd.ErrOrStderr())
		defer func() { err = errors.Join(err, display.Clear()) }()
	}
	for ev, err := range events {
		switch {
		case err != nil:
		case asJSON:
			err = printJSON(cmd.OutOrStdout(), ev)
		case display != nil && !ev.Done:
			err = display.Show(progress.Transfer{Name: ref, Phase: provingPhase(ev.Proof, ev.Layer, ev.Layers), Moved: ev.Checked, Total: ev.Total})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func verify(ctx context.Context, cmd *cobra.Command, c *api.Client, ref string, asJSON bool) (err error) {
	w := cmd.OutOrStdout()
	var display *progress.Display
	if _, ok := progress.Terminal(cmd.ErrOrStderr()); ok && !asJSON {
		display = progress.NewDisplay(cmd.ErrOrStderr())
		defer func() { err = errors.Join(err, display.Clear()) }()
	}
	bad := 0
	var last api.VerifyEvent
	for ev, err := range c.Verify(ctx, ref) {
		if err != nil {
			return err
		}
		last = ev
		if ev.Bad != "" {
			bad++
		}
		switch {
		case asJSON:
			err = printJSON(w, ev)
		case ev.Bad != "":
			if display != nil {
				err = display.Clear()
			}
			_, perr := fmt.Fprintf(w, "wrong: %s\n", printable(ev.Bad))
			err = errors.Join(err, perr)
		case display != nil && !ev.Done:
			err = display.Show(progress.Transfer{Name: ref, Phase: "verify", Moved: ev.Checked, Total: ev.Total - ev.Absent})
		}
		if err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("%s: %d files have wrong bytes on this worker; remove the image (foil rm --force %s) and pull it again", ref, bad, ref)
	}
	if asJSON {
		return nil
	}
	_, err = fmt.Fprintf(w, "%s: %s right", ref, progress.Bytes(last.Checked))
	if err == nil && last.Absent > 0 {
		_, err = fmt.Fprintf(w, ", %s not here yet", progress.Bytes(last.Absent))
	}
	if err == nil {
		_, err = fmt.Fprintf(w, "; %s\n", cmp.Or(last.Proof, "served"))
	}
	return err
}

// printable quotes a name from an image if a terminal might act on it.
func printable(name string) string {
	if q := fmt.Sprintf("%q", name); len(q) != len(name)+2 {
		return q
	}
	return name
}
