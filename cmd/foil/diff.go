package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/format/toc"
	"hydrofoil.dev/foil/internal/worker/api"
)

func newDiffCommand() *cobra.Command {
	var root string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "diff [flags] CONTAINER | IMAGE IMAGE",
		Short: "Show what a container has changed, or in what two images differ",
		Long: `diff lists paths, one a line: A for those that are new, M for those that differ, D for
those that are gone; and of files how many bytes they have.

Of a container it says what that has changed of its image, whether it runs or not. A
directory counts as changed if something in it has. Of two images, which must be
here (complete or not), it says in what the second differs: in type, mode, owner,
time, attributes, target, or bytes. Of a directory that is gone what was in it is
not listed.

With --json each line is an object: kind (added, modified, deleted), path, type, bytes.

Exit codes: 0, whether or not there are differences; 1 an error; 2 the command line
makes no sense.`,
		Example: `  foil diff web
  foil diff registry.example/app:1 registry.example/app:2
  foil diff --json web | jq -r 'select(.kind == "added" and .bytes > 1000000) | .path'`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return ask(cmd.Context(), root, func(ctx context.Context, c *api.Client) error {
				show := func(ch api.Change) error { return printChange(cmd.OutOrStdout(), ch, asJSON) }
				if len(args) == 1 {
					return diffContainer(ctx, c, args[0], show)
				}
				return diffImages(ctx, c, args[0], args[1], show)
			})
		},
	}
	clientRoot(cmd, &root)
	jsonFlag(cmd, &asJSON)
	cmd.ValidArgsFunction = completeNames(&root, true)
	return cmd
}

func diffContainer(ctx context.Context, c *api.Client, id string, show func(api.Change) error) error {
	for ch, err := range c.Changes(ctx, id) {
		if err != nil {
			return err
		}
		if err := show(ch); err != nil {
			return err
		}
	}
	return nil
}

func diffImages(ctx context.Context, c *api.Client, before, after string, show func(api.Change) error) (err error) {
	var trees [2]*toc.TOC
	for i, ref := range []string{before, after} {
		if !strings.Contains(ref, "/") {
			return usagef("%s is no image's name; a container is compared with its own image (foil diff CONTAINER), and with others when it was committed (foil commit)", ref)
		}
		encoded, err := c.TOC(ctx, api.AboutImage{Ref: ref})
		if err != nil {
			return err
		}
		if trees[i], err = toc.Decode(encoded); err != nil {
			return fmt.Errorf("table of contents of %s: %w", ref, err)
		}
	}
	toc.Compare(trees[0], trees[1], func(path string, x, y int) {
		ch := api.Change{Kind: "modified", Path: path}
		switch {
		case x < 0:
			ch.Kind = "added"
		case y < 0:
			ch.Kind = "deleted"
		}
		if y >= 0 {
			n := &trees[1].Inodes[y]
			ch.Type = api.TypeOf(n.Mode)
			if n.IsRegular() {
				ch.Bytes = n.Size
			}
		}
		if err == nil {
			err = show(ch)
		}
	})
	return err
}

func printChange(w io.Writer, ch api.Change, asJSON bool) error {
	if asJSON {
		return printJSON(w, ch)
	}
	path := ch.Path
	if strings.ContainsFunc(path, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\ufffd' }) {
		path = fmt.Sprintf("%q", path)
	}
	s := strings.ToUpper(ch.Kind[:1]) + " " + path
	if ch.Type == "file" {
		s += fmt.Sprintf(" %d", ch.Bytes)
	}
	_, err := fmt.Fprintln(w, s)
	return err
}
