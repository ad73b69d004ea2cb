package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/convert"
	"hydrofoil.dev/foil/internal/server/stores"
)

func newServerModeCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "mode",
		Short: "Say in how many stores blobs rest intact, and why some rest in more than their mode wants",
		Long: `Asks the server that runs with a root. A blob has intact copies in as many stores as its mode says, and is made
again from packs where it has none; docs/modes.md has the modes, and when a copy goes. The answer is what the last
pass over all blobs has found, which is made each hour and when the rules have changed.

  foil server mode             what the last pass has found
  foil server mode now         make a pass now, and say what it found
  foil server mode renew DIR   an empty disk is mounted where a store's lost one was: it is that store from now on

A blob keeps a copy that its mode does not want because it is
  unproven      nobody has proven how it is made again, as that of a config, or of a layer that an unknown tool made
  encoder       its encoder is not in this foil, or makes other bytes on this machine
  away          a store is away
  damaged       it did not come out of what a store has: foil server scrub finds what is wrong
  busy          it was being ingested
  not-written   a copy that it should have could not be written, or it is lost

Exit codes: 0; 1 an error, a store is away; 2 the command line makes no sense.`,
		Example: `  foil server mode --root /var/lib/foil-registry
  foil server mode --json | jq '.groups[] | select(.copies == 0)'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return showModes(cmd, root, asJSON, false) },
	}
	runningFlags(cmd, &root, &asJSON)
	now := &cobra.Command{
		Use:     "now",
		Short:   "Give blobs as many intact copies as their modes want, now",
		Example: "  foil server mode now",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return showModes(cmd, root, asJSON, true) },
	}
	runningFlags(now, &root, &asJSON)
	renew := &cobra.Command{
		Use:   "renew DIR",
		Short: "Make an empty directory the store that was there",
		Long: `A store whose disk was lost is away: the directory that is left there is not it, and nothing is written to it. When
an empty disk is mounted there, this makes it the store, and the server, which may run, fills it.

Exit codes: 0; 1 an error, no such store, or the directory is not empty; 2 the command line makes no sense.`,
		Example: "  foil server mode renew /mnt/second",
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return stores.Renew(root, args[0])
		},
	}
	renew.Flags().StringVar(&root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.AddCommand(now, renew)
	return cmd
}

func showModes(cmd *cobra.Command, root string, asJSON, now bool) error {
	s, err := admin.NewClient(root).Mode(cmd.Context(), now)
	if err != nil {
		return fmt.Errorf("ask what rests where: %w", err)
	}
	if asJSON {
		err = printJSON(cmd.OutOrStdout(), s)
	} else {
		err = printModes(cmd.OutOrStdout(), &s)
	}
	for _, one := range s.Stores {
		if one.Away != "" && err == nil {
			err = &exitError{code: 1}
		}
	}
	return err
}

func printModes(w io.Writer, s *convert.Status) error {
	var rows []string
	for _, one := range s.Stores {
		state := "here"
		if one.Away != "" {
			state = one.Away
		}
		rows = append(rows, one.Dir+"\t"+state)
	}
	if err := table(w, "STORE STATE", rows); err != nil {
		return err
	}
	if s.Ended.IsZero() {
		_, err := fmt.Fprintln(w, "\nno pass over all blobs has ended yet: foil server mode now makes one")
		return err
	}
	rows = nil
	for _, g := range s.Groups {
		rows = append(rows, fmt.Sprintf("%s\t%d\t%d\t%s\t%s", g.Mode, g.Copies, g.Blobs, progress.Bytes(g.Bytes), progress.Bytes(g.Bytes*int64(g.Copies))))
	}
	fmt.Fprintln(w)
	if err := table(w, "MODE COPIES BLOBS BYTES INTACT", rows); err != nil {
		return err
	}
	rows = nil
	for _, k := range s.Kept {
		rows = append(rows, fmt.Sprintf("%s\t%d\t%s", k.Why, k.Blobs, progress.Bytes(k.Bytes)))
	}
	if len(rows) > 0 {
		fmt.Fprintln(w)
		if err := table(w, "KEPT BLOBS BYTES", rows); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "\nas a pass found it that ended %v ago\n", time.Since(s.Ended).Round(time.Second))
	return err
}
