package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/images"
)

func imagesCommand() *cobra.Command {
	var cache string
	cmd := &cobra.Command{
		Use:   "images",
		Short: "Build, list and verify the images that are measured",
		Long: `Builds the images that bench/images/images.toml declares, from Debian, Python
and npm packages, and keeps them in the cache. NAME is an image in all its
versions, NAME:TAG one of them; without names all are meant.`,
		Example: `  bench images build redis nginx:1
  bench images push redis:1 127.0.0.1:5000/redis:1
  bench images ls
  bench images verify redis`,
	}
	cmd.PersistentFlags().StringVar(&cache, "cache", here(".cache"), "where built images are kept")
	cmd.AddCommand(imagesBuild(&cache), imagesPush(&cache), imagesList(&cache), imagesVerify(&cache), imagesFetch(&cache), imagesPrune(&cache))
	return cmd
}

// imageBuilder tells on standard error what it does, and since when.
func imageBuilder(cache string) *images.Builder {
	start := time.Now()
	return &images.Builder{Cache: imageCache(cache), Log: func(line string) {
		fmt.Fprintf(os.Stderr, "%5ds  %s\n", int(time.Since(start).Seconds()), line)
	}}
}

func selectImages(names []string) (images.Catalogue, []images.Image, error) {
	catalogue, err := images.Declared()
	if err != nil {
		return catalogue, nil, err
	}
	selected, err := catalogue.Select(names)
	return catalogue, selected, err
}

func needRoot(what string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%s needs root: it makes namespaces and mounts, and files of many owners", what)
	}
	return nil
}

func imagesBuild(cache *string) *cobra.Command {
	return &cobra.Command{
		Use:   "build [NAME[:TAG]...]",
		Short: "Build images that are not in the cache yet, and say where they are",
		Long: `Builds images one after the other, and prints for each: its name, its digest,
the bytes of its layers as they are pulled, and what skopeo calls it. What was
built or downloaded is not built or downloaded again; an interrupted build goes
on where it was. One that fails does not keep the others from being built.`,
		RunE: func(cmd *cobra.Command, names []string) error {
			catalogue, selected, err := selectImages(names)
			if err != nil {
				return err
			}
			if err := needRoot("building images"); err != nil {
				return err
			}
			builder := imageBuilder(*cache)
			var failed []error
			for i, image := range selected {
				builder.Log(fmt.Sprintf("image %d of %d: %s", i+1, len(selected), image.Ref()))
				built, err := builder.Build(cmd.Context(), catalogue, image.Ref())
				if cmd.Context().Err() != nil {
					return err
				}
				if err != nil {
					builder.Log("failed: " + err.Error())
					failed = append(failed, fmt.Errorf("%s: %w", image.Ref(), err))
					continue
				}
				fmt.Printf("%s\t%s\t%d\t%s\n", image.Ref(), built.Digest, built.LayerBytes(), built.Source())
			}
			if len(failed) > 0 {
				return fmt.Errorf("%d of %d images were not built:\n%w", len(failed), len(selected), errors.Join(failed...))
			}
			return nil
		},
	}
}

func imagesPush(cache *string) *cobra.Command {
	return &cobra.Command{
		Use:   "push NAME:TAG HOST:PORT/REPOSITORY:TAG",
		Short: "Push an image to foil serve, and build it first if need be",
		Long: `Pushes an image to a registry that speaks HTTP without TLS, such as foil serve on
this machine. An image that is not in the cache yet is built first: redis takes a
minute and a half.`,
		Example: "  bench images push redis:1 127.0.0.1:5000/redis:1",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			catalogue, err := images.Declared()
			if err != nil {
				return err
			}
			builder := imageBuilder(*cache)
			built, err := builder.Cached(catalogue, args[0])
			if err == nil && built == nil {
				if err := needRoot("building images"); err != nil {
					return err
				}
				built, err = builder.Build(cmd.Context(), catalogue, args[0])
			}
			if err != nil {
				return err
			}
			if err := built.Push(cmd.Context(), args[1]); err != nil {
				return err
			}
			fmt.Printf("pushed %s (%s): %s\n", args[1], megabytes(built.LayerBytes()), built.Digest)
			return nil
		},
	}
}

func imagesList(cache *string) *cobra.Command {
	var hub bool
	cmd := &cobra.Command{
		Use:   "ls [NAME[:TAG]...]",
		Short: "List the declared images, and which are built",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, names []string) error {
			catalogue, selected, err := selectImages(names)
			if err != nil {
				return err
			}
			table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
			if hub {
				fmt.Fprintln(table, "HUB\tCATEGORY\tPROBE\tHERE")
				for _, h := range catalogue.Hub {
					fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", h.Name, h.Category, h.Probe, h.Local)
				}
				return table.Flush()
			}
			builder := imageBuilder(*cache)
			fmt.Fprintln(table, "IMAGE\tVERSION\tLAYERS\tCOMPRESSED\tPROBE\tTASK")
			for _, image := range selected {
				built, err := builder.Cached(catalogue, image.Ref())
				if err != nil {
					return err
				}
				version, layers, size := "not built", "", ""
				if built != nil {
					version, layers, size = built.Version(), fmt.Sprint(len(built.Manifest.Layers)), megabytes(built.LayerBytes())
				}
				fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", image.Ref(), version, layers, size, image.Probe, image.Task)
			}
			return table.Flush()
		},
	}
	cmd.Flags().BoolVar(&hub, "hub", false, "list the images of a public registry that are declared, instead")
	return cmd
}

func imagesVerify(cache *string) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "verify [NAME[:TAG]...]",
		Short: "Unpack built images, run them, and wait until they are ready",
		Long: `Unpacks each image as it is, runs its task by runc, and waits until its probe
says that it is ready. Images that are not built are built first. Prints one line
for each; READY is the time from runc's start to ready, with what was just unpacked
still in memory.`,
		RunE: func(cmd *cobra.Command, names []string) error {
			catalogue, selected, err := selectImages(names)
			if err != nil {
				return err
			}
			if err := needRoot("verifying images"); err != nil {
				return err
			}
			builder := imageBuilder(*cache)
			fmt.Println(verifyHeader)
			var failed []error
			for _, image := range selected {
				built, err := builder.Build(cmd.Context(), catalogue, image.Ref())
				if err == nil {
					err = verifyOne(cmd, builder, image.Ref(), built, timeout, os.Stdout)
				}
				if cmd.Context().Err() != nil {
					return err
				}
				if err != nil {
					fmt.Printf("%-14s  failed: %v\n", image.Ref(), err)
					failed = append(failed, fmt.Errorf("%s: %w", image.Ref(), err))
				}
			}
			if len(failed) > 0 {
				return fmt.Errorf("%d of %d images failed:\n%w", len(failed), len(selected), errors.Join(failed...))
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long one may take to be ready")
	return cmd
}

const verifyHeader = "IMAGE           VERSION                     LAYERS  COMPRESSED    UNPACKED    FILES    UNPACK     READY"

func verifyOne(cmd *cobra.Command, builder *images.Builder, ref string, built *images.Built, timeout time.Duration, out io.Writer) error {
	v, err := builder.Verify(cmd.Context(), built, timeout)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%-14s  %-26s  %6d  %10s  %10s  %7d  %8s  %8s\n", ref, built.Version(), len(built.Manifest.Layers),
		megabytes(built.LayerBytes()), megabytes(v.Bytes), v.Files, seconds(v.Unpack), seconds(v.Ready))
	return nil
}

func imagesFetch(cache *string) *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "fetch --from HOST[/PREFIX] [NAME:TAG...]",
		Short: "Fetch the declared images of a public registry by skopeo",
		Long: `Fetches images that are declared as being in a public registry (see bench images
ls --hub), from the registry that is named, and prints what bench images build
prints. It needs no root.`,
		Example: "  bench images fetch --from registry.example/library redis:6.2.1",
		RunE: func(cmd *cobra.Command, names []string) error {
			catalogue, err := images.Declared()
			if err != nil {
				return err
			}
			selected, err := catalogue.SelectHub(names)
			if err != nil {
				return err
			}
			builder := imageBuilder(*cache)
			for _, hub := range selected {
				built, err := builder.Fetch(cmd.Context(), strings.TrimSuffix(from, "/")+"/"+hub.Name)
				if err != nil {
					return err
				}
				fmt.Printf("%s\t%s\t%d\t%s\n", hub.Name, built.Digest, built.LayerBytes(), built.Source())
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "the registry, with what comes before the names there")
	if err := cmd.MarkFlagRequired("from"); err != nil {
		panic(err) // there is such a flag
	}
	return cmd
}

func imagesPrune(cache *string) *cobra.Command {
	return &cobra.Command{
		Use:   "prune",
		Short: "Remove built images that are not declared any more",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			catalogue, err := images.Declared()
			if err != nil {
				return err
			}
			if err := needRoot("removing images"); err != nil {
				return err
			}
			removed, err := imageBuilder(*cache).Prune(cmd.Context(), catalogue)
			for _, name := range removed {
				fmt.Println(name)
			}
			return err
		},
	}
}

func megabytes(n int64) string       { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
func imageCache(cache string) string {
	if absolute, err := filepath.Abs(cache); err == nil {
		cache = absolute // skopeo and apt run elsewhere
	}
	return filepath.Join(cache, "images")
}
