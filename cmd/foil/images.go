package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
)

func newImagesCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "images [flags]",
		Short: "List the images on this worker",
		Long: `images lists what was pulled to this worker, and how much of it is here. An
image in state "pulling" can run already; one in state "broken" says why below
the table.

PROOF says what is known of where its files come from. served: a server said what
they are. proven: the layers were hashed here, are those that the image's config
names, and make these files. proving: that is on the way. unproven: it could not be
found out yet. failed: the files are others; no new container starts on them.

Exit codes: 0; 1 no daemon answers.`,
		Example: `  foil images
  foil images --json | jq -r 'select(.state == "broken") | .ref'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				images, err := c.Images(ctx)
				if err != nil {
					return err
				}
				return printImages(cmd, images, asJSON)
			})
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	return cmd
}

func printImages(cmd *cobra.Command, images []api.Image, asJSON bool) error {
	w := cmd.OutOrStdout()
	rows := make([]string, len(images))
	for i, img := range images {
		if asJSON {
			if err := printJSON(w, img); err != nil {
				return err
			}
			continue
		}
		rows[i] = fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s", img.Ref, shortDigest(img.Digest), img.State, proofWord(img.Proof),
			progress.Bytes(img.ContentHere), progress.Bytes(img.ContentTotal), img.Files, localTime(img.Created))
	}
	if asJSON {
		return nil
	}
	if err := table(w, "IMAGE DIGEST STATE PROOF HERE CONTENTS FILES PULLED", rows); err != nil {
		return err
	}
	for _, img := range images {
		if strings.Contains(img.Proof, ": ") {
			if _, err := fmt.Fprintf(w, "%s is %s\n", img.Ref, img.Proof); err != nil {
				return err
			}
		}
		if img.Why == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s is %s: %s\n", img.Ref, img.State, img.Why); err != nil {
			return err
		}
	}
	return nil
}

// proofWord is how a proof stands, without why.
func proofWord(proof string) string {
	word, _, _ := strings.Cut(cmp.Or(proof, "served"), ":")
	return word
}
