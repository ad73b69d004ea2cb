package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// eachFlags are the flags of foil each that are not launch.EachOptions themselves.
type eachFlags struct {
	root, file, since, logs, net string
	mounts                       []string
	json, entrypoint             bool
	maxLog                       int64
}

func newEachCommand() *cobra.Command {
	var f eachFlags
	var o launch.EachOptions
	var creds func() (credentials.Credential, error)
	cmd := &cobra.Command{
		Use:   "each [flags] REF... -- COMMAND ARG...",
		Short: "Run one command over many images",
		Long: `each runs one command in a container of every image that is named, some side by
side. Each starts before its image has arrived; what the images share is fetched
once. A REF may name many: the tag may have the wildcards of a shell, as in
'registry.example/app:*' (quote it), and --file reads names, one a line. Tags
that signers make of digests (sha256-...) are left out.

COMMAND takes the place of the image's entrypoint and command; with --entrypoint
it is what the image's entrypoint is given. FOIL_IMAGE in its environment is the
name of the image. Sources come in, and results go out, by --mount.

When a container has ended its output is printed whole, below a line that says of
which image it is and how it ended; with --logs it goes to a file for each image
instead. With --json one object a line says how each image ended (ref, digest,
end, exit_code, error, times in seconds, bytes_moved, and log, the name of the
file, or output, the end of it), and a last one, with "totals", what all took. A terminal
shows meanwhile what runs.

Containers are removed when they end. Images that were not here before are
removed a little later, and no more of them is fetched; with --keep they stay,
and come whole. An interrupted command ends what runs and removes all the same; a
second interrupt ends it at once, and what it leaves "foil ps" lists.

Exit codes: 0 the command ended with 0 in every image; 1 in one of them it did
not, or was not started; 2 the command line makes no sense; 130 interrupted.`,
		Example: `  foil each 'registry.example/gcc:*' --mount source=.,target=/src,ro -- gcc --version
  foil each --since 720h --timeout 5m 'registry.example/app:*' -- /app/selftest
  foil each --file images.txt --logs out --json -- sh -c 'uname -m; cat /etc/os-release' > results.jsonl`,
		RunE: func(cmd *cobra.Command, args []string) error {
			dash := cmd.ArgsLenAtDash()
			if dash < 0 {
				return usagef("foil each needs \"--\" between the images and the command; foil each --help says more")
			}
			names, command := args[:dash:dash], args[dash:] // names may grow
			if err := f.apply(&o, command); err != nil {
				return &usageError{err}
			}
			var err error
			if f.file != "" {
				if names, err = readNames(cmd, f.file, names); err != nil {
					return err
				}
			}
			if err := checkNames(names); err != nil {
				return &usageError{err}
			}
			if o.Run.Pull.Credential, err = creds(); err != nil {
				return &usageError{err}
			}
			if o.Run.Pull.Credential != (credentials.Credential{}) && len(registriesOf(names)) > 1 {
				return usagef("--creds and FOIL_CREDS are for one registry, and these images are of %d", len(registriesOf(names)))
			}
			if err := needRoot(os.Geteuid(), "foil each"); err != nil {
				return err
			}
			return advise(f.root, runEach(cmd, &f, &o, names))
		},
	}
	clientRoot(cmd, &f.root)
	cmd.ValidArgsFunction = completeNames(&f.root, false)
	creds = credsFlag(cmd)
	addEachFlags(cmd.Flags(), &f, &o)
	return cmd
}

func addEachFlags(fs *pflag.FlagSet, f *eachFlags, o *launch.EachOptions) {
	fs.IntVarP(&o.Jobs, "jobs", "j", runtime.NumCPU(), "how many images run side by side")
	fs.DurationVar(&o.Timeout, "timeout", 0, "how long an image may take, its pull included (default as long as it likes)")
	fs.DurationVar(&o.Run.Grace, "grace", 10*time.Second, "how long a container that is stopped has between SIGTERM and SIGKILL")
	fs.BoolVar(&o.FailFast, "fail-fast", false, "begin no more images after the first that fails")
	fs.BoolVar(&o.Keep, "keep", false, "leave the images on the worker")
	fs.StringVar(&f.file, "file", "", "read names of images from `FILE` (-: standard input), one a line; # begins a comment")
	fs.StringVar(&f.since, "since", "", "of tags with wildcards, only images that were created since `WHEN`: a date (2026-01-31) or a time ago (720h)")
	fs.StringVar(&f.logs, "logs", "", "write the output of each image to a file in `DIR`")
	fs.Int64Var(&f.maxLog, "max-log", 16<<20, "keep so many `BYTES` of the output of an image")
	fs.BoolVar(&f.json, "json", false, "print one JSON object a line: how each image ended, and what all took")
	fs.BoolVar(&f.entrypoint, "entrypoint", false, "give COMMAND to the image's entrypoint")
	fs.StringArrayVar(&f.mounts, "mount", nil, mountUsage)
	fs.StringArrayVarP(&o.Run.Spec.Env, "env", "e", nil, "set `KEY=VALUE`, or pass on the caller's KEY; may be repeated")
	fs.StringVarP(&o.Run.Spec.Cwd, "workdir", "w", "", "working `DIR` in place of the image's")
	fs.StringVarP(&o.Run.Spec.User, "user", "u", "", "`USER[:GROUP]`, names or numbers, in place of the image's")
	fs.StringVar(&f.net, "net", string(runner.HostNetwork), "`NETWORK`: host, or none (loopback only)")
	fs.StringVar(&o.Run.Pull.Platform, "platform", "", "`OS/ARCH[/VARIANT]` to choose from an index (default this host's)")
	fs.BoolVar(&o.Run.Pull.PlainHTTP, "plain-http", false, "speak HTTP without TLS; loopback addresses always do")
}

// mountUsage is the help of --mount.
const mountUsage = "mount `type=bind|tmpfs,source=DIR,target=DIR[,readonly][,tmpfs-size=64m][,tmpfs-mode=1777]` in the container; may be repeated"

// apply checks the flags and puts them into o.
func (f *eachFlags) apply(o *launch.EachOptions, command []string) (err error) {
	o.Run.Spec.Net = runner.Network(f.net)
	switch {
	case o.Jobs < 1:
		return errors.New("--jobs: at least 1")
	case f.maxLog < 0:
		return errors.New("--max-log: at least 0")
	case o.Run.Spec.Net != runner.HostNetwork && o.Run.Spec.Net != runner.NoNetwork:
		return fmt.Errorf("--net %s: say host or none", f.net)
	case f.entrypoint && len(command) == 0, len(command) == 0:
		return errors.New("foil each needs a command after \"--\"")
	}
	if f.since != "" {
		if _, err := parseSince(f.since, time.Now()); err != nil {
			return err
		}
	}
	if o.Run.Spec.Mounts, err = parseMounts(f.mounts); err != nil {
		return err
	}
	o.Run.Spec.Args = command
	if !f.entrypoint {
		o.Run.Spec.Entrypoint, o.Run.Spec.Args = command[:1], command[1:]
	}
	return nil
}

// parseSince reads a date, a time, or how long before now.
func parseSince(s string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(s); err == nil {
		return now.Add(-d.Abs()), nil
	}
	for _, layout := range []string{time.DateOnly, time.DateTime, time.RFC3339} {
		if t, err := time.ParseInLocation(layout, s, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("--since %s: write a date (2026-01-31) or a time ago (720h)", s)
}

// readNames adds to names those of a file.
func readNames(cmd *cobra.Command, file string, names []string) ([]string, error) {
	in := cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("--file: %w", err)
		}
		defer f.Close()
		in = f
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		names = append(names, strings.Fields(line)...)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("--file: %w", err)
	}
	return names, nil
}

// cutPattern splits a name whose tag has wildcards.
func cutPattern(name string) (repository, pattern string, ok bool) {
	i := strings.LastIndexByte(name, ':')
	if i < 0 || !strings.ContainsAny(name[i:], "*?[") || strings.Contains(name[i:], "/") {
		return name, "", false
	}
	return name[:i], name[i+1:], true
}

func checkNames(names []string) error {
	if len(names) == 0 {
		return errors.New("foil each needs images: name them before \"--\", or in a --file")
	}
	for _, name := range names {
		repository, _, _ := cutPattern(name)
		if _, err := api.NormalRef(repository); err != nil {
			return err
		}
	}
	return nil
}

func registriesOf(names []string) []string {
	set := make(map[string]bool)
	for _, name := range names {
		host, _, _ := strings.Cut(name, "/")
		set[host] = true
	}
	return slices.Collect(maps.Keys(set))
}

// expand returns the images that are named, each once, and says on w what was left out.
func expand(ctx context.Context, c *api.Client, f *eachFlags, o *launch.EachOptions, names []string, w io.Writer) (refs []string, err error) {
	var since time.Time
	if f.since != "" {
		if since, err = parseSince(f.since, time.Now()); err != nil {
			return nil, err
		}
	}
	seen := make(map[string]bool)
	add := func(name string) error {
		ref, err := api.NormalRef(name)
		if err == nil && !seen[ref] {
			seen[ref] = true
			refs = append(refs, ref)
		}
		return err
	}
	for _, name := range names {
		repository, pattern, ok := cutPattern(name)
		if !ok {
			if err := add(name); err != nil {
				return nil, err
			}
			continue
		}
		p := o.Run.Pull
		tags, err := c.Tags(ctx, api.TagsRequest{
			Repository: repository, Pattern: pattern, Since: since,
			Platform: p.Platform, PlainHTTP: p.PlainHTTP, Credential: p.Credential,
		})
		if err != nil {
			return nil, err
		}
		if tags.Older > 0 {
			fmt.Fprintf(w, "foil: %s: %d images are older, and left out\n", name, tags.Older)
		}
		for _, t := range tags.Tags {
			if err := add(repository + ":" + t); err != nil {
				return nil, err
			}
		}
	}
	if len(refs) == 0 {
		return nil, fmt.Errorf("no image matches %s", strings.Join(names, " "))
	}
	return refs, nil
}

func runEach(cmd *cobra.Command, f *eachFlags, o *launch.EachOptions, names []string) error {
	ctx := cmd.Context()
	if f.logs != "" {
		if err := os.MkdirAll(f.logs, 0o755); err != nil {
			return fmt.Errorf("--logs: %w", err)
		}
	}
	c, err := api.EnsureDaemon(ctx, f.root, api.EnsureOptions{})
	if err != nil {
		return err
	}
	defer c.Close()
	if o.Refs, err = expand(ctx, c, f, o, names, cmd.ErrOrStderr()); err != nil {
		return err
	}
	report := newEachReport(cmd.OutOrStdout(), cmd.ErrOrStderr(), f, o.Refs)
	if report.live() {
		o.Run.Pull.Interval = 200 * time.Millisecond
	}
	o.Output, o.Event, o.Ended, o.Removing = report.output, report.event, report.ended, report.removing
	totals, err := worker(f.root, c).Each(ctx, *o)
	if perr := report.close(totals); err == nil {
		err = perr
	}
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return &exitError{130, errors.New("interrupted")}
	case report.bad() > 0:
		return &exitError{code: 1}
	}
	return nil
}
