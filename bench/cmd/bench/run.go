package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/bench/engines"
	"hydrofoil.dev/foil/bench/images"
	"hydrofoil.dev/foil/bench/run"
	"hydrofoil.dev/foil/bench/site"
)

func runCommand() *cobra.Command {
	var o run.Options
	var rtts []string
	var rates []string
	var completeAt []string
	var against engines.Programs
	var cut string
	cmd := &cobra.Command{
		Use:   "run [flags]",
		Args:  cobra.NoArgs,
		Short: "Measure provisioning: engines, images, links, repetitions",
		Long: `Provisions every image with every engine over every link, several times, fresh
and as an update, in an order that is shuffled each time. Each run becomes a
file below --out; bench report draws them, bench compare compares two results.

An interrupted run goes on when it is started again with the same --out. What is
there is not run again, so that engines, images, links and repetitions can be
added later; programs of another version want another --out.

Most of the time goes into waiting until images are complete. --complete-at says
at which round-trip times that is measured; at others, runs of lazy engines are
stopped when the container is ready and was put under load, and have no figure of
completion. Full pulls are complete before they start. A worker that is updated
afterwards is always given the first version whole, without a limit of the rate where
its completion is not measured.

With --against two builds of foil are measured in turns, --foil and --against: each
run is made with both, one right after the other, in an order that changes with each
repetition. Each build serves itself, unless --server and --against-server say
otherwise. The results are below --out, in before (--against) and after (--foil);
at the end the times to ready are compared, as bench compare --all does.

With --cut 30% only resumed runs are made: of a worker that has nothing, whose
connections are all cut once, after that share of the bytes of the image's layers.

Engines: hydrofoil; hydrofoil-untraced (of whose images the server knows neither
startup sets nor traces); hydrofoil-containerd and hydrofoil-cri (as the snapshotter of
containerd 2, by ctr and as a kubelet uses it); hydrofoil-used (a worker that has
pulled and run before, as those of CRI have); hydrofoil-proving (where no container
begins before its image is proven); overlayfs and erofs (containerd, a
full pull); overlayfs-cri (the same as a kubelet uses it); stargz; soci;
starlight; nydus; curl (the compressed layers, to nowhere). One whose programs are not
found on PATH, or where an option says, is left out and reported as absent. The
floor T* is always measured. docs/benchmarks.md says where peers come from.`,
		Example: `  bench run --images redis --runs 3 --out results
  bench run --images redis,nginx,python --engines hydrofoil,overlayfs,stargz \
      --rtt 0,50ms,150ms,300ms --rate 100mbit --runs 5 --out results
  bench run --images redis,node --engines hydrofoil,hydrofoil-untraced --rtt 0,150ms \
      --foil bin/foil --against old/foil --runs 5 --load 0 --complete-at none --out turns`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if os.Geteuid() != 0 {
				return fmt.Errorf("bench run needs root: it makes namespaces, mounts and containers")
			}
			if o.RTTs, err = parseRTTs(rtts); err != nil {
				return err
			}
			if o.Runs < 1 || o.Load < 0 || o.Timeout <= 0 {
				return fmt.Errorf("--runs %d, --load %v, --timeout %v: there is at least one run, and no time is below 0", o.Runs, o.Load, o.Timeout)
			}
			for _, list := range []*[]string{&o.Images, &o.Engines} {
				*list = once(*list)
			}
			o.RTTs = once(o.RTTs)
			if cut != "" {
				if o.Cut, err = parseShare(cut); err != nil {
					return err
				}
				if err := foilsOwn(cmd, &o, "--cut is for engines that resume"); err != nil {
					return err
				}
			}
			if against.Foil != "" {
				if o.Against, err = otherBuild(cmd, &o, against); err != nil {
					return err
				}
			} else if against.Server != "" {
				return fmt.Errorf("--against-server is for --against")
			}
			switch {
			case len(completeAt) == 1 && completeAt[0] == "none":
				o.CompleteAt = []time.Duration{}
			case len(completeAt) != 1 || completeAt[0] != "all":
				if o.CompleteAt, err = parseRTTs(completeAt); err != nil {
					return err
				}
			}
			if o.Rates, o.ImageRates, err = parseRates(rates); err != nil {
				return err
			}
			if len(o.Images) == 1 && o.Images[0] == "all" {
				if o.Images, err = allImages(); err != nil {
					return err
				}
			}
			if !site.Confined() {
				return site.Confine()
			}
			o.Command, o.Commit = os.Args, commit(cmd.Context())
			o.Log = func(line string) { fmt.Fprintln(os.Stderr, time.Now().Format("15:04:05"), line) }
			if err = run.Run(cmd.Context(), o); err != nil && cmd.Context().Err() != nil {
				return fmt.Errorf("interrupted (%w); the same command goes on where it was", err)
			}
			if err == nil && o.Against != nil && !o.Forecast {
				return compareTurns(o.Out, true, "ready")
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&against.Foil, "against", "", "another foil binary, to be measured in turns with --foil")
	flags.StringVar(&o.Programs.Server, "server", "", "the foil binary that serves (default --foil)")
	flags.StringVar(&against.Server, "against-server", "", "the foil binary that serves --against (default --against)")
	flags.StringSliceVar(&o.Images, "images", []string{"redis"}, "declared images, without tags, or all")
	flags.StringSliceVar(&o.Engines, "engines", engineNames(), "engines to compare")
	flags.StringSliceVar(&rtts, "rtt", []string{"0", "50ms", "150ms", "300ms"}, "round-trip times of the link")
	flags.StringSliceVar(&rates, "rate", []string{"100mbit"}, "rates of the link; 0 is no limit; IMAGE=RATE is for that image alone, in place of the others")
	flags.StringSliceVar(&completeAt, "complete-at", []string{"all"}, "round-trip times at which runs go on until the image is complete, all or none; elsewhere they are stopped after ready and the load")
	flags.IntVar(&o.Runs, "runs", 5, "repetitions")
	flags.DurationVar(&o.Load, "load", 2*time.Second, "how long a ready server is put under load (redis-benchmark, pgbench, wrk); 0 for not at all")
	flags.StringVar(&o.Out, "out", "results", "directory of the results")
	flags.StringVar(&o.Cache, "cache", here(".cache"), "directory on a disk, for images and for workers")
	flags.Uint64Var(&o.Seed, "seed", 1, "of the order of runs")
	flags.StringVar(&o.Note, "note", "", "remark that the report shows, such as what else runs on the machine")
	flags.BoolVar(&o.SkipUpdates, "skip-updates", false, "fresh provisioning only")
	flags.StringVar(&cut, "cut", "", "make resumed runs instead: cut all connections once, after this share of the bytes of an image's layers, such as 30%")
	flags.BoolVar(&o.SkipCheck, "skip-check", false, "do not try the links first")
	flags.BoolVar(&o.RetryFailed, "retry-failed", false, "make failed runs again")
	flags.BoolVar(&o.RetryStolen, "retry-stolen", false, "make runs again during which the host of this virtual machine gave more than a twentieth of the processors' time to others")
	flags.BoolVar(&o.Forecast, "forecast", false, "say how much is to be run and how long it takes, and run nothing")
	flags.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "of one run")
	programFlags(cmd, &o.Programs)
	return cmd
}

// otherBuild is what is measured in turns with o.Programs. Only engines that are foil's own
// differ by it.
func otherBuild(cmd *cobra.Command, o *run.Options, against engines.Programs) (*engines.Programs, error) {
	if err := foilsOwn(cmd, o, "--against compares two builds of foil"); err != nil {
		return nil, err
	}
	programs := o.Programs
	programs.Foil, programs.Server = against.Foil, against.Server
	return &programs, nil
}

// foilsOwn chooses engines that are foil's own, if none were named.
func foilsOwn(cmd *cobra.Command, o *run.Options, why string) error {
	if !cmd.Flags().Changed("engines") {
		o.Engines = []string{"hydrofoil", "hydrofoil-untraced"}
	}
	for _, name := range o.Engines {
		if !strings.HasPrefix(name, "hydrofoil") {
			return fmt.Errorf("%s, and %s is none: leave it out of --engines", why, name)
		}
	}
	return nil
}

// parseShare reads a percentage below 100.
func parseShare(text string) (float64, error) {
	number, ok := strings.CutSuffix(text, "%")
	percent, err := strconv.ParseFloat(number, 64)
	if !ok || err != nil || !(percent > 0 && percent < 100) {
		return 0, fmt.Errorf("%q is no share of the bytes; write 10%%, 50%%, ...", text)
	}
	return percent / 100, nil
}

// once is a list without what comes again: nothing is to be measured twice.
func once[T comparable](list []T) (all []T) {
	for _, v := range list {
		if !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return all
}

func parseRTTs(texts []string) (rtts []time.Duration, err error) {
	for _, text := range texts {
		rtt, err := time.ParseDuration(text)
		if text == "0" {
			rtt, err = 0, nil
		}
		if err != nil || rtt < 0 {
			return nil, fmt.Errorf("%q is no round-trip time; write 0, 50ms, 150ms, ...", text)
		}
		rtts = append(rtts, rtt)
	}
	return rtts, nil
}

// programFlags say where programs are.
func programFlags(cmd *cobra.Command, p *engines.Programs) {
	cmd.Flags().StringVar(&p.Foil, "foil", here("bin/foil"), "the foil binary")
	cmd.Flags().StringVar(&p.Containerd, "containerd", "", "the containerd binary, with its ctr and shim beside it (default: on PATH)")
	cmd.Flags().StringVar(&p.Peers, "peers", "", "directory of the programs of peers, such as containerd-stargz-grpc, ctr-remote, soci (default: on PATH)")
}

// parseRates reads rates for all images, and for single ones, as IMAGE=RATE.
func parseRates(texts []string) (all []int64, own map[string][]int64, err error) {
	for _, text := range texts {
		image, value, single := strings.Cut(text, "=")
		if !single {
			value = text
		}
		var rate rateFlag
		if err := rate.Set(value); err != nil {
			return nil, nil, err
		}
		if !single {
			all = append(all, int64(rate))
			continue
		}
		if own == nil {
			own = map[string][]int64{}
		}
		own[image] = append(own[image], int64(rate))
	}
	return all, own, nil
}

func engineNames() (names []string) {
	for _, e := range engines.All() {
		names = append(names, e.Name())
	}
	return names
}

func allImages() (names []string, err error) {
	catalogue, err := images.Declared()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, image := range catalogue.Images {
		if !seen[image.Name] {
			seen[image.Name] = true
			names = append(names, image.Name)
		}
	}
	return names, nil
}

// commit is that of the source tree that the benchmark is run in, if any.
func commit(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=10").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
