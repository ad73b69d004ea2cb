package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/server/rebuild"
)

func newServerRebuildCommand() *cobra.Command {
	var o rebuild.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "rebuild",
		Short: "Make a server's catalog anew from its objects",
		Long: `Makes the catalog of foil serve anew, when its file is lost or damaged: repositories,
manifests, tags and deletions from the journal, packs from what they say themselves, layers that were ingested as
far as their objects are whole. What was acknowledged is in it. Startup sets and what they
were learned from are not: they are learned again.

The server must not run. The new catalog is made beside the old one and takes its place in
one step; the old one stays as catalog.before-TIME, which may be removed. What is
interrupted has changed nothing.

If the journal does not have everything (an object of it is damaged, or the server never got to
the end of writing it after an upgrade), nothing is put in place but with --incomplete.
Then the next start of the server removes blobs that no repository holds any more: make a
copy of the root before.

Objects in a bucket (foil serve --store) need no root that is left: with --store a new one is made,
and with --take the bucket is its own from then on. The old server must never run again on it.

A catalog in a PostgreSQL database (foil serve --catalog) is made anew in an empty database that --catalog
names. The root's is that one from then on; what the other one has stays there. So a root whose catalog is a file
moves to a database as well, but for its startup sets.

Exit codes: 0; 1 an error, a server that runs, a journal that lacks something; 2 the
command line makes no sense.`,
		Example: `  foil server rebuild --root /var/lib/foil-registry
  foil server rebuild --root /var/lib/foil-registry --json | jq .catalog
  foil server rebuild --root /var/lib/foil-registry --catalog 'postgres://foil@db.example/foil2'
  foil server rebuild --root /srv/new --store 's3://images?endpoint=https://s3.example:9000' --take`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			end := showRebuild(cmd.ErrOrStderr(), &o)
			r, err := rebuild.Run(cmd.Context(), o)
			end()
			if err != nil && !errors.Is(err, rebuild.ErrIncomplete) {
				return err
			}
			if asJSON {
				return errors.Join(err, printJSON(cmd.OutOrStdout(), r))
			}
			return errors.Join(err, printRebuild(cmd.OutOrStdout(), r, err == nil))
		},
	}
	cmd.Flags().StringVar(&o.Root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.Flags().StringVar(&o.Store, "store", "", "bucket that the objects are in, as of foil serve --store; without it the one that the root names, or the root itself")
	cmd.Flags().StringVar(&o.Catalog, "catalog", "", "empty PostgreSQL database that the catalog is made in, as of foil serve --catalog")
	cmd.Flags().BoolVar(&o.Take, "take", false, "take the bucket from another root, whose server is gone for ever")
	cmd.Flags().BoolVar(&o.Incomplete, "incomplete", false, "put a catalog in place though the journal lacks something")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

// showRebuild shows on a terminal how far a rebuild is, until end is called.
func showRebuild(w io.Writer, o *rebuild.Options) (end func()) {
	show, end := oneLine(w)
	o.Progress = func(p rebuild.Progress) {
		show(func() string {
			line := fmt.Sprintf("%s: %d", p.Phase, p.Done)
			if p.Total > 0 {
				line = fmt.Sprintf("%s of %d", line, p.Total)
			}
			return line
		})
	}
	return end
}

// printRebuild says what was made. Of what was not put in place it says what is damaged only.
func printRebuild(w io.Writer, r *rebuild.Report, placed bool) error {
	for _, d := range append(r.Journal.Damaged, r.DamagedPacks...) {
		fmt.Fprintf(w, "damaged: %s\n", d)
	}
	if !placed {
		return nil
	}
	c := r.Catalog
	fmt.Fprintf(w, "rebuilt in %v from %d objects of the journal: %d repositories, %d manifests, %d tags, %d links to blobs; %d packs with %d hooks; %d layers, %d rootfs\n",
		r.Took.Round(time.Millisecond), r.Journal.Objects, c.Repositories, c.Manifests, c.Tags, c.Blobs, c.Packs, c.Hooks, c.Layers, c.Rootfs)
	if r.Dropped > 0 {
		fmt.Fprintf(w, "%d layers and rootfs are not whole: they are ingested again when they are pulled\n", r.Dropped)
	}
	if r.Unheld > 0 {
		fmt.Fprintf(w, "%d blobs are of no repository: the next start of the server removes them\n", r.Unheld)
	}
	if r.Old != "" {
		fmt.Fprintf(w, "the old catalog is %s\n", r.Old)
	}
	return nil
}
