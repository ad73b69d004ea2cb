package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/backup"
)

func newServerBackupCommand() *cobra.Command {
	var root, to string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Copy what a server keeps, while it runs",
		Long: `Makes a consistent copy of the root of foil serve: the catalog as it is at one
moment, and all objects that it names. The server goes on meanwhile. On the same file system
objects are hard links, and the copy takes no room but for the catalog, until the server deletes
something; it protects from deletions and from damage to the catalog then, not from
the loss of the disk. The keys that sign tokens are in it.

A copy that was interrupted is none: foil server restore refuses it. Remove it, and begin again.

Exit codes: 0; 1 an error; 2 the command line makes no sense.`,
		Example: `  foil server backup --root /var/lib/foil-registry --to /backup/registry-1`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if to == "" {
				return usagef("where to? --to names a directory that is not there yet")
			}
			r, err := backup.Backup(cmd.Context(), root, to)
			if err != nil {
				return err
			}
			return printCopy(cmd.OutOrStdout(), r, asJSON)
		},
	}
	cmd.Flags().StringVar(&root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.Flags().StringVar(&to, "to", "", "`DIR` of the copy; it must not be there")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func newServerRestoreCommand() *cobra.Command {
	var root, from string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Make a server's root of a backup",
		Long: `Makes a root for foil serve of what foil server backup has copied. The root must not
be there yet. On the same file system objects are hard links, so that the backup stays
what it is, and takes no room.

Exit codes: 0; 1 an error; 2 the command line makes no sense.`,
		Example: `  foil server restore --from /backup/registry-1 --root /var/lib/foil-registry`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from == "" {
				return usagef("from where? --from names a directory that foil server backup has made")
			}
			r, err := backup.Restore(cmd.Context(), from, root)
			if err != nil {
				return err
			}
			return printCopy(cmd.OutOrStdout(), r, asJSON)
		},
	}
	cmd.Flags().StringVar(&root, "root", "/var/lib/foil-registry", "`DIR` for foil serve --root; it must not be there")
	cmd.Flags().StringVar(&from, "from", "", "`DIR` of the backup")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func printCopy(w io.Writer, r *backup.Report, asJSON bool) error {
	if asJSON {
		return printJSON(w, r)
	}
	for _, key := range r.Missing {
		fmt.Fprintf(w, "missing: %s: the server has lost it; push it again\n", key)
	}
	_, err := fmt.Fprintf(w, "%d files of %s, %d of them linked, and a catalog of %s, in %v\n",
		r.Objects, progress.Bytes(r.Bytes), r.Linked, progress.Bytes(r.Catalog), r.Took.Round(time.Millisecond))
	return err
}
