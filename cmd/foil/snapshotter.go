package main

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"hydrofoil.dev/foil/internal/kernel"
	"hydrofoil.dev/foil/internal/metrics"
	"hydrofoil.dev/foil/internal/worker/credentials"
	"hydrofoil.dev/foil/internal/worker/criproxy"
	"hydrofoil.dev/foil/internal/worker/mirror"
	"hydrofoil.dev/foil/internal/worker/node"
	"hydrofoil.dev/foil/internal/worker/snapshotter"
)

// sockets are where containerd is served; "off" is nowhere.
type sockets struct {
	snapshotter string // a path, or "default"
	mirror      string // HOST:PORT
	criProxy    string // a path
	criEndpoint string // containerd's own, never off
	metrics     string // an address of package metrics
}

// serveNode answers foil's own commands, containerd and a kubelet at their
// sockets, until ctx ends. A snapshotter that cannot be opened, a mirror whose port
// is taken, and a kubelet's socket that cannot be made do not keep the daemon from
// its other work: containers wait for what it brings.
func serveNode(ctx context.Context, n *node.Node, opts node.Options, at sockets, kubelet *credentials.Memory) error {
	var s *snapshotter.Snapshotter
	evict := true
	var asks net.Listener // where containerd asks the mirror
	var key *tls.Certificate
	if at.mirror != "off" {
		var err error
		if key, err = mirror.LoadKey(opts.Root, at.mirror); err == nil {
			asks, err = net.Listen("tcp", at.mirror)
		}
		if err != nil {
			opts.Logger.Error("containerd has no mirror here, and asks registries itself; name another port with --mirror-listen, and in hosts.toml", "error", err)
		}
	}
	if at.snapshotter != "off" {
		var err error
		s, err = snapshotter.Open(ctx, snapshotter.Options{
			Dir:        filepath.Join(opts.Root, "snapshotter"),
			Node:       n,
			Groups:     opts.Groups,
			Claims:     asks != nil,
			Containerd: at.criEndpoint,
			Logger:     opts.Logger,
			Listening:  opts.Listening,
		})
		if err != nil {
			n.Warn("containerd is not served, and nothing is evicted: %v", err)
			evict = false
			opts.Listening() // nobody waits for a socket that there will not be
		}
	}
	if evict {
		// Not before the snapshots that are there have taken hold of their images.
		n.StartEviction()
	}
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return n.Serve(ctx) })
	all.Go(func() error {
		// Each foil run is a process of this program, and would wait for some 7 MB
		// of it that the daemon does not use itself.
		if err := kernel.HoldProgram(); err != nil {
			opts.Logger.Debug("keep the program in memory; a start may wait for the disk", "error", err)
		}
		return nil
	})
	if s != nil {
		if at.snapshotter == "default" {
			at.snapshotter = snapshotter.SocketPath(opts.Root)
		}
		all.Go(func() error {
			l, err := n.Listen(ctx, at.snapshotter)
			if err != nil {
				return err
			}
			return s.Serve(ctx, l)
		})
	} else {
		n.DropSockets(ctx)
	}
	if asks != nil {
		to := mirror.Options{
			Node:    n,
			Private: func(repository string) bool { return !kubelet.For(repository).IsZero() },
			Logger:  opts.Logger,
		}
		if s != nil {
			to.Expect, to.Claim, to.Besides = s.Expect, s.Claim, s.Besides
		}
		m := mirror.New(to)
		all.Go(func() error { return m.Serve(ctx, asks, key) })
	}
	if at.criProxy != "off" {
		all.Go(func() error {
			p, err := criproxy.New(criproxy.Options{Endpoint: at.criEndpoint, Memory: kubelet, Logger: opts.Logger})
			if err == nil {
				err = p.Serve(ctx, at.criProxy)
			}
			if err != nil {
				opts.Logger.Error("no kubelet is served: it cannot pull by this address; see --cri-proxy-socket and --cri-endpoint", "socket", at.criProxy, "error", err)
			}
			return nil // running containers need the daemon all the same
		})
	}
	if at.metrics != metrics.Off {
		list := []prometheus.Collector{n.Metrics()}
		if s != nil {
			list = append(list, s.Metrics())
		}
		serveMetrics(ctx, all, at.metrics, opts.Logger, list...)
	}
	err := all.Wait()
	if s != nil {
		err = errors.Join(err, s.Close())
	}
	return err
}

// serveMetrics answers Prometheus at an address. Where that is not possible,
// everything else goes on: that nobody measures is no reason to do nothing.
func serveMetrics(ctx context.Context, all *errgroup.Group, address string, log *slog.Logger, list ...prometheus.Collector) {
	r, err := metrics.Registry(list...)
	var l net.Listener
	if err == nil {
		l, err = metrics.Listen(address)
	}
	if err != nil {
		log.Error("nobody can ask for metrics; name another address with --metrics-listen", "address", address, "error", err)
		return
	}
	log.Info("metrics are served", "address", l.Addr().String())
	all.Go(func() error {
		if err := metrics.Serve(ctx, l, r, log); err != nil {
			log.Error("nobody can ask for metrics any more", "error", err)
		}
		return nil
	})
}

// metricsFlag adds --metrics-listen to a command.
func metricsFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "metrics-listen", metrics.Off, "`ADDRESS` of metrics for Prometheus, at /metrics: HOST:PORT, or /PATH of a Unix socket; without TLS and passwords; off: none")
}

// checkMetrics says what is wrong with an address of --metrics-listen.
func checkMetrics(address string) error {
	if address == metrics.Off {
		return nil
	}
	if _, _, err := metrics.Network(address); err != nil {
		return usagef("--metrics-listen: %w", err)
	}
	return nil
}
