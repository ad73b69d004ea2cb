package main

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/worker/api"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/hosts"
	"hydrofoil.dev/foil/internal/worker/memory"
	"hydrofoil.dev/foil/internal/worker/mirror"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/origin"
	"hydrofoil.dev/foil/internal/worker/servers"
	"hydrofoil.dev/foil/internal/worker/systemd"
)

// proveCalm is how long proofs let what has just come here start.
const proveCalm = 10 * time.Second

// spareProcessors is how many goroutines may run besides those that decode frames: the
// gate's, the stream's, the one that reads ahead, and the answer to a command.
const spareProcessors = 4

// nodeFlags are the flags of foil node. Those that are words become Options when all
// are known.
type nodeFlags struct {
	opts                                         node.Options
	at                                           sockets
	level                                        slog.Level
	format, gate, report, limit, startup, memory string
	groups, policies                             []string
}

func newNodeCommand() *cobra.Command {
	var f nodeFlags
	cmd := &cobra.Command{
		Use:   "node [flags]",
		Short: "Run the worker daemon",
		Long: `node is the daemon of a worker: it pulls images, mounts them before their bytes
have arrived, holds back reads of bytes that are not here yet, and prepares the
filesystems of containers. It answers the other commands on DIR/run/foil.sock.

Everything it keeps is below --root, which must be on ext4, XFS or btrfs. It
needs root. "foil doctor" says whether this host can do what it takes.

containerd uses the daemon as a snapshotter by DIR/run/snapshotter.sock, and as a
mirror of registries at --mirror-listen: see deploy/containerd/README.md. A
kubelet can reach containerd's image service by --cri-proxy-socket.

A pull from a server that was not used before connects first, and TCP begins
slowly: on a long way that costs more than all else. --connect makes the
connection when the daemon starts, keeps it, and lets it learn the path. To the
servers that are used most the daemon keeps one without being told, also after it
was started again: --keep-servers says to how many.

foil pull and foil run start a daemon when none runs; its log is in
DIR/run/node.log, and "foil status" names the process to end. For a daemon that
is there from boot to shutdown, run it as a system service:
deploy/systemd/foil-node.service. It tells systemd when it is ready.

Registries are spoken to over TLS, with verified certificates; --hosts-dir says
otherwise where containerd's hosts.toml does: mirrors, certificate authorities,
client certificates, headers. Credentials are those that "docker login" left for
the daemon's user, unless a command or containerd brings some.

What came for an image of one registry is used for images of that registry only,
and no server is told of what came from another one. --origin-group names
registries that trust each other.

A container starts before its image is here, on the word of its server, if that
was authenticated. Of a registry without TLS, or whose certificate is not
verified, it waits until the image is complete and was proven against the diff
IDs of its layers. --policy says otherwise, for each registry; "foil doctor" shows
which policy holds, and why.

What holds back reads is the gate: fanotify (Linux 6.14), else fuse (Linux 6.12),
else loop, which is fuse with loop devices. auto takes the first that this host
can have; "foil doctor" says which, and why.

With --disk-limit, images that are complete and that nothing uses go when images
take more than that, or a pull would fill the filesystem: the least recently used
first, before pulls and during them. "foil gc --dry-run" says what would go.

After a container became ready while its image was still on the way, the daemon
tells the image's server which pages it read until then, so that the next worker
gets them first: docs/startup.md says what is told. --report off tells nothing.

--metrics-listen serves metrics to Prometheus; docs/metrics.md lists them.

An interrupt or SIGTERM ends it. Containers go on: a small process, the keeper,
makes their reads wait until a daemon runs again, which then goes on with the
pulls that were under way.

Exit codes: 0 it was told to end; 1 an error, in the log as well.`,
		Example: `  foil node
  foil node --root /srv/foil --log-format json
  foil node --config site.toml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runNode(cmd, &f) },
	}
	rootFlag(cmd, &f.opts.Root)
	f.add(cmd.Flags())
	metricsFlag(cmd, &f.at.metrics)
	configurable(cmd)
	return cmd
}

func (f *nodeFlags) add(flags *pflag.FlagSet) {
	flags.DurationVar(&f.opts.GiveUp, "give-up", 5*time.Minute, "how long to go on trying when a server cannot be reached, before reads that wait for it fail; then it is tried now and then")
	flags.StringSliceVar(&f.opts.Connect, "connect", nil, "`SERVER`s (http://HOST:PORT or https://HOST) to keep a warm connection to")
	flags.IntVar(&f.opts.KeepServers, "keep-servers", 2, "to how many `SERVERS`, those that pulls used most in the last three days, to keep a warm connection besides; 0: none, and none is remembered")
	flags.DurationVar(&f.opts.ProveWithin, "prove-within", 24*time.Hour, "how long an image may be here unproven before it starts no new container; of those of before the upgrade, since then; 0: for ever")
	flags.StringSliceVar(&f.policies, "policy", nil, "`REGISTRY=POLICY` for the images of a registry (HOST[:PORT], or * for all that are not named). served: a container starts at once, when a server has said what its files are. proven: it waits until the image is complete and its layers were hashed here. Default: served, if the server was authenticated by TLS or is on loopback; else proven")
	flags.Int64Var(&f.opts.WarmUp, "warm-up", 32<<20, "most `BYTES` that a server of --connect sends on a new connection so that TCP learns the path, and one of --keep-servers at most 8 MiB an hour; 0: none")
	flags.StringVar(&f.report, "report", "on", "tell an image's server which pages a container read until it was ready: on or off")
	flags.Float64Var(&f.opts.ReportSample, "report-sample", 1, "`SHARE` of the starts to tell of, above 0 and at most 1")
	flags.StringVar(&f.gate, "gate", "auto", "`GATE` that holds back reads: auto, fanotify, fuse or loop")
	flags.StringVar(&f.limit, "disk-limit", "", "`LIMIT` for what images take, 80% of the filesystem or 50GB, above which those that nothing uses are removed, least recently used first; empty: none")
	flags.StringVar(&f.startup, "startup", "on", "startup sets, the pages that a start touches, sent before all else: `on` or off")
	flags.StringVar(&f.memory, "startup-memory", "25%", "`LIMIT` for the memory of startup pages that are read before anybody asks for them, 25% of what is available or 200MB: those of all starts together; while memory is short none are, nor more than a container's own limit leaves; 0: none; empty: no limit")
	flags.StringVar(&f.at.snapshotter, "snapshotter-socket", "default", "`PATH` of the socket for containerd; default: DIR/run/snapshotter.sock; off: none")
	flags.StringSliceVar(&f.groups, "origin-group", nil, "`REGISTRIES` that trust each other, with spaces between them: what came for images of one is used for those of the others, which whoever runs one of them can choose then. Without a group each registry is a wall: what images of two have in common is fetched once for each")
	flags.StringVar(&f.at.mirror, "mirror-listen", "off", "`HOST:PORT` of loopback at which containerd resolves images, so that pull and resolve are one request to the server; by TLS, for those who have mirror/key.pem of the root; off: none")
	flags.StringVar(&f.at.criProxy, "cri-proxy-socket", "off", "`PATH` of a socket for the kubelet's --image-service-endpoint, by which the daemon learns the credentials of its pulls; off: none")
	flags.StringVar(&f.at.criEndpoint, "cri-endpoint", "/run/containerd/containerd.sock", "`PATH` of containerd's socket, which is asked what runs in a container, and which what comes by --cri-proxy-socket goes to")
	flags.StringVar(&f.opts.Hosts.Dirs, "hosts-dir", hosts.DefaultDirs, "`DIRS`, separated by colons, with containerd's configuration of registry hosts (HOST/hosts.toml); read for each pull")
	flags.StringVar(&f.opts.Hosts.DockerConfig, "docker-config", hosts.DockerConfig(), "Docker's `FILE` of credentials and of helpers that have some; read when a registry demands them")
	flags.StringVar(&f.format, "log-format", "text", "`FORMAT` of the log: text or json")
	flags.TextVar(&f.level, "log-level", slog.LevelInfo, "least `LEVEL` to log: debug, info, warn or error")
}

// options checks the flags and puts them into f.opts.
func (f *nodeFlags) options() error {
	o := &f.opts
	switch f.gate {
	case "auto":
	case kernel.GateFanotify, kernel.GateFUSE, kernel.GateLoop:
		o.Gate = f.gate
	default:
		return usagef("--gate %s: say auto, fanotify, fuse or loop", f.gate)
	}
	var err error
	if o.DiskLimit, err = node.ParseLimit(f.limit); err != nil {
		return usagef("--disk-limit: %w", err)
	}
	if o.StartupMemory, err = node.ParseLimit(f.memory); err != nil {
		return usagef("--startup-memory: %w", err)
	}
	if o.Groups, err = origin.ParseGroups(f.groups); err != nil {
		return usagef("--origin-group: %w", err)
	}
	if o.Policies, err = origin.ParsePolicies(f.policies); err != nil {
		return usagef("--policy: %w", err)
	}
	if o.KeepServers < 0 || o.KeepServers > servers.MostKept {
		return usagef("--keep-servers %d: say 0 to %d", o.KeepServers, servers.MostKept)
	}
	if err := checkMetrics(f.at.metrics); err != nil {
		return err
	}
	if f.at.mirror != "off" {
		if o.Hosts.Self, err = mirror.Addresses(f.at.mirror); err != nil {
			return usagef("--mirror-listen: %v", err)
		}
	}
	if o.ReportSample <= 0 || o.ReportSample > 1 {
		return usagef("--report-sample %v: say a share above 0, at most 1", o.ReportSample)
	}
	for _, s := range []struct {
		flag, value string
		off         *bool
	}{{"report", f.report, &o.NoReports}, {"startup", f.startup, &o.NoStartup}} {
		if s.value != "on" && s.value != "off" {
			return usagef("--%s %s: say on or off", s.flag, s.value)
		}
		*s.off = s.value == "off"
	}
	return nil
}

// logger returns the log that the flags ask for.
func (f *nodeFlags) logger(w io.Writer) (*slog.Logger, error) {
	o := &slog.HandlerOptions{Level: f.level}
	switch f.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, usagef("--log-format %s: say text or json", f.format)
}

// runNode is the daemon, until it is told to end.
func runNode(cmd *cobra.Command, f *nodeFlags) (err error) {
	opts := &f.opts
	if opts.Logger, err = f.logger(cmd.ErrOrStderr()); err != nil {
		return err
	}
	if err := needRoot(os.Geteuid(), "foil node"); err != nil {
		return err
	}
	if err := f.options(); err != nil {
		return err
	}
	// The host's memory is its containers', so garbage is collected twice as
	// often as usual. But not within the first 48 MiB, which the start of a large
	// image makes in a moment: it would be collected several times meanwhile, on
	// the processors that the start needs, and is given back when a pull has
	// ended. An allocation that is never touched keeps the collector away; it takes
	// no memory. With Go's own settings (GOGC=100) a start of redis takes 1.086 times
	// as long (95%: 1.057 to 1.100): 28 pairs, no delay and no limit on the link,
	// page caches dropped.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
		untouched := make([]byte, 96<<20)
		defer runtime.KeepAlive(untouched)
		if own := (memory.Host{}).Own(); own > 0 && os.Getenv("GOMEMLIMIT") == "" {
			debug.SetMemoryLimit(own + int64(len(untouched)))
		}
	}
	store, err := systemd.OpenStore()
	if err != nil {
		return err
	}
	if store != nil {
		opts.Store = store
	}
	var kubelet credentials.Memory
	opts.Credentials = kubelet.For
	// As many goroutines decode frames as there are processors. Readers that
	// meanwhile wait at the gate must not wait for one of these to be
	// preempted, after 10 ms: the kernel is the better scheduler.
	opts.Workers = runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(opts.Workers + spareProcessors)
	opts.Version = version()
	opts.ProveCalm = proveCalm
	opts.Listening = whenAll(listeners(f.at.snapshotter), func() { tell(opts.Logger, systemd.Ready, systemd.Status("serving %s", opts.Root)) })
	n, err := node.New(*opts)
	if err != nil {
		tell(opts.Logger, systemd.Status("%v", err))
		return advise(opts.Root, err)
	}
	opts.Logger.Info("ready", "root", opts.Root, "socket", api.SocketPath(opts.Root), "version", opts.Version)
	err = serveNode(cmd.Context(), n, *opts, f.at, &kubelet)
	opts.Logger.Info("ending")
	tell(opts.Logger, systemd.Stopping)
	return errors.Join(err, n.Close())
}

// listeners is how many sockets there are to wait for before the daemon is ready.
func listeners(snapshotter string) int32 {
	if snapshotter == "off" {
		return 1
	}
	return 2
}

// whenAll returns a function whose n-th call calls fn.
func whenAll(n int32, fn func()) func() {
	var calls atomic.Int32
	return func() {
		if calls.Add(1) == n {
			fn()
		}
	}
}

// tell tells the service manager, if there is one.
func tell(log *slog.Logger, lines ...string) {
	if err := systemd.Notify(lines...); err != nil {
		log.Warn("the service manager does not hear how the daemon is", "error", err)
	}
}
