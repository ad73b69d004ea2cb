package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/registries"
	"hydrofoil.dev/foil/bench/trace"
)

func registryCommand() *cobra.Command {
	var o registries.Options
	var file, like, out string
	var scale float64
	var requests int
	var simulate bool
	var restoring registries.Restoring
	load := func() ([]trace.Request, error) {
		if file != "" {
			f, err := os.Open(file)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			o.Name = file
			return trace.Read(f, requests)
		}
		s, err := trace.Find(like)
		if err != nil {
			return nil, err
		}
		o.Name = like
		list := trace.Generate(s.Scale(scale), o.Seed)
		if requests > 0 && len(list) > requests {
			list = list[:requests]
		}
		return list, nil
	}
	cmd := &cobra.Command{
		Use:   "registry [flags]",
		Args:  cobra.NoArgs,
		Short: "Replay a trace of a registry against foil serve in each mode, and against other registries",
		Long: `Pushes the layers that a trace names, waits until foil serve has them as its mode wants, and then asks for manifests and layers as
the trace does, each client from an address of its own. Says what rests on the disk, and how long a layer takes.

A trace is one of those that are public of the IBM Cloud registry (--trace FILE), or made like one of the four that DupHunter
was measured with (--like). Layers have the proportions of the trace, and are made of files of this machine.

--simulate asks servers nothing: it says how often caches of 5, 10 and 15% of all layers would have had a layer, with and without
prediction. With --restore-rate layers take time to be restored, and are waited for.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := load()
			if err != nil {
				return err
			}
			if out != "" {
				f, err := os.Create(out)
				if err != nil {
					return err
				}
				if err := trace.Write(f, list, time.Unix(1_500_000_000, 0)); err != nil {
					return err
				}
				return f.Close()
			}
			if simulate {
				_, err := registries.SimulateAll(os.Stdout, o.Name, list, restoring)
				return err
			}
			o.Requests, o.Out, o.Log = list, os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, line) }
			_, err = registries.Replay(cmd.Context(), o)
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&file, "trace", "", "`FILE` in the format of the IBM Cloud registry's traces")
	flags.StringVar(&like, "like", "dal", "make a trace like that of dal, fra, lon or syd")
	flags.Float64Var(&scale, "scale", 0.05, "so many times the requests and layers of that")
	flags.IntVar(&requests, "requests", 0, "only the first of them; 0: all")
	flags.StringVar(&out, "write", "", "write the trace to this `FILE`, and do nothing else")
	flags.BoolVar(&simulate, "simulate", false, "caches instead of servers")
	flags.Int64Var(&restoring.Rate, "restore-rate", 0, "with --simulate: `BYTES` of a blob that are restored a second")
	flags.IntVar(&restoring.Workers, "restore-workers", 1, "with --simulate: how many at once that nobody waits for")
	flags.StringSliceVar(&o.Servers, "servers", []string{"docker-registry", "distribution", "foil:intact", "foil:selective", "foil:full"}, "which servers, one after the other; foil:MODE is foil serve in that mode")
	flags.StringVar(&o.Foil, "foil", here("bin/foil"), "the foil binary")
	flags.StringVar(&o.DockerRegistry, "docker-registry", "docker-registry", "the program of Debian's docker-registry")
	flags.StringVar(&o.Distribution, "distribution", here(".cache/bin/registry"), "the program of distribution 3")
	flags.Int64Var(&o.Bytes, "bytes", 100_000_000, "`BYTES` of all distinct layers together")
	flags.Float64Var(&o.Speed, "speed", 100, "how many times as fast as in the trace time goes, but for that from a manifest to its layers")
	flags.Int64Var(&o.Restored, "restored-max", 1<<30, "of foil serve, `BYTES`")
	flags.Float64Var(&o.Hot, "hot", 6, "in the mode selective: pulls that earn an intact copy")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for the registries")
	flags.StringSliceVar(&o.Pool, "pool", []string{"/usr/lib", "/usr/share", "/usr/bin"}, "directories with files that layers are made of")
	flags.Uint64Var(&o.Seed, "seed", 1, "of the trace, and of the layers")
	flags.StringVar(&o.JSON, "json", "", "write the result to this file as well")
	return cmd
}
