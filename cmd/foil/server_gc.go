package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/admin"
	"hydrofoil.dev/foil/internal/server/catalog"
	"hydrofoil.dev/foil/internal/server/collect"
)

// runningFlags say where the server runs that is asked.
func runningFlags(cmd *cobra.Command, root *string, asJSON *bool) {
	cmd.Flags().StringVar(root, "root", "/var/lib/foil-registry", "`DIR` of the foil serve --root that runs")
	cmd.Flags().BoolVar(asJSON, "json", false, "print the answer as one JSON object")
}

// parseTarget reads REPO, REPO:TAG or REPO@DIGEST.
func parseTarget(s string) (r admin.Reference, err error) {
	if repo, d, ok := strings.Cut(s, "@"); ok {
		r.Repository = repo
		if r.Digest, err = digest.Parse(d); err != nil {
			return r, usagef("%q: %v", s, err)
		}
		return r, nil
	}
	r.Repository = s
	if i := strings.LastIndexByte(s, ':'); i > strings.LastIndexByte(s, '/') {
		r.Repository, r.Tag = s[:i], s[i+1:]
	}
	if r.Repository == "" {
		return r, usagef("%q names no repository: want REPO, REPO:TAG or REPO@DIGEST", s)
	}
	return r, nil
}

func newServerDeleteCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "delete REPO[:TAG|@DIGEST]",
		Short: "Delete an image, or a whole repository",
		Long: `Asks the server that runs with a root to delete.

  REPO:TAG      the tag; the image goes with it unless another tag or an index names it
  REPO@DIGEST   the manifest, its tags and its referrers, and of an index the images that nothing else names
  REPO          all of it

For a window (foil serve --undelete-window) foil server undelete brings it back. After that
its room is freed, see foil server gc.

Exit codes: 0; 1 an error; 2 the command line makes no sense.`,
		Example: `  foil server delete team/app:1.2
  foil server delete team/old`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := parseTarget(args[0])
			if err != nil {
				return err
			}
			out, err := admin.NewClient(root).Delete(cmd.Context(), r)
			if err != nil {
				return fmt.Errorf("delete %s: %w", args[0], err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), out)
			}
			for _, it := range out.Items {
				fmt.Fprintf(cmd.OutOrStdout(), "deleted %s\n", nameOfItem(it))
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "foil server undelete %s brings it back until %s\n", args[0], out.Until.Local().Format(time.DateTime))
			return err
		},
	}
	runningFlags(cmd, &root, &asJSON)
	return cmd
}

func nameOfItem(it catalog.DeletedItem) string {
	if it.Tag != "" {
		return it.Repository + ":" + it.Tag
	}
	return it.Repository + "@" + it.Digest.String()
}

func newServerUndeleteCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "undelete [REPO[:TAG|@DIGEST]]",
		Short: "Bring back what was deleted, or list what can be",
		Long: `Brings back a tag or a manifest with all that belongs to it, or all that was deleted of a
repository. Without an argument it lists what can be brought back. A tag that was pushed again
meanwhile stays what it is; the image that it named before comes back by its digest.

Exit codes: 0; 1 an error, or there is nothing like that; 2 the command line makes no sense.`,
		Example: `  foil server undelete
  foil server undelete team/app:1.2`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			client := admin.NewClient(root)
			if len(args) == 0 {
				out, err := client.Deleted(cmd.Context(), "")
				if err != nil {
					return fmt.Errorf("list what was deleted: %w", err)
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), out)
				}
				var rows []string
				for _, it := range out.Items {
					rows = append(rows, nameOfItem(it)+"\t"+it.Deleted.Local().Format(time.DateTime))
				}
				return table(cmd.OutOrStdout(), "NAME DELETED", rows)
			}
			r, err := parseTarget(args[0])
			if err != nil {
				return err
			}
			out, err := client.Undelete(cmd.Context(), r)
			if err != nil {
				return fmt.Errorf("undelete %s: %w", args[0], err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), out)
			}
			for _, it := range out.Items {
				fmt.Fprintf(cmd.OutOrStdout(), "brought back %s\n", nameOfItem(it))
			}
			if len(out.Items) == 0 {
				return fmt.Errorf("undelete %s: nothing was brought back: its tag was pushed again, or its blobs were deleted one by one", args[0])
			}
			return nil
		},
	}
	runningFlags(cmd, &root, &asJSON)
	return cmd
}

func newServerGCCommand() *cobra.Command {
	var root string
	var asJSON, dryRun bool
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Say what is freed when, or free it now",
		Long: `The server frees by itself what nobody needs: what was deleted when its window is over, and a day after
what no manifest names. These commands ask the server that runs with a root; docs/deleting.md says what it does when.

  foil server gc --dry-run   what would be freed, in bytes
  foil server gc stats       what waits to be looked at, since when, and what was done
  foil server gc now         do it now, without the grace

Exit codes: 0; 1 an error; 2 the command line makes no sense.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !dryRun {
				return usagef("what about it? stats, now or --dry-run")
			}
			s, err := admin.NewClient(root).Status(cmd.Context())
			if err != nil {
				return fmt.Errorf("ask the collector: %w", err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), s)
			}
			return printForecast(cmd.OutOrStdout(), &s)
		},
	}
	runningFlags(cmd, &root, &asJSON)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what would be freed")
	cmd.AddCommand(newGCStatsCommand(), newGCNowCommand())
	return cmd
}

func printForecast(w io.Writer, s *admin.Status) error {
	return table(w, "BYTES WHAT", []string{
		progress.Bytes(s.Unnamed) + "\tof blobs that no manifest names: freed a day after they came, or were orphaned",
		progress.Bytes(s.DeadBytes) + fmt.Sprintf("\tof %s in packs that no layer needs: freed by compaction", progress.Bytes(s.PackBytes)),
		progress.Bytes(s.InWindow) + fmt.Sprintf("\tof blobs of %d manifests and tags that can still be brought back, with what was made of them", s.DeletedThings),
	})
}

func newGCStatsCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "stats",
		Short:   "Show the collector's queues, their ages, and dead bytes",
		Example: `  foil server gc stats --json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := admin.NewClient(root).Status(cmd.Context())
			if err != nil {
				return fmt.Errorf("ask the collector: %w", err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), s)
			}
			w := cmd.OutOrStdout()
			var rows []string
			for _, q := range s.Queues {
				oldest := "-"
				if !q.Oldest.IsZero() {
					oldest = time.Since(q.Oldest).Round(time.Second).String()
				}
				rows = append(rows, fmt.Sprintf("%s\t%d\t%d\t%s", q.Name, q.Length, q.Due, oldest))
			}
			if err := table(w, "QUEUE LENGTH DUE OLDEST", rows); err != nil {
				return err
			}
			fmt.Fprintf(w, "\nleased blobs: %d\n", s.Leased)
			if err := printForecast(w, &s); err != nil {
				return err
			}
			fmt.Fprintf(w, "\nsince the server was started: ")
			return printCollected(w, &s.Done)
		},
	}
	runningFlags(cmd, &root, &asJSON)
	return cmd
}

func newGCNowCommand() *cobra.Command {
	var root string
	var asJSON, purge bool
	cmd := &cobra.Command{
		Use:   "now",
		Short: "Free what nobody needs, without the grace",
		Long: `Has the server free now what it would free a day later. Blobs stay that a client was told of within the hour
(leases), and what can be brought back. --purge ends the time in which deleted things can be brought back.
Pushes and pulls go on meanwhile.`,
		Example: `  foil server gc now --purge`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var r collect.Report
			if err := admin.NewClient(root).Collect(cmd.Context(), admin.GCRequest{Purge: purge}, &r); err != nil {
				return fmt.Errorf("collect: %w", err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), r)
			}
			return printCollected(cmd.OutOrStdout(), &r)
		},
	}
	runningFlags(cmd, &root, &asJSON)
	cmd.Flags().BoolVar(&purge, "purge", false, "what was deleted cannot be brought back any more")
	return cmd
}

func printCollected(w io.Writer, r *collect.Report) error {
	_, err := fmt.Fprintf(w, "%s freed in %d objects: %d blobs, %d packs, %d packs compacted to %s; %d rootfs, %d startup sets\n",
		progress.Bytes(r.Bytes), r.Objects, r.Blobs, r.Packs, r.Compacted, progress.Bytes(r.Copied), r.Rootfs, r.StartupSets)
	for _, more := range []struct {
		n    int
		what string
	}{{r.Leased, "blobs stay for up to an hour: clients were told that they are there"},
		{r.Busy, "packs are in use by a push, and are looked at again"},
		{r.Waiting, "objects may still be read, and go when their readers have ended"}} {
		if more.n > 0 && err == nil {
			_, err = fmt.Fprintf(w, "%d %s\n", more.n, more.what)
		}
	}
	return err
}
