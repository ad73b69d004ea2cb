package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// runFlags are the flags of foil run that are not launch.Options themselves.
type runFlags struct {
	root, probe, until, pull, net, events, entrypoint string
	mounts                                            []string
	json, interactive, startup                        bool
}

func newRunCommand() *cobra.Command {
	begun := time.Now()
	var f runFlags
	o := launch.Options{Begun: begun}
	var creds func() (credentials.Credential, error)
	cmd := &cobra.Command{
		Use:   "run [flags] REF [-- COMMAND ARG...]",
		Short: "Run an image, before it has arrived",
		Long: `run starts a container as soon as its image is mounted, while most of the bytes
are still on the way: what the container reads comes first, and a read of bytes
that are not here waits for them. Output, signals and the exit code pass through.

The container is what the image's config says (entrypoint, command, environment,
user, working directory), in namespaces of its own but on the host's network. It
writes to a layer of its own, which stays until "foil rm", or goes at the end
with --rm. COMMAND replaces the image's command.

The daemon is started if none runs. An image that is here, complete, is run
without asking its server; --pull always asks.

A probe tells when the container is ready:

  exit              the container has ended with code 0
  stdout:REGEX      a line that it writes matches (standard error counts too)
  tcp:PORT          the port accepts a connection
  http:PORT/PATH    a GET is answered with a status below 400
  exec:COMMAND      the command, run in the container, ends with code 0

With --json or --events each event is a line of JSON: resolved, mounted,
started, ready, complete, exited; with the seconds since the command began, the
bytes moved so far, the reads that had to wait, and what came as a startup set:
the pages that a start of this service touches, sent before all else. The standard output is the
container's alone, so --json writes to standard error; --events writes to a file,
or to a descriptor that the caller opened.

Exit codes: the container's; 128+N if signal N ended it; 125 foil or runc
failed; 126 the command cannot be executed; 127 it was not found; 130
interrupted before the start. With --until: 0 if the event came.`,
		Example: `  foil run --rm registry.example/redis:7
  foil run --rm -it registry.example/debian:13 -- bash
  foil run --rm --mount source=.,target=/src -w /src registry.example/gcc:14 -- make
  foil run --rm --probe tcp:6379 --until ready --events times.jsonl registry.example/redis:7
  foil run --rm --json --probe http:8080/health registry.example/app:v2 2> events.jsonl`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return &exitError{launch.ExitFailed, errors.New("foil run needs the name of an image; foil run --help says more")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if o.Pull.Credential, err = creds(); err != nil {
				return &exitError{launch.ExitFailed, err}
			}
			f.image(&o, args)
			code, err := runContainer(cmd, &f, &o)
			if err != nil {
				return &exitError{launch.ExitCode(err), advise(f.root, err)}
			}
			if code != 0 {
				return &exitError{code: code}
			}
			return nil
		},
	}
	// 2 could be the container's own code.
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return &exitError{launch.ExitFailed, fmt.Errorf("%w; foil run --help says more", err)}
	})
	clientRoot(cmd, &f.root)
	cmd.ValidArgsFunction = completeNames(&f.root, false)
	creds = credsFlag(cmd)
	addRunFlags(cmd.Flags(), &f, &o)
	return cmd
}

func addRunFlags(fs *pflag.FlagSet, f *runFlags, o *launch.Options) {
	// What follows REF belongs to the container, with or without "--".
	fs.SetInterspersed(false)
	fs.BoolVar(&o.Remove, "rm", false, "remove the container when it has ended")
	fs.StringVar(&o.Spec.ID, "name", "", "name of the container (default: a random one)")
	fs.StringVar(&f.entrypoint, "entrypoint", "", "`COMMAND` in place of the image's entrypoint and command")
	fs.StringArrayVarP(&o.Spec.Env, "env", "e", nil, "set `KEY=VALUE`, or pass on the caller's KEY; may be repeated")
	fs.StringArrayVar(&f.mounts, "mount", nil, mountUsage)
	fs.StringVarP(&o.Spec.Cwd, "workdir", "w", "", "working `DIR` in place of the image's")
	fs.StringVarP(&o.Spec.User, "user", "u", "", "`USER[:GROUP]`, names or numbers, in place of the image's")
	fs.StringVar(&f.net, "net", string(runner.HostNetwork), "`NETWORK`: host, or none (loopback only)")
	fs.BoolVarP(&o.Spec.TTY, "tty", "t", false, "give the container a terminal")
	fs.BoolVarP(&f.interactive, "interactive", "i", false, "pass standard input on")
	fs.StringVar(&f.probe, "probe", "", "`PROBE` that tells when the container is ready (see above)")
	fs.StringVar(&f.until, "until", "", "stop the container at `EVENT` and exit with 0: ready or complete")
	fs.BoolVar(&f.json, "json", false, "write events to standard error, one JSON object a line")
	fs.StringVar(&f.events, "events", "", "write events to `FILE`, or to descriptor N (fd:N), one JSON object a line")
	fs.StringVar(&f.pull, "pull", string(launch.PullMissing), "when to ask the image's server: missing (unless it is here, complete), always or never")
	fs.StringVar(&o.Pull.Platform, "platform", "", "`OS/ARCH[/VARIANT]` to choose from an index (default this host's)")
	fs.BoolVar(&o.Pull.PlainHTTP, "plain-http", false, "speak HTTP without TLS; loopback addresses always do")
	fs.BoolVar(&f.startup, "startup", true, "have the pages that a start touches come first, if the server knows them")
}

func runContainer(cmd *cobra.Command, f *runFlags, o *launch.Options) (code int, err error) {
	if err := f.apply(o); err != nil {
		return 0, err
	}
	if err := needRoot(os.Geteuid(), "foil run"); err != nil {
		return 0, err
	}
	o.IO = runner.IO{Stdout: cmd.OutOrStdout(), Stderr: cmd.ErrOrStderr(), TTY: o.Spec.TTY}
	if f.interactive {
		o.IO.Stdin = cmd.InOrStdin()
	}
	if f.probe != "" {
		if o.Probe, err = probe.Parse(f.probe); err != nil {
			return 0, err
		}
	}
	out, err := f.printer(cmd)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	o.Emit = out.emit
	o.Pull.Interval = out.interval

	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	o.Signals = signals

	c, err := api.EnsureDaemon(cmd.Context(), f.root, api.EnsureOptions{})
	if cmd.Context().Err() != nil {
		return 0, launch.ErrInterrupted
	}
	if err != nil {
		return 0, err
	}
	defer c.Close()
	// Run hears of signals by o.Signals: one that comes while the container's process is
	// being started is for that.
	return worker(f.root, c).Run(context.WithoutCancel(cmd.Context()), *o)
}

// image puts the arguments of the command line into o: REF, and COMMAND with or
// without "--" before it.
func (f *runFlags) image(o *launch.Options, args []string) {
	o.Pull.Ref = args[0]
	o.Pull.NoStartup = !f.startup
	command := args[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	if len(command) > 0 {
		o.Spec.Args = command
	}
}

// apply checks the flags and puts them into o.
func (f *runFlags) apply(o *launch.Options) error {
	o.Until = api.EventKind(f.until)
	o.Policy = launch.Policy(f.pull)
	o.Spec.Net = runner.Network(f.net)
	switch {
	case o.Until != "" && o.Until != api.Ready && o.Until != api.Complete:
		return fmt.Errorf("--until %s: say ready or complete", f.until)
	case o.Until == api.Ready && f.probe == "":
		return errors.New("--until ready needs a --probe that tells when the container is ready")
	case o.Policy != launch.PullMissing && o.Policy != launch.PullAlways && o.Policy != launch.PullNever:
		return fmt.Errorf("--pull %s: say missing, always or never", f.pull)
	case o.Spec.Net != runner.HostNetwork && o.Spec.Net != runner.NoNetwork:
		return fmt.Errorf("--net %s: say host or none", f.net)
	case f.json && f.events != "":
		return errors.New("--json and --events: use one of them")
	}
	var err error
	if o.Spec.Mounts, err = parseMounts(f.mounts); err != nil {
		return err
	}
	if f.entrypoint != "" {
		o.Spec.Entrypoint = []string{f.entrypoint}
	}
	if o.Spec.ID == "" {
		o.Spec.ID = "foil-" + strings.ToLower(rand.Text()[:10])
	}
	return nil
}

// parseMounts reads the values of --mount.
func parseMounts(values []string) ([]specs.Mount, error) {
	var mounts []specs.Mount
	for _, s := range values {
		m, err := runner.ParseMount(s)
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// runEvents shows the events of a run.
type runEvents struct {
	printer  eventPrinter
	interval time.Duration
	stderr   io.Writer
	file     *os.File // to be closed; nil: none
	started  bool
	err      error // the first one of printing
}

// printer chooses where events go: to a file as JSON; else, while the container
// does not run yet, to a terminal as a bar; else nowhere.
func (f *runFlags) printer(cmd *cobra.Command) (*runEvents, error) {
	e := &runEvents{printer: noEvents{}, stderr: cmd.ErrOrStderr()}
	_, terminal := progress.Terminal(e.stderr)
	switch {
	case f.json:
		e.printer = jsonEvents{e.stderr}
	case strings.HasPrefix(f.events, "fd:"):
		fd, err := strconv.ParseUint(f.events[len("fd:"):], 10, 16)
		if err != nil {
			return nil, fmt.Errorf("--events %s: after fd: comes the number of a descriptor", f.events)
		}
		e.file = os.NewFile(uintptr(fd), f.events)
		if _, err := e.file.Stat(); err != nil {
			return nil, fmt.Errorf("--events %s: %w", f.events, err)
		}
		e.printer = jsonEvents{e.file}
	case f.events != "":
		file, err := os.Create(f.events)
		if err != nil {
			return nil, fmt.Errorf("--events: %w", err)
		}
		e.file, e.printer = file, jsonEvents{file}
	case terminal:
		e.printer = &barEvents{display: progress.NewDisplay(e.stderr)}
		e.interval = 100 * time.Millisecond
	}
	return e, nil
}

func (e *runEvents) emit(ev api.Event) {
	if bar, ok := e.printer.(*barEvents); ok && (ev.Event == api.Mounted || ev.Event == api.Complete) {
		// The container may start at any moment, and the terminal is its own.
		e.err = errors.Join(e.err, bar.close())
		e.printer = noEvents{}
	}
	e.started = e.started || ev.Event == api.Started
	if e.started && ev.Event == api.Failed {
		fmt.Fprintf(e.stderr, "foil: the rest of the image cannot be had, reads of it fail: %s\n", ev.Err)
	}
	if err := e.printer.print(ev); err != nil && e.err == nil {
		e.err = fmt.Errorf("write events: %w", err)
	}
}

func (e *runEvents) close() error {
	err := errors.Join(e.err, e.printer.close())
	if e.file != nil {
		err = errors.Join(err, e.file.Close())
	}
	return err
}
