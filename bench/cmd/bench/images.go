package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/images"
)

func imagesCommand() *cobra.Command {
	var cache string
	cmd := &cobra.Command{
		Use:   "images [flags] [NAME:TAG...]",
		Short: "Build the declared images, or the named ones, and say where they are",
		Long: `Builds images from Debian packages, as bench/images/images.toml declares them,
and prints for each: its name, its digest, the bytes of its layers as they are
pulled, and what skopeo calls it.`,
		RunE: func(cmd *cobra.Command, refs []string) error {
			catalogue, err := images.Declared()
			if err != nil {
				return err
			}
			if len(refs) == 0 {
				for _, image := range catalogue.Images {
					refs = append(refs, image.Name+":"+image.Tag)
				}
			}
			builder := images.Builder{Cache: imageCache(cache), Log: func(line string) { fmt.Fprintln(os.Stderr, line) }}
			for _, ref := range refs {
				built, err := builder.Build(cmd.Context(), catalogue, ref)
				if err != nil {
					return err
				}
				fmt.Printf("%s\t%s\t%d\t%s\n", ref, built.Digest, built.LayerBytes(), built.Source())
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&cache, "cache", "../.cache", "where built images are kept")
	return cmd
}

func imageCache(cache string) string {
	if absolute, err := filepath.Abs(cache); err == nil {
		cache = absolute // skopeo and apt run elsewhere
	}
	return filepath.Join(cache, "images")
}
