package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"hydrofoil.dev/foil/internal/format/trace"
	"hydrofoil.dev/foil/internal/picture"
	"hydrofoil.dev/foil/internal/progress"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/launch"
	"hydrofoil.dev/foil/internal/worker/probe"
	"hydrofoil.dev/foil/internal/worker/runner"
)

// traceFlags are those of the commands that trace.
type traceFlags struct {
	root, probe, net, entrypoint string
	runs                         int
	asJSON                       bool
	html                         string // of foil trace
	opts                         launch.Options
	trace                        launch.TraceOptions
	creds                        func() (credentials.Credential, error)
}

// add adds them to cmd. What follows REF and "--" is the command.
func (f *traceFlags) add(cmd *cobra.Command) {
	clientRoot(cmd, &f.root)
	cmd.ValidArgsFunction = completeNames(&f.root, false)
	f.creds = credsFlag(cmd)
	fs := cmd.Flags()
	fs.StringVar(&f.probe, "probe", "", "`PROBE` that tells when the service is ready, as for foil run")
	fs.DurationVar(&f.trace.After, "after", time.Second, "with a probe: how long a ready service goes on, for what its first users need; use it meanwhile")
	fs.DurationVar(&f.trace.Quiet, "quiet", 3*time.Second, "without a probe: how long nothing new is read when the service counts as ready")
	fs.DurationVar(&f.trace.Timeout, "timeout", 10*time.Minute, "how long the service may take to be ready; 0: as long as it likes")
	fs.IntVar(&f.runs, "runs", 1, "how often to trace the service; pages that at least a quarter of the runs touch count")
	fs.StringVar(&f.entrypoint, "entrypoint", "", "`COMMAND` in place of the image's entrypoint and command")
	fs.StringArrayVarP(&f.opts.Spec.Env, "env", "e", nil, "set `KEY=VALUE`, or pass on the caller's KEY; may be repeated")
	fs.StringVarP(&f.opts.Spec.Cwd, "workdir", "w", "", "working `DIR` in place of the image's")
	fs.StringVarP(&f.opts.Spec.User, "user", "u", "", "`USER[:GROUP]`, names or numbers, in place of the image's")
	fs.StringVar(&f.net, "net", string(runner.HostNetwork), "`NETWORK`: host, or none (loopback only)")
	fs.StringVar(&f.opts.Pull.Platform, "platform", "", "`OS/ARCH[/VARIANT]` to choose from an index (default this host's)")
	fs.BoolVar(&f.opts.Pull.PlainHTTP, "plain-http", false, "speak HTTP without TLS; loopback addresses always do")
	jsonFlag(cmd, &f.asJSON)
}

// apply checks the command line and puts it into the options.
func (f *traceFlags) apply(args []string) (err error) {
	if f.opts.Pull.Ref, err = api.NormalRef(args[0]); err != nil {
		return &usageError{err}
	}
	if f.opts.Pull.Credential, err = f.creds(); err != nil {
		return &usageError{err}
	}
	if len(args) > 1 {
		f.opts.Spec.Args = args[1:]
	}
	f.opts.Spec.Net = runner.Network(f.net)
	if f.entrypoint != "" {
		f.opts.Spec.Entrypoint = []string{f.entrypoint}
	}
	switch {
	case f.opts.Spec.Net != runner.HostNetwork && f.opts.Spec.Net != runner.NoNetwork:
		return usagef("--net %s: say host or none", f.net)
	case f.runs < 1 || f.runs > 100:
		return usagef("--runs %d: say 1 to 100", f.runs)
	case f.trace.Timeout < 0:
		return usagef("--timeout %v: say how long, for example 5m; 0: no limit", f.trace.Timeout)
	case f.trace.Quiet <= 0:
		return usagef("--quiet %v: say how long, for example 3s", f.trace.Quiet)
	}
	if f.probe != "" {
		if _, err := probe.Parse(f.probe); err != nil {
			return &usageError{err}
		}
	}
	return nil
}

func newTraceCommand() *cobra.Command {
	var f traceFlags
	var output string
	var noSend bool
	cmd := &cobra.Command{
		Use:   "trace [flags] REF [-- COMMAND ARG...]",
		Short: "Record which pages of an image a service reads until it is ready",
		Long: `trace runs a container of an image that is here, complete (it is pulled first),
until its probe says that it is ready, and records which pages of which files it
read, in which order and when: page by page, whether by read, mmap or exec. Only
what this container and what it starts read is recorded. Then the container is
stopped and removed.

Each run has a mount of its own with a cold page cache. Then the service is started
once more, with these pages in memory, as a worker that has its startup set finds
them: it is faster then, and some services read other pages, which are in the trace
as well. The traces go to the image's server, which makes the startup set of the service from them: an image
with an entrypoint and a command. Pages count that at least a quarter of the runs
touched, and what lies between pages that some runs touched and others did not.
"foil startup" shows and removes sets; docs/startup.md says more.

Without --probe a service is ready when it has read nothing new for --quiet, or
has ended with code 0.

With --json each run is a line of JSON on standard output; its last member lists
what was touched: path, first page, pages, and seconds since the start.

Exit codes: 0; 1 the service did not become ready, or not within --timeout, or the
trace could not be taken or sent (it is printed all the same); 130 interrupted.`,
		Example: `  foil trace --probe tcp:6379 registry.example/redis:7
  foil trace --runs 5 --probe http:8080/health registry.example/app:v2
  foil trace --no-send --json --probe exit registry.example/python:3 -- python3 -c 'import ssl'`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.apply(args); err != nil {
				return err
			}
			f.trace.Send = !noSend
			if output == "" {
				_, err := f.run(cmd, nil)
				return err
			}
			file, err := os.Create(output)
			if err != nil {
				return fmt.Errorf("--output: %w", err)
			}
			_, err = f.run(cmd, file)
			return errors.Join(err, file.Close())
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&output, "output", "", "write the traces to `FILE` as well, as --json does")
	cmd.Flags().StringVar(&f.html, "html", "", "write a page that shows the last run to `FILE`, for a browser")
	cmd.Flags().BoolVar(&noSend, "no-send", false, "do not send the traces to the server")
	return cmd
}

// run takes the traces, prints them, and writes them to file unless it is nil.
// It returns the last one.
func (f *traceFlags) run(cmd *cobra.Command, file io.Writer) (last *picture.Trace, err error) {
	if err := needRoot(os.Geteuid(), cmd.CommandPath()); err != nil {
		return nil, err
	}
	c, err := api.EnsureDaemon(cmd.Context(), f.root, api.EnsureOptions{})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	f.opts.Signals = signals
	var img *picture.Image
	var failed error
	for i := range f.runs {
		res, err := f.once(cmd, c, i)
		if err != nil && cmd.Context().Err() != nil {
			return nil, &exitError{130, errors.New("interrupted: the container was stopped, and its trace was not taken")}
		}
		if err != nil {
			return nil, advise(f.root, err)
		}
		if img == nil {
			if img, err = imageOf(cmd.Context(), c, api.AboutImage{Ref: f.opts.Pull.Ref}); err != nil {
				return nil, advise(f.root, err)
			}
		}
		t, err := trace.Decode(res.Trace)
		if err != nil {
			return nil, err
		}
		v, err := img.Trace(t)
		if err != nil {
			return nil, err
		}
		last = v
		if f.html != "" {
			set, err := img.OfTrace(t)
			if err == nil {
				err = writeHTML(set, f.html)
			}
			if err != nil {
				return nil, err
			}
		}
		if res.Cut {
			fmt.Fprintf(cmd.ErrOrStderr(), "foil: the service reads more than a trace can hold (%d pieces, %d bytes): it has the first %d pages, what was read after them (%d pages or more) is left out\n", trace.MaxPieces, trace.MaxEncoded, v.Pages, res.Left)
		}
		if file != nil {
			if err := printJSON(file, v); err != nil {
				return nil, fmt.Errorf("--output: %w", err)
			}
		}
		if f.asJSON {
			err = printJSON(cmd.OutOrStdout(), v)
		} else {
			err = f.summary(cmd.OutOrStdout(), v, i, res)
		}
		if err != nil {
			return nil, err
		}
		if res.SendError != "" && failed == nil {
			failed = fmt.Errorf("send the trace: %s", res.SendError)
		}
	}
	return last, failed
}

// once takes one trace: the service is started with a cold page cache, and once more with the
// pages there that it read.
func (f *traceFlags) once(cmd *cobra.Command, c *api.Client, i int) (*api.TraceResult, error) {
	cold := f.trace
	cold.Send = false
	res, err := f.start(cmd, c, i, cold)
	if err != nil {
		return nil, err
	}
	warm := f.trace
	warm.Before = res.Trace
	return f.start(cmd, c, i, warm)
}

// start starts the service once.
func (f *traceFlags) start(cmd *cobra.Command, c *api.Client, i int, t launch.TraceOptions) (*api.TraceResult, error) {
	o := f.opts
	o.Begun = time.Now()
	o.Spec.ID = "trace-" + strings.ToLower(rand.Text()[:10])
	var err error
	if f.probe != "" {
		if o.Probe, err = probe.Parse(f.probe); err != nil {
			return nil, err
		}
	}
	if i > 0 || t.Before != nil {
		o.Policy = launch.PullNever // all runs are of one image
	}
	// What the container says matters when it does not become ready.
	said := new(tail)
	o.IO = runner.IO{Stdout: said, Stderr: said}
	done := func() {}
	if _, terminal := progress.Terminal(cmd.ErrOrStderr()); terminal && !f.asJSON {
		d := progress.NewDisplay(cmd.ErrOrStderr())
		what := fmt.Sprintf("run %d of %d", i+1, f.runs)
		o.Pull.Interval = 100 * time.Millisecond
		o.Emit = func(ev api.Event) {
			switch ev.Event {
			case api.Progress:
				_ = d.Lines(fmt.Sprintf("%s: pulling, %s of %s here", what, progress.Bytes(ev.ContentHere), progress.Bytes(ev.ContentTotal)))
			case api.Started, api.Ready:
				_ = d.Lines(what + ": " + string(ev.Event))
			}
		}
		t.Progress = func(s api.TraceStatus) {
			_ = d.Lines(fmt.Sprintf("%s: %d pages, %s", what, s.Pages, progress.Bytes(s.Pages*trace.BlockSize)))
		}
		done = func() { _ = d.Clear() }
	}
	res, err := worker(f.root, c).Trace(cmd.Context(), o, t)
	done()
	if err != nil && len(said.b) > 0 {
		err = fmt.Errorf("%w; the end of what it said:\n%s", err, strings.TrimRight(string(said.b), "\n"))
	}
	return res, err
}

func (f *traceFlags) summary(w io.Writer, v *picture.Trace, i int, res *api.TraceResult) error {
	if i == 0 {
		if _, err := fmt.Fprintf(w, "service %s of %s: %s\n", v.Service, v.Ref, strings.Join(v.Args, " ")); err != nil {
			return err
		}
	}
	sent := "not sent"
	if res.Sent {
		sent = "sent"
	}
	_, err := fmt.Fprintf(w, "run %d: ready after %s; %d pages, %s of %s (%.1f%%), in %d files; %s\n", i+1,
		progress.Duration(time.Duration(v.Ready*float64(time.Second))), v.Pages, progress.Bytes(v.Bytes), progress.Bytes(v.ImageBytes),
		percent(v.Bytes, v.ImageBytes), v.Files, sent)
	return err
}

func percent(part, whole int64) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}

// imageOf returns an image whose pages can be named.
func imageOf(ctx context.Context, c *api.Client, req api.AboutImage) (*picture.Image, error) {
	b, err := c.TOC(ctx, req)
	if err != nil {
		return nil, err
	}
	return picture.NewImage(req.Ref, b)
}

// tail keeps the end of what both streams of a container say.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 2048

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if n := len(t.b) - tailBytes; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(b), nil
}
