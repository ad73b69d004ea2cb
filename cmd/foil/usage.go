package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/usage"
)

func newServerUsageCommand() *cobra.Command {
	o := usage.Options{}
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "usage [REPOSITORY]",
		Short: "Say what a server's bytes are of, and what is there more than once",
		Long: `Says what rests below the root of foil serve, by kind; what each repository would cost a registry that
keeps layers as they are (plain), what of that no other repository has (alone), and what its contents take in packs
that are no other's (packed), and both together, which is what it adds to the store (adds); what is there more than once, by layers, files and segments; and the largest
contents. With a repository: what each of its images costs.

The server may run: it is read, and nothing is changed. It takes a copy of the catalog and a table of what was counted,
both in the directory for temporary files (TMPDIR), and some 50 MB of memory. It reads no blob and no pack; how long it took is in
the report.

Exit codes: 0; 1 an error, no such repository; 2 the command line makes no sense.`,
		Example: `  foil server usage --root /var/lib/foil-registry
  foil server usage team/app --json | jq '.images[] | [.name, .alone]'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.Largest < 0 {
				return usagef("--largest must not be negative")
			}
			if len(args) > 0 {
				o.Repository = args[0]
			}
			show, end := oneLine(cmd.ErrOrStderr())
			o.Progress = func(p usage.Progress) {
				show(func() string { return fmt.Sprintf("layer %d of %d", p.Layers, p.Total) })
			}
			r, err := usage.Look(cmd.Context(), o)
			end()
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), r)
			}
			return printUsage(cmd.OutOrStdout(), r)
		},
	}
	cmd.Flags().StringVar(&o.Root, "root", "/var/lib/foil-registry", "`DIR` of foil serve --root")
	cmd.Flags().IntVar(&o.Largest, "largest", 10, "list so many of the largest contents")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func printUsage(w io.Writer, r *usage.Report) error {
	row := func(columns ...any) string {
		var text []string
		for _, c := range columns {
			if n, ok := c.(int64); ok {
				c = progress.Bytes(n)
			}
			text = append(text, fmt.Sprint(c))
		}
		return strings.Join(text, "\t")
	}
	var tables [5][]string
	for _, v := range slices.Concat(r.Rest, []usage.Rest{r.Total}, r.Stores) {
		tables[0] = append(tables[0], row(v.Kind, fmt.Sprint(v.Files), v.Bytes, v.Disk))
	}
	for _, v := range r.Repositories {
		tables[1] = append(tables[1], row(v.Name, fmt.Sprint(v.Manifests), fmt.Sprint(v.Tags), v.Plain, v.Alone, v.Shared, v.Packed, v.Adds))
	}
	for _, v := range r.Images {
		tables[2] = append(tables[2], row(v.Name, fmt.Sprint(v.Layers), v.Plain, v.Uncompressed, v.Alone, v.Shared))
	}
	for _, v := range []struct {
		what string
		usage.Duplicates
	}{{"layers", r.Layers}, {"files", r.Files}, {"segments", r.Segments}} {
		tables[3] = append(tables[3], row(v.what, fmt.Sprint(v.Count), v.Bytes, fmt.Sprint(v.Distinct), v.DistinctBytes, fmt.Sprintf("%.2f", v.Ratio())))
	}
	for _, v := range r.Largest {
		tables[4] = append(tables[4], row(v.Bytes, fmt.Sprint(v.Copies), v.Path, v.Layer))
	}
	for i, head := range []string{"KIND FILES BYTES DISK", "REPOSITORY MANIFESTS TAGS PLAIN ALONE SHARED PACKED ADDS", "IMAGE LAYERS PLAIN UNCOMPRESSED ALONE SHARED",
		"DUPLICATES COUNT BYTES DISTINCT BYTES RATIO", "LARGEST COPIES PATH LAYER"} {
		if len(tables[i]) == 0 {
			continue
		}
		if err := table(w, head, tables[i]); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	for _, l := range r.Unread {
		fmt.Fprintf(w, "not counted: %s: foil server scrub mends it\n", l)
	}
	fmt.Fprintf(w, "%d of %d blobs rest as they were pushed, %s of %s; the others are made again from packs when they are read\n",
		r.Intact.Intact, r.Intact.Blobs, progress.Bytes(r.Intact.IntactBytes), progress.Bytes(r.Intact.Bytes))
	_, err := fmt.Fprintf(w, "distinct segments take %s of packs; read %s of entry lists in %v\n", progress.Bytes(r.Packed), progress.Bytes(r.Read), r.Took.Round(time.Millisecond))
	return err
}
