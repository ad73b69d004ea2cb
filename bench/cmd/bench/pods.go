package main

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/pods"
	"hydrofoil.dev/foil/bench/site"
)

func podsCommand() *cobra.Command {
	var o pods.Options
	var rtts []string
	rate := rateFlag(100e6)
	cmd := &cobra.Command{
		Use:   "pods [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure how long pods of a kubelet take until they run, and are ready",
		Long: `Has a real kubelet start static pods on nodes that have nothing, by containerd with
overlayfs and with Hydrofoil, and says how many seconds after it had the manifest the
container runs, the service answers, and the pod is ready by its readiness probe.

With Hydrofoil each pod is started on two nodes, one after the other: when nobody has
traced the image, and when the server has learned from the first. --args own has
pods with arguments of their own (args:), which are services of their own.

Each measurement becomes a line of JSON in --out; an interrupted command goes on
when it is called again, and what failed is made again. All of --out is printed at
the end as a table in Markdown. It needs a kubelet (make .cache/kubernetes/kubelet),
containerd 2, a runc with seccomp and iptables on PATH, and skopeo.`,
		Example: `  bench pods --images memcached:1 --rtt 0 --runs 1 --out pods.jsonl
  bench pods --images redis:1,nginx:1,postgres:1,memcached:1 --rtt 0,150ms --runs 5 --out pods.jsonl`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench pods needs root: it makes namespaces, mounts and containers")
			}
			if o.RTTs, err = parseRTTs(rtts); err != nil {
				return err
			}
			for _, list := range []struct {
				flag        string
				said, known []string
			}{{"engines", o.Engines, pods.Engines}, {"args", o.Args, pods.Args}} {
				for _, name := range list.said {
					if !slices.Contains(list.known, name) {
						return fmt.Errorf("--%s %q: there are %q", list.flag, name, list.known)
					}
				}
			}
			if o.Runs < 1 || o.Timeout <= 0 {
				return fmt.Errorf("--runs %d, --timeout %v: there is at least one run, and it takes some time", o.Runs, o.Timeout)
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Images, o.Engines, o.Args, o.RTTs = once(o.Images), once(o.Engines), once(o.Args), once(o.RTTs)
			o.Rate = int64(rate)
			o.Table, o.Log = os.Stdout, func(line string) { fmt.Fprintln(os.Stderr, time.Now().Format("15:04:05"), line) }
			return pods.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&o.Images, "images", []string{"redis:1", "nginx:1", "postgres:1", "memcached:1"}, "declared images, NAME:TAG")
	flags.StringSliceVar(&o.Engines, "engines", pods.Engines, "engines to compare")
	flags.StringSliceVar(&o.Args, "args", pods.Args, "arguments of the pods: the image's (image), their own (own)")
	flags.StringSliceVar(&rtts, "rtt", []string{"0", "150ms"}, "round-trip times of the link")
	flags.Var(&rate, "rate", "its rate")
	flags.IntVar(&o.Runs, "runs", 5, "measurements of each")
	flags.DurationVar(&o.Timeout, "timeout", 5*time.Minute, "of one start")
	flags.StringVar(&o.Kubelet, "kubelet", here(".cache/kubernetes/kubelet"), "the kubelet binary")
	flags.StringVar(&o.Results, "out", "pods.jsonl", "file of the results, one a line")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and nodes")
	programFlags(cmd, &o.Programs)
	return cmd
}
