package main

import (
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/server/imports"
)

func newServerImportCommand() *cobra.Command {
	var o imports.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "import {DIR|URL} --to URL",
		Short: "Bring what another registry has into a server that runs",
		Long: `Copies images to foil serve, with all digests as they are: from the directory of a registry of the
Distribution kind (that which has docker/registry/v2 in it), or from a registry that runs, by its API. Indexes come with all
their entries, and what refers to an image (signatures, SBOMs) with it. From a directory also what no tag names comes;
a registry does not list that. An image can be pulled from the server as soon as it is there.

It pushes as any client does, so it needs the right push. Credentials for both sides are those of docker login (or podman
login with REGISTRY_AUTH_FILE unset). The server's certificate has to be one that the system trusts; SSL_CERT_FILE names others.

It may be interrupted and begun again: what is there is not sent again. What is lost or damaged in the source is
named, and the others still come. While it reads a directory the registry should take no pushes, or is imported once more
afterwards.

Exit codes: 0 all has come; 1 something has not, which is named, or an error; 2 the command line makes no sense; 130
interrupted.`,
		Example: `  foil server import /var/lib/registry --to http://localhost:5000
  foil server import https://old.example --to https://registry.example --repository 'team/**' --dry-run
  foil server import https://old.example/team --to https://registry.example/team --repository app --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.From = args[0]; o.To == "" {
				return usagef("where to? --to names the server, as http://localhost:5000")
			}
			if o.Parallel < 1 {
				return usagef("--parallel must be 1 or more")
			}
			o.Log = slog.New(slog.DiscardHandler) // the report says it
			show, end := oneLine(cmd.ErrOrStderr())
			begun := time.Now()
			o.Progress = func(r imports.Report) {
				show(func() string {
					return fmt.Sprintf("%d repositories, %d tags, %d blobs, %s at %s/s, %d failed", r.Repositories, r.Tags, r.Blobs+r.Mounted, progress.Bytes(r.Bytes),
						progress.Bytes(int64(float64(r.Bytes)/max(0.001, time.Since(begun).Seconds()))), len(r.Failures))
				})
			}
			r, err := imports.Run(cmd.Context(), o)
			end()
			if r == nil {
				return err
			}
			print := func(w io.Writer) error { return printImport(w, r, o.DryRun) }
			if asJSON {
				print = func(w io.Writer) error { return printJSON(w, r) }
			}
			if perr := print(cmd.OutOrStdout()); err == nil {
				err = perr
			}
			if err == nil && len(r.Failures) > 0 {
				return &exitError{code: 1}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&o.To, "to", "", "`URL` of the server, and a prefix for the names that repositories get there")
	cmd.Flags().StringSliceVar(&o.Repositories, "repository", nil, "`PATTERN` of names: * is a part of one segment, ** any segments; may be repeated. Names without * need no catalog at the source")
	cmd.Flags().IntVar(&o.Parallel, "parallel", 4, "how many images, and blobs, are brought at once")
	cmd.Flags().BoolVarP(&o.DryRun, "dry-run", "n", false, "only say what would be brought")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func printImport(w io.Writer, r *imports.Report, dry bool) error {
	for _, f := range r.Failures {
		fmt.Fprintf(w, "failed: %s: %s\n", f.Image, f.Error)
	}
	verb := "imported"
	if dry {
		verb = "would import"
	}
	_, err := fmt.Fprintf(w, "%s %d repositories: %d tags, %d of them there before; %d manifests and %d blobs of %s, %d blobs that were there, in %v; %d failed\n",
		verb, r.Repositories, r.Tags, r.Here, r.Manifests, r.Blobs, progress.Bytes(r.Bytes), r.Mounted, r.Took.Round(time.Millisecond), len(r.Failures))
	return err
}
